"""Layers of a sequence model; the table of mixers by name: `model.mixer`."""

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
    """`config` with every None filled in by the conventions of the mixer called `name`.

    Raises:
        ValueError: A value that is no choice, or two that do not go together.
    """
    return KINDS[name].resolve(name, config)


def make_mixer(name: str, dim: int, num_heads: int, config: AttentionConfig) -> Mixer:
    """The layer that a recipe's `model.mixer` names, of a config with or without None."""
    return KINDS[name](dim, num_heads, name, config)
