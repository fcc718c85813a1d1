"""Gradient of decays through their prefix sums, which the caller has computed.

If the mask of one direction is `M_ij = exp(s_i - s_j)`, the prefix sum s of a token has two effects. It is a factor
`exp(s_i)` on all that the token's query reads, and a factor `exp(-s_i)` on all that the token's key contributes. For
the loss l and each key dimension,

    dl/ds_i = q_i dl/dq_i - k_i dl/dk_i

A prefix sum that all key dimensions share has the sum of their gradients. These two products replace a derivative
through every decay between two tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.once import once


def gradients_to(prefix: Tensor, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and k (B, H, L, D) unchanged; their gradients determine that of `prefix` (B, H, L, D or 1)."""
    return _GradientTo.apply(prefix, q, 1, valid), _GradientTo.apply(prefix, k, -1, valid)


class _GradientTo(torch.autograd.Function):
    """Queries (sign 1) or keys (sign -1), unchanged; `prefix` also receives their part of its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(prefix: Tensor, x: Tensor, sign: int, valid: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        prefix, x, ctx.sign, valid = inputs
        ctx.save_for_backward(x, valid)
        ctx.dtype, ctx.scalar = prefix.dtype, prefix.shape[-1] == 1

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, valid = ctx.saved_tensors
        prefix = x.to(ctx.dtype) * dx.to(ctx.dtype)
        if ctx.scalar:
            prefix = prefix.sum(-1, keepdim=True)
        if valid is not None:  # padding may hold NaN
            prefix = prefix.masked_fill(~valid[:, None, :, None], 0)
        prefix, _ = once("decays through their prefix sums", (prefix if ctx.sign > 0 else -prefix, dx), x, dx)
        return prefix, dx, None, None
