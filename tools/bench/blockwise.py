"""The paper's Lion-chunk in the place of the layers' forms, for `bench inference` (Figures 1 and 4)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from lion.layers.layout import ROW_MAJOR, Layout
from lion.layers.mixers import LionAttention, Mixer, mixers_of
from lion.ops import blockwise_attention


def use_blockwise(model: nn.Module) -> None:
    """Let every layer of a model mix by `blockwise_attention`, with the chunk size of the layer."""
    for layer in mixers_of(model):
        layer.mix = partial(mix_blockwise, layer)


def mix_blockwise(layer: Mixer, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Mix tokens as `LionAttention.mix` does, by `blockwise_attention`.

    Raises:
        ValueError: The layer has several scans, a decay per key dimension, the delta rule, or LightNet's keys.
    """
    if type(layer) is not LionAttention or layer.config.scans != ROW_MAJOR:
        raise ValueError("only for one scan, without decay or with a decay per head or token")
    given = layer.operands(x, q, k, v, layout)
    settings = layer.operator_settings
    return blockwise_attention(given.q, given.k, given.v, given.gates, segments=layout.segments, settings=settings)
