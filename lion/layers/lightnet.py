"""LightNet (arXiv 2405.21022): attention with keys that are normalised over the tokens.

In both directions this is one scan without decay (Eq. 6 and 7, `lion.ops.one_scan`), forward or backward a vector decay
(Eq. 5, `lion.layers.decays.KeySoftmax`), whose state after the last token is that of both directions. A rotation turns
queries and normalised keys (Eq. 10 to 14); decays go by the dimensions of keys that are turned, and two of one pair may
differ, so that rotation is one thing in one direction and another in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from lion.layers.attention import AttentionConfig
from lion.layers.decay import Decay
from lion.layers.decays import DECAYS
from lion.layers.linear import LionAttention
from lion.layers.mixers import MIXERS

LIGHTNET = tuple(name for name, entry in MIXERS.items() if entry.one_scan)


@dataclass
class LightNetConfig(AttentionConfig):
    """`share`: whether the key makes the decay, too; false gives the decay logits of its own (Table 4, "no share")."""

    share: bool = True

    def label(self) -> str:
        return "" if self.share else "with a decay of its own"


class LightNetAttention(LionAttention):
    """Linear attention whose keys are normalised over the tokens."""

    Config = LightNetConfig

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> LightNetConfig:
        if not isinstance(config, LightNetConfig):
            config = LightNetConfig(**vars(config))
        if config.direction == "both" and not config.share:
            raise ValueError("share: both directions are one scan without decay, use 'forward' or 'backward'")
        return LionAttention.resolve(name, config)

    def make_decay(self, dim: int) -> Decay:
        return DECAYS[self.mixer.decay](dim, self.num_heads, share=self.config.share)
