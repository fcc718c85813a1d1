"""Full attention: `Y = (Q K^T * M) V`, the training form (Eq. 13 and 30).

Without decay the product is taken right to left, `Q (K^T V)`, and no L x L matrix exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_number, rounded
from lion.ops.decay import Direction, hold, make_directions, pair_mask

ALIGNMENT = 8  # products of 200 tokens take three quarters of the time of 197 here, and GPUs ask for as much
ALIGNED_ABOVE = 64  # tokens; not worth a copy below


def pair_scores(q: Tensor, k: Tensor, directions: tuple[Direction, ...], own: bool) -> Tensor:
    """Decayed scores (B, H, .., L, L), float32 or wider; `own`: whether a token reads its own key here."""
    mask = pair_mask(directions, own).squeeze(-1)
    scores = (q @ k.mT).to(mask.dtype)
    return scores * mask if torch.is_grad_enabled() else scores.mul_(mask)


def masked_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    run: Tensor | None,
    *,
    decay_convention: str,
    direction: str,
    own: bool,
    rowsum: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of the masked product, dense in L; log_decay (b, H, L, 1)."""
    length = q.shape[2]
    q, k, v, log_decay, missing = aligned(q, k, v, log_decay)
    run = pad_run(run, missing)
    directions = make_directions(log_decay, run, decay_convention=decay_convention, direction=direction)
    weights = pair_scores(q, k, directions, own)  # (B, H, L, L)
    return weighted_parts(weights, v, length, rowsum=rowsum, dropout_p=dropout_p)


def aligned(*xs: Tensor) -> tuple:
    """Tokens (B, H, L, D) with zeros behind them, to a length that matrix products are fast at, and how many."""
    length = xs[0].shape[2]
    missing = 0 if is_number(length) and length <= ALIGNED_ABOVE else rounded(length, ALIGNMENT) - length
    return (*(F.pad(x, (0, 0, 0, missing)) if missing else x for x in xs), missing)


def pad_run(run: Tensor | None, missing: int) -> Tensor | None:
    """Segments (B, L) with `missing` places more, which belong to the last one."""
    return run if run is None or not missing else hold(run[..., None], missing).squeeze(-1)


def weighted_parts(
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
