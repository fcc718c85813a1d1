"""Rotations of queries and keys by where tokens stand: modules from tokens and their layout to angles.

A new one is one class here and its line in `ROTATIONS`; `lion.ops.rotary` says how the angles are used.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.marks import Marks
from lion.ops import rope_frequencies, rotary_angles


class Rotation(nn.Module):
    """A module (x, layout) -> angles in radians, see `lion.ops.linear_attention`, for tokens x (B, L, dim)."""

    shared: ClassVar[bool] = False  # whether the layout alone decides: the angles are then made once for all layers
    row_sums: ClassVar[bool] = True  # whether it goes with row sums, those of the scores before they are turned

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        if head_dim % 2:
            raise ValueError(f"num_heads: rotation turns pairs, got an odd head dim {head_dim}")

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError


def along_text(x: Tensor, layout: Layout) -> Tensor:
    """Positions in the sequence as coordinates of one axis: (1, L), the same for all rows, or (B, 1, L)."""
    positions = layout.positions_of(x)  # (B or 1, L)
    return positions[:, None] if positions.shape[0] > 1 else positions


class Rope(Rotation):
    """RoPE (arXiv 2104.09864): by the position in the sequence, the same in every head."""

    shared = True

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        frequencies = rope_frequencies(self.head_dim, device=x.device, dtype=torch.float64)
        return rotary_angles(along_text(x, layout), frequencies)


class Lrpe(Rotation):
    """MD-LRPE (LightNet, arXiv 2405.21022, Eq. 10-14): by the coordinates of a grid of any number of axes, or, where
    there are none, by the position in the sequence (RoPE).

    The pairs of a head are shared out among the axes, in their order and as many to each; those left over are not
    turned, and no more is a token without a place (cls). Pair j of an axis turns by `10000^(-2j / D)` a place, D the
    whole head dim: each axis has the fast end of RoPE's spectrum, as in the authors' MdLrpe. Eq. 12 prints n_k for each
    axis' n_s, an angle for each of D dimensions in place of pairs, and j that runs on over the axes (`PrintedLrpe`).
    """

    shared = True
    row_sums = False
    runs_on: ClassVar[bool] = False  # whether the pairs are numbered over all axes, or anew in each

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        coords = along_text(x, layout) if layout.coords is None else layout.coords
        return rotary_angles(coords, self.frequencies(coords.shape[-2], x.device))

    def frequencies(self, axes: int, device: torch.device) -> Tensor:
        """(axes, D/2), 0 for the pairs of other axes.

        Raises:
            ValueError: More axes than pairs.
        """
        pairs = self.head_dim // 2
        each = pairs // axes
        if not each:
            raise ValueError(f"rotation: a head dim of {self.head_dim} has {pairs} pairs to turn, the grid {axes} axes")
        all_ = rope_frequencies(self.head_dim, device=device, dtype=torch.float64)[0]
        own = [all_[i * each :][:each] if self.runs_on else all_[:each] for i in range(axes)]
        return F.pad(torch.block_diag(*own), (0, pairs - axes * each))


class PrintedLrpe(Lrpe):
    """MD-LRPE with theta_j as Eq. 12 prints it: j runs on over the axes, each of which turns more slowly than the one
    before."""

    runs_on = True


class LearnedLrpe(Lrpe):
    """The same with angles that are learned, from these on, in each head: all times `exp(log_scale)`, positive whatever
    the optimizer does, and as free to move where they are small."""

    shared = False

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.log_scale = nn.Parameter(torch.zeros(num_heads, head_dim // 2))
        self.marks = {"log_scale": Marks(weight_decay=0)}

    def frequencies(self, axes: int, device: torch.device) -> Tensor:
        """(H, axes, D/2)"""
        return super().frequencies(axes, device) * self.log_scale.double().exp()[:, None]


ROTATIONS: dict[str, type[Rotation]] = {
    "rope": Rope,
    "lrpe": Lrpe,
    "lrpe_printed": PrintedLrpe,
    "lrpe_learned": LearnedLrpe,
}
NO_ROTATION = "none"
