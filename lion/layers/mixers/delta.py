"""The delta rule: DeltaNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.mixers.decay import Decay, Gating, linear
from lion.layers.mixers.linear import LinearMixer, LionAttention
from lion.layers.mixers.registry import Entry
from lion.ops import Gates


class DeltaRule(Decay):
    """DeltaNet (arXiv 2406.06484): `beta_i = sigmoid(W x_i)`, (B, H, L)."""

    per, delta = "delta rule", True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads, bias=False)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, Gates(beta=torch.sigmoid(linear(self.gate, x)).mT))


FAMILY = {
    "deltanet": Entry(
        LionAttention,
        LinearMixer(
            DeltaRule,
            feature_map="silu_unit",
            scale=1.0,
            source="2406.06484",
            left_out="short convolution, SiLU on v, head norm",
        ),
    )
}
