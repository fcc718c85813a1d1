"""Streaming with `step`: causal outputs, one or a few tokens at a time, from a state of constant size."""

import pytest
import torch

from lion.ops import State, initial_state, step

from .helpers import (
    DECAYS,
    NORMALIZE,
    Inputs,
    make,
)

LENGTH = 14
PIECES = {"token by token": [1] * LENGTH, "pieces": [3, 1, 5, 1, 4], "whole": [LENGTH]}
FORWARD = dict(direction="forward")


def one_step(inputs: Inputs, state: State, **arguments) -> tuple[torch.Tensor, State]:
    return step(inputs.q, inputs.k, inputs.v, state, **inputs.gates(), **{"feature_map": None} | arguments)


def stream(inputs: Inputs, pieces: list[int], state: State | None = None, start: int = 0, **arguments):
    """Run consecutive pieces from token `start` on; return their outputs and the last state."""
    if state is None:
        state = initial_state(inputs.k, inputs.v)
    out = []
    for size in pieces:
        y, state = one_step(inputs.at(slice(start, start + size)), state, **arguments)
        out.append(y)
        start += size
    assert start == inputs.q.shape[2]
    return torch.cat(out, 2), state


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    "dtype, wide",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_state_is_wide(decay, dtype, wide):
    """Check that the state has a wide dtype; a bf16 state would stop growing after a few hundred tokens."""
    inputs = make(decay, 5, dtype=dtype)
    start = initial_state(inputs.k, inputs.v)
    assert start.S.shape == (2, 3, 4, 6) and start.z.shape == (2, 3, 4)
    y, state = stream(inputs, [1, 4], state=start)
    assert y.dtype == dtype
    assert {x.dtype for x in (*start, *state)} == {wide}
    assert not start.S.any() and not start.z.any()  # a state is a value and must not be modified


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)])
def test_inference_and_autocast_change_nothing(mode):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = make("S", LENGTH, dtype=dtype)
        for normalize in NORMALIZE:
            expected, _ = stream(inputs, PIECES["pieces"], normalize=normalize)
            with mode:
                got, _ = stream(inputs, PIECES["pieces"], normalize=normalize)
            assert got.dtype == dtype
            assert torch.equal(got, expected)


def test_padding_may_hold_nan():
    angles = torch.rand(3, LENGTH, 2, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(LENGTH).expand(2, -1) % 5 != 3
    hole = ~valid[:, None, :, None]
    inputs = make("S", LENGTH)._replace(angles=angles)
    for name in "qkv":
        inputs = inputs._replace(**{name: getattr(inputs, name).masked_fill(hole, torch.nan)})
    y, state = one_step(inputs, initial_state(inputs.k, inputs.v), valid=valid, feature_map="elu1")
    y.sum().backward()
    assert y.isfinite().all() and state.S.isfinite().all() and angles.grad.isfinite().all() and angles.grad.any()
