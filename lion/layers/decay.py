"""What every decay promises: x (B, L, dim), k (B, H, L, D) -> what the operator takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.ops import no_autocast


class Gating(NamedTuple):
    """Arguments of `lion.ops.linear_attention`: keys with their gates folded in, one of the memories, the angles by
    which queries and keys are turned, and, where they come first, the sums of decays with a token's own. `state` is
    what a decay that remembers goes on from."""

    k: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    prefix: Tensor | None = None
    state: tuple[Tensor, ...] = ()


class Decay(nn.Module):
    """A module (x, k, layout, state) -> `Gating` for tokens x (B, L, dim) with keys k (B, H, L, D).

    Most remember nothing; one that does (a running maximum, a running sum) starts from `initial_state`, and gives the
    state after these tokens, of several segments the last. It sees tokens from right to left where `reverse` is set.
    """

    per = "a token and head"  # what has a lambda of its own
    delta = False  # beta of the delta rule in place of a decay
    scans = False  # whether several scans can share q, k and v: all that it gives is a decay

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.dim, self.num_heads, self.reverse = dim, num_heads, False

    def forward(self, x: Tensor, k: Tensor, layout: Layout = PLAIN, state: tuple[Tensor, ...] = ()) -> Gating:
        with no_autocast(x):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            return self.gating(x, k, layout, *([state] if state else []))

    def initial_state(self, z: Tensor) -> tuple[Tensor, ...]:
        """Before the first token, beside the operator's empty z (B, H, D)."""
        return ()

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        raise NotImplementedError

    def by_head(self, x: Tensor) -> Tensor:
        """(B, L, H D) -> (B, H, L, D)"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in the dtype of `x`, which is float32 or wider."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def fold(k: Tensor, gate: Tensor) -> Tensor:
    """k (B, H, L, D) times a gate (B, H, L) or (B, H, L, D), in the dtype of k."""
    return (k * (gate[..., None] if gate.dim() == 3 else gate)).to(k.dtype)
