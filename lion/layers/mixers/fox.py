"""FoX, the forgetting transformer (2503.02130): softmax attention with a forget gate per token and head.

The mask of Lion-S is a bias of the scores: `softmax(q_i k_j / sqrt(D) + log M_ij) v_j`. In direction "forward"
`log M_ij = sum_{j < l <= i} log f_l`, and in "backward", the same on reversed tokens, `sum_{i <= l < j} log f_l`. In
both directions the sum runs over the tokens after the earlier one of i and j, up to the later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.config import present
from lion.layers.layout import Layout
from lion.layers.mixers.base import MixerInfo, check_state, state_type
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.lion import SelectiveDecay
from lion.layers.mixers.parts import Parts, describe
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.softmax import CachedAttention, KeyValueCache
from lion.layers.shares import by_heads
from lion.ops.decay import two_terms
from lion.ops.inductor import materialized
from lion.ops.tokens import flip

FOX = "fox"
PUBLISHED = Parts(kv_shift=True, qk_norm="rmsnorm", head_norm="rmsnorm", out_gate="sigmoid")


@state_type
class ForgettingCache(NamedTuple):
    """A cache of keys and values, and the sums (B, H, T) of the log forget gates of the tokens so far."""

    cache: KeyValueCache
    sums: Tensor

    def with_room(self, count: int) -> ForgettingCache:
        """Return the state with room for `count` more tokens in its cache."""
        torch._dynamo.maybe_mark_dynamic(self.sums, 2)  # symbolic, as the lengths of the cache
        return ForgettingCache(self.cache.with_room(count), self.sums)


class ForgettingAttention(CachedAttention):
    """Softmax attention with forget gates `f_i = sigmoid(W x_i + b)` per token and head.

    With `direction="forward"` the layer streams; its state is a KV cache with a number per token and head.
    """

    def __init__(
        self, dim: int, num_heads: int, mixer: str = FOX, config: AttentionConfig | None = None, **settings: Any
    ) -> None:
        super().__init__(dim, num_heads, mixer, config, **settings)
        self.decay = SelectiveDecay(dim, num_heads)

    @staticmethod
    def info(name: str) -> MixerInfo:
        return MixerInfo("FoX, 2503.02130", "a token and head", "softmax", describe(PUBLISHED))

    @staticmethod
    def knows_order(name: str, config: AttentionConfig) -> bool:
        return True

    def log_gates(self, x: Tensor, k: Tensor, layout: Layout) -> Tensor:
        """Return the log forget gates (B, H, L) in float32 or wider, 0 for padding."""
        log_gates = present(self.decay(x, k, layout).log_decay, "log_decay")
        if layout.valid is None:
            return log_gates
        return log_gates.masked_fill(~layout.valid[:, None], 0)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        q, k = self.map_and_rotate(x, q, k, layout)
        return self.mix_mapped(x, q, k, v, layout)

    def mix_mapped(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Mix tokens whose queries and keys are mapped and rotated."""
        return by_heads(self.mix_rows, layout, q, k, v, self.log_gates(x, k, layout))

    def mix_rows(self, q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor, layout: Layout) -> Tensor:
        """Mix whole rows of any heads, whose queries and keys are mapped and rotated."""
        direction = self.config.direction
        reverse = direction == "backward"
        log_gates = materialized(log_gates)  # the scan of a GPU under torch 2.11 cannot add their bias
        sums = flip(flip(log_gates, -1, reverse).double().cumsum(-1), -1, reverse)
        terms = [materialized(t) for t in (two_terms(sums) if log_gates.dtype == torch.float32 else (sums,))]
        mask = layout.with_pairs(direction).readable(direction)
        if mask is None and direction != "both":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
            mask = mask.triu() if reverse else mask.tril()
        y = self.attend(q, k, v, self.bias(terms, terms, mask).to(q.dtype))
        return y if layout.valid is None else y.masked_fill(~layout.valid[:, None, :, None], 0)

    def bias(self, by_query: Sequence[Tensor], by_key: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return log M (B, H, L, T) from the terms of the sums of queries (B, H, L) and keys (B, H, T).

        It is minus infinity where `mask` is False.
        """
        bias = -reduce(add, [q[..., None] - k[..., None, :] for q, k in zip(by_query, by_key)]).abs()
        return bias if mask is None else bias.masked_fill(~mask, -torch.inf)

    def initial_heads(self, batch: int) -> ForgettingCache:
        cache = self.empty_cache(batch)
        return ForgettingCache(cache, cache.k.new_zeros(batch, self.num_heads, 0, dtype=torch.float64))

    def prefill_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout
    ) -> tuple[Tensor, ForgettingCache]:
        q, k = self.map_and_rotate(x, q, k, layout)
        cache = self.cache_of(x, k, v, layout)
        sums = self.log_gates(x, k, layout).double().cumsum(-1)
        return self.mix_mapped(x, q, k, v, layout), ForgettingCache(cache, sums)

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: ForgettingCache, valid: Tensor | None
    ) -> tuple[Tensor, ForgettingCache]:
        check_state(state, ForgettingCache, x)
        layout = Layout.after(x, state.cache.valid.sum(1), valid)
        q, k = self.map_and_rotate(x, q, k, layout)
        before = F.pad(state.sums, (1, 0))[..., -1:]  # 0 before the first token
        sums = before + self.log_gates(x, k, layout).double().cumsum(-1)
        cache, read = self.extended(state.cache, k, v, valid)
        every = torch.cat([state.sums, sums], -1)
        keys, values = cache.read(q.dtype)
        y = self.attend(q, keys, values, self.bias((sums,), (every,), read).to(q.dtype))
        return y, ForgettingCache(cache, every)


FAMILY = {FOX: Entry(ForgettingAttention, published=PUBLISHED)}
