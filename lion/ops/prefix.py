"""The gradient of decays by prefix sums that the caller has.

Where the mask of one direction is `M_ij = exp(s_i - s_j)`, a token's `s` is a factor `exp(s_i)` on all that its query
reads and `exp(-s_i)` on all that its key gives. So with the loss l, of each key dimension,

    dl/ds_i = q_i dl/dq_i - k_i dl/dk_i

two products in the place of a derivative through every decay between two tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gradients_to(prefix: Tensor, q: Tensor, k: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k (B, H, L, D) as they are; what reads them gives `prefix` (B, H, L, D) its gradient."""
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
