"""Rotations of queries and keys by where tokens stand: modules from tokens and their layout to angles.

A new one is one class here and its line in `ROTATIONS`; `lion.ops.rotary` says how the angles are used.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.ops import rope_frequencies, rotary_angles


class Rotation(nn.Module):
    """A module (x, layout) -> angles in radians, see `lion.ops.linear_attention`, for tokens x (B, L, dim)."""

    shared: ClassVar[bool] = False  # whether the layout alone decides: the angles are then made once for all layers

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        if head_dim % 2:
            raise ValueError(f"num_heads: rotation turns pairs, got an odd head dim {head_dim}")

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError


class Rope(Rotation):
    """RoPE (arXiv 2104.09864): by the position in the sequence, the same in every head."""

    shared = True

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        positions = layout.positions_of(x)  # (B or 1, L)
        if positions.shape[0] > 1:
            positions = positions[:, None]  # (B, axes, L), of one axis; else (1, L), the same for all rows
        return rotary_angles(positions, rope_frequencies(self.head_dim, device=x.device, dtype=torch.float64))


ROTATIONS: dict[str, type[Rotation]] = {"rope": Rope}
NO_ROTATION = "none"
