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
    if hinting():
        return _Materialized.apply(t)
    return t


def with_gradient_in_memory(x: Tensor) -> Tensor:
    """Return x, whose gradient Inductor stores in memory on a GPU.

    The gradients of q, k and v become parts of one tensor, that of their projection. Otherwise the kernel that writes
    it computes, for each element, the last steps of the gradients of all three.
    """
    if hinting_for_gpu(x):
        return _GradientInMemory.apply(x)
    return x


def inner_products(q: Tensor, k: Tensor) -> Tensor:
    """Return `q k^T` (.., L, L') of queries (.., L, D) and keys (.., L', D).

    Autograd computes the gradient of `k^T`, a tensor (.., D, L'), of which the keys' gradient is a transposed view. Its
    rows are slow on a GPU if L' is not a multiple of 8. There, the gradient is computed as (.., L', D).
    """
    if hinting_for_gpu(q):
        return _InnerProducts.apply(q, k)
    return q @ k.mT


def outer_sum(k: Tensor, v: Tensor) -> Tensor:
    """Return `k^T v` (.., D, E) of keys (.., L, D) and values (.., L, E); the gradients are as in `inner_products`."""
    if hinting_for_gpu(k):
        return _OuterSum.apply(k, v)
    return k.mT @ v


def decayed(scores: Tensor, log_mask: Tensor) -> Tensor:
    """Return `scores exp(log_mask)` (.., L, L') in the dtype of the scores.

    Autograd would save the scores for the gradient of the mask. Here, `d log_mask = d result * result`, and the product
    with the values saves the result anyway.
    """
    return _Decayed.apply(scores, log_mask)


def joined_differences(first: Tensor, q: Tensor, k: Tensor, q_other: Tensor, k_other: Tensor) -> Tensor:
    """Return `q - k` (.., L, L', D) where `first` is True, and elsewhere `q_other - k_other`.

    Queries are (.., L, 1, D) and keys (.., 1, L', D). On a GPU, the gradient of the pairs is stored in bfloat16 for the
    sums over queries, which another kernel computes; the sums over keys are computed from float32.
    """
    if hinting_for_gpu(q):
        return _JoinedDifferences.apply(first, q, k, q_other, k_other)
    return torch.where(first, q - k, q_other - k_other)


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


class _Decayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, log_mask: Tensor) -> Tensor:
        weights = (scores * log_mask.exp()).to(scores.dtype)
        ctx.save_for_backward(log_mask, weights)
        return weights

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        log_mask, weights = ctx.saved_tensors
        of_mask = gradient * weights.to(log_mask.dtype)
        return (gradient * log_mask.exp()).to(gradient.dtype), of_mask.sum_to_size(log_mask.shape)


class _JoinedDifferences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first: Tensor, q: Tensor, k: Tensor, q_other: Tensor, k_other: Tensor) -> Tensor:
        ctx.save_for_backward(first)
        ctx.shapes = q.shape, k.shape, q_other.shape, k_other.shape
        return torch.where(first, q - k, q_other - k_other)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (first,) = ctx.saved_tensors
        narrow = in_memory(gradient.to(torch.bfloat16)).to(gradient.dtype)
        q, k, q_other, k_other = ctx.shapes
        of_q = gradient.where(first, 0).sum_to_size(q)
        of_k = -narrow.where(first, 0).sum_to_size(k)
        of_q_other = gradient.where(~first, 0).sum_to_size(q_other)
        of_k_other = -narrow.where(~first, 0).sum_to_size(k_other)
        return None, of_q, of_k, of_q_other, of_k_other


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
