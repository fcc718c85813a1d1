"""Cumulative sums of exponentials in log space: values and gradients against separate sums of each prefix."""

import pytest
import torch

from lion.ops import logcumsumexp
from lion.ops.logcumsumexp import BLOCK

from .helpers import assert_close


def prefixes(x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the logsumexp of each prefix of each segment separately."""
    rows = []
    for b in range(len(x)):
        ids = [0] * x.shape[2] if index is None else index[b].tolist()
        kept = [[j for j in range(i + 1) if ids[j] == ids[i]] for i in range(x.shape[2])]
        rows.append(torch.stack([x[b][:, places].logsumexp(1) for places in kept], 1))
    return torch.stack(rows)


def logits(length: int, spread: float = 3.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(length)
    return spread * torch.randn(2, 2, length, 3, generator=rng).double()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 65, BLOCK**2 + 1, 150])
def test_is_the_sum_of_each_prefix(length, cut):
    x = logits(length).requires_grad_()
    index = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1) if cut else None
    weights = logits(length, 1.0)
    want, got = prefixes(x, index), logcumsumexp(x, index)
    assert_close(got.detach(), want.detach(), 1e-13)
    grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (want, got)]
    assert_close(grads[1], grads[0], 1e-12)
    assert_close(logcumsumexp(x.detach().float(), index), want.detach(), 1e-6)


@pytest.mark.parametrize("length", [5, 40])
def test_extremes_stay_finite(length):
    """Check steps of 20,000 up and down, with absent tokens at both ends and between."""
    x = torch.where(logits(length) < 0, -1e4, 1e4).float()
    x[0, :, :3], x[1, :, 1], x[1, :, -2:] = -torch.inf, -torch.inf, -torch.inf
    x.requires_grad_()
    y = logcumsumexp(x)
    assert (y[0, :, :3] == -torch.inf).all() and y[0, :, 3:].isfinite().all() and y[1].isfinite().all()
    assert_close(y[0, :, 3:].detach(), prefixes(x[:1, :, 3:].detach())[0], 1e-6)
    (2 * y[:, :, 3:]).sum().backward()
    assert x.grad.isfinite().all() and not x.grad[0, :, :3].any() and not x.grad[1, :, 1].any()
    assert x.grad.sum().item() == pytest.approx(2 * y[:, :, 3:].numel(), rel=1e-3)  # weights of a sum add up to 1


def test_differences():
    x = logits(BLOCK + 3)[:1, :1].requires_grad_()
    index = (torch.arange(BLOCK + 3) > 4)[None].long()
    assert torch.autograd.gradcheck(logcumsumexp, [x])
    assert torch.autograd.gradcheck(lambda x: logcumsumexp(x, index), [x])


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.every)])
def test_one_graph(backend):
    torch._dynamo.reset()
    x, same = (logits(70).float().requires_grad_() for _ in range(2))
    compiled = torch.compile(logcumsumexp, backend=backend, fullgraph=True, dynamic=False)
    index = (torch.arange(70) // 9).expand(2, -1)
    for y, want in ((compiled(x, index), logcumsumexp(same, index)),):
        assert_close(y.detach(), want.detach(), 1e-6)
        y.sum().backward(), want.sum().backward()
        assert_close(x.grad, same.grad, 1e-5)
    torch._dynamo.reset()
