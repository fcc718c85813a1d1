"""Full attention: `Y = (Q K^T * M) V`, the training form (Eq. 13 and 30).

Without decay the product is taken right to left, `Q (K^T V)`, and no L x L matrix exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_static, round_up
from lion.ops.decay import Direction, decay_mask, make_directions, pad_with_last
from lion.ops.tokens import ScoreSettings, TokenBlock

ALIGNMENT = 8  # products of 200 tokens take three quarters of the time of 197 here, and GPUs ask for as much
ALIGNED_ABOVE = 64  # tokens; not worth a copy below


def decayed_scores(q: Tensor, k: Tensor, directions: tuple[Direction, ...], include_diagonal: bool) -> Tensor:
    """(B, H, .., L, L), float32 or wider."""
    mask = decay_mask(directions, include_diagonal).squeeze(-1)
    scores = (q @ k.mT).to(mask.dtype)
    return scores * mask if torch.is_grad_enabled() else scores.mul_(mask)


def masked_parts(tokens: TokenBlock, how: ScoreSettings, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of the masked product, dense in L; a decay (b, H, L, 1)."""
    length = tokens.q.shape[2]
    q, k, v, log_decay, padding = aligned(*tokens[:4])
    index = pad_segments(tokens.segment_index, padding)
    directions = make_directions(log_decay, index, decay_convention=how.decay_convention, direction=how.direction)
    weights = decayed_scores(q, k, directions, how.include_diagonal)  # (B, H, L, L)
    return weighted_sum(weights, v, length, rowsum=how.rowsum, dropout_p=dropout_p)


def undecayed_parts(tokens: TokenBlock, how: ScoreSettings, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """The same where nothing decays, for scores that are dropped: a mask of which pairs there are, if not all."""
    length, wide = tokens.q.shape[2], tokens.gate.dtype
    q, k, v, padding = aligned(*tokens[:3])
    index, place = pad_segments(tokens.segment_index, padding), torch.arange(length + padding, device=q.device)
    weights = (q @ k.mT).to(wide)  # (B, H, L, L)
    if index is not None:
        weights = weights.masked_fill((index[:, :, None] != index[:, None])[:, None], 0)
    if how.direction != "both":
        later = place[:, None] < place  # keys behind their queries
        weights = weights.masked_fill(later if how.direction == "forward" else later.mT, 0)
    return weighted_sum(weights, v, length, rowsum=how.rowsum, dropout_p=dropout_p)


def aligned(*xs: Tensor) -> tuple:
    """Tokens (B, H, L, D) with zeros behind them, to a length that matrix products are fast at, and how many."""
    length = xs[0].shape[2]
    padding = 0 if is_static(length) and length <= ALIGNED_ABOVE else round_up(length, ALIGNMENT) - length
    return (*(F.pad(x, (0, 0, 0, padding)) if padding else x for x in xs), padding)


def pad_segments(segment_index: Tensor | None, padding: int) -> Tensor | None:
    """(B, L) with `padding` tokens more, which belong to the last segment."""
    if segment_index is None or not padding:
        return segment_index
    return pad_with_last(segment_index[..., None], padding).squeeze(-1)


def weighted_sum(
    weights: Tensor, v: Tensor, length: int, *, rowsum: bool, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of decayed scores, their first `length` rows."""
    total = weights.sum(-1)[..., :length] if rowsum else None
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return (weights.to(v.dtype) @ v)[:, :, :length], total


def add_diagonal(
    numerator: Tensor, total: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bonus: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What a token reads of itself, weighted by `bonus` (H, 1, D or 1) or 1, where the form has left it out."""
    weight = (q.to(wide) * k * (1 if bonus is None else bonus)).sum(-1)  # (B, H, L)
    return (numerator + weight[..., None] * v).to(v.dtype), None if total is None else total + weight


def product_parts(q: Tensor, k: Tensor, v: Tensor, *, rowsum: bool) -> tuple[Tensor, Tensor | None]:
    """The same without mask: `Q (K^T V)` and `Q sum(K)`, linear in L (Lion-lit, both directions)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    numerator = q @ (k.mT @ v)
    if not rowsum:
        return numerator, None
    z = k.sum(-2, dtype=wide)  # (B, H, D)
    return numerator, (q.to(wide) @ z[..., None]).squeeze(-1)
