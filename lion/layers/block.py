"""The pre-norm block: `x + attention(norm(x))`, `x + mlp(norm(x))`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.attention import NORMS, AttentionConfig, make_attention
from lion.layers.padding import without_padding
from lion.layers.scans import Grid


class Mlp(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Glu(nn.Module):
    """Gated linear unit with SiLU: `W_o (silu(W_g x) * W_v x)`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * value)


MLPS = {"mlp": Mlp, "glu": Glu}


class DropPath(nn.Module):
    """Stochastic depth: a whole sample's branch is dropped at `rate`, the others scaled up.

    The rate is a buffer: as a float, every layer's own rate would compile a graph of its own.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


class Block(nn.Module):
    """One layer of an encoder.

    `drop_path` is this layer's stochastic depth rate, None where the model has none.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mixer: str,
        attention: AttentionConfig,
        mlp: str = "mlp",
        mlp_ratio: float = 4.0,
        norm: str = "layernorm",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        drop_path: float | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](dim, eps=norm_eps)
        self.attention = make_attention(mixer, dim, num_heads, attention)
        self.norm2 = NORMS[norm](dim, eps=norm_eps)
        self.mlp = MLPS[mlp](dim, int(dim * mlp_ratio))
        self.dropout = nn.Dropout(dropout)
        self.drop_path = nn.Identity() if drop_path is None else DropPath(drop_path)

    def forward(
        self, x: Tensor, grid: Grid | None = None, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """(B, L, dim) -> (B, L, dim); the other arguments, and padding, as in `Attention.forward`."""
        x, valid = without_padding(x, valid, segments)
        x = x + self.drop_path(self.dropout(self.attention(self.norm1(x), grid, valid, segments)))
        return x + self.drop_path(self.dropout(self.mlp(self.norm2(x))))
