"""Full attention: `Y = (Q K^T * M) V`, the training form (Eq. 13 and 30).

Without decay the product is taken right to left, `Q (K^T V)`, and no L x L matrix exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import Direction, pair_mask


def pair_scores(q: Tensor, k: Tensor, directions: tuple[Direction, ...], own: bool) -> Tensor:
    """Decayed scores (B, H, .., L, L), float32 or wider; `own`: whether a token reads its own key here."""
    return (q @ k.mT).to(directions[0].key.terms[0].dtype) * pair_mask(directions, own).squeeze(-1)


def masked_parts(
    q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...], *, own: bool, rowsum: bool, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of the masked product, dense in L."""
    return weighted_parts(pair_scores(q, k, directions, own), v, rowsum=rowsum, dropout_p=dropout_p)


def weighted_parts(weights: Tensor, v: Tensor, *, rowsum: bool, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of decayed scores (B, H, L, L)."""
    total = weights.sum(-1) if rowsum else None
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ v, total


def product_parts(q: Tensor, k: Tensor, v: Tensor, *, rowsum: bool) -> tuple[Tensor, Tensor | None]:
    """The same without mask: `Q (K^T V)` and `Q sum(K)`, linear in L (Lion-lit, both directions)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    numerator = q @ (k.mT @ v)
    if not rowsum:
        return numerator, None
    z = k.sum(-2, dtype=wide)  # (B, H, D)
    return numerator, (q.to(wide) @ z[..., None]).squeeze(-1)
