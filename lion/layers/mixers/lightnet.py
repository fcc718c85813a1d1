"""LightNet (arXiv 2405.21022): attention with keys that are normalised over the tokens.

In both directions, LightNet is one scan without decay (Eq. 6 and 7, `lion.ops.one_scan`). Forward or backward, it is a
vector decay (Eq. 5, `KeySoftmax`), whose state after the last token equals the state of the one scan.

A rotation applies to queries and normalised keys (Eq. 10 to 14). The decays act on the dimensions of rotated keys, and
the two decays of one pair may differ. The same rotation therefore has different effects in one direction and in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.mixers.base import MixerInfo
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.linear import LinearMixer, LionAttention, resolve_linear
from lion.layers.mixers.parts import Parts
from lion.layers.mixers.registry import Entry
from lion.layers.weights import linear
from lion.ops import Gates, log_sum_outside, logcumsumexp, one_scan_attention, split_one_scan_attention
from lion.ops.segments import segment_starts


@dataclass
class LightNetConfig(AttentionConfig):
    """Settings of a LightNet layer.

    `share` is whether the key also makes the decay. False computes the decay from separate logits (Table 4, "no
    share").
    """

    share: bool = True

    def label(self) -> str:
        return "" if self.share else "with a decay of its own"


class KeySoftmax(Decay):
    """LightNet in one direction (arXiv 2405.21022, Eq. 5): keys that are normalised over the tokens so far.

    The state is `S = (1 - p) S + p v^T` with the vector `p_i = exp(k_i - LSE_i)`, where LSE_i is the logarithm of the
    sum of `exp(k_j)` over j <= i. The decay is `1 - p_i = exp(LSE_{i-1} - LSE_i)`. Its logarithm is a difference of
    neighbours, so over any range of tokens the log decays sum to the difference between the two ends. The first token
    has no LSE before it: p = 1 and 1 - p = 0. The state of this decay is the last LSE.

    Args:
        share: Whether the decay uses the p of the key. Otherwise the decay uses the p of separate logits `W2 W1 x_i` of
            rank dim / 8. This rank matches the 6 M parameters of Table 4; the paper does not define the logits.
    """

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int, *, share: bool = True) -> None:
        super().__init__(dim, num_heads)
        self.gate = None
        if not share:  # no bias: a constant added to all logits does not change p
            self.gate = nn.Sequential(*(nn.Linear(*n, bias=False) for n in pairwise((dim, max(1, dim // 8), dim))))

    def initial_state(self, z: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(z, -torch.inf) for _ in range(1 if self.gate is None else 2))

    def gating(self, x: Tensor, k: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()) -> Gating:
        logits = [k.to(x.dtype)]
        if self.gate is not None:
            logits.append(self.by_head(linear(self.gate[1], linear(self.gate[0], x))))
        given = zip(logits, *((state,) if state else ()))
        keys, log_decays, totals, last = zip(*(self.shares(y, layout, *before) for y, *before in given))
        gates = Gates(log_decays[-1], prefix=None if state else -totals[-1])
        return Gating(keys[0].to(k.dtype), gates, last)

    def shares(self, logits: Tensor, layout: Layout, before: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return p, log(1 - p) and LSE, all (B, H, L, D), and the last LSE (B, H, D), of tokens after `before`.

        `before` is the last LSE of earlier tokens. At a first token log(1 - p) is minus infinity.
        """
        valid, index = layout.valid, layout.segment_index
        if layout.part is not None:
            before = log_sum_outside(logits, layout.segments, layout.part, self.reverse)
        if self.reverse:
            logits = logits.flip(2)
            valid, index = (None if mask is None else mask.flip(1) for mask in (valid, index))
        invalid = None if valid is None else ~valid[:, None, :, None]
        kept = logits if invalid is None else logits.masked_fill(invalid, -torch.inf)
        if before is None:
            total = logcumsumexp(kept, index)
            earlier = F.pad(total[:, :, :-1], (0, 0, 1, 0), value=-torch.inf)
        else:
            number = None if index is None else torch.cat([index[:, :1], index], 1)
            total = logcumsumexp(torch.cat([before[:, :, None], kept], 2), number)
            earlier, total = total[:, :, :-1], total[:, :, 1:]
        if index is not None:
            earlier = earlier.masked_fill(segment_starts(index)[:, None, :, None], -torch.inf)
        share, log_decay = (logits - total).clamp_max(0).exp(), earlier - total
        if invalid is not None:
            share, log_decay = share.masked_fill(invalid, 0), log_decay.masked_fill(invalid, 0)
        last = total[:, :, -1].clone()
        if self.reverse:
            share, log_decay, total = share.flip(2), log_decay.flip(2), total.flip(2)
        return share, log_decay, total, last


class LightNetAttention(LionAttention):
    """Linear attention whose keys are normalised over the tokens."""

    Config = LightNetConfig
    config: LightNetConfig

    @staticmethod
    def resolve(name: str, config: LightNetConfig) -> LightNetConfig:
        if config.direction == "both" and not config.share:
            raise ValueError(
                "share: direction 'both' has no decay, so share=false needs direction 'forward' or 'backward'"
            )
        for field, usual in (("normalize", "none"), ("decay_convention", "target")):
            if getattr(config, field) not in (None, usual):
                raise ValueError(
                    f"{field} {getattr(config, field)!r}: mixer {name!r} has normalised keys, use {usual!r}"
                )
        if config.score_dropout:
            raise ValueError(f"score_dropout is not available with mixer {name!r}, which computes no scores")
        return resolve_linear(name, config)

    @staticmethod
    def info(name: str) -> MixerInfo:
        info = LionAttention.info(name)
        memory = f"{info.memory}; none in both directions"
        return info._replace(memory=memory, divisor="softmax of keys over tokens", tpe=64, rotation="lrpe")

    @staticmethod
    def knows_order(name: str, config: AttentionConfig) -> bool:
        return config.direction != "both"

    @property
    def one_scan(self) -> bool:
        """Return whether both directions are computed as one scan without decay."""
        return self.config.direction == "both"

    def make_decays(self, dim: int) -> list[Decay]:
        return [] if self.one_scan else [KeySoftmax(dim, self.num_heads, share=self.config.share)]

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        if not self.one_scan:
            return super().mix(x, q, k, v, layout)
        angles = self.angles(x, layout)
        attention = partial(one_scan_attention, form=self.form)
        if layout.part is not None:
            attention = partial(split_one_scan_attention, part=layout.part)
        return attention(
            q,
            k,
            v,
            angles=angles,
            segments=layout.segments,
            feature_map=self.config.feature_map,
            chunk_size=self.chunk_size,
        )


LIGHTNET = "lightnet"
FAMILY = {
    LIGHTNET: Entry(
        LightNetAttention,
        LinearMixer(
            KeySoftmax,
            feature_map="silu",
            key_map="identity",
            scale=1.0,
            plain=Parts(out_norm="rmsnorm", out_gate="sigmoid", out_gate_rank=64),
            source="LightNet, 2405.21022",
            left_out="nothing",
        ),
    )
}
