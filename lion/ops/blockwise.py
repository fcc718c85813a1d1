"""Blockwise form, the paper's own Lion-chunk (Eq. 81, 216-220): quadratic in L, memory of O(L C).

The masked product is taken one block of keys at a time, every query against C keys, and numerator and row sum are
added up. It saves memory, not arithmetic; `chunk` computes the same in time linear in L. It is here for the paper's
Figures 1 and 4, and as a check.

Block (i, j) of the mask of a fixed decay is `lambda^(C |i-j|) L (1/L)^T` with `L_c = lambda^c`, transposed above
the diagonal of blocks. The printed versions are not: Eq. 82 is transposed and has `lambda^|i-j|` for
`lambda^(C |i-j|)`, appendix B.9 lacks the C, and the blog's `Gamma * lambda^|i-j|` does too (errors of 0.17 to 0.52
at lambda 0.9, C 3). Eq. 218-220 mix `A_[i]` and `A_[ij]`, their second Tril should be Triu, and block i is
`iC+1 : (i+1)C`, not `iC+1 : i(C+1)`. Here a block is cut out of the exact mask, as differences of cumulative decays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lion.ops.decay import decay_mask, make_directions
from lion.ops.tokens import ScoreSettings, TokenBlock


def blockwise_parts(tokens: TokenBlock, how: ScoreSettings) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L); a decay (b, H, L, 1)."""
    q, k, v, log_decay, _, index, _ = tokens
    directions = make_directions(log_decay, index, decay_convention=how.decay_convention, direction=how.direction)

    def block(start: int) -> tuple[Tensor, Tensor]:
        keys = slice(start, start + how.chunk_size)
        scores = (q @ k[:, :, keys].mT).to(directions[0].key.terms[0].dtype)
        weights = scores * decay_mask(directions, how.include_diagonal, keys).squeeze(-1)  # (B, H, L, C)
        return weights.to(v.dtype) @ v[:, :, keys], weights.sum(-1)

    numerator, total = 0, 0
    for start in range(0, q.shape[2], how.chunk_size):
        # recomputed in the backward pass: stored, the blocks would be the L x L matrix
        y, row = checkpoint(block, start, use_reentrant=False) if torch.is_grad_enabled() else block(start)
        numerator, total = numerator + y, total + row
    return numerator, total if how.rowsum else None
