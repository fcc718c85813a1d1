"""The layout of the tokens of a batch: made once per batch, and passed to every block, mixer and decay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lion.config import present
from lion.ops import Part, SegmentIndex
from lion.ops.arguments import check_dense
from lion.ops.modes import may_wait
from lion.ops.segments import check_masks, index_of, segment_starts
from lion.ops.settings import hint

MASK_OF_TOKENS = "True marks tokens: pass layout=mask, but of PyTorch's key_padding_mask layout=~key_padding_mask"


class Layout(NamedTuple):
    """The layout of tokens x (B, L, dim). A field that is None means one plain sequence per row, without padding.

    Attributes:
        valid: Boolean (B, L), False for padding.
        segment_index: Integer (B, L), rising from one segment to the next; padding belongs to the segment before it.
        positions: Integer (B, L), the position of each token in its segment, not counting padding; None: 0 .. L - 1.
        coords: Integer (axes, L), coordinates on a grid; -1 in all axes for special tokens.
        special: Boolean (L,), or (B, L) where rows differ: tokens without coordinates on the grid (cls).
        orders: Integer (S, L), token indices in the order in which each scan visits them; None: one scan, in sequence
            order.
        pairs, causal_pairs, later_pairs: Boolean (B, 1, L, L), the keys that each query may attend to: among all keys,
            among the keys up to the query, and among those from the query on. Only softmax attention uses them.
        angles: Angles in radians that rotate queries and keys, if the rotation depends on the layout alone.
        part: The part of the rows that these tokens are, if the rows are split over processes (`split`).
        whole: The layout of the whole rows, if they are split.
    """

    valid: Tensor | None = None
    segment_index: Tensor | None = None
    positions: Tensor | None = None
    coords: Tensor | None = None
    special: Tensor | None = None
    orders: Tensor | None = None
    pairs: Tensor | None = None
    causal_pairs: Tensor | None = None
    later_pairs: Tensor | None = None
    angles: Tensor | None = None
    part: Part | None = None
    whole: Layout | None = None

    @staticmethod
    def of(x: Tensor, valid: Tensor | None = None, segments: Tensor | None = None) -> Layout:
        """Return the layout of tokens x (B, L, dim) with padding (`valid` False, or `segments` -1) and segments.

        `valid` and `segments` have the shape (B, L). Boolean `segments` are a mask `valid`.

        Raises:
            ValueError: A mask of the wrong shape or dtype, or a segment whose tokens are not contiguous.
        """
        return Layout().masked(x, valid, segments)

    @staticmethod
    def given(x: Tensor, layout: Layout | Tensor | None) -> Layout:
        """Return the layout of tokens x (B, L, dim) from a caller's `Layout`, mask `valid` (B, L), or None.

        Raises:
            ValueError: Any other type, a mask of the wrong shape or dtype, or the layout of other tokens.
        """
        check_dense("x", x)
        if isinstance(layout, Layout):
            layout.check(x)
            return layout
        if layout is None:
            return PLAIN
        if torch.is_tensor(layout):
            given = Layout.of(x, valid=layout)
            warn_of_rows_without_tokens(layout)
            return given
        kind = type(layout).__name__
        raise ValueError(f"layout: expected lion.Layout, a boolean mask (B, L) of tokens, or None, got {kind}")

    def check(self, x: Tensor) -> None:
        """Check that this is the layout of tokens x (B, L, dim).

        Raises:
            ValueError: A field of another number of rows or tokens, or segments without a mask and positions.
        """
        batch, length = x.shape[:2]
        masked = self.valid is not None or self.segment_index is not None
        if masked and (self.valid is None or self.positions is None):
            raise ValueError("layout: padding and segments need `valid` and `positions`, which Layout.of(x, ..) makes")
        for name in ("valid", "segment_index", "positions", "coords", "special", "orders"):
            field = getattr(self, name)
            if field is None:
                continue
            rows = (batch,) if name in ("valid", "segment_index") else (1, batch)
            by_row = name not in ("coords", "orders") and field.dim() == 2
            if field.shape[-1] != length or (by_row and field.shape[0] not in rows):
                got = tuple(x.shape[:2])
                raise ValueError(f"layout: {name} {tuple(field.shape)} is of other tokens, got x of shape {got}")

    @staticmethod
    def after(x: Tensor, position: Tensor, valid: Tensor | None = None) -> Layout:
        """Return the layout of the next tokens x (B, C, dim) of a stream; the first one is at `position` (B,)."""
        layout = Layout.of(x, valid)
        return layout._replace(positions=position[:, None] + layout.positions_of(x))

    def masked(self, x: Tensor, valid: Tensor | None = None, segments: Tensor | None = None) -> Layout:
        """Return this layout with padding and segments, see `of`."""
        if torch.is_tensor(segments) and segments.dtype == torch.bool:
            valid, segments = segments if valid is None else valid & segments, None
        if valid is None and segments is None:
            return self
        check_masks(x.shape[:2], valid, segments)
        index, prepared = index_of(valid, segments)
        valid = present(prepared, "valid")
        positions = valid.cumsum(1) - 1
        if index is not None:  # positions restart in each segment
            first = segment_starts(index, first=True)
            positions = positions - positions.masked_fill(~first, 0).cummax(1).values
        return self._replace(valid=valid, segment_index=index, positions=positions)

    def split(self, x: Tensor, part: Part) -> Layout:
        """Return the layout of the tokens that this process holds of whole rows x (B, L, ..), which have this layout.

        The parts have the same size, `part.size(L)`: `part.own` cuts the rows. Padding fills the end of the last part.

        Raises:
            ValueError: Fewer tokens than processes.
        """
        batch, length = x.shape[:2]
        part = part._replace(length=length)
        if length < part.count:
            raise ValueError(f"tokens: rows of {length} cannot be split over {part.count} processes")
        valid, index, size = self.valid, self.segment_index, part.size(length)
        if valid is None and length % part.count:
            valid = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        if index is not None:
            padding = size * part.count - length
            index = torch.cat([index, index[:, -1:].expand(-1, padding)], 1)
            part = part.with_segments(index, range(0, size * part.count, size))
        return Layout(
            valid=None if valid is None else part.own(valid, fill=False),
            segment_index=None if index is None else part.own(index),
            positions=part.own(self.positions_of(x)),
            coords=None if self.coords is None else part.own(self.coords, fill=-1),
            special=None if self.special is None else part.own(self.special, -1, fill=True),
            part=part,
            whole=self,
        )

    @property
    def segments(self) -> SegmentIndex | None:
        """Padding and segments in the format of the operator."""
        return None if self.valid is None else SegmentIndex(self.segment_index, self.valid)

    def clean(self, x: Tensor) -> Tensor:
        """Return x (B, L, dim) with zeros for padding.

        A layer does this first. Later, a NaN in padding times a gradient of 0 would put NaN into every weight.
        """
        return x if self.valid is None else x.masked_fill(~self.valid[..., None], 0)

    def positions_of(self, x: Tensor) -> Tensor:
        """Return the position (B or 1, L) of each token of x (B, L, dim) in its segment."""
        return torch.arange(x.shape[1], device=x.device)[None] if self.positions is None else self.positions

    def special_of_heads(self) -> Tensor | None:
        """Return `special` in a shape that broadcasts over heads: (L,) or (B, 1, L)."""
        return self.special if self.special is None or self.special.dim() == 1 else self.special[:, None]

    def next_position(self, x: Tensor) -> Tensor:
        """Return the position (B,), in the last segment, of the token that would follow x (B, L, dim)."""
        if self.positions is None:
            return torch.full((x.shape[0],), x.shape[1], device=x.device)
        positions = self.positions
        last = self.in_last_segment()
        if last is not None:
            positions = positions.masked_fill(~last, -1)
        return positions.amax(1) + 1

    def tokens_of(self, x: Tensor) -> Tensor | int:
        """Return the number of tokens x (B, L, dim) that are not padding: L, or (B,) if there is a mask."""
        return x.shape[1] if self.valid is None else self.valid.sum(1)

    def in_last_segment(self) -> Tensor | None:
        """Return a mask (B, L) of the valid tokens in the last segment of each row; None without a mask."""
        if self.valid is None or self.segment_index is None:
            return self.valid
        return self.valid & (self.segment_index == self.segment_index[:, -1:])

    def with_pairs(self, direction: str) -> Layout:
        """Return this layout with the pairs of a direction, if there is a mask."""
        if self.valid is None or self.readable(direction) is not None:
            return self
        pairs = self.valid[:, None, None]
        if self.segment_index is not None:
            pairs = pairs & (self.segment_index[:, None, :, None] == self.segment_index[:, None, None])
        pairs = pairs.expand(-1, -1, self.valid.shape[1], -1)
        padding = ~self.valid[:, None, :, None]  # attends to anything, so that its output is finite
        if direction == "forward":
            return self._replace(causal_pairs=pairs.tril() | padding)
        if direction == "backward":
            return self._replace(later_pairs=pairs.triu() | padding)
        return self._replace(pairs=pairs | padding)

    def readable(self, direction: str) -> Tensor | None:
        """Return the mask (B, 1, L, L) of keys that each query may attend to; None without padding and segments."""
        return getattr(self, PAIRS[direction])


PLAIN = Layout()
PAIRS = {"both": "pairs", "forward": "causal_pairs", "backward": "later_pairs"}  # fields by direction


def warn_of_rows_without_tokens(valid: Tensor) -> None:
    """Warn if a mask (B, L) has a row without tokens: it is likely PyTorch's. Not in a graph and not on a GPU."""
    if may_wait(valid.device) and not valid.any(1).all():
        warnings.warn(f"layout: a row of the mask has no tokens. {MASK_OF_TOKENS}", stacklevel=2)


