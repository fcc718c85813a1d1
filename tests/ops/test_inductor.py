"""Hints for Inductor: values and gradients in a graph are those without the hints."""

import pytest
import torch

from lion.ops import inductor

from .helpers import assert_close

pytestmark = pytest.mark.compiled
PRODUCTS = {
    "inner_products": (inductor.inner_products, lambda q, k: q @ k.mT, (5, 4), (7, 4)),
    "outer_sum": (inductor.outer_sum, lambda k, v: k.mT @ v, (7, 4), (7, 3)),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Trace as for a GPU."""
    monkeypatch.setattr("lion.ops.modes.for_gpu", lambda _: True)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients(name):
    fn, plain, *shapes = PRODUCTS[name]
    leaves = [torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    results = []
    for run in (torch.compile(fn, backend="aot_eager", fullgraph=True), plain):
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, want in zip(*results):
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_products_have_the_layout_of_their_tensors(name):
    fn, _, *shapes = PRODUCTS[name]
    leaves = [torch.randn(2, *shape, requires_grad=True) for shape in shapes]
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    strides = []
    for x in leaves:
        x.register_hook(lambda gradient: strides.append(gradient.stride()))
    compiled(*leaves).sum().backward()
    assert sorted(strides) == sorted(x.stride() for x in leaves)


def test_a_gradient_in_memory_is_the_same_gradient():
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: inductor.with_gradient_in_memory(x).sin(), backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), [x])
    assert_close(gradient, x.cos(), 1e-12)


def test_differences_have_their_gradients_up_to_a_rounding():
    """Check two triangles of pairs: sums over keys are exact, those over queries are of numbers in bfloat16."""
    q, k, q_other, k_other = (
        torch.randn(2, 5, *size, 1, dtype=torch.float64, requires_grad=True) for size in ((6, 1), (1, 7)) * 2
    )
    first = torch.arange(6)[:, None, None] >= torch.arange(7)[:, None]
    given, weights = (first, q, k, q_other, k_other), torch.randn(2, 5, 6, 7, 1, dtype=torch.float64)
    results = []
    for run in (torch.compile(inductor.joined_differences, backend="aot_eager", fullgraph=True), plain_differences):
        y = run(*given)
        results.append([y, *torch.autograd.grad((y * weights).sum(), given[1:])])
    for got, want, tolerance in zip(*results, (0, 1e-12, 2**-8, 1e-12, 2**-8)):
        assert_close(got, want, tolerance or 1e-15)
        assert tolerance != 2**-8 or (got != want).any()


def plain_differences(first, q, k, q_other, k_other):
    return torch.where(first, q - k, q_other - k_other)
