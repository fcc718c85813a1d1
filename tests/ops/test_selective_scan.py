"""The selective scan against its recurrence token by token: values, states, and gradients of every argument."""

import pytest
import torch
from torch import Tensor

from lion.ops import selective_scan as module
from lion.ops.selective_scan import selective_scan

from .helpers import pairwise

GROUPS, BATCH, LENGTH, CHANNELS, STATE = 2, 2, 21, 5, 3


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(GROUPS, *shape, generator=generator, dtype=torch.double)

    given = {
        "x": random(BATCH, LENGTH, CHANNELS),
        "dt": random(BATCH, LENGTH, CHANNELS).abs(),
        "A": -random(CHANNELS, STATE).exp(),
        "B": random(BATCH, LENGTH, STATE),
        "C": random(BATCH, LENGTH, STATE),
        "state": random(BATCH, CHANNELS, STATE),
    }
    return {name: part.requires_grad_() for name, part in given.items()}


def recurrence(x, dt, A, B, C, state, start) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t, from h = 0 at every start."""
    h = state
    rows = []
    for t in range(x.shape[2]):
        if start is not None:
            h = h.masked_fill(start[:, :, t, None, None], 0)
        h = torch.exp(torch.einsum("gbe,gen->gben", dt[:, :, t], A)) * h
        h = h + torch.einsum("gbe,gbn->gben", dt[:, :, t] * x[:, :, t], B[:, :, t])
        rows.append(torch.einsum("gben,gbn->gbe", h, C[:, :, t]))
    return torch.stack(rows, 2), h


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def gradients(y: Tensor, state: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    total = 0
    for out in (y, state):
        total += (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    return torch.autograd.grad(total, list(given.values()))


@pytest.mark.parametrize("size, starts, stacks", pairwise((1, 4, 7, 64), (False, True), (False, True)))
def test_values_and_gradients_are_those_of_the_recurrence(size, starts, stacks, monkeypatch):
    monkeypatch.setattr(module, "stacks", lambda x: stacks)  # on a GPU
    given = arguments()
    start = None
    if starts:
        start = torch.rand(GROUPS, BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.2
    y, state = recurrence(**given, start=start)
    with torch.no_grad():
        again, other = selective_scan(**given, start=start, chunk_size=size)
    close(again, y)
    close(other, state)
    got, last = selective_scan(**given, start=start, chunk_size=size)
    close(got, y)
    close(last, state)
    for grad, expected in zip(gradients(got, last, given), gradients(y, state, given), strict=True):
        close(grad, expected, 1e-11)


@pytest.mark.slow
def test_the_operators_keep_the_rules_of_operators():
    """Check schema, fake tensors and autograd registration with PyTorch's own checks."""
    *given, state = arguments().values()
    for start in (torch.zeros(GROUPS, BATCH, LENGTH, dtype=torch.bool), None):
        torch.library.opcheck(torch.ops.lion.selective_scan.default, (*given, start, state, 4, True, False))


def test_tokens_without_a_step_and_an_empty_state_change_nothing():
    given = {name: part.detach().clone() for name, part in arguments().items() if name != "state"}
    given["x"][:, :, 9:12] = 0
    given["dt"][:, :, 9:12] = 0
    y, state = selective_scan(**given)
    kept = [t for t in range(LENGTH) if t not in range(9, 12)]
    for name in ("x", "dt", "B", "C"):
        given[name] = given[name][:, :, kept]
    less, end = selective_scan(**given)
    close(y[:, :, kept], less)
    close(state, end)


def test_half_precision_keeps_states_wide():
    narrow = {name: part.detach().float() for name, part in arguments().items()}
    for name in ("x", "B", "C"):
        narrow[name] = narrow[name].bfloat16()
    want, end = selective_scan(**{name: part.float() for name, part in narrow.items()})
    y, state = selective_scan(**narrow)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(state, end)
    torch.testing.assert_close(y.float(), want, rtol=0.01, atol=0.01)
