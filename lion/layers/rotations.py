"""Rotations of queries and keys by where tokens stand: modules from tokens and their layout to angles.

A new one is one class here and its line in `ROTATIONS`; `lion.ops.rotary` says how the angles are used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.ops import rope_frequencies, rotary_angles


def rope_angles(x: Tensor, head_dim: int, layout: Layout) -> Tensor:
    """RoPE's angles (arXiv 2104.09864) for tokens x (B, L, dim): (L, D/2), or (B, 1, L, D/2) where rows differ."""
    positions = layout.positions_of(x)  # (B or 1, L)
    if positions.shape[0] > 1:
        positions = positions[:, None]  # (B, axes, L), of one axis
    return rotary_angles(positions, rope_frequencies(head_dim, device=x.device, dtype=torch.float64))


class Rope(nn.Module):
    """By the position in the sequence, the same in every head."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        if head_dim % 2:
            raise ValueError(f"num_heads: rotation turns pairs, got an odd head dim {head_dim}")

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Angles in radians, see `lion.ops.linear_attention`."""
        return rope_angles(x, self.head_dim, layout)


ROTATIONS: dict[str, type[nn.Module]] = {"rope": Rope}
NO_ROTATION = "none"
