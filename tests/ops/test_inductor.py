"""Hints for Inductor: values and gradients in a graph are those without the hints."""

import pytest
import torch
from torch import Tensor

from lion.ops import inductor

from .helpers import assert_close

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Trace as for a GPU."""
    monkeypatch.setattr("lion.ops.modes.for_gpu", lambda _: True)
    torch._dynamo.reset()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def products(q: Tensor, k: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return inductor.inner_products(q, k), inductor.outer_sum(key, v)


def test_products_and_their_gradients():
    """Check values and gradients, and that gradients have the layout of their tensors."""
    leaves = [leaf(2, 3, 5, 4), leaf(2, 3, 7, 4), leaf(2, 3, 7, 4), leaf(2, 3, 7, 3)]
    q, k, key, v = leaves
    scores, state = compiled(products)(q, k, key, v)
    assert_close(scores, q @ k.mT, 1e-12)
    assert_close(state, key.mT @ v, 1e-12)
    grads = torch.autograd.grad(scores.square().sum() + state.square().sum(), leaves)
    plain = (q @ k.mT).square().sum() + (key.mT @ v).square().sum()
    for x, grad, expected in zip(leaves, grads, torch.autograd.grad(plain, leaves), strict=True):
        assert_close(grad, expected, 1e-12)
        assert grad.stride() == x.stride()


def test_a_gradient_in_memory_is_the_same_gradient():
    x = leaf(2, 5, 4)

    def sine(x: Tensor) -> Tensor:
        return inductor.with_gradient_in_memory(x).sin()

    (gradient,) = torch.autograd.grad(compiled(sine)(x).sum(), [x])
    assert_close(gradient, x.cos(), 1e-12)


def test_differences_have_their_gradients_up_to_a_rounding():
    """Check two triangles of pairs: sums over keys are exact, those over queries are of numbers in bfloat16."""
    queries = [leaf(2, 5, 6, 1, 1), leaf(2, 5, 6, 1, 1)]
    keys = [leaf(2, 5, 1, 7, 1), leaf(2, 5, 1, 7, 1)]
    first = torch.arange(6)[:, None, None] >= torch.arange(7)[:, None]
    y = compiled(inductor.joined_differences)(first, queries[0], keys[0], queries[1], keys[1])
    want = torch.where(first, queries[0] - keys[0], queries[1] - keys[1])
    assert_close(y, want, 1e-15)
    weights = torch.randn(2, 5, 6, 7, 1, dtype=torch.float64)
    grads = torch.autograd.grad((y * weights).sum(), queries + keys)
    expected = torch.autograd.grad((want * weights).sum(), queries + keys)
    for n in (0, 1):
        assert_close(grads[n], expected[n], 1e-12)
        assert_close(grads[n + 2], expected[n + 2], 2**-8)
        assert (grads[n + 2] != expected[n + 2]).any()
