"""Layers of a sequence model, and the table of mixers by name (`model.mixer` of a recipe)."""

from __future__ import annotations

from lion.layers.attention import Attention, AttentionConfig
from lion.layers.hippo import HIPPO, HippoAttention
from lion.layers.lightnet import LIGHTNET, LightNetAttention
from lion.layers.linear import LionAttention
from lion.layers.mixer import Mixer
from lion.layers.mixers import MIXERS, NONE, SOFTMAX
from lion.layers.softmax import NoMixing, SoftmaxAttention

__all__ = [
    "KINDS",
    "MIXERS",
    "NONE",
    "SOFTMAX",
    "Attention",
    "AttentionConfig",
    "HippoAttention",
    "LightNetAttention",
    "LionAttention",
    "NoMixing",
    "SoftmaxAttention",
    "make_mixer",
    "resolve_mixer",
]

KINDS: dict[str, type[Mixer]] = {
    SOFTMAX: SoftmaxAttention,
    NONE: NoMixing,
    **dict.fromkeys(MIXERS, LionAttention),
    **dict.fromkeys(HIPPO, HippoAttention),
    **dict.fromkeys(LIGHTNET, LightNetAttention),
}


def resolve_mixer(name: str, config: AttentionConfig) -> AttentionConfig:
    """Return `config` with every None replaced by the convention of the mixer `name`.

    Raises:
        ValueError: An invalid value, or two values that cannot be combined.
    """
    return KINDS[name].resolve(name, config)


def make_mixer(name: str, dim: int, num_heads: int, config: AttentionConfig) -> Mixer:
    """Return a new layer of the mixer `name` (`model.mixer` of a recipe); `config` may still contain None."""
    return KINDS[name](dim, num_heads, name, config)
