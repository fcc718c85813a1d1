"""Padding, where a layer meets it: what it holds goes no further, and it takes no place."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops import check_masks


def without_padding(x: Tensor, valid: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x (B, L, dim) with zeros for padding, and which tokens are kept (B, L), None for all.

    The first thing that a layer does: further on, a NaN times a gradient of 0 would be one in every weight.

    Raises:
        ValueError: A mask of another shape or dtype.
    """
    check_masks(x[:, None], valid, segments)
    if segments is not None:
        valid = segments >= 0 if valid is None else valid & (segments >= 0)
    return (x if valid is None else x.masked_fill(~valid[..., None], 0)), valid


def places_of(x: Tensor, valid: Tensor | None) -> Tensor:
    """The place of each token of x (B, L, dim) in its sequence without padding, (B or 1, L)."""
    return torch.arange(x.shape[1], device=x.device)[None] if valid is None else valid.cumsum(1) - 1
