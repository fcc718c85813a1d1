"""Hints for Inductor: which results it stores in memory, and the layouts of gradients. Eager, they change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops import modes


def hinting() -> bool:
    return torch.compiler.is_compiling() and not modes.exporting()


def hinting_for_gpu(x: Tensor) -> bool:
    return hinting() and modes.for_gpu(x.device)


def materialized(t: Tensor) -> Tensor:
    """Return t as a tensor that Inductor stores in memory.

    Otherwise Inductor recomputes a sum for each of the L pairs that read it, which takes a tenth of a forward pass, and
    index expressions nest.
    """
    return _Materialized.apply(t) if hinting() else t


def with_gradient_in_memory(x: Tensor) -> Tensor:
    """Return x, whose gradient Inductor stores in memory on a GPU.

    The gradients of q, k and v become parts of one tensor, that of their projection. Otherwise the kernel that writes
    it computes, for each element, the last steps of the gradients of all three.
    """
    return _GradientInMemory.apply(x) if hinting_for_gpu(x) else x


def inner_products(q: Tensor, k: Tensor) -> Tensor:
    """Return `q k^T` (.., L, L') of queries (.., L, D) and keys (.., L', D).

    Autograd computes the gradient of `k^T`, a tensor (.., D, L'), of which the keys' gradient is a transposed view. Its
    rows are slow on a GPU if L' is not a multiple of 8. There, the gradient is computed as (.., L', D).
    """
    return _InnerProducts.apply(q, k) if hinting_for_gpu(q) else q @ k.mT


def outer_sum(k: Tensor, v: Tensor) -> Tensor:
    """Return `k^T v` (.., D, E) of keys (.., L, D) and values (.., L, E); the gradients are as in `inner_products`."""
    return _OuterSum.apply(k, v) if hinting_for_gpu(k) else k.mT @ v


def in_memory(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t.as_strided(t.shape, t.stride())  # Inductor does not see through this view


class _Materialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor) -> Tensor:
        return in_memory(t)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class _GradientInMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return in_memory(gradient)


class _InnerProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return q @ k.mT

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return gradient @ k, gradient.mT @ q


class _OuterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return k.mT @ v

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        k, v = ctx.saved_tensors
        return v @ gradient.mT, k @ gradient
