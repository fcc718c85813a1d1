"""Full form: `Y = (Q K^T * M) V` as dense products, for training (Eq. 13 and 30).

Without decay the product is computed from right to left, `Q (K^T V)`, and no L x L matrix exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import round_up
from lion.ops.decay import Direction, exponential, log_decay_mask, make_directions
from lion.ops.dtypes import wide_dtype
from lion.ops.inductor import decayed, hinting, inner_products, outer_sum
from lion.ops.modes import is_static, reuses_memory
from lion.ops.settings import Settings
from lion.ops.tokens import Sums, Tokens, pad_segments

ALIGNMENT = 8  # keys; products with 200 take three quarters of the time of 197 on a CPU, and GPUs read rows of 16 bytes
ALIGNED_ABOVE = 64  # keys; below, padding is not worth a copy


def full_sums(tokens: Tokens, settings: Settings) -> Sums:
    """Compute `(Q K^T * M) V` and the row sums, dense in L, under one decay for all key dimensions."""
    q = tokens.q
    padding = padding_of(q.shape[2])
    k = pad(tokens.k, padding)  # (B, H, L', D)
    v = pad(tokens.v, padding)
    segment = pad_segments(tokens.segment, padding)
    if tokens.log_decay is None and tokens.bonus is None:
        weights = undecayed_scores(q, k, segment, settings.direction)
        return weighted_sum(weights, v, settings)
    directions = make_directions(pad(tokens.decays(), padding), settings.decay_convention, settings.direction, q.dtype)
    weights = decayed_scores(q, k, directions, segment, include_diagonal=tokens.bonus is None)
    sums = weighted_sum(weights, v, settings)
    return with_own_keys(sums, tokens, settings)


def decayed_scores(
    q: Tensor, k: Tensor, directions: tuple[Direction, ...], segment: Tensor | None, include_diagonal: bool
) -> Tensor:
    """Return the scores `Q K^T * M` (B, H, .., L, L'), float32 or wider; compiled, of the dtype of q."""
    log_mask = log_decay_mask(directions, segment, include_diagonal, queries=q.shape[-2]).squeeze(-1)
    scores = inner_products(q, k)
    if hinting():
        return decayed(scores, log_mask)
    mask = exponential(log_mask)
    scores = scores.to(mask.dtype)
    if reuses_memory():
        return scores.mul_(mask)
    return scores * mask


def undecayed_scores(q: Tensor, k: Tensor, segment: Tensor | None, direction: str) -> Tensor:
    """Return the scores (B, H, L, L') without decay, of which a segment or one direction masks pairs."""
    length = q.shape[2]
    place = torch.arange(k.shape[2], device=q.device)
    scores = inner_products(q, k).to(wide_dtype(q))
    if segment is not None:
        other = segment[:, :length, None] != segment[:, None]
        scores = scores.masked_fill(other[:, None], 0)
    if direction == "forward":
        scores = scores.masked_fill(place[:length, None] < place, 0)
    if direction == "backward":
        scores = scores.masked_fill(place[:length, None] > place, 0)
    return scores


def weighted_sum(scores: Tensor, v: Tensor, settings: Settings) -> Sums:
    """Compute the numerator (B, H, .., L, E) and the row sum (B, H, .., L) from decayed scores (B, H, .., L, L')."""
    row_sum = None
    if settings.row_sums:
        row_sum = scores.sum(-1, dtype=wide_dtype(scores))
    if settings.dropout_p:
        scores = F.dropout(scores, settings.dropout_p)
    return Sums(scores.to(v.dtype) @ v, row_sum)


def with_own_keys(sums: Sums, tokens: Tokens, settings: Settings) -> Sums:
    """Add the own key of each token, whose weight is `bonus` (H or 1, 1, D or 1), to the sums over the other keys."""
    bonus = tokens.bonus
    if bonus is None:
        return sums
    weight = (tokens.q.to(bonus.dtype) * tokens.k * bonus).sum(-1)  # (B, H, L)
    row_sum = weight if settings.row_sums else None
    if settings.dropout_p:
        weight = F.dropout(weight, settings.dropout_p)
    return sums.plus(Sums(weight[..., None] * tokens.v, row_sum)).rounded(tokens.v.dtype)


def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `Q (K^T V)` (B, H, L, E), the numerator of Lion-lit in both directions, linear in L."""
    return q @ outer_sum(k, v)


def product_row_sum(q: Tensor, k: Tensor) -> Tensor:
    """Compute `Q sum(K)` (B, H, L), the row sums of Lion-lit in both directions."""
    wide = wide_dtype(q)
    z = k.sum(-2, keepdim=True, dtype=wide)
    return (q.to(wide) * z).sum(-1)


def padding_of(length: int) -> int:
    """Return the number of keys that extend `length` to a fast length for products."""
    if is_static(length) and length <= ALIGNED_ABOVE:
        return 0
    return round_up(length, ALIGNMENT) - length


def pad(x: Tensor, padding: int) -> Tensor:
    """Append `padding` zeros to tokens x (.., L, D): keys of 0 add nothing."""
    if not padding:
        return x
    return F.pad(x, (0, 0, 0, padding))
