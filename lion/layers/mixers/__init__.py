"""Sequence mixers: a file for each family, and the table of all of them by name, `MIXERS`."""

from __future__ import annotations

from typing import Any

import torch

from lion.layers.mixers import (
    delta,
    delta_product,
    fox,
    hippo,
    hydra,
    lightnet,
    linear_transformers,
    lion,
    performer,
    softmax,
    vim,
    xlstm,
)
from lion.layers.mixers.attention import Attention
from lion.layers.mixers.base import Mixer, forms_of, mixers_of, set_form
from lion.layers.mixers.config import AttentionConfig, MixerConfig
from lion.layers.mixers.delta import DeltaAttention, RWKV7Attention
from lion.layers.mixers.delta_product import DeltaProductAttention
from lion.layers.mixers.fox import ForgettingAttention
from lion.layers.mixers.hippo import HippoAttention
from lion.layers.mixers.hydra import HydraAttention
from lion.layers.mixers.lightnet import LightNetAttention
from lion.layers.mixers.linear import LinearMixer, LionAttention, linear_mixers
from lion.layers.mixers.linear_transformers import RWKV6Attention
from lion.layers.mixers.performer import PerformerAttention
from lion.layers.mixers.registry import MIXERS, Entry, entry_of, own_settings
from lion.layers.mixers.softmax import NONE, SOFTMAX, NoMixing, SoftmaxAttention, reserve
from lion.layers.mixers.vim import VIM, VimMixer
from lion.layers.mixers.xlstm import MLSTMAttention

for family in (
    lion,
    hippo,
    linear_transformers,
    performer,
    xlstm,
    lightnet,
    delta,
    delta_product,
    softmax,
    fox,
    hydra,
    vim,
):
    MIXERS.update(family.FAMILY)
LINEAR = linear_mixers()
__all__ = [
    "LINEAR",
    "MIXERS",
    "NONE",
    "SOFTMAX",
    "VIM",
    "Attention",
    "AttentionConfig",
    "DeltaAttention",
    "DeltaProductAttention",
    "Entry",
    "ForgettingAttention",
    "HippoAttention",
    "HydraAttention",
    "LightNetAttention",
    "LinearMixer",
    "LionAttention",
    "MLSTMAttention",
    "Mixer",
    "MixerConfig",
    "NoMixing",
    "PerformerAttention",
    "RWKV6Attention",
    "RWKV7Attention",
    "SoftmaxAttention",
    "VimMixer",
    "forms_of",
    "make_mixer",
    "mixers_of",
    "register_mixer",
    "reserve",
    "resolve_mixer",
    "set_form",
]


def resolve_mixer(name: str, config: MixerConfig) -> Any:
    """Return `config` with every None replaced by the convention of the mixer `name`.

    Raises:
        ValueError: An unknown mixer, an invalid value, or two values that cannot be combined.
    """
    return entry_of(name).layer.resolve(name, own_settings(name, config))


def make_mixer(
    name: str,
    dim: int,
    num_heads: int,
    config: MixerConfig | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> Mixer:
    """Return a new layer of the mixer `name` (`model.mixer` of a recipe).

    Args:
        name: The mixer, an entry of `MIXERS`.
        dim: Width of the tokens.
        num_heads: Number of heads.
        config: Settings; values of None follow the convention of the mixer. None: its defaults.
        device, dtype: Device and dtype of the weights.
        settings: Settings by name, in place of those of `config`: `direction`, `form`, `chunk_size`, ..

    Raises:
        ValueError: An unknown mixer, an invalid value, or values that cannot be combined.
    """
    layer = entry_of(name).layer(dim, num_heads, name, own_settings(name, config, settings))
    return layer.to(device=device, dtype=dtype)


def register_mixer(name: str, entry: Entry) -> None:
    """Add a mixer to the table, under which recipes, models, `lion.timm` and `lion.transformers` then find it.

    Raises:
        ValueError: The name is taken.
    """
    if name in MIXERS:
        raise ValueError(f"mixer: {name!r} exists already")
    MIXERS[name] = entry
    LINEAR.update(linear_mixers())
