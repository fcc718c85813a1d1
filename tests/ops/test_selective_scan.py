"""The selective scan against its recurrence token by token: values, states, and gradients of every argument."""

import pytest
import torch

from lion.ops import selective_scan as module
from lion.ops.selective_scan import selective_scan

GROUPS, BATCH, LENGTH, CHANNELS, STATE = 2, 2, 21, 5, 3


def arguments(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(GROUPS, *shape, generator=generator, dtype=torch.double)

    x, dt = random(BATCH, LENGTH, CHANNELS), random(BATCH, LENGTH, CHANNELS).abs()
    A, B, C = -random(CHANNELS, STATE).exp(), random(BATCH, LENGTH, STATE), random(BATCH, LENGTH, STATE)
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": random(BATCH, CHANNELS, STATE)}
    return {name: part.requires_grad_() for name, part in given.items()}


def recurrence(x, dt, A, B, C, state, start):
    """Compute h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t, from h = 0 at every start."""
    h, rows = state, []
    for t in range(x.shape[2]):
        if start is not None:
            h = torch.where(start[:, :, t, None, None], torch.zeros_like(h), h)
        h = torch.exp(torch.einsum("gbe,gen->gben", dt[:, :, t], A)) * h
        h = h + torch.einsum("gbe,gbn->gben", dt[:, :, t] * x[:, :, t], B[:, :, t])
        rows.append(torch.einsum("gben,gbn->gbe", h, C[:, :, t]))
    return torch.stack(rows, 2), h


def gradients(run, given):
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in run)
    return torch.autograd.grad(sum((y * w).sum() for y, w in zip(run, weights)), list(given.values()))


@pytest.mark.parametrize("stacks", [False, True])  # on a CPU, on a GPU
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("size", [1, 4, 7, 64])
def test_values_and_gradients_are_those_of_the_recurrence(size, starts, stacks, monkeypatch):
    monkeypatch.setattr(module, "stacks", lambda x: stacks)
    given, start = arguments(), None
    if starts:
        start = torch.rand(GROUPS, BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.2
    want = recurrence(**given, start=start)
    got = selective_scan(**given, start=start, chunk_size=size)
    with torch.no_grad():
        without = selective_scan(**given, start=start, chunk_size=size)
    for y, again, expected in zip(got, without, want):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
    for grad, expected, name in zip(gradients(got, given), gradients(want, given), given):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-11, msg=name)


def test_the_operators_keep_the_rules_of_operators():
    """Check schema, fake tensors and autograd registration with PyTorch's own checks."""
    *given, state = arguments().values()
    start = torch.zeros(GROUPS, BATCH, LENGTH, dtype=torch.bool)
    torch.library.opcheck(torch.ops.lion.selective_scan.default, (*given, start, state, 4, True, False))
    torch.library.opcheck(torch.ops.lion.selective_scan.default, (*given, None, state, 4, True, False))


def test_tokens_without_a_step_and_an_empty_state_change_nothing():
    given = arguments()
    x, dt = given["x"].detach().clone(), given["dt"].detach().clone()
    x[:, :, 9:12] = dt[:, :, 9:12] = 0
    kept = [t for t in range(LENGTH) if t not in range(9, 12)]
    more = {name: given[name] for name in ("B", "C")}
    y, state = selective_scan(x, dt, given["A"], **more)
    less, end = selective_scan(x[:, :, kept], dt[:, :, kept], given["A"], **{n: p[:, :, kept] for n, p in more.items()})
    torch.testing.assert_close(y[:, :, kept], less, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, end, rtol=0, atol=1e-12)


def test_half_precision_keeps_states_wide():
    given = {name: part.detach().float() for name, part in arguments().items()}
    narrow = given | {name: given[name].bfloat16() for name in ("x", "B", "C")}
    want, end = selective_scan(**{name: part.float() for name, part in narrow.items()})
    y, state = selective_scan(**narrow)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(state, end)
    torch.testing.assert_close(y.float(), want, rtol=0.01, atol=0.01)
