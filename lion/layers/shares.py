"""Whole rows of a share of the heads in each process, for layers whose tokens cannot be mixed part by part."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lion.config import nearest_divisor
from lion.layers.layout import Layout


def by_heads(mix: Callable[..., Tensor], layout: Layout, *tokens: Tensor) -> Tensor:
    """Return `mix(*tokens, layout)`; if rows are split over processes, each of them mixes whole rows of its heads.

    Args:
        mix: A function of tokens (B, H, L, ..) and their layout that mixes each head by itself, to (B, H, L, ..).
        layout: The layout of the tokens.
        tokens: Tokens (B, H, L, ..), or what all tokens of a head share, (H, ..). The number of processes divides H.

    An all-to-all brings all tokens of its heads to each process, and another one brings the outputs back. A process
    sends and receives its part of the tokens and outputs, whatever the number of processes.
    """
    part = layout.part
    if part is None:
        return mix(*tokens, layout)

    def of_own_heads(x: Tensor) -> Tensor:
        return part.swap(x, 1, 2)[:, :, : part.length] if x.dim() > 2 else x.chunk(part.count)[part.rank]

    y = mix(*map(of_own_heads, tokens), layout.whole)
    missing = part.size(part.length) * part.count - part.length
    return part.swap(F.pad(y, (*(0, 0) * (y.dim() - 3), 0, missing)), 2, 1)


def check_share(name: str, count: int, processes: int) -> None:
    """Check that `processes` divides the number `count` of heads or channels, which the setting `name` is.

    Raises:
        ValueError: It does not.
    """
    if count % processes:
        near = nearest_divisor(processes, count)
        raise ValueError(f"{name}: {count} cannot be divided among {processes} processes, nearest number: {near}")
