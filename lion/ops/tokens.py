"""What every form works on: a block of tokens, how its scores are made, and the state that a recurrence remembers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.features import apply_feature_map


class State(NamedTuple):
    """What a recurrence remembers: `S` (B, H, D, E) and `z` (B, H, D), float32 or wider."""

    S: Tensor
    z: Tensor


def initial_state(k: Tensor, v: Tensor) -> State:
    """The empty state for keys (B, H, L, D) and values (B, H, L, E)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    return State(k.new_zeros(shape, dtype=wide), k.new_zeros(shape[:-1], dtype=wide))


class ScoreSettings(NamedTuple):
    """How one set of scores is made and summed up.

    `form` is "full", "chunk", "rnn", "blockwise", "delta_rnn" (the rnn form of the delta rule) or "one_scan". Without
    `include_diagonal` a token's own key does not come in as other keys do, see `lion.ops.full.add_diagonal`. `rowsum`:
    whether there is a row sum.
    """

    form: str
    decay_convention: str
    direction: str
    include_diagonal: bool
    rowsum: bool
    chunk_size: int


class TokenBlock(NamedTuple):
    """Consecutive tokens in scan order: q, k (B, H, C, D), v (B, H, C, E), gate (b, h, C, D or 1), masks (B, C).

    `gate` is the log decay, the delta rule's beta, or the angles of one scan; `segment_index` numbers the segments from
    left to right; `feature_map` names the one that q and k have yet to go through.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    valid: Tensor | None = None
    segment_index: Tensor | None = None
    feature_map: str | None = None

    def slice(self, start: int, size: int, reverse: bool = False) -> TokenBlock:
        """`size` tokens from `start`, in reverse the last one first."""
        dims = (2, 2, 2, 2, 1, 1)
        parts = (x if x is None else flip(x.narrow(d, start, size), d, reverse) for x, d in zip(self, dims))
        return TokenBlock(*parts, feature_map=self.feature_map)

    def contiguous(self) -> TokenBlock:
        """With strides that do not tell how long the whole sequence is: a compiled step looks at them."""
        return TokenBlock(*(x if x is None else x.contiguous() for x in self[:6]), feature_map=self.feature_map)

    def featurized(self) -> TokenBlock:
        """With the feature map applied; what invalid tokens hold does not go through it."""
        if self.feature_map is None:
            return self
        invalid = None if self.valid is None else ~self.valid[:, None, :, None]
        q, k = (
            apply_feature_map(self.feature_map, x if invalid is None else x.masked_fill(invalid, 0)) for x in self[:2]
        )
        return self._replace(q=q, k=k, feature_map=None)

    def masked(self) -> TokenBlock:
        """With the feature map applied and invalid tokens zeroed: a key of 0 that does not decay is as good as none."""
        tokens = self.featurized()
        if self.valid is None:
            return tokens
        invalid = ~self.valid[:, None, :, None]  # select, never multiply: padding may hold NaN
        return TokenBlock(*(x.masked_fill(invalid, 0) for x in tokens[:4]), segment_index=self.segment_index)

    def padded(self, padding: int) -> TokenBlock:
        """With invalid tokens behind them."""
        index = self.segment_index
        index = None if index is None else torch.cat([index, index[:, -1:].expand(-1, padding)], 1)
        wide = (F.pad(x, (0, 0, 0, padding)) for x in self[:4])
        return TokenBlock(*wide, F.pad(self.valid, (0, padding)), index, self.feature_map)

    def to(self, dtype: torch.dtype) -> TokenBlock:
        return TokenBlock(*(x.to(dtype) for x in self[:4]), *self[4:])


def flip(x: Tensor, dim: int, reverse: bool) -> Tensor:
    """x in scan order, or back in its own."""
    return x.flip(dim) if reverse and x.shape[dim] > 1 else x


def scan_directions(direction: str) -> list[str]:
    return [name for name in ("forward", "backward") if direction in (name, "both")]
