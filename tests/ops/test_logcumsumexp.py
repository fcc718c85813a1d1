"""Cumulative sums of exponentials in log space: values and gradients against separate sums of each prefix."""

import pytest
import torch

from lion.ops import logcumsumexp
from lion.ops.logcumsumexp import BLOCK

from .helpers import assert_close, pairwise


def prefixes(x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the logsumexp of each prefix of each segment separately."""
    place = torch.arange(x.shape[2])
    seen = place <= place[:, None]
    if index is not None:
        seen = seen & (index[:, None, :, None] == index[:, None, None])
    return x[:, :, None].masked_fill(~seen[..., None], -torch.inf).logsumexp(3)


def logits(length: int, spread: float = 3.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(length)
    return spread * torch.randn(2, 2, length, 3, generator=rng).double()


@pytest.mark.parametrize("length, cut", pairwise((1, 2, BLOCK, BLOCK + 1, 65, BLOCK**2 + 1, 150), (False, True)))
def test_is_the_sum_of_each_prefix(length, cut):
    x = logits(length).requires_grad_()
    index = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1) if cut else None
    want = prefixes(x, index)
    got = logcumsumexp(x, index)
    assert_close(got.detach(), want.detach(), 1e-13)
    weights = logits(length, 1.0)
    (expected,) = torch.autograd.grad((want * weights).sum(), x)
    (grad,) = torch.autograd.grad((got * weights).sum(), x)
    assert_close(grad, expected, 1e-12)
    assert_close(logcumsumexp(x.detach().float(), index), want.detach(), 1e-6)


@pytest.mark.parametrize("length", [5, 40])
def test_extremes_stay_finite(length):
    """Check steps of 20,000 up and down, with absent tokens at both ends and between."""
    x = torch.where(logits(length) < 0, -1e4, 1e4).float()
    x[0, :, :3] = -torch.inf
    x[1, :, 1] = -torch.inf
    x[1, :, -2:] = -torch.inf
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
    x = logits(70).float().requires_grad_()
    index = (torch.arange(70) // 9).expand(2, -1)
    compiled = torch.compile(logcumsumexp, backend=backend, fullgraph=True, dynamic=False)
    y = compiled(x, index)
    want = logcumsumexp(x, index)
    assert_close(y.detach(), want.detach(), 1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_close(grad, torch.autograd.grad(want.sum(), x)[0], 1e-5)
    torch._dynamo.reset()
