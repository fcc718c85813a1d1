"""Where the tokens of a batch stand: made once a batch, and handed to every block, mixer and decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops import SegmentIndex, check_masks, segment_index


class Layout(NamedTuple):
    """The layout of tokens x (B, L, dim). Whatever is None is as in one plain sequence a row, without padding.

    Attributes:
        valid: Boolean (B, L), False for padding.
        segment_index: Integer (B, L), rising from one segment to the next; padding belongs to the one before it.
        positions: Integer (B, L), a token's place in its segment, without padding; None: 0 .. L - 1.
        coords: Integer (axes, L), places on a grid; -1 in all axes for special tokens.
        special: Boolean (L,), or (B, L) where rows differ: tokens without a place on the grid (cls).
        orders: Integer (S, L), the tokens in the order in which each scan visits them; None: one scan, as they stand.
        pairs, causal_pairs: Boolean (B, 1, L, L), which keys a query may read, of all and of those up to itself: what
            softmax attention needs of all this.
        angles: In radians, by which a rotation that goes by the layout alone turns queries and keys.
    """

    valid: Tensor | None = None
    segment_index: Tensor | None = None
    positions: Tensor | None = None
    coords: Tensor | None = None
    special: Tensor | None = None
    orders: Tensor | None = None
    pairs: Tensor | None = None
    causal_pairs: Tensor | None = None
    angles: Tensor | None = None

    @staticmethod
    def of(x: Tensor, valid: Tensor | None = None, segments: Tensor | None = None) -> Layout:
        """That of tokens x (B, L, dim) with padding (`valid` False, or `segments` -1) and segments, both (B, L).

        Raises:
            ValueError: A mask of another shape or dtype, or a segment whose tokens do not stand together.
        """
        return Layout().masked(x, valid, segments)

    @staticmethod
    def given(x: Tensor, layout: Layout | Tensor | None) -> Layout:
        """The layout of tokens x (B, L, dim) that a caller gave: itself, a mask `valid` (B, L) alone, or None.

        Raises:
            ValueError: Something else, or a mask of another shape or dtype.
        """
        if isinstance(layout, Layout):
            return layout
        if layout is None:
            return PLAIN
        if torch.is_tensor(layout):
            return Layout.of(x, valid=layout)
        kind = type(layout).__name__
        raise ValueError(f"layout: expected lion.Layout, a boolean mask (B, L) of tokens, or None, got {kind}")

    @staticmethod
    def after(x: Tensor, position: Tensor, valid: Tensor | None = None) -> Layout:
        """That of the next tokens x (B, C, dim) of a stream, the first of which stands at `position` (B,)."""
        layout = Layout.of(x, valid)
        return layout._replace(positions=position[:, None] + layout.positions_of(x))

    def masked(self, x: Tensor, valid: Tensor | None = None, segments: Tensor | None = None) -> Layout:
        """The same with padding and segments, see `of`."""
        if valid is None and segments is None:
            return self
        check_masks(x[:, None], valid, segments)
        index, valid = segment_index(valid, segments)
        positions = valid.cumsum(1) - 1
        if index is not None:  # they start anew with each segment
            first = index.diff(dim=1, prepend=index[:, :1] - 1) > 0
            positions = positions - positions.masked_fill(~first, 0).cummax(1).values
        return self._replace(valid=valid, segment_index=index, positions=positions)

    @property
    def segments(self) -> SegmentIndex | None:
        """Padding and segments as the operator takes them."""
        return None if self.valid is None else SegmentIndex(self.segment_index, self.valid)

    def clean(self, x: Tensor) -> Tensor:
        """x (B, L, dim) with zeros for padding.

        The first thing that a layer does: further on, a NaN times a gradient of 0 would be one in every weight.
        """
        return x if self.valid is None else x.masked_fill(~self.valid[..., None], 0)

    def positions_of(self, x: Tensor) -> Tensor:
        """The place of each token of x (B, L, dim) in its segment, (B or 1, L)."""
        return torch.arange(x.shape[1], device=x.device)[None] if self.positions is None else self.positions

    def special_of_heads(self) -> Tensor | None:
        """`special` as it broadcasts over heads: (L,) or (B, 1, L)."""
        return self.special if self.special is None or self.special.dim() == 1 else self.special[:, None]

    def next_position(self, x: Tensor) -> Tensor:
        """The place (B,) of the token that would come after x (B, L, dim), in the last segment."""
        if self.positions is None:
            return torch.full((x.shape[0],), x.shape[1], device=x.device)
        last = self.valid if self.segment_index is None else self.in_last_segment()
        return self.positions.masked_fill(~last, -1).amax(1) + 1

    def count(self, x: Tensor) -> Tensor | int:
        """How many of the tokens x (B, L, dim) are no padding, (B,) where there is any."""
        return x.shape[1] if self.valid is None else self.valid.sum(1)

    def in_last_segment(self) -> Tensor:
        """Which valid tokens belong to the last segment of their row, (B, L)."""
        return self.valid & (self.segment_index == self.segment_index[:, -1:])

    def with_pairs(self, causal: bool) -> Layout:
        """The same with `causal_pairs` or `pairs`, where there is padding."""
        if self.valid is None or self.readable(causal) is not None:
            return self
        pairs = self.valid[:, None, None]
        if self.segment_index is not None:
            pairs = pairs & (self.segment_index[:, None, :, None] == self.segment_index[:, None, None])
        pairs = pairs.expand(-1, -1, self.valid.shape[1], -1)
        if causal:
            pairs = pairs.tril()
        pairs = pairs | ~self.valid[:, None, :, None]  # padding reads anything, and stays finite
        return self._replace(**{"causal_pairs" if causal else "pairs": pairs})

    def readable(self, causal: bool) -> Tensor | None:
        """Which keys a query may read (B, 1, L, L), where that is known; without padding it need not be."""
        return self.causal_pairs if causal else self.pairs


PLAIN = Layout()


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


def grid_layout(height: int, width: int, scans: Sequence[str] = AS_THEY_STAND, special: int = 1) -> Layout:
    """That of an image of `height` x `width` patches behind `special` tokens, which every scan visits first."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).reshape(-1, 2).mT  # (2, H W)
    coords = torch.cat([torch.full((2, special), -1), places], 1)
    layout = Layout(coords=coords, special=(coords < 0).all(0))
    if tuple(scans) == AS_THEY_STAND:
        return layout
    patches = torch.arange(height * width).view(height, width) + special
    orders = [torch.cat([torch.arange(special), SCANS[s](patches).flatten()]) for s in scans]
    return layout._replace(orders=torch.stack(orders))
