"""Softmax attention, the baseline, and a layer without mixing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from lion.config import check_settings, fill
from lion.layers.layout import ROW_MAJOR, Layout, check_scan_names
from lion.layers.mixers.attention import Attention
from lion.layers.mixers.base import MixerInfo, check_state, state_type
from lion.layers.mixers.config import AttentionConfig, streams
from lion.layers.mixers.parts import PLAIN_BLOCK, Parts, parts_of, with_parts
from lion.layers.mixers.registry import Entry, entry_of, own_settings
from lion.layers.norms import over_tokens
from lion.layers.rotations import NO_ROTATION
from lion.layers.shares import by_heads, check_share
from lion.ops.features import apply_feature_map
from lion.ops.modes import transforms_active
from lion.ops.rotary import rotate_pair
from lion.ops.tokens import flip

SOFTMAX = "softmax"  # the baseline: no feature map, no decay, PyTorch's SDPA
NONE = "none"  # no mixing: values pass through unchanged


@state_type
class KeyValueCache(NamedTuple):
    """A cache of the keys and values of all tokens so far.

    Each step copies the cache, unless the cache has room (R > T, see `reserve`).

    Attributes:
        k, v: Keys and values (B, H, R, D), of which the first T of R are in use.
        valid: Boolean (B, T), the tokens that queries may attend to.
    """

    k: Tensor
    v: Tensor
    valid: Tensor

    def with_room(self, count: int) -> KeyValueCache:
        """Return the cache with room for `count` more tokens."""
        length = self.valid.shape[1]
        k = F.pad(self.k[:, :, :length], (0, 0, 0, count))
        v = F.pad(self.v[:, :, :length], (0, 0, 0, count))
        for x, tokens in ((k, 2), (v, 2), (self.valid, 1)):
            torch._dynamo.maybe_mark_dynamic(x, tokens)  # symbolic, so that one compiled step serves all lengths
        return KeyValueCache(k, v, self.valid)

    def append(self, k: Tensor, v: Tensor, valid: Tensor) -> KeyValueCache:
        """Return the cache with C more tokens: keys and values (B, H, C, D), and their mask `valid` (B, C)."""
        length, end = self.valid.shape[1], self.valid.shape[1] + k.shape[2]
        valid = torch.cat([self.valid, valid], 1)
        if end <= self.k.shape[2]:
            self.k[:, :, length:end], self.v[:, :, length:end] = k, v
            return KeyValueCache(self.k, self.v, valid)
        if length:  # an empty cache takes the dtype of the tokens, which autocast may have changed
            k, v = (torch.cat([old[:, :, :length], new], 2) for old, new in ((self.k, k), (self.v, v)))
        return KeyValueCache(k, v, valid)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, T, D), without the room, in the dtype of queries, which may have changed."""
        length = self.valid.shape[1]
        return self.k[:, :, :length].to(dtype), self.v[:, :, :length].to(dtype)


def reserve(state: Any, count: int) -> Any:
    """Return a state, of a layer or of a whole model, with room for `count` more tokens in every cache.

    While there is room, a step writes its tokens there in place, in constant time. The state before the step must then
    not be used again.

    Raises:
        ValueError: A negative `count`.
    """
    if count < 0:
        raise ValueError(f"count: expected at least 0, got {count}")

    def is_cache(part: Any) -> bool:
        return hasattr(part, "with_room")

    return tree_map(lambda part: part.with_room(count) if is_cache(part) else part, state, is_leaf=is_cache)


def published_parts(name: str) -> Parts:
    """Return the parts of the published block of a mixer of softmax; by default none."""
    return entry_of(name).published or PLAIN_BLOCK


