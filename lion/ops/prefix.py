"""Gradient of decays through their prefix sums, which the caller has computed.

If the mask of one direction is `M_ij = exp(s_i - s_j)`, the prefix sum s of a token has two effects. It is a factor
`exp(s_i)` on all that the token's query reads, and a factor `exp(-s_i)` on all that the token's key contributes. For
the loss l and each key dimension,

    dl/ds_i = q_i dl/dq_i - k_i dl/dk_i

These two products replace a derivative through every decay between two tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gradients_to(prefix: Tensor, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and k (B, H, L, D) unchanged; their gradients determine that of `prefix` (B, H, L, D)."""
    return _GradientsTo.apply(prefix, q, k, valid)


class _GradientsTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, prefix: Tensor, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, valid)
        ctx.dtype = prefix.dtype
        return q.view_as(q), k.view_as(k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, valid = ctx.saved_tensors
        by_query, by_key = (x.to(ctx.dtype) * dx.to(ctx.dtype) for x, dx in ((q, dq), (k, dk)))
        prefix = by_query - by_key
        if valid is not None:  # padding may hold NaN
            prefix = prefix.masked_fill(~valid[:, None, :, None], 0)
        return prefix, dq, dk, None
