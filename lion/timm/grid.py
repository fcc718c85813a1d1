"""The places of an image's tokens, shared by all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lion.layers.constants import Constants, grid_constants
from lion.layers.layout import Layout, grid_layout


class Placed(NamedTuple):
    """The argument `attn_mask` of a call whose tokens have places of their own.

    Attributes:
        mask: A mask of padding, or None.
        layout: The layout of the tokens.
    """

    mask: Tensor | None
    layout: Layout


class Grid(Constants):
    """The layout of the tokens of every image: prefix tokens (cls, registers), then patches.

    Args:
        size: Number of patches, (height, width).
        prefix: Number of prefix tokens.
        scans: Orders in which the patches are visited, entries of `SCANS`.
    """

    coords: Tensor
    special: Tensor
    orders: Tensor | None

    def __init__(self, size: tuple[int, int], prefix: int, scans: Sequence[str]) -> None:
        super().__init__()
        self.prefix = prefix
        self.scans = scans
        self.resize(size)

    def resize(self, size: tuple[int, int]) -> None:
        """Place the tokens of images with another number of patches, (height, width)."""
        self.size = tuple(size)
        height, width = self.size
        self.hold(partial(grid_constants, height, width, scans=self.scans, special=self.prefix))

    def reset_parameters(self) -> None:
        self.remake(self.coords.device)

    def forward(self, size: tuple[int, int] | None = None) -> Layout:
        """Return the layout of images with another number of patches, (height, width), or that of the model."""
        if size is None or size == self.size:
            return Layout(coords=self.coords, special=self.special, orders=self.orders)
        height, width = size
        with torch.device(self.coords.device):
            return grid_layout(height, width, self.scans, self.prefix)


@torch.no_grad()
def copy_own(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters and buffers of a module to a module with the same parts, except those of linear layers."""
    for path, part in source.named_modules():
        if isinstance(part, nn.Linear):
            continue
        copy = target.get_submodule(path)
        for name, value in {**part._parameters, **part._buffers}.items():
            if value is not None:
                getattr(copy, name).copy_(value)
