"""Softmax attention, the baseline, and no mixing at all, the floor."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.config import check_settings, fill
from lion.layers.attention import Attention, AttentionConfig, check_scan_names
from lion.layers.layout import AS_THEY_STAND, PLAIN, Layout
from lion.layers.mixer import Facts, state_type
from lion.layers.mixers import NONE, SOFTMAX
from lion.layers.rotations import NO_ROTATION
from lion.ops.features import apply_feature_map
from lion.ops.rotary import rotate_pair


@state_type
class KeyValueCache(NamedTuple):
    """Keys and values (B, H, T, D) of all tokens so far, and which of them are read, (B, T)."""

    k: Tensor
    v: Tensor
    valid: Tensor


class SoftmaxAttention(Attention):
    """Softmax attention through `scaled_dot_product_attention`; a feature map only if one is asked for (Table 14).

    With `direction="forward"` the layer streams; its state holds the keys and values of every token (a KV cache).
    """

    def __init__(
        self, dim: int, num_heads: int, mixer: str = SOFTMAX, config: AttentionConfig | None = None, **settings
    ) -> None:
        super().__init__(dim, num_heads, self.resolve(mixer, replace(config or AttentionConfig(), **settings)))

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> AttentionConfig:
        check_settings(config)
        check_scan_names(config)
        if config.direction not in ("both", "forward"):
            raise ValueError(
                f"direction {config.direction!r} is not available with mixer {name!r}, use 'both' or 'forward'"
            )
        if config.form not in ("auto", "full"):
            raise ValueError(f"form {config.form!r} is not available with mixer {name!r}, which has only 'full'")
        config = fill(config, {"rotation": NO_ROTATION})
        for setting in ("normalize", "decay_convention"):
            if getattr(config, setting) is not None:
                raise ValueError(f"{setting} belongs to linear mixers, {name!r} has none")
        if config.scans != AS_THEY_STAND:
            raise ValueError(f"scans: not available with mixer {name!r}, which has no order to scan in")
        return config

    @staticmethod
    def facts(name: str) -> Facts:
        return Facts("1706.03762, the baseline", "-", "softmax")

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        return super().prepare(x, layout).with_pairs(self.causal)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        q, k = self.turned(x, q, k, layout)
        mask = layout.with_pairs(self.causal).readable(self.causal)
        y = self.attend(q, k, v, mask, causal=self.causal and mask is None)
        return y if mask is None else y.masked_fill(~layout.valid[:, None, :, None], 0)

    def turned(self, x: Tensor, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """q and k through the feature map, and turned by where the tokens stand."""
        q, k = (apply_feature_map(self.config.feature_map, x) for x in (q, k))
        return rotate_pair(q, k, self.angles(x, layout), layout.valid)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        dropout = self.config.score_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)

    def initial_state(self, batch: int) -> KeyValueCache:
        empty = self.proj.weight.new_zeros(batch, self.num_heads, 0, self.head_dim)
        return KeyValueCache(empty, empty.clone(), torch.zeros(batch, 0, dtype=torch.bool, device=empty.device))

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, KeyValueCache]:
        self.check_causal()
        x = layout.clean(x)
        q, k, v = self.heads(x)
        read = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if layout.valid is None else layout.valid
        if layout.segment_index is not None:
            read = layout.in_last_segment()
        cache = KeyValueCache(self.turned(x, q, k, layout)[1], v, read)
        return self.merge(x, self.mix(x, q, k, v, layout), layout), cache

    def step(self, x: Tensor, state: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        self.check_causal()
        q, k, v = self.heads(x)
        new, before = x.shape[1], state.k.shape[2]
        positions = state.valid.sum(1, keepdim=True) + torch.arange(new, device=x.device)  # (B, C)
        q, k = self.turned(x, q, k, Layout(positions=positions))
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        valid = torch.cat([state.valid, state.valid.new_ones(x.shape[0], new)], 1)  # (B, T)
        seen = torch.ones(new, before + new, dtype=torch.bool, device=x.device).tril(before)  # (C, T)
        y = self.attend(q, k, v, valid[:, None, None] & seen)
        return self.merge(x, y), KeyValueCache(k, v, valid)


class NoMixing(Attention):
    """Values go through as they are, and all projections stay: what a layer costs without its mixer."""

    def __init__(
        self, dim: int, num_heads: int, mixer: str = NONE, config: AttentionConfig | None = None, **settings
    ) -> None:
        super().__init__(dim, num_heads, self.resolve(mixer, replace(config or AttentionConfig(), **settings)))

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> AttentionConfig:
        for setting, plain in (("feature_map", None), ("rotation", NO_ROTATION)):
            if getattr(config, setting) not in (None, plain):
                raise ValueError(f"{setting} belongs to mixers with scores, {name!r} has none")
        return SoftmaxAttention.resolve(name, config)

    @staticmethod
    def facts(name: str) -> Facts:
        return Facts("the floor: values go through", "-", "-")

    @property
    def causal(self) -> bool:
        return True

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return v

    def initial_state(self, batch: int) -> tuple:
        return ()

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, tuple]:
        return self(x, layout), ()

    def step(self, x: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        return self(x), ()
