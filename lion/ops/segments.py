"""Packed sequences: which tokens belong together, worked out once a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_whole, mismatch


class SegmentIndex(NamedTuple):
    """Masks of a batch as every form takes them.

    `index` (B, L) numbers the segments from left to right, never decreasing, padding belonging to the segment before
    it; None where rows are not cut. `valid` (B, L) marks the tokens that are there; None for all.
    """

    index: Tensor | None
    valid: Tensor | None


def segment_index(valid: Tensor | None, segments: Tensor | None) -> SegmentIndex:
    """Prepare masks for all layers of a model: what sorts and checks them is done here alone.

    Args:
        valid: Boolean (B, L) or None, as in `linear_attention`.
        segments: Integer (B, L) or None, as in `linear_attention`.

    Raises:
        ValueError: A mask of the wrong shape or dtype, or a segment whose tokens do not stand together. In a graph and
            on a GPU the latter is an assertion, for which nothing waits.
    """
    for name, mask in (("valid", valid), ("segments", segments)):
        if mask is not None and not (torch.is_tensor(mask) and mask.dim() == 2):
            raise mismatch(name, "(B, L)", mask)
    some = segments if valid is None else valid
    if some is not None:
        _check(some.shape, valid, segments)
    if segments is None:
        return SegmentIndex(None, valid)
    segments = segments.long()
    valid = segments >= 0 if valid is None else valid & (segments >= 0)
    ids = segments.masked_fill(~valid, -1)
    position = torch.arange(ids.shape[1], device=ids.device)
    filled = ids.gather(1, torch.where(valid, position, 0).cummax(1).values)  # padding takes the id before it
    starts = valid & (filled != F.pad(filled[:, :-1], (1, 0), value=-1))
    ordered = ids.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + (ordered[:, 0] >= 0)
    together, message = (starts.sum(1) == distinct).all(), "segments: the tokens of a segment must stand together"
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        torch._assert_async(together, message)  # a graph and a GPU are not waited for
    elif not together:
        raise ValueError(f"{message}, got an id that comes back")
    return SegmentIndex(starts.cumsum(1), valid)


def prepared(q: Tensor, valid: Tensor | None, segments: Tensor | SegmentIndex | None) -> SegmentIndex:
    """The masks of tokens q (B, H, L, D); those that are prepared stay as they are."""
    if isinstance(segments, SegmentIndex):
        if valid is not None:
            raise ValueError("valid: prepared segments hold it, give it to `segment_index`")
        for mask in segments:
            if mask is not None and mask.shape != (q.shape[0], q.shape[2]):
                raise mismatch("segments", f"prepared ones of {(q.shape[0], q.shape[2])}", mask)
        return segments
    check_masks(q, valid, segments)
    return segment_index(valid, segments)


def check_masks(q: Tensor, valid: Tensor | None, segments: Tensor | None) -> None:
    """Raises ValueError where masks are not those of tokens q (B, H, L, D)."""
    _check((q.shape[0], q.shape[2]), valid, segments)


def _check(shape: tuple[int, int], valid: Tensor | None, segments: Tensor | None) -> None:
    if valid is not None and not (torch.is_tensor(valid) and valid.shape == shape and valid.dtype == torch.bool):
        raise mismatch("valid", f"bool {tuple(shape)}", valid)
    if segments is not None:
        if not is_whole(segments) or segments.shape != shape:
            raise mismatch("segments", f"integer {tuple(shape)}", segments)
