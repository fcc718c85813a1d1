"""Decays: modules from tokens x (B, L, dim) to `log_decay` <= 0, always in float32.

A new decay is one class here and its line in `DECAYS`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.ops import no_autocast


class FixedDecay(nn.Module):
    """Lion-D: `lambda = sigmoid(a)`, one learned `a ~ N(0, 1)` a head; log_decay (H,)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(num_heads))

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return F.logsigmoid(self.a.to(torch.promote_types(self.a.dtype, torch.float32)))


class SelectiveDecay(nn.Module):
    """Lion-S: `lambda_i = sigmoid(W x_i + b)`; log_decay (B, H, L).

    Extra tokens (cls) do not decay, lambda = 1, as in the released code.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_heads)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        with no_autocast(x):
            wide = torch.promote_types(self.gate.weight.dtype, torch.float32)
            logits = F.linear(x.to(wide), self.gate.weight.to(wide), self.gate.bias.to(wide))
            log_decay = F.logsigmoid(logits).mT  # (B, H, L)
        return log_decay if extra is None else log_decay.masked_fill(extra, 0)


DECAYS = {"fixed": FixedDecay, "selective": SelectiveDecay}
