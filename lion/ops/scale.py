"""The scale of `Y = scale(Q K^T * M) V`: division of the sums over keys, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.modes import reuses_memory
from lion.ops.settings import Settings
from lion.ops.tokens import Sums


def normalized(sums: Sums, settings: Settings, dim: int, floor: Tensor | None = None) -> Tensor:
    """Divide the numerator (B, H, L, E) by the row sum (B, H, L) as `normalize` specifies, or scale it.

    Without gradients the result reuses the memory of the numerator.
    """
    factor = row_factor(sums.row_sum, settings, dim, floor)
    if reuses_memory():
        return sums.numerator.mul_(factor)  # inference in the rnn form keeps a single copy of its outputs
    return (sums.numerator * factor).to(sums.numerator.dtype)


def row_factor(row_sum: Tensor | None, settings: Settings, dim: int, floor: Tensor | None = None) -> Tensor | float:
    """Return the factor of each row (B, H, L, 1) that `normalize` specifies, or one number if there are no row sums.

    `floor` (B, H, L) is the smallest divisor of each row under "max".
    """
    scale = settings.scale_of(dim)
    if row_sum is None:
        return scale
    if settings.normalize == "max":
        size = (scale * row_sum).abs()
        if floor is None:
            divisor = size.clamp_min(1)
        else:
            divisor = torch.maximum(size, floor.to(size.dtype))
        return (scale / divisor)[..., None]
    # an empty row and its gradient are 0, even where 1 / eps overflows
    return row_sum.clamp_min(settings.eps).reciprocal().masked_fill(row_sum == 0, 0)[..., None]
