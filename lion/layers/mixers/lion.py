"""The mixers of LION (2502.16249): Lion-lit, Lion-D and Lion-S, with a decay per head or per key dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.linear import LinearMixer, LionAttention
from lion.layers.mixers.registry import Entry
from lion.layers.weights import linear
from lion.ops import Gates

LION: dict[str, Any] = {
    "feature_map": "silu_shifted",
    "normalize": "sum",
    "decay_convention": "source",
    "source": "LION, 2502.16249",
}


class FixedDecay(Decay):
    """Lion-D: `lambda = sigmoid(a)`, one learned `a ~ N(0, 1)` per head; log_decay (H,)."""

    per = "a head"
    tempered = scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.a = nn.Parameter(torch.randn(num_heads))

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, Gates(F.logsigmoid(self.a.to(x.dtype))))

    def rates(self) -> Tensor:
        """Return lambda (H,) of each head."""
        return (F.logsigmoid(self.a) / self.temperature).exp()


class SelectiveDecay(Decay):
    """Lion-S: `lambda_i = sigmoid(W x_i + b)`; log_decay (B, H, L).

    Special tokens (cls) do not decay (lambda = 1), as in the released code.
    """

    tempered = scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        log_decay = F.logsigmoid(linear(self.gate, x)).mT  # (B, H, L)
        special = layout.special_of_heads()
        if special is not None:
            log_decay = log_decay.masked_fill(special, 0)
        return Gating(k, Gates(log_decay))


class SelectiveVectorDecay(Decay):
    """Lion-S with vectors (Table 13): `lambda_i = sigmoid(W x_i + b)` per key dimension; log_decay (B, H, L, D)."""

    per = "a token and key dimension"
    tempered = scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        log_decay = self.by_head(F.logsigmoid(linear(self.gate, x)))
        special = layout.special_of_heads()
        if special is not None:
            log_decay = log_decay.masked_fill(special[..., None], 0)
        return Gating(k, Gates(log_decay))


FAMILY = {
    "lion_lit": Entry(LionAttention, LinearMixer(None, **LION)),
    "lion_d": Entry(LionAttention, LinearMixer(FixedDecay, **LION)),
    "lion_s": Entry(LionAttention, LinearMixer(SelectiveDecay, **LION)),
    "lion_s_vector": Entry(LionAttention, LinearMixer(SelectiveVectorDecay, **LION)),
}
