"""The interface of decays: x (B, L, dim), k (B, H, L, D) -> arguments of `lion.ops.linear_attention`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.ops import NO_GATES, Gates, no_autocast
from lion.ops.dtypes import wide_dtype

__all__ = ["Decay", "Gating"]  # for mixers of your own


class Gating(NamedTuple):
    """Keys and gates that a decay computes.

    Attributes:
        k: Keys (B, H, L, D), multiplied by their gates.
        gates: Gates of the operator.
        state: State of the decay after these tokens; empty if the decay has no state.
        query_shift: Vectors (B, H, L, D) that are added to the queries, or None.
        value_gate: Factors (B, H, L, D) of the values, or None.
    """

    k: Tensor
    gates: Gates = NO_GATES
    state: tuple[Tensor, ...] = ()
    query_shift: Tensor | None = None
    value_gate: Tensor | None = None

    @property
    def log_decay(self) -> Tensor | None:
        return self.gates.log_decay


class Decay(nn.Module):
    """Base class of decays, which compute the `Gating` of tokens x (B, L, dim) with keys k (B, H, L, D).

    Most decays have no state. A decay with a state (a running maximum, a running sum) starts from `initial_state` and
    returns the state after these tokens; with several segments, the state after the last segment. If `reverse` is set,
    the decay scans tokens from right to left.

    Attributes:
        per: Unit that has its own lambda, as the list of mixers prints it ("a token and head").
        delta: Whether the gates are those of a delta rule, with or without a decay.
        value_gates: Whether each value dimension has a gate, so that values are as wide as keys.
        scans: Whether several scans can share q, k and v, because only `log_decay` is computed.
        temperature: T; `forward` divides the log decays of `gating` by T, `lambda^(1/T)`.
        tempered: Whether the setting `decay_temperature` of the layer sets `temperature`.
    """

    per = "a token and head"
    delta = False
    value_gates = False
    scans = False
    temperature = 1.0
    tempered = False

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.dim, self.num_heads, self.reverse = dim, num_heads, False

    def forward(self, x: Tensor, k: Tensor, layout: Layout = PLAIN, state: tuple[Tensor, ...] = ()) -> Gating:
        with no_autocast(x):
            x = x.to(wide_dtype(x))
            gating = self.gating(x, k, layout, *([state] if state else []))
            log_decay = gating.log_decay
            if self.temperature == 1 or log_decay is None:
                return gating
            return gating._replace(gates=gating.gates._replace(log_decay=log_decay / self.temperature))

    def initial_state(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return the state of the decay before the first token; `z` (B, H, D) is the empty z of the operator."""
        return ()

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        """Return keys and gates; implemented by every decay.

        Called outside autocast, with x in float32 or float64. A decay with a state takes it as the last argument.
        """
        raise NotImplementedError

    def by_head(self, x: Tensor) -> Tensor:
        """Split the heads: (B, L, H D) -> (B, H, L, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def fold(k: Tensor, gate: Tensor) -> Tensor:
    """Return keys or values (B, H, L, D) times a gate (B, H, L) or (B, H, L, D), in their dtype."""
    return (k * (gate[..., None] if gate.dim() == 3 else gate)).to(k.dtype)
