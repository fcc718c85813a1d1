"""Gated DeltaProduct (arXiv 2502.10297): a decay, then several steps of the delta rule for each token.

    S_{i,0} = lambda_i S_{i-1,n}      S_{i,j} = (I - beta_ij k_ij k_ij^T) S_{i,j-1} + beta_ij k_ij v_ij^T
    y_i = q_i S_{i,n} / sqrt(D)

Each of the n steps has its own key, value and `beta = 2 sigmoid(.)`. The decay is that of Gated DeltaNet. The operator
receives n tokens for each token: the first of them decays, and the last one reads.

A backward scan visits the tokens from right to left, and takes the steps of a token in the same order 1 .. n. With both
directions, what a token reads of its own n steps is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import present, setting
from lion.layers.layout import Layout
from lion.layers.mixers.base import check_state
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.delta import BLOCK, UNIT, DeltaAttention, DeltaConfig, GatedDeltaRule
from lion.layers.mixers.linear import LinearMixer, LinearState, Operands
from lion.layers.mixers.registry import Entry
from lion.layers.shares import by_heads, check_share
from lion.layers.weights import linear
from lion.ops import Gates, SegmentIndex, Settings, State, linear_attention, prefill, step
from lion.ops.rotary import rotate_pair
from lion.ops.tokens import optional


@dataclass
class DeltaProductConfig(DeltaConfig):
    """Settings of DeltaProduct: `householders` is the number n of steps for each token."""

    negative_eigenvalues: bool = True
    householders: int = setting(2, min=1, max=8)

    def label(self) -> str:
        parts = [f"{self.householders} steps per token"] * (self.householders != 2)
        return ", ".join(parts + ["without negative eigenvalues"] * (not self.negative_eigenvalues))


class ProductRule(GatedDeltaRule):
    """Gates of Gated DeltaProduct: lambda (B, H, L n), 1 except at the first step of a token, and beta (B, H, L n)."""

    def __init__(self, dim: int, num_heads: int, strength: float = 2.0, count: int = 2) -> None:
        super().__init__(dim, num_heads, strength)
        self.count, self.gate = count, nn.Linear(dim, count * num_heads, bias=False)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        beta = self.strength * torch.sigmoid(self.by_head(linear(self.gate, x)))  # (B, H, L, n)
        log_decay = F.pad(self.decay.log_decay(x)[..., None], (0, self.count - 1))
        return Gating(k, Gates(log_decay.flatten(2), beta=beta.flatten(2)))


class DeltaProductAttention(DeltaAttention):
    """Gated DeltaProduct. A chunk of the chunk form holds `chunk_size` steps."""

    Config = DeltaProductConfig
    config: DeltaProductConfig

    def projected(self, keys: int, values: int) -> tuple[int, int, int]:
        return keys, self.config.householders * keys, self.config.householders * values

    def make_decays(self, dim: int) -> list[Decay]:
        c = self.config
        return [ProductRule(dim, self.num_heads, 2.0 if c.negative_eigenvalues else 1.0, c.householders)]

    def check_split(self, count: int) -> None:
        check_share("num_heads", self.num_heads, count)

    def make_settings(self) -> Settings:
        return replace(super().make_settings(), direction="forward")  # both directions are scans forward

    def operands(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()
    ) -> Operands:
        """Return the operands of n tokens (B, H, L n, ..) in place of each; the last one reads."""
        n = self.config.householders
        k = k.unflatten(-1, (n, -1)).flatten(2, 3)
        v = v.unflatten(-1, (n, -1)).flatten(2, 3)
        q = F.pad(q[..., None, :], (0, 0, n - 1, 0)).flatten(2, 3)
        given = super().operands(x, q, k, v, layout, state)
        gates = given.gates
        if gates.angles is not None:
            gates = gates._replace(angles=gates.angles.repeat_interleave(n, -2))
        return given._replace(gates=gates)

    def of_steps(self, segments: SegmentIndex | None) -> SegmentIndex | None:
        """Return the masks (B, L n) of the steps of all tokens."""
        n = self.config.householders
        if segments is None:
            return None
        index, valid = (optional(lambda mask: mask.repeat_interleave(n, 1), mask) for mask in segments)
        return SegmentIndex(index, valid)

    def read_out(self, y: Tensor) -> Tensor:
        """Return the outputs (B, H, L, E) of the last steps of all tokens."""
        n = self.config.householders
        return y[:, :, n - 1 :: n]

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        given = self.operands(x, q, k, v, layout)
        if layout.part is None:
            return self.mix_rows(given, layout)
        gates = given.gates
        q, k = rotate_pair(gates.angles, None, given.q, given.k)  # angles of whole rows are not at hand

        def mix_heads(*steps: Any) -> Tensor:
            q, k, v, log_decay, beta = (t.flatten(2, 3) for t in steps[:-1])
            return self.mix_rows(Operands(q, k, v, Gates(log_decay, beta)), steps[-1])

        steps = (q, k, given.v, present(gates.log_decay, "log_decay"), present(gates.beta, "beta"))
        return by_heads(mix_heads, layout, *(t.unflatten(2, (-1, self.config.householders)) for t in steps))

    def mix_rows(self, given: Operands, layout: Layout) -> Tensor:
        """Mix whole rows of any heads."""
        segments = self.of_steps(layout.segments)
        direction = self.config.direction
        if direction == "forward":
            return self.scanned(given, segments)
        backward = self.scanned(self.reversed(given), self.reversed_segments(segments)).flip(2)
        if direction == "backward":
            return backward
        y = self.scanned(given, segments) + backward
        own = self.own(given)
        if layout.valid is not None:
            own = own.masked_fill(~layout.valid[:, None, :, None], 0)
        return y - own

    def scanned(self, given: Operands, segments: SegmentIndex | None) -> Tensor:
        """Return the outputs (B, H, L, E) of one scan of the steps, from left to right."""
        y = linear_attention(given.q, given.k, given.v, given.gates, segments=segments, settings=self.operator_settings)
        return self.read_out(y)

    def turned(self, x: Tensor, dim: int = 2) -> Tensor:
        """Return the tokens from right to left, each with its steps in order."""
        return x.unflatten(dim, (-1, self.config.householders)).flip(dim).flatten(dim, dim + 1)

    def reversed(self, given: Operands) -> Operands:
        """Return the operands with the tokens from right to left."""
        gates = given.gates
        log_decay, beta = optional(self.turned, gates.log_decay), optional(self.turned, gates.beta)
        gates = gates._replace(log_decay=log_decay, beta=beta)
        if gates.angles is not None:
            gates = gates._replace(angles=self.turned(gates.angles, gates.angles.dim() - 2))
        return Operands(self.turned(given.q), self.turned(given.k), self.turned(given.v), gates)

    def reversed_segments(self, segments: SegmentIndex | None) -> SegmentIndex | None:
        if segments is None:
            return None
        index, valid = (optional(lambda mask: self.turned(mask, 1), mask) for mask in segments)
        return SegmentIndex(optional(torch.neg, index), valid)

    def own(self, given: Operands) -> Tensor:
        """Return the outputs (B, H, L, E) of each token from its own steps, which both directions include."""
        n, beta = self.config.householders, present(given.gates.beta, "beta")[..., None]
        q, k, v, beta = (x.unflatten(2, (-1, n)) for x in (given.q, given.k, given.v, beta))  # (B, H, L, n, ..)
        read = q[:, :, :, -1].to(beta.dtype)
        y = 0
        for i in reversed(range(n)):
            key = k[:, :, :, i]
            held = beta[:, :, :, i] * (read * key).sum(-1, keepdim=True)
            y = y + held * v[:, :, :, i]
            read = read - held * key
        return (self.head_dim**-0.5 * y).to(v.dtype)

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, LinearState]:
        given = self.operands(x, q, k, v, layout)
        segments = self.of_steps(layout.segments)
        y, new = prefill(given.q, given.k, given.v, given.gates, segments=segments, settings=self.operator_settings)
        return self.read_out(y), LinearState(new.S, new.z, layout.next_position(x), given.state)

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LinearState, valid: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        check_state(state, LinearState, x)
        layout = Layout.after(x, state.position, valid)
        given = self.operands(x, q, k, v, layout, state.decay)
        if valid is not None:
            valid = valid.repeat_interleave(self.config.householders, 1)
        before = State(state.S, state.z)
        y, new = step(given.q, given.k, given.v, before, given.gates, valid=valid, settings=self.operator_settings)
        return self.read_out(y), LinearState(new.S, new.z, state.position + layout.tokens_of(x), given.state)


FAMILY = {
    "deltaproduct": Entry(
        DeltaProductAttention,
        LinearMixer(ProductRule, **UNIT, source="2502.10297", published=replace(BLOCK, out_gate="silu", value_ratio=2)),
    ),
}
