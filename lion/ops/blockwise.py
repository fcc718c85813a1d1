"""Blockwise form, the Lion-chunk of the paper (Eq. 81, 216-220): quadratic in L, memory of O(L C).

The masked product is computed one block of keys at a time. Every query meets C keys, and the numerators and row sums of
all blocks are added up. This saves memory, not arithmetic: `chunk` computes the same function in time linear in L. The
blockwise form is kept for Figures 1 and 4 of the paper, and as a check.

Under a fixed decay, block (i, j) of the mask is `lambda^(C |i-j|) L (1/L)^T` with `L_c = lambda^c`, transposed above
the diagonal of blocks. The printed versions are different. Eq. 82 is transposed, and has `lambda^|i-j|` in place of
`lambda^(C |i-j|)`. Appendix B.9 lacks the C, and so does `Gamma * lambda^|i-j|` in the blog. The errors of these masks
are 0.17 to 0.52 at lambda 0.9 and C = 3. Eq. 218-220 mix `A_[i]` and `A_[ij]`, their second Tril should be Triu, and
block i is `iC+1 : (i+1)C`, not `iC+1 : i(C+1)`. Here each block is cut out of the exact mask, from differences of
cumulative decays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lion.ops.decay import decay_mask, make_directions
from lion.ops.tokens import ScoreSettings, TokenBlock


def blockwise_parts(tokens: TokenBlock, how: ScoreSettings) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) under a decay (b, H, L, 1)."""
    q, k, v, log_decay, _, index, _ = tokens
    directions = make_directions(log_decay, index, decay_convention=how.decay_convention, direction=how.direction)

    def block(start: int) -> tuple[Tensor, Tensor]:
        keys = slice(start, start + how.chunk_size)
        scores = (q @ k[:, :, keys].mT).to(directions[0].key.terms[0].dtype)
        weights = scores * decay_mask(directions, how.include_diagonal, keys).squeeze(-1)  # (B, H, L, C)
        return weights.to(v.dtype) @ v[:, :, keys], weights.sum(-1)

    numerator, total = 0, 0
    for start in range(0, q.shape[2], how.chunk_size):
        # recomputed in the backward pass: if stored, the blocks would add up to the L x L matrix
        y, row = checkpoint(block, start, use_reentrant=False) if torch.is_grad_enabled() else block(start)
        numerator, total = numerator + y, total + row
    return numerator, total if how.rowsum else None
