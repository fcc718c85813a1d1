"""The block of S5 (2208.04933): a norm, a mixer and a gated activation in one residual branch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.blocks.base import MLPS, Block
from lion.layers.layout import PLAIN, Layout


class ChannelDropout(nn.Dropout):
    """Dropout of whole channels of a sequence (B, L, dim), with one mask for all its tokens.

    In a model whose `window` cuts rows, a sequence is a window; if processes share a row, it is the whole row.
    """

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return x * super().forward(x.new_ones(x.shape[0], 1, x.shape[-1])) if self.training and self.p else x


class HalfGlu(nn.Module):
    """S5's half_glu1: `u * sigmoid(W u + b)` with `u = drop(gelu(x))`, and the tanh GELU of flax."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.gate, self.dropout = nn.Linear(dim, dim), ChannelDropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        u = self.dropout(F.gelu(x, approximate="tanh"))
        return u * torch.sigmoid(self.gate(u))


class HalfGluOfInput(HalfGlu):
    """S5's half_glu2: `x * sigmoid(W u + b)` with `u = drop(gelu(x))`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(self.dropout(F.gelu(x, approximate="tanh"))))


ACTIVATIONS: dict[str, type[nn.Module]] = {"half_glu1": HalfGlu, "half_glu2": HalfGluOfInput}


class S5Block(Block):
    """The block of S5: `x + drop(activation(mixer(norm(x))))`.

    The activation is `mlp`, an entry of `ACTIVATIONS` or of `MLPS`. Dropout drops whole channels.
    """

    final_norm = False
    Dropout = ChannelDropout
    mlp: nn.Module

    def add_mlp(self, dim: int, *, mlp: str, mlp_ratio: float, dropout: float, **norm: Any) -> None:
        gates = mlp in ACTIVATIONS
        self.mlp = ACTIVATIONS[mlp](dim, dropout) if gates else MLPS[mlp](dim, int(dim * mlp_ratio))

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        return self.norm1(x, layout)

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        return x + self.drop_path(self.dropout(self.mlp(mixed)))
