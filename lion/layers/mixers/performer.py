"""Performer (arXiv 2009.14794): positive orthogonal random features, FAVOR+, which estimate softmax attention.

    phi(x)_f = exp(w_f x' - |x'|^2 / 2 - c) / sqrt(m)       x' = x / D^(1/4)       E[phi(q) phi(k)] = exp(q k / sqrt(D))

The m vectors w_f have the distribution N(0, I), and are orthogonal within each block of D vectors. They are drawn when
the layer is made, and are not learned. The stabilisers c cancel in the division of rows by their sums. For a query, c
is its largest logit; for keys, it is the largest logit of all keys of a segment. In one direction, a key does not see
later keys, so c is the largest logit so far, and the state is multiplied by `exp(c_{t-1} - c_t)`, which is a decay. No
exponent is positive. The released code adds 1e-4 to the features; what that means depends on c, so it is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lion.config import setting
from lion.layers.layout import Layout
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.linear import LinearMixer, LinearState, LionAttention, Operands, resolve_linear
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.running import running_maximum
from lion.layers.rotations import NO_ROTATION
from lion.layers.shares import by_heads, check_share
from lion.ops import Gates, Settings, no_autocast
from lion.ops.decay import scan_directions
from lion.ops.dtypes import wide_dtype

LOWEST = -60.0  # least c: padding, which has no logit, does not change it
EPS = 1e-18  # least row sum: where query and keys are far apart, a sum is as small as exp(-|q' - k'|^2 / 2)


@dataclass
class PerformerConfig(AttentionConfig):
    """Settings of Performer: `features` is the number m of random features; None is `D ln D`, rounded up."""

    features: int | None = setting(None, min=1, max=65_536)

    def label(self) -> str:
        return "" if self.features is None else f"{self.features} features"


def orthogonal_features(count: int, dim: int) -> Tensor:
    """Draw vectors (count, dim) of the distribution N(0, I), orthogonal within each block of `dim` vectors."""
    dtype = torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)  # no decomposition in half precision
    Q, R = torch.linalg.qr(torch.randn(-(-count // dim), dim, dim, dtype=wide))
    rows = Q.mT * R.diagonal(0, -2, -1).sign()[..., None]  # LAPACK fixes the signs of Q, which would not be uniform
    lengths = torch.randn(count, dim, dtype=wide).norm(dim=-1, keepdim=True)
    return (lengths * rows.flatten(0, 1)[:count]).to(dtype)


class PerformerAttention(LionAttention):
    """Linear attention with random features that estimate softmax attention."""

    Config = PerformerConfig
    config: PerformerConfig
    random_features: Tensor

    def __init__(self, dim: int, num_heads: int, *args: Any, **settings: Any) -> None:
        super().__init__(dim, num_heads, *args, **settings)
        D = self.head_dim
        self.count = self.config.features or max(1, math.ceil(D * math.log(D)))
        self.register_buffer("random_features", orthogonal_features(self.count, D).to(self.like))

    @staticmethod
    def resolve(name: str, config: PerformerConfig) -> PerformerConfig:
        taken = {"feature_map": "identity", "rotation": NO_ROTATION, "normalize": "sum", "decay_convention": "target"}
        for field, usual in taken.items():
            if getattr(config, field) not in (None, usual):
                raise ValueError(
                    f"{field} {getattr(config, field)!r}: mixer {name!r} has random features, use {usual!r}"
                )
        if config.score_dropout:
            raise ValueError(f"score_dropout is not available with mixer {name!r}")
        return replace(resolve_linear(name, replace(config, normalize="none")), normalize="sum")

    def check_split(self, count: int) -> None:
        check_share("num_heads", self.num_heads, count)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return by_heads(partial(super().mix, x), layout, q, k, v)

    def make_settings(self) -> Settings:
        return replace(super().make_settings(), scale=None, eps=EPS, feature_map=None)

    def operands(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()
    ) -> Operands:
        with no_autocast(x):
            wide = wide_dtype(q)
            q = q.to(wide) * self.head_dim**-0.25
            k = k.to(wide) * self.head_dim**-0.25
            features = self.random_features.to(wide).mT
            queries = q @ features  # (B, H, L, m)
            keys = k @ features - k.square().sum(-1, keepdim=True) / 2
            queries = (queries - queries.detach().amax(-1, keepdim=True)).exp() * self.count**-0.5
            largest = keys.detach().amax(-1).double() - LOWEST  # (B, H, L)
            if layout.valid is not None:
                largest = largest.masked_fill(~layout.valid[:, None], 0)
            c, earlier, last = self.stabilisers(largest.clamp_min(0), layout, *state)
            keys = (keys - (c + LOWEST)[..., None]).exp().to(v.dtype) * self.count**-0.5
            log_decay = None if earlier is None else (earlier - c).to(q.dtype)
        return Operands(queries.to(v.dtype), keys, v, Gates(log_decay), (last,))

    def stabilisers(
        self, largest: Tensor, layout: Layout, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return c of each token, c before each token (None in both directions), and the last c, all above `LOWEST`."""
        index, direction = layout.segment_index, self.config.direction
        scans = {}
        for name in scan_directions(direction):
            scans[name] = running_maximum(largest, torch.zeros_like(largest), index, before, name == "backward")
        if direction != "both":
            return scans[direction]
        c = torch.maximum(*(scan[0] for scan in scans.values()))
        return c, None, c[..., -1].clone()

    def initial_heads(self, batch: int) -> LinearState:
        _, _, position, _ = super().initial_heads(batch)
        weight = self.like
        wide = wide_dtype(weight)
        S = weight.new_zeros(batch, self.num_heads, self.count, self.value_dim, dtype=wide)
        return LinearState(S, S[..., 0].clone(), position, (S.new_zeros(S.shape[:2], dtype=torch.float64),))


FAMILY = {
    "performer": Entry(
        PerformerAttention,
        LinearMixer(
            None,
            normalize="sum",
            source="2009.14794",
            left_out="1e-4 added to features (its meaning depends on a stabiliser), features drawn anew in training",
        ),
    ),
}
