"""Rotations of queries and keys by token positions: modules from tokens and their layout to angles.

A new rotation is one class here and its line in `ROTATIONS`. `lion.ops.rotary` describes how the angles are used.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.optim_factors import undecayed
from lion.ops import rope_frequencies, rotary_angles


class Rotation(nn.Module):
    """A module (x, layout) -> angles in radians, see `lion.ops.linear_attention`, for tokens x (B, L, dim)."""

    shared: ClassVar[bool] = False  # whether angles depend on the layout alone, and are computed once for all layers
    row_sums: ClassVar[bool] = True  # whether row sums are allowed: those of the scores before rotation

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        if head_dim % 2:
            raise ValueError(f"num_heads: rotation needs pairs, got an odd head dimension {head_dim}")

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        raise NotImplementedError


def along_text(x: Tensor, layout: Layout) -> Tensor:
    """Return positions in the sequence as coordinates of one axis: (1, L), the same for all rows, or (B, 1, L)."""
    positions = layout.positions_of(x)  # (B or 1, L)
    return positions[:, None] if positions.shape[0] > 1 else positions


class Rope(Rotation):
    """RoPE (arXiv 2104.09864): rotation by the position in the sequence, the same in every head."""

    shared = True

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        frequencies = rope_frequencies(self.head_dim, device=x.device, dtype=torch.float64)
        return rotary_angles(along_text(x, layout), frequencies)


class Lrpe(Rotation):
    """MD-LRPE (LightNet, arXiv 2405.21022, Eq. 10-14): rotation by the coordinates of a grid with any number of axes.

    Without coordinates, tokens are rotated by the position in the sequence (RoPE).

    The pairs of a head are divided equally among the axes, in order. Leftover pairs are not rotated, nor are tokens
    without coordinates (cls). Pair j of an axis rotates by `10000^(-2j / D)` per position, where D is the head
    dimension, so that each axis has the fast end of RoPE's spectrum. The authors' MdLrpe numbers the pairs of an axis
    in the same way, but spreads one spectrum over all heads. The printed Eq. 12 differs from both: it has n_k in place
    of n_s for each axis, an angle for each of D dimensions instead of pairs, and a j that continues over the axes
    (`PrintedLrpe`).
    """

    shared = True
    row_sums = False
    runs_on: ClassVar[bool] = False  # whether pairs are numbered over all axes, or from 0 in each axis

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        coords = along_text(x, layout) if layout.coords is None else layout.coords
        return rotary_angles(coords, self.frequencies(coords.shape[-2], x.device))

    def frequencies(self, axes: int, device: torch.device) -> Tensor:
        """Return frequencies (axes, D/2), which are 0 for the pairs of other axes.

        Raises:
            ValueError: More axes than pairs.
        """
        pairs = self.head_dim // 2
        each = pairs // axes
        if not each:
            raise ValueError(f"rotation: head dimension {self.head_dim} has {pairs} pairs, the grid has {axes} axes")
        all_ = rope_frequencies(self.head_dim, device=device, dtype=torch.float64)[0]
        own = [all_[i * each :][:each] if self.runs_on else all_[:each] for i in range(axes)]
        return F.pad(torch.block_diag(*own), (0, pairs - axes * each))


class PrintedLrpe(Lrpe):
    """MD-LRPE whose index j continues over the axes, as in theta_j of Eq. 12.

    Each axis rotates more slowly than the axis before. The first axis has the first pairs (s = 0; Eq. 12 counts s from
    1, by which the last axis would have indices above those of the features).
    """

    runs_on = True


class LearnedLrpe(Lrpe):
    """MD-LRPE with learned angles in each head, which start from those of `Lrpe`.

    Each angle is multiplied by `exp(log_scale)`. This factor stays positive under any update, and small angles can
    change as freely as large ones.
    """

    shared = False

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.log_scale = nn.Parameter(torch.zeros(num_heads, head_dim // 2))
        self.optim_factors = undecayed("log_scale")

    def frequencies(self, axes: int, device: torch.device) -> Tensor:
        """Return frequencies (H, axes, D/2)."""
        return super().frequencies(axes, device) * self.log_scale.double().exp()[:, None]


ROTATIONS: dict[str, type[Rotation]] = {
    "rope": Rope,
    "lrpe": Lrpe,
    "lrpe_printed": PrintedLrpe,
    "lrpe_learned": LearnedLrpe,
}
NO_ROTATION = "none"
