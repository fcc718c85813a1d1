"""Feature maps phi of queries and keys (.., D), computed in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.dtypes import wide_dtype
from lion.ops.inductor import with_gradient_in_memory


def unit(x: Tensor) -> Tensor:
    """Return `x / sqrt(|x|^2 + 1e-6)`, as in the published delta rules; the gradient at 0 is finite."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class FeatureMap(NamedTuple):
    apply: Callable[[Tensor], Tensor]
    positive: bool  # phi is never negative, so that rows can be divided by sums of their scores


FEATURE_MAPS = {
    "silu_shifted": FeatureMap(lambda x: F.normalize(F.silu(x) + 0.5, dim=-1), True),  # the paper's map (3.2)
    "silu": FeatureMap(F.silu, False),
    "silu_unit": FeatureMap(lambda x: unit(F.silu(x)), False),  # norm 1, for the delta rule
    "elu1": FeatureMap(lambda x: F.elu(x) + 1, True),  # the released code's map for Lion-lit
    "relu": FeatureMap(F.relu, True),
    "sigmoid": FeatureMap(torch.sigmoid, True),
    "identity": FeatureMap(lambda x: x, False),
}


def apply_feature_map(name: str | None, x: Tensor) -> Tensor:
    """Return phi(x) in the dtype of `x`, or x unchanged if `name` is None."""
    if name is None:
        return x
    if name == "identity":
        return with_gradient_in_memory(x)
    wide = wide_dtype(x)
    return FEATURE_MAPS[name].apply(with_gradient_in_memory(x).to(wide)).to(x.dtype)
