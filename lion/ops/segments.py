"""Packed sequences: the segment of each token, computed once per batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_integer_tensor, mismatch
from lion.ops.modes import holds


class SegmentIndex(NamedTuple):
    """Masks of a batch in the format of all forms.

    Attributes:
        index: Segment numbers (B, L) from left to right, never decreasing. Padding belongs to the segment before it.
            None if rows have no segments.
        valid: Boolean (B, L), True for tokens and False for padding. None if all tokens are valid.
    """

    index: Tensor | None  # type: ignore[assignment]  # also a method of tuples
    valid: Tensor | None

    def part(self, start: int, length: int) -> SegmentIndex:
        """Return the masks of `length` tokens from token `start`; the numbers stay those of the whole rows."""
        here = slice(start, start + length)
        index = None if self.index is None else self.index[:, here]
        valid = None if self.valid is None else self.valid[:, here]
        return SegmentIndex(index, valid)


def segment_index(valid: Tensor | None, segments: Tensor | None) -> SegmentIndex:
    """Check masks, and prepare them for all layers of a model.

    Args:
        valid: Boolean (B, L) or None, as in `linear_attention`.
        segments: Integer (B, L) or None, as in `linear_attention`.

    Raises:
        ValueError: A mask of the wrong shape or dtype, or a segment whose tokens are not contiguous. In a graph and on
            a GPU, the check of contiguous segments is an asynchronous assertion instead, which nothing waits for.
    """
    for name, mask in (("valid", valid), ("segments", segments)):
        if mask is not None and not (torch.is_tensor(mask) and mask.dim() == 2):
            raise mismatch(name, "(B, L)", mask)
    given = segments if valid is None else valid
    if given is not None:
        check_masks(given.shape, valid, segments)
    return index_of(valid, segments)


def index_of(valid: Tensor | None, segments: Tensor | None) -> SegmentIndex:
    """Return `segment_index` of masks whose shapes and dtypes have been checked."""
    if segments is None:
        return SegmentIndex(None, valid)
    segments = segments.long()
    own = segments >= 0
    valid = own if valid is None else valid & own
    ids = segments.masked_fill(~valid, -1)
    position = torch.arange(ids.shape[1], device=ids.device)
    filled = ids.gather(1, torch.where(valid, position, 0).cummax(1).values)  # padding takes the previous id
    starts = valid & (filled != F.pad(filled[:, :-1], (1, 0), value=-1))
    ordered = ids.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + (ordered[:, 0] >= 0)
    message = "segments: the tokens of a segment must be contiguous"
    if not holds((starts.sum(1) == distinct).all(), message):
        raise ValueError(f"{message}, got an id that occurs again after another segment")
    return SegmentIndex(starts.cumsum(1), valid)


def segment_starts(index: Tensor, first: bool = False) -> Tensor:
    """Return a mask (.., L) of the tokens that follow one of another segment; `first`: is the first token one of them?

    `index` (.., L) holds numbers of segments, in either order.
    """
    return F.pad(index[..., 1:] != index[..., :-1], (1, 0), value=first)


def prepared(q: Tensor, valid: Tensor | None, segments: Tensor | SegmentIndex | None) -> SegmentIndex:
    """Return the masks of tokens q (B, H, L, D); prepared masks are returned unchanged."""
    if isinstance(segments, SegmentIndex):
        if valid is not None:
            raise ValueError("valid: prepared segments already contain it, pass it to `segment_index`")
        for mask in segments:
            if mask is not None and mask.shape != (q.shape[0], q.shape[2]):
                raise mismatch("segments", f"a SegmentIndex of shape {(q.shape[0], q.shape[2])}", mask)
        return segments
    check_masks((q.shape[0], q.shape[2]), valid, segments)
    return index_of(valid, segments)


def check_masks(shape: tuple[int, ...], valid: Tensor | None, segments: Tensor | None) -> None:
    """Check masks of tokens of the shape (B, L).

    Raises:
        ValueError: A mask of another shape or dtype.
    """
    if valid is not None and not (torch.is_tensor(valid) and valid.shape == shape and valid.dtype == torch.bool):
        raise mismatch("valid", f"bool {tuple(shape)}", valid)
    if segments is not None:
        if not is_integer_tensor(segments) or segments.shape != shape:
            raise mismatch("segments", f"integer {tuple(shape)}", segments)