def valid_of(segments: Tensor) -> Tensor:
    """Return the mask (B, L) of tokens that are not padding, from `segments` as in `Layout.of`."""
    return segments if segments.dtype == torch.bool else segments >= 0


def row_major(patches: Tensor) -> Tensor:
    return patches


def row_snake(patches: Tensor) -> Tensor:
    """Order even rows from left to right, odd rows from right to left."""
    patches = patches.clone()
    patches[1::2] = patches[1::2].flip(1)
    return patches


def column_snake(patches: Tensor) -> Tensor:
    """Order even columns downwards, odd columns upwards."""
    return row_snake(patches.mT)


SCANS: dict[str, Callable[[Tensor], Tensor]] = {  # patches (height, width) -> visiting order, in row-major order
    "row_major": row_major,
    "row_snake": row_snake,  # "s" in the released code
    "column_snake": column_snake,  # "sr" in the released code
}
ROW_MAJOR = ("row_major",)


def check_scan_names(scans: Sequence[str]) -> None:
    """Check the names of scans.

    Raises:
        ValueError: An unknown scan, or no scan.
    """
    for scan in scans:
        if scan not in SCANS:
            raise ValueError(f"scans: unknown scan {scan!r}, {hint(scan, SCANS)}")
    if not scans:
        raise ValueError("scans: expected at least one")


def grid_layout(height: int, width: int, scans: Sequence[str] = ROW_MAJOR, special: int = 1, before: int = 0) -> Layout:
    """Return the layout of an image: `before` of its `height` x `width` patches, `special` tokens, all other patches.

    Every scan visits the special tokens first.

    Raises:
        ValueError: An unknown scan, no scan, or one other than row-major order with patches before the special tokens.
    """
    check_scan_names(scans)
    if before and tuple(scans) != ROW_MAJOR:
        raise ValueError(f"scans: expected {ROW_MAJOR[0]!r} with {before} patches before the special tokens")
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).reshape(-1, 2).mT  # (2, H W)
    coords = torch.cat([places[:, :before], torch.full((2, special), -1), places[:, before:]], 1)
    layout = Layout(coords=coords, special=(coords < 0).all(0))
    if tuple(scans) == ROW_MAJOR:
        return layout
    patches = torch.arange(height * width).view(height, width) + special
    orders = [torch.cat([torch.arange(special), SCANS[s](patches).flatten()]) for s in scans]
    return layout._replace(orders=torch.stack(orders))
