"""Data structures of all forms: a block of tokens, the settings of its scores, and the state of a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.features import apply_feature_map


class State(NamedTuple):  # graphs return a new one: that of `_replace` leaves a graph of torch 2.11 without fields
    """Hidden state of a recurrence: `S` (B, H, D, E) and `z` (B, H, D), float32 or wider."""

    S: Tensor
    z: Tensor


def initial_state(k: Tensor, v: Tensor) -> State:
    """Return the empty state for keys (B, H, L, D) and values (B, H, L, E)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    return State(k.new_zeros(shape, dtype=wide), k.new_zeros(shape[:-1], dtype=wide))


class ScoreSettings(NamedTuple):
    """Settings of one set of scores and of its sums.

    Attributes:
        form: "full", "chunk", "rnn", "delta_rnn" (the rnn form of the delta rule) or "one_scan".
        decay_convention: Decay convention (`lion.ops.decay`).
        direction: "both", "forward" or "backward".
        include_diagonal: Whether a token's own key is included like other keys. If not, `lion.ops.full.add_diagonal`
            adds it.
        rowsum: Whether row sums are computed.
        chunk_size: Tokens per chunk or step.
        undecayed_erase: Whether the delta rule's erase reads the state before the token's decay.
    """

    form: str
    decay_convention: str
    direction: str
    include_diagonal: bool
    rowsum: bool
    chunk_size: int
    undecayed_erase: bool = False


class TokenBlock(NamedTuple):
    """Consecutive tokens in scan order.

    Attributes:
        q, k: Queries and keys (B, H, C, D).
        v: Values (B, H, C, E).
        gate: Log decay, or angles of one scan (b, h, C, D or 1).
        valid: Mask (B, C), False for padding, or None.
        segment_index: Segment numbers (B, C) from left to right, or None.
        feature_map: Name of the feature map that is not yet applied to q and k, or None.
        beta: Writing strengths of the delta rule (B, H, C, 1), or None.
        erase, read: Vectors of the delta rule (B, H, C, D), or None (`lion.ops.delta`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    valid: Tensor | None = None
    segment_index: Tensor | None = None
    feature_map: str | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    read: Tensor | None = None

    @property
    def delta(self) -> bool:
        """Return whether these are tokens of the delta rule."""
        return any(x is not None for x in (self.beta, self.erase, self.read))

    def map(self, of_tokens: Callable[[Tensor], Tensor], of_masks: Callable[[Tensor], Tensor] | None = None):
        """Apply a function to each tensor of tokens (b, h, C, ..), and another one to each mask (B, C)."""
        *tokens, valid, index, feature_map, beta, erase, read = self
        tokens, deltas = ([x if x is None else of_tokens(x) for x in some] for some in (tokens, (beta, erase, read)))
        masks = [x if x is None or of_masks is None else of_masks(x) for x in (valid, index)]
        return TokenBlock(*tokens, *masks, feature_map, *deltas)

    def slice(self, start: int, size: int, reverse: bool = False) -> TokenBlock:
        """Return `size` tokens from `start`; with `reverse`, the last one comes first."""

        def along(dim: int) -> Callable[[Tensor], Tensor]:
            return lambda x: flip(x.narrow(dim, start, size), dim, reverse)

        return self.map(along(2), along(1))

    def contiguous(self) -> TokenBlock:
        """Return the tokens with contiguous memory.

        Their strides then do not depend on the length of the whole sequence: a compiled step checks strides.
        """
        return self.map(Tensor.contiguous, Tensor.contiguous)

    def featurized(self) -> TokenBlock:
        """Return the tokens after the feature map; the values of invalid tokens are zeroed before it."""
        if self.feature_map is None:
            return self
        invalid = None if self.valid is None else ~self.valid[:, None, :, None]
        q, k = (
            apply_feature_map(self.feature_map, x if invalid is None else x.masked_fill(invalid, 0)) for x in self[:2]
        )
        return self._replace(q=q, k=k, feature_map=None)

    def masked(self) -> TokenBlock:
        """Return the tokens after the feature map, with invalid tokens zeroed.

        A key of 0 that does not decay has the effect of no key.
        """
        tokens = self.featurized()
        if self.valid is None:
            return tokens
        invalid = ~self.valid[:, None, :, None]  # select, never multiply: padding may hold NaN
        return tokens.map(lambda x: x.masked_fill(invalid, 0))._replace(valid=None)

    def padded(self, padding: int) -> TokenBlock:
        """Return the tokens with `padding` invalid tokens appended."""
        index = self.segment_index
        index = None if index is None else torch.cat([index, index[:, -1:].expand(-1, padding)], 1)
        longer = self.map(lambda x: F.pad(x, (0, 0, 0, padding)))
        return longer._replace(valid=F.pad(self.valid, (0, padding)), segment_index=index)

    def to(self, dtype: torch.dtype) -> TokenBlock:
        return self.map(lambda x: x.to(dtype))


def flip(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """Flip x into scan order, or back into its original order, if `reverse`."""
    return x.flip(dim) if reverse and x.shape[dim] > 1 else x