class CachedAttention(Attention):
    """Softmax attention with a cache of keys and values in its state; a subclass defines `mix` and the streaming."""

    def __init__(
        self, dim: int, num_heads: int, mixer: str = SOFTMAX, config: AttentionConfig | None = None, **settings
    ) -> None:
        config = self.resolve(mixer, own_settings(mixer, config, settings, type(self)))
        super().__init__(dim, num_heads, config, parts_of(config, PLAIN_BLOCK, published_parts(mixer)))

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> AttentionConfig:
        check_settings(config)
        check_scan_names(config.scans)
        if config.form not in ("auto", "full"):
            raise ValueError(f"form {config.form!r} is not available with mixer {name!r}, which has only 'full'")
        parts = parts_of(config, PLAIN_BLOCK, published_parts(name))
        config = with_parts(fill(config, {"rotation": NO_ROTATION}), parts)
        for setting in ("normalize", "decay_convention", "decay_temperature"):
            if getattr(config, setting) is not None:
                raise ValueError(f"{setting} belongs to linear mixers, {name!r} has none")
        if config.scans != ROW_MAJOR:
            raise ValueError(f"scans: not available with mixer {name!r}, which has no scan order")
        return config

    def check_split(self, count: int) -> None:
        if self.config.score_dropout:
            raise ValueError("attention.score_dropout=0 is needed: a process has the scores of its heads alone")
        check_share("num_heads", self.num_heads, count)

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        layout = super().prepare(x, layout)
        if layout.whole is not None:
            return layout._replace(whole=layout.whole.with_pairs(self.config.direction))
        return layout.with_pairs(self.config.direction)

    def map_and_rotate(self, x: Tensor, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Apply the feature map to q and k, then rotate them by the positions of their tokens."""
        q = apply_feature_map(self.config.feature_map, q)
        k = apply_feature_map(self.config.feature_map, k)
        return rotate_pair(self.angles(x, layout), layout.valid, q, k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        dropout = self.config.score_dropout if self.training else 0.0
        if mask is not None and mask.is_floating_point() and transforms_active():
            with sdpa_kernel(SDPBackend.MATH):  # inside of `vmap` others are chosen that have no gradient of the mask
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)

    def empty_cache(self, batch: int) -> KeyValueCache:
        k = self.like.new_zeros(batch, self.num_heads, 0, self.head_dim)
        v = self.like.new_zeros(batch, self.num_heads, 0, self.value_dim)
        return KeyValueCache(k, v, torch.zeros(batch, 0, dtype=torch.bool, device=k.device))

    def cache_of(self, x: Tensor, k: Tensor, v: Tensor, layout: Layout) -> KeyValueCache:
        """Return the cache after a prompt x (B, L, dim), from its rotated keys and its values."""
        read = layout.in_last_segment()
        if read is None:
            read = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return KeyValueCache(k, v, read)

    def extended(
        self, cache: KeyValueCache, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> tuple[KeyValueCache, Tensor]:
        """Return the cache with C more tokens, and the mask (B, 1, C or 1, T) of keys that each of them attends to."""
        new, before = k.shape[2], cache.valid.shape[1]
        cache = cache.append(k, v, cache.valid.new_ones(k.shape[0], new) if valid is None else valid)
        read = cache.valid[:, None, None]
        if new > 1:
            read = read & torch.ones(new, before + new, dtype=torch.bool, device=k.device).tril(before)
        if valid is not None:
            read = read | ~valid[:, None, :, None]  # padding attends to anything, so that its output is finite
        return cache, read


class SoftmaxAttention(CachedAttention):
    """Softmax attention through `scaled_dot_product_attention`, with an optional feature map (Table 14).

    With `direction="forward"` the layer streams; its state holds the keys and values of every token (a KV cache).
    """

    @staticmethod
    def info(name: str) -> MixerInfo:
        return MixerInfo("1706.03762, the baseline", "-", "softmax")

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        q, k = self.map_and_rotate(x, q, k, layout)
        return by_heads(self.mix_rows, layout, q, k, v)

    def mix_rows(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Mix whole rows of any heads, whose queries and keys are mapped and rotated."""
        direction = self.config.direction
        mask = layout.with_pairs(direction).readable(direction)
        if mask is not None and layout.valid is not None:
            return self.attend(q, k, v, mask).masked_fill(~layout.valid[:, None, :, None], 0)
        reverse = direction == "backward"  # the kernel of causal attention, without a mask, reads from the left
        q, k, v = flip(q, 2, reverse), flip(k, 2, reverse), flip(v, 2, reverse)
        return flip(self.attend(q, k, v, None, causal=direction != "both"), 2, reverse)

    def initial_heads(self, batch: int) -> KeyValueCache:
        return self.empty_cache(batch)

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, KeyValueCache]:
        q, k = self.map_and_rotate(x, q, k, layout)
        return by_heads(self.mix_rows, layout, q, k, v), self.cache_of(x, k, v, layout)

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, valid: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        check_state(state, KeyValueCache, x)
        q, k = self.map_and_rotate(x, q, k, Layout.after(x, state.valid.sum(1), valid))
        state, read = self.extended(state, k, v, valid)
        keys, values = state.read(q.dtype)
        return self.attend(q, keys, values, read), state


class NoMixing(Attention):
    """A layer without mixing, which shows the cost of a layer without its mixer.

    Values pass through unchanged; all projections remain.
    """

    def __init__(
        self, dim: int, num_heads: int, mixer: str = NONE, config: AttentionConfig | None = None, **settings
    ) -> None:
        config = self.resolve(mixer, own_settings(mixer, config, settings, type(self)))
        super().__init__(dim, num_heads, config, parts_of(config, PLAIN_BLOCK, published_parts(mixer)))

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> AttentionConfig:
        for setting, plain in (("feature_map", None), ("rotation", NO_ROTATION)):
            if getattr(config, setting) not in (None, plain):
                raise ValueError(f"{setting} belongs to mixers with scores, {name!r} has none")
        return CachedAttention.resolve(name, config)

    @staticmethod
    def info(name: str) -> MixerInfo:
        return MixerInfo("no mixing of tokens: the lower bound of cost", "-", "-")

    def check_split(self, count: int) -> None:
        """Accept any number of processes: a layer without mixing exchanges nothing."""

    @property
    def causal(self) -> bool:
        mixes = self.neighbours or over_tokens(self.config.out_norm)
        return not mixes or streams(self.config)

    def check_causal(self) -> None:
        if not self.causal:
            super().check_causal()

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return v

    def initial_heads(self, batch: int) -> tuple:
        return ()

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, tuple]:
        return v, ()

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: tuple, valid: Tensor | None
    ) -> tuple[Tensor, tuple]:
        return v, ()


FAMILY = {SOFTMAX: Entry(SoftmaxAttention), NONE: Entry(NoMixing)}
