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

from lion.ops.arguments import Gates, check_call, no_autocast
from lion.ops.decay import decay_mask, make_directions
from lion.ops.forms import prepare
from lion.ops.full import weighted_sum, with_own_keys
from lion.ops.modes import transforms_active
from lion.ops.scale import normalized
from lion.ops.segments import SegmentIndex
from lion.ops.settings import DEFAULTS, Settings
from lion.ops.tokens import Sums, Tokens


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
    gates, settings = check_call(q, k, v, gates, settings, fields, unused=("form", "dropout_p"))
    vector = gates.log_decay is not None and gates.log_decay.dim() in (2, 4)
    if gates.delta or vector:
        raise ValueError(
            "blockwise_attention: takes neither the delta rule nor decays per key dimension, use form 'chunk'"
        )
    with no_autocast(q):
        scores, of_rows = prepare(q, k, v, gates, valid, segments, settings)
        sums = block_sums(scores.tokens, scores.settings)
        if of_rows is not None:
            sums = Sums(sums.numerator, block_sums(of_rows.tokens, of_rows.settings).row_sum)
        return normalized(sums, settings, q.shape[-1], gates.floor).to(v.dtype)


def block_sums(tokens: Tokens, settings: Settings) -> Sums:
    """Compute the sums over keys (B, H, L, ..) under one decay for all key dimensions."""
    tokens = tokens.masked()
    log_decay = tokens.decays()
    directions = make_directions(log_decay, settings.decay_convention, settings.direction)

    def block(start: int) -> Sums:
        keys = slice(start, start + settings.chunk_size)
        scores = (tokens.q @ tokens.k[:, :, keys].mT).to(log_decay.dtype)
        mask = decay_mask(directions, tokens.segment, tokens.bonus is None, keys=keys).squeeze(-1)  # (b, H, L, C)
        return weighted_sum(scores * mask, tokens.v[:, :, keys], settings)

    def run(start: int) -> Sums:
        if torch.is_grad_enabled() and not transforms_active():
            # recomputed in the backward pass: if stored, the blocks would add up to the L x L matrix
            return checkpoint(block, start, use_reentrant=False)
        return block(start)

    sums = run(0)
    for start in range(settings.chunk_size, tokens.q.shape[2], settings.chunk_size):
        sums = sums.plus(run(start))
    return with_own_keys(sums, tokens, settings)
