"""Masks and positions of `transformers` as the segments of this package."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.config import present
from lion.layers.layout import Layout
from lion.ops.modes import holds, may_wait


def valid_of(attention_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return an `attention_mask` (B, L), 1 for tokens and 0 for padding, as a boolean mask.

    Raises:
        ValueError: A mask that a mixer without scores cannot express: of pairs of tokens, or with values to add.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != shape or attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask: expected 1 for tokens and 0 for padding, integer or boolean {shape}, got "
            f"{str(attention_mask.dtype)[6:]} {tuple(attention_mask.shape)}; masks of pairs of tokens cannot be "
            "expressed, for packed documents pass position_ids or seq_idx"
        )
    return attention_mask.bool()


def segments_of(
    shape: tuple[int, int],
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """Return the number of each token's document in its row (B, L), -1 for padding; None for one document per row.

    Args:
        shape: (B, L).
        attention_mask: (B, L), 0 for padding.
        position_ids: (B or 1, L), 0 where a document starts, as `DataCollatorWithFlattening` returns them.
        seq_idx: (B, L), the number of the document.
        cu_seq_lens_q: (N + 1,), the ends of N documents in a single row, after a 0.

    Raises:
        ValueError: A mask that cannot be expressed, other positions than those of tokens in their documents, or ends
            of documents that do not rise from 0 to L.
    """
    valid = valid_of(attention_mask, shape)
    documents: Tensor | None = None
    if seq_idx is not None:
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx: expected the shape {shape}, got {tuple(seq_idx.shape)}")
        documents = seq_idx.long()
    elif cu_seq_lens_q is not None:
        if shape[0] != 1:
            raise ValueError(f"cu_seq_lens_q: expected packed documents in one row, got {shape[0]} rows")
        documents = documents_of_ends("cu_seq_lens_q", cu_seq_lens_q, shape[1])
    elif position_ids is not None:
        documents = starts_of(position_ids, valid, shape)
    if documents is None:
        if valid is None:
            return None
        return valid.long() - 1
    if position_ids is not None and not (seq_idx is None and cu_seq_lens_q is None):
        check_positions(positions_of(position_ids, shape), documents, valid)
    if valid is None:
        return documents
    return documents.masked_fill(~valid, -1)


def documents_of_ends(name: str, ends: Tensor, length: int) -> Tensor:
    """Return the number of each token's document (1, L) from the ends (N + 1,) of N documents in one row, after a 0.

    Raises:
        ValueError: Ends that do not rise from 0 to L; the argument `name` has them.
    """
    check_ends(name, ends, length)
    places = torch.arange(length, device=ends.device)
    return torch.bucketize(places, ends[1:].long(), right=True)[None]


def check_ends(name: str, ends: Tensor, length: int) -> None:
    if ends.dim() != 1 or len(ends) < 2:
        raise ValueError(f"{name}: expected 0 and the ends of documents (N + 1,), got the shape {tuple(ends.shape)}")
    right = (ends[0] == 0) & (ends[-1] == length) & (ends.diff() >= 0).all()
    message = f"{name}: expected ends of documents that rise from 0 to {length} tokens"
    if not holds(right, message):
        if len(ends) < 9:
            raise ValueError(f"{message}, got {ends.tolist()}")
        raise ValueError(f"{message}, got {int(ends[0])} .. {int(ends[-1])}")


def starts_of(position_ids: Tensor, valid: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return the number of each token's document (B, L) from positions that restart; None if none restarts.

    Raises:
        ValueError: Positions that do not count the tokens of each document from 0.
    """
    positions = positions_of(position_ids, shape)
    start = positions == 0
    if valid is not None:
        start = start & valid
    documents = start.cumsum(1)
    check_positions(positions, documents, valid)
    if may_wait(positions.device) and (documents <= 1).all():
        return None
    return documents


def check_next(position_ids: Tensor, seen: Tensor, valid: Tensor | None, shape: tuple[int, int]) -> None:
    """Check that positions of the next tokens (B, L) count on from the tokens that a cache has `seen` (B,).

    Raises:
        ValueError: They do not.
    """
    positions = positions_of(position_ids, shape)
    if valid is None:
        valid = torch.ones_like(positions, dtype=torch.bool)
    same = (positions == seen[:, None] + valid.cumsum(1) - 1) | ~valid
    message = "position_ids: expected positions that count on from the tokens of the cache"
    if not holds(same.all(), message):
        raise ValueError(message)


def positions_of(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the positions (B, L) of position_ids (B or 1, L)."""
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]:
        raise ValueError(f"position_ids: expected the shape {shape}, got {tuple(position_ids.shape)}")
    return position_ids.expand(shape)


def check_positions(positions: Tensor, documents: Tensor, valid: Tensor | None) -> None:
    """Check that positions count the tokens of each document (B, L) from 0.

    Raises:
        ValueError: They do not.
    """
    segments = documents
    if valid is not None:
        segments = documents.masked_fill(~valid, -1)
    rows, length = positions.shape
    expected = Layout.of(positions.new_empty(rows, length, 0), segments=segments).positions
    same = positions == present(expected, "positions")
    if valid is not None:
        same = same | ~valid
    message = "position_ids: expected positions that count the tokens of each document from 0"
    if not holds(same.all(), message):
        raise ValueError(f"{message}; other positions cannot be expressed")
