"""Position embeddings of pictures, for pictures of another size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def interpolated(places: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Embeddings (.., H * W, dim) of the places of a picture, row after row, as those of H' x W' places (bicubic)."""
    *before, _, dim = places.shape
    grid = places.reshape(-1, *old, dim).movedim(-1, 1)  # (N, dim, H, W)
    grid = F.interpolate(grid.float(), new, mode="bicubic", antialias=True)
    return grid.flatten(2).mT.to(places.dtype).reshape(*before, -1, dim)
