"""Interpolation of position embeddings for images of another size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def interpolated(places: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings (.., H * W, dim) of an image to H' x W' positions (bicubic).

    Positions are in row-major order.
    """
    *before, _, dim = places.shape
    grid = places.reshape(-1, *old, dim).movedim(-1, 1)  # (N, dim, H, W)
    grid = F.interpolate(grid.float(), new, mode="bicubic", antialias=True)
    return grid.flatten(2).mT.to(places.dtype).reshape(*before, -1, dim)
