"""Data structures of all forms: tokens, the state of a recurrence, and the sums over keys that a query reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.dtypes import wide_dtype
from lion.ops.features import apply_feature_map


class State(NamedTuple):  # graphs return a new one: that of `_replace` leaves a graph of torch 2.11 without fields
    """Hidden state of a recurrence: `S` (B, H, D, E) and `z` (B, H, D), float32 or wider."""

    S: Tensor
    z: Tensor


def initial_state(k: Tensor, v: Tensor) -> State:
    """Return the empty state for keys (B, H, L, D) and values (B, H, L, E)."""
    wide = wide_dtype(k)
    batch, heads, _, dim = k.shape
    S = k.new_zeros(batch, heads, dim, v.shape[-1], dtype=wide)
    z = k.new_zeros(batch, heads, dim, dtype=wide)
    return State(S, z)


class EnteringState(NamedTuple):
    """State that enters a part of a sequence from one side: S (B, H, D, E), z (B, H, D) and its segment (B,)."""

    S: Tensor
    z: Tensor
    segment: Tensor | None


class Sums(NamedTuple):
    """Sums over the keys that each query reads.

    Attributes:
        numerator: Weighted sum of the values (B, H, L, E).
        row_sum: Sum of the weights (B, H, L), float32 or wider; None where rows are not divided.
    """

    numerator: Tensor
    row_sum: Tensor | None

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the keys of both."""
        row_sum = None
        if self.row_sum is not None and other.row_sum is not None:
            row_sum = self.row_sum + other.row_sum
        return Sums(self.numerator + other.numerator, row_sum)

    def rounded(self, dtype: torch.dtype) -> Sums:
        """Return the sums with a numerator of a dtype."""
        return Sums(self.numerator.to(dtype), self.row_sum)


class Tokens(NamedTuple):
    """Consecutive tokens of a sequence.

    Attributes:
        q, k: Queries and keys (B, H, L, D).
        v: Values (B, H, L, E).
        log_decay: Logarithms of the decays (b, H, L, D or 1), or None if nothing decays.
        valid: Mask (B, L), False for padding, or None.
        segment: Segment numbers (B, L) from left to right, or None.
        feature_map: Name of the feature map that is not yet applied to q and k, or None.
        bonus: Weight (H, 1, D or 1) of each token's own key, or None if it counts like other keys.
        angles: Rotation (b, h, L, D/2) of LightNet's keys and queries, or None.
        beta: Writing strengths of the delta rule (B, H, L, 1), or None.
        erase, read: Vectors of the delta rule (B, H, L, D), or None (`lion.ops.delta`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    valid: Tensor | None = None
    segment: Tensor | None = None
    feature_map: str | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    read: Tensor | None = None

    @property
    def delta(self) -> bool:
        """Return whether these are tokens of the delta rule."""
        return self.beta is not None or self.erase is not None or self.read is not None

    def decays(self) -> Tensor:
        """Return the log decays (b, h, .., L, D or 1), 0 if nothing decays; float32 or wider."""
        if self.log_decay is not None:
            return self.log_decay
        zero = self.k.new_zeros((), dtype=wide_dtype(self.k))
        return zero.expand(1, 1, *self.k.shape[2:-1], 1)

    @property
    def vector(self) -> bool:
        """Return whether each key dimension decays separately."""
        return self.log_decay is not None and self.log_decay.shape[-1] > 1

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply a function to each tensor of tokens (b, h, L, ..)."""
        return self._replace(
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            log_decay=optional(change, self.log_decay),
            angles=optional(change, self.angles),
            beta=optional(change, self.beta),
            erase=optional(change, self.erase),
            read=optional(change, self.read),
        )

    def map_masks(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Apply a function to each mask (B, L)."""
        return self._replace(valid=optional(change, self.valid), segment=optional(change, self.segment))

    def slice(self, start: int, size: int) -> Tokens:
        """Return `size` tokens from `start`.

        Their memory is contiguous, so that strides do not depend on the length of the sequence: a compiled step checks
        strides.
        """
        part = self.map(lambda x: x.narrow(2, start, size).contiguous())
        return part.map_masks(lambda x: x.narrow(1, start, size).contiguous())

    def featurized(self) -> Tokens:
        """Return the tokens after the feature map."""
        if self.feature_map is None:
            return self
        q = featurize(self.q, self.feature_map, self.valid)
        k = featurize(self.k, self.feature_map, self.valid)
        return self._replace(q=q, k=k, feature_map=None)

    def masked(self) -> Tokens:
        """Return the tokens after the feature map, with invalid tokens zeroed.

        A key of 0 that does not decay has the effect of no key.
        """
        tokens = self.featurized()
        if self.valid is None:
            return tokens
        return tokens.map(lambda x: mask_tokens(x, self.valid))._replace(valid=None)

    def padded(self, padding: int) -> Tokens:
        """Return the tokens with `padding` tokens of 0 appended, which are invalid if there is a mask."""
        if not padding:
            return self
        longer = self.map(lambda x: F.pad(x, (0, 0, 0, padding)))
        valid = self.valid
        if valid is not None:
            valid = F.pad(valid, (0, padding))
        return longer._replace(valid=valid, segment=pad_segments(self.segment, padding))

    def in_chunks(self, size: int, count: int) -> Tokens:
        """Cut unmasked tokens into `count` chunks (B, H, N, C, ..) and segments (B, N, C), padded with tokens of 0."""
        tokens = self.padded(size * count - self.q.shape[2])
        chunks = tokens.map(lambda x: x.unflatten(2, (count, size)))
        return chunks.map_masks(lambda x: x.unflatten(1, (count, size)))

    def to(self, dtype: torch.dtype) -> Tokens:
        return self.map(lambda x: x.to(dtype))


def optional(change: Callable[[Tensor], Tensor], x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return change(x)


def mask_tokens(x: Tensor, valid: Tensor | None, value: float = 0.0) -> Tensor:
    """Return x (b, h, L, ..) with `value` in all invalid tokens; they are selected, because padding may hold NaN."""
    if valid is None:
        return x
    return x.masked_fill(~valid[:, None, :, None], value)


def featurize(x: Tensor, feature_map: str | None, valid: Tensor | None) -> Tensor:
    """Return phi(x) of queries or keys (B, H, L, D), whose invalid tokens are zeroed first."""
    if feature_map is None:
        return x
    return apply_feature_map(feature_map, mask_tokens(x, valid))


def pad_segments(segment: Tensor | None, padding: int) -> Tensor | None:
    """Extend segment numbers (B, L) by `padding` tokens, which belong to the last segment."""
    if segment is None or not padding:
        return segment
    return padded_segments(segment, padding)


def padded_segments(segment: Tensor, padding: int) -> Tensor:
    length = segment.shape[1]
    known = torch.arange(length + padding, device=segment.device) < length  # `expand` would add a guard on size 1
    return torch.where(known, F.pad(segment, (0, padding)), segment[:, -1:])


def flip(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """Flip x into scan order, or back into its original order, if `reverse`."""
    return x.flip(dim) if reverse and x.shape[dim] > 1 else x
