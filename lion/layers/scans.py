"""Where tokens stand on a grid, and the orders in which scans visit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Places of a sequence's tokens, the same for all layers and samples.

    `coords` (axes, L), integer, -1 in all axes for extra tokens (cls), which `extra` (L,) marks; `orders` (S, L), the
    tokens in the order in which each scan visits them, None where there is one scan and it goes as they stand.
    """

    coords: Tensor
    extra: Tensor
    orders: Tensor | None = None


def row_major(patches: Tensor) -> Tensor:
    return patches


def row_snake(patches: Tensor) -> Tensor:
    """Even rows from left to right, odd rows from right to left."""
    patches = patches.clone()
    patches[1::2] = patches[1::2].flip(1)
    return patches


def column_snake(patches: Tensor) -> Tensor:
    """Even columns downwards, odd columns upwards."""
    return row_snake(patches.mT)


SCANS: dict[str, Callable[[Tensor], Tensor]] = {  # patches (height, width) -> the same as they are visited, row by row
    "row_major": row_major,
    "row_snake": row_snake,  # the released code's "s"
    "column_snake": column_snake,  # its "sr"
}
AS_THEY_STAND = ("row_major",)


def make_grid(height: int, width: int, scans: Sequence[str] = AS_THEY_STAND, extra: int = 1) -> Grid:
    """The grid of an image of `height` x `width` patches behind `extra` tokens, which every scan visits first."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).reshape(-1, 2).mT  # (2, H W)
    coords = torch.cat([torch.full((2, extra), -1), places], 1)
    placeless = (coords < 0).all(0)  # here and not in every layer
    if tuple(scans) == AS_THEY_STAND:
        return Grid(coords, placeless)
    patches = torch.arange(height * width).view(height, width) + extra
    orders = [torch.cat([torch.arange(extra), SCANS[s](patches).flatten()]) for s in scans]
    return Grid(coords, placeless, torch.stack(orders))
