"""Full form: `Y = (Q K^T * M) V` as dense products, for training (Eq. 13 and 30).

Without decay the product is computed from right to left, `Q (K^T V)`, and no L x L matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import round_up
from lion.ops.decay import Direction, exponential, log_decay_mask, make_directions, pad_with_last
from lion.ops.inductor import decayed, hinting, inner_products, outer_sum
from lion.ops.modes import is_static, reuses_memory
from lion.ops.tokens import ScoreSettings, TokenBlock

Scale = Callable[[Tensor | None], Tensor | float]  # factor of each row (B, H, L, 1), from its sum (B, H, L)
ALIGNMENT = 8  # keys; products with 200 take three quarters of the time of 197 on a CPU, and GPUs read rows of 16 bytes
ALIGNED_ABOVE = 64  # keys; below, padding is not worth a copy


def decayed_scores(q: Tensor, k: Tensor, directions: tuple[Direction, ...], include_diagonal: bool) -> Tensor:
    """Return the scores under the decay mask, (B, H, .., L, L'), float32 or wider; compiled, of the dtype of q."""
    log_mask, scores = log_decay_mask(directions, include_diagonal).squeeze(-1), inner_products(q, k)
    if hinting():
        return decayed(scores, log_mask)
    mask, scores = exponential(log_mask), scores.to(log_mask.dtype)
    return scores.mul_(mask) if reuses_memory() else scores * mask


def masked_parts(tokens: TokenBlock, how: ScoreSettings, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), dense in L, under a decay (b, H, L, 1)."""
    q, length = tokens.q, tokens.q.shape[2]
    k, v, log_decay, padding = aligned(*tokens[1:4])  # L' keys
    index = pad_segments(tokens.segment_index, padding)
    directions = make_directions(
        log_decay, index, decay_convention=how.decay_convention, direction=how.direction, dtype=q.dtype
    )
    if padding:
        directions = tuple(d.with_queries(length) for d in directions)
    weights = decayed_scores(q, k, directions, how.include_diagonal)  # (B, H, L, L')
    return weighted_sum(weights, v, rowsum=how.rowsum, dropout_p=dropout_p)


def undecayed_parts(tokens: TokenBlock, how: ScoreSettings, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) without decay, for scores with dropout.

    Only segments and a single direction need a mask of pairs.
    """
    q, length = tokens.q, tokens.q.shape[2]
    k, v, padding = aligned(*tokens[1:3])  # L' keys
    index, place = pad_segments(tokens.segment_index, padding), torch.arange(length + padding, device=q.device)
    weights = inner_products(q, k).to(tokens.gate.dtype)  # (B, H, L, L')
    if index is not None:
        weights = weights.masked_fill((index[:, :length, None] != index[:, None])[:, None], 0)
    if how.direction != "both":
        query = place[:length, None]
        weights = weights.masked_fill(query < place if how.direction == "forward" else query > place, 0)
    return weighted_sum(weights, v, rowsum=how.rowsum, dropout_p=dropout_p)


def aligned(*xs: Tensor) -> tuple:
    """Pad keys, values and decays (B, H, L, D) with zeros to a fast length for products; return all and the padding."""
    length = xs[0].shape[2]
    padding = 0 if is_static(length) and length <= ALIGNED_ABOVE else round_up(length, ALIGNMENT) - length
    return (*(F.pad(x, (0, 0, 0, padding)) if padding else x for x in xs), padding)


def pad_segments(segment_index: Tensor | None, padding: int) -> Tensor | None:
    """Extend segment numbers (B, L) by `padding` tokens, which belong to the last segment."""
    if segment_index is None or not padding:
        return segment_index
    return pad_with_last(segment_index[..., None], padding).squeeze(-1)


def weighted_sum(weights: Tensor, v: Tensor, *, rowsum: bool, dropout_p: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) from decayed scores (B, H, L, L')."""
    total = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32)) if rowsum else None
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ v, total


def add_diagonal(
    numerator: Tensor,
    total: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bonus: Tensor | None,
    wide: torch.dtype,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Add what each token reads from itself, for scores without a diagonal.

    The weight of a token's own key is `bonus` (H, 1, D or 1), or 1.
    """
    weight = (q.to(wide) * k * (1 if bonus is None else bonus)).sum(-1)  # (B, H, L)
    total = None if total is None else total + weight
    if dropout_p:
        weight = F.dropout(weight, dropout_p)
    return (numerator + weight[..., None] * v).to(v.dtype), total


def product_parts(
    q: Tensor, k: Tensor, v: Tensor, *, rowsum: bool, scale: Scale | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute numerator and row sum without a mask, `Q (K^T V)` and `Q sum(K)`, linear in L.

    This is Lion-lit in both directions. Rows are multiplied by `scale` of their sums before the product, in the kernel
    that maps q, and not after it.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    total = (q.to(wide) * k.sum(-2, keepdim=True, dtype=wide)).sum(-1) if rowsum else None
    if scale is not None:
        q = (q * scale(total)).to(q.dtype)
    return q @ outer_sum(k, v), total
