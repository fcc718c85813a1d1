"""LightNet (arXiv 2405.21022): attention with keys that are normalised over the tokens.

In both directions, LightNet is one scan without decay (Eq. 6 and 7, `lion.ops.one_scan`). Forward or backward, it is a
vector decay (Eq. 5, `lion.layers.decays.KeySoftmax`). The state of this decay after the last token equals the state of
the one scan.

A rotation applies to queries and normalised keys (Eq. 10 to 14). The decays act on the dimensions of rotated keys, and
the two decays of one pair may differ. The same rotation therefore has different effects in one direction and in both.
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
    """Settings of a LightNet layer.

    `share` is whether the key also makes the decay. False computes the decay from separate logits (Table 4, "no
    share").
    """

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
            raise ValueError(
                "share: direction 'both' has no decay, so share=false needs direction 'forward' or 'backward'"
            )
        return LionAttention.resolve(name, config)

    def make_decay(self, dim: int) -> Decay:
        return DECAYS[self.mixer.decay](dim, self.num_heads, share=self.config.share)
