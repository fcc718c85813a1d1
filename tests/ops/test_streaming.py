"""Streaming with `step`: causal outputs, one or a few tokens at a time, from a state of constant size."""

import pytest
import torch

from lion.ops import State, initial_state, linear_attention, step

from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    NORMALIZE,
    SMALL_FORMS,
    Case,
    Inputs,
    assert_close,
    backward,
    make,
    oracle_attention,
)

LENGTH = 14
PIECES = {"token by token": [1] * LENGTH, "pieces": [3, 1, 5, 1, 4], "whole": [LENGTH]}


def stream(inputs: Inputs | Case, pieces: list[int], state: State | None = None, start: int = 0, **arguments):
    """Run consecutive pieces from token `start` on; return their outputs and the last state."""
    state = initial_state(inputs.k, inputs.v) if state is None else state
    out = []
    for size in pieces:
        y, state = cut(inputs, start, start + size).on(
            lambda *x, state=state, **y: step(*x[:3], state, *x[3:], **y, feature_map=None), **arguments
        )
        out.append(y)
        start += size
    assert start == inputs.q.shape[2]
    return torch.cat(out, 2), state


def cut(inputs: Inputs | Case, start: int, stop: int) -> Case:
    """Return the tokens from `start` to `stop`."""
    q, k, v, a, beta, bonus, angles, erase, read = Case(*inputs)
    q, k, v = (x[:, :, start:stop] for x in (q, k, v))
    a = a[:, :, start:stop] if a is not None and a.dim() >= 3 else a
    beta, erase, read = (None if x is None else x[:, :, start:stop] for x in (beta, erase, read))
    return Case(q, k, v, a, beta, bonus, None if angles is None else angles[..., start:stop, :], erase, read)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_streaming_is_the_forward_direction(decay_convention, decay, normalize):
    inputs = make(decay, LENGTH)
    arguments = dict(decay_convention=decay_convention, normalize=normalize)
    expected = oracle_attention(inputs, direction="forward", **arguments)
    for form, how in SMALL_FORMS.items():
        assert_close(
            linear_attention(*inputs, direction="forward", **how, **arguments, feature_map=None), expected, 1e-12, form
        )
    for name, pieces in PIECES.items():
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            got, _ = stream(inputs.to(dtype), pieces, **arguments)
            assert got.dtype == dtype
            assert_close(got, expected, tolerance, f"{name} {dtype}")


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_the_state_does_not_depend_on_the_pieces(decay_convention, decay):
    """Check that the state is independent of the pieces, so that a sequence may be split anywhere."""
    inputs = make(decay, LENGTH)
    _, whole = stream(inputs, [LENGTH], decay_convention=decay_convention)
    for pieces in PIECES.values():
        _, state = stream(inputs, pieces, decay_convention=decay_convention)
        assert_close(state.S, whole.S, 1e-12, f"S {pieces}")
        assert_close(state.z, whole.z, 1e-12, f"z {pieces}")


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_gradients_flow_through_the_state(decay_convention):
    leaves = make("S", LENGTH).leaves()
    expected = backward(
        linear_attention(*leaves, direction="forward", decay_convention=decay_convention, feature_map=None), leaves
    )
    for name, pieces in PIECES.items():
        leaves = make("S", LENGTH).leaves()
        grads = backward(stream(leaves, pieces, decay_convention=decay_convention)[0], leaves)
        for key, grad in grads.items():
            assert_close(grad, expected[key], 1e-10, f"d{key} {name}")


def test_scale_and_eps():
    inputs = make("S", LENGTH)
    for arguments in (dict(normalize="none", scale=0.3), dict(eps=20.0)):
        expected = oracle_attention(inputs, direction="forward", **arguments)
        assert_close(stream(inputs, [1] * LENGTH, **arguments)[0], expected, 1e-12, f"{arguments}")


@pytest.mark.parametrize("decay", DECAYS)
def test_state_is_wide(decay):
    """Check that the state has a wide dtype; a bf16 state would stop growing after a few hundred tokens."""
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        inputs = make(decay, 5, dtype=dtype)
        start = initial_state(inputs.k, inputs.v)
        assert start.S.shape == (2, 3, 4, 6) and start.z.shape == (2, 3, 4)
        y, state = stream(inputs, [1, 4], state=start)
        assert y.dtype == dtype
        assert {x.dtype for x in (*start, *state)} == {wide}
        assert not start.S.any() and not start.z.any()  # a state is a value and must not be modified


def test_inference_is_the_same():
    for dtype in (torch.float64, torch.bfloat16):
        inputs = make("S", LENGTH, dtype=dtype)
        for normalize in NORMALIZE:
            expected, _ = stream(inputs, PIECES["pieces"], normalize=normalize)
            with torch.inference_mode():
                got, _ = stream(inputs, PIECES["pieces"], normalize=normalize)
            assert got.dtype == dtype
            assert torch.equal(got, expected)


def test_autocast_leaves_the_step_alone():
    inputs = make("S", LENGTH, dtype=torch.float32)
    expected, _ = stream(inputs, PIECES["pieces"])
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = stream(inputs, PIECES["pieces"])
    assert torch.equal(got, expected)


def test_padding_may_hold_nan():
    given = make("S", LENGTH)._asdict()
    angles = torch.rand(3, LENGTH, 2, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(LENGTH).expand(2, -1) % 5 != 3
    q, k, v = (given[name].masked_fill(~valid[:, None, :, None], torch.nan) for name in "qkv")
    state = initial_state(k, v)
    y, state = step(q, k, v, state, given["log_decay"], angles=angles, valid=valid, feature_map="elu1")
    y.sum().backward()
    assert y.isfinite().all() and state.S.isfinite().all() and angles.grad.isfinite().all() and angles.grad.any()
