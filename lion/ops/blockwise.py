"""Blockwise attention, the Lion-chunk of the paper (Eq. 81, 216-220): quadratic in L, memory of O(L C).

The masked product is computed one block of keys at a time. Every query meets C keys, and the numerators and row sums of
all blocks are added up. This saves memory, not arithmetic: the form "chunk" computes the same function in time linear
in L. Blockwise attention is therefore not a form of the layers. It is kept for Figures 1 and 4 of the paper, and as a
check.

Under a fixed decay, block (i, j) of the mask is `lambda^(C |i-j|) L (1/L)^T` with `L_c = lambda^c`, transposed above
the diagonal of blocks. The printed versions are different. Eq. 82 is transposed, and has `lambda^|i-j|` in place of
`lambda^(C |i-j|)`. Appendix B.9 lacks the C, and so does `Gamma * lambda^|i-j|` in the blog. The errors of these masks
are 0.17 to 0.52 at lambda 0.9 and C = 3. Eq. 218-220 mix `A_[i]` and `A_[ij]`, their second Tril should be Triu, and
block i is `iC+1 : (i+1)C`, not `iC+1 : i(C+1)`. Here each block is cut out of the exact mask, from differences of
cumulative decays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lion.ops.api import normalized
from lion.ops.arguments import (
    Gates,
    check_gates,
    check_tokens,
    check_values,
    expand_decay,
    no_autocast,
    sum_dtype,
    take_gates,
)
from lion.ops.decay import decay_mask, make_directions
from lion.ops.full import add_diagonal
from lion.ops.modes import transforms_active
from lion.ops.rotary import rotate_each
from lion.ops.scores import separate_rowsum
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import DEFAULTS, Settings, with_fields
from lion.ops.tokens import TokenBlock


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> Tensor:
    """Compute `lion.ops.linear_attention` with `chunk_size` keys at a time.

    The arguments are those of `linear_attention` except `form`, `dropout_p`, the gates of a delta rule, and decays per
    key dimension.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name, or two arguments that cannot be combined.
    """
    gates = take_gates(gates, fields)
    settings = with_fields(settings, fields, unused=("form", "dropout_p", "scan_merge"))
    check_tokens(q, k, v)
    check_gates(q, gates, settings)
    log_decay, bonus, angles = gates.log_decay, gates.bonus, gates.angles
    if gates.delta or (log_decay is not None and log_decay.dim() in (2, 4)):
        raise ValueError(
            "blockwise_attention: takes neither the delta rule nor decays per key dimension, use form 'chunk'"
        )
    with no_autocast(q):
        checked, (index, valid) = isinstance(segments, SegmentIndex), prepared(q, valid, segments)
        if not checked:
            check_values(gates, valid)
        wide = (x.to(sum_dtype(x)) for x in (q, k, v))
        tokens = TokenBlock(*wide, expand_decay(log_decay, q), valid, index, settings.feature_map).masked()
        q, k = rotate_each(angles, valid, *tokens[:2])
        numerator, rowsum = block_sums(tokens._replace(q=q, k=k), bonus, settings)
        if separate_rowsum(settings.normalize, angles):  # other scores for the row sum, with values of width 0
            tokens = tokens._replace(v=tokens.v[..., :0])
            if settings.normalize == "pre":
                tokens, bonus = tokens._replace(gate=torch.zeros_like(tokens.gate)), None
            rowsum = block_sums(tokens, bonus, settings)[1]
        rowsum = None if settings.normalize == "none" else rowsum
        return normalized(numerator, rowsum, settings, q.shape[-1], gates.floor).to(v.dtype)


def block_sums(tokens: TokenBlock, bonus: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) under a decay (b, H, L, 1)."""
    q, k, v, log_decay, _, index = tokens[:6]
    convention, size = settings.decay_convention, settings.chunk_size
    diagonal = bonus is None and convention != "between"
    directions = make_directions(log_decay, index, decay_convention=convention, direction=settings.direction)

    def block(start: int) -> tuple[Tensor, Tensor]:
        keys = slice(start, start + size)
        scores = (q @ k[:, :, keys].mT).to(log_decay.dtype)
        weights = scores * decay_mask(directions, diagonal, keys).squeeze(-1)  # (B, H, L, C)
        return weights.to(v.dtype) @ v[:, :, keys], weights.sum(-1)

    numerator, total = 0, 0
    again = torch.is_grad_enabled() and not transforms_active()
    for start in range(0, q.shape[2], size):
        # recomputed in the backward pass: if stored, the blocks would add up to the L x L matrix
        y, row = checkpoint(block, start, use_reentrant=False) if again else block(start)
        numerator, total = numerator + y, total + row
    if diagonal:
        return numerator, total
    own = None if bonus is None else bonus.to(log_decay.dtype).reshape(bonus.shape[0], 1, -1)  # (H, 1, D or 1)
    return add_diagonal(numerator, total, q, k, v, own, log_decay.dtype)
