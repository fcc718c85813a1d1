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

from lion.config import setting
from lion.layers.layout import Layout
from lion.layers.mixers.base import check_state
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.delta import BLOCK, UNIT, DeltaAttention, DeltaConfig, GatedDeltaRule
from lion.layers.mixers.linear import LinearMixer, LinearState
from lion.layers.mixers.registry import Entry
from lion.layers.shares import by_heads, check_share
from lion.layers.weights import linear
from lion.ops import Gates, SegmentIndex, Settings, State, linear_attention, prefill, step
from lion.ops.decay import scan_directions
from lion.ops.rotary import rotate_each


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

    def arguments_and_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the arguments of the operator for n tokens (B, H, L n, ..) in place of each; the last one reads."""
        n = self.config.householders
        k, v = (t.unflatten(-1, (n, -1)).flatten(2, 3) for t in (k, v))
        q = F.pad(q[..., None, :], (0, 0, n - 1, 0)).flatten(2, 3)
        inputs, state = super().arguments_and_state(x, q, k, v, layout, state)
        angles = inputs["gates"].angles
        if angles is not None:
            inputs["gates"] = inputs["gates"]._replace(angles=angles.repeat_interleave(n, -2))
        return inputs, state

    def of_steps(self, segments: SegmentIndex | None) -> SegmentIndex | None:
        """Return the masks (B, L n) of the steps of all tokens."""
        n = self.config.householders
        return segments and SegmentIndex(*(x if x is None else x.repeat_interleave(n, 1) for x in segments))

    def read_out(self, y: Tensor) -> Tensor:
        """Return the outputs (B, H, L, E) of the last steps of all tokens."""
        n = self.config.householders
        return y[:, :, n - 1 :: n]

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        inputs = self.arguments(x, q, k, v, layout)
        if layout.part is None:
            return self.mix_rows(inputs, layout)
        gates = inputs["gates"]
        q, k = rotate_each(gates.angles, None, inputs["q"], inputs["k"])  # angles of whole rows are not at hand

        def mix_heads(*steps: Any) -> Tensor:
            q, k, v, log_decay, beta = (t.flatten(2, 3) for t in steps[:-1])
            return self.mix_rows({**inputs, "q": q, "k": k, "v": v, "gates": Gates(log_decay, beta)}, steps[-1])

        steps = (q, k, inputs["v"], gates.log_decay, gates.beta)
        return by_heads(mix_heads, layout, *(t.unflatten(2, (-1, self.config.householders)) for t in steps))

    def mix_rows(self, inputs: dict[str, Any], layout: Layout) -> Tensor:
        """Mix whole rows of any heads, from the arguments of the operator."""
        settings = Settings(form=self.form, direction="forward", chunk_size=self.chunk_size)
        segments = self.of_steps(layout.segments)
        names, y = scan_directions(self.config.direction), 0
        for name in names:
            given, masks = (inputs, segments) if name == "forward" else self.reversed(inputs, segments)
            out = self.read_out(linear_attention(**given, settings=settings, segments=masks))
            y = y + (out if name == "forward" else out.flip(2))
        if len(names) == 1:
            return y
        own = self.own(inputs)
        return y - (own if layout.valid is None else own.masked_fill(~layout.valid[:, None, :, None], 0))

    def reversed(
        self, inputs: dict[str, Any], segments: SegmentIndex | None
    ) -> tuple[dict[str, Any], SegmentIndex | None]:
        """Return the arguments of the operator with the tokens from right to left, each with its steps in order."""

        def turned(x: Tensor, dim: int = 2) -> Tensor:
            return x.unflatten(dim, (-1, self.config.householders)).flip(dim).flatten(dim, dim + 1)

        gates = inputs["gates"]
        turn = {name: turned(gates._asdict()[name]) for name in ("log_decay", "beta")}
        if gates.angles is not None:
            turn["angles"] = turned(gates.angles, gates.angles.dim() - 2)
        if segments is not None:
            index, valid = segments
            segments = SegmentIndex(index if index is None else -turned(index, 1), turned(valid, 1))
        return {**inputs, **{name: turned(inputs[name]) for name in "qkv"}, "gates": gates._replace(**turn)}, segments

    def own(self, inputs: dict[str, Any]) -> Tensor:
        """Return the outputs (B, H, L, E) of each token from its own steps, which both directions include."""
        n, gates = self.config.householders, inputs["gates"]
        q, k, v, beta = (x.unflatten(2, (-1, n)).unbind(3) for x in (*map(inputs.get, "qkv"), gates.beta[..., None]))
        read, y = q[-1].to(gates.beta.dtype), 0
        for key, value, strength in reversed([*zip(k, v, beta)]):
            held = strength * (read * key).sum(-1, keepdim=True)
            y, read = y + held * value, read - held * key
        return (self.head_dim**-0.5 * y).to(v[0].dtype)

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, LinearState]:
        inputs, decay = self.arguments_and_state(x, q, k, v, layout)
        y, state = prefill(**inputs, chunk_size=self.chunk_size, segments=self.of_steps(layout.segments))
        return self.read_out(y), LinearState(*state, layout.next_position(x), decay)

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LinearState, valid: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        check_state(state, LinearState, x)
        layout = Layout.after(x, state.position, valid)
        inputs, decay = self.arguments_and_state(x, q, k, v, layout, state.decay)
        valid = None if valid is None else valid.repeat_interleave(self.config.householders, 1)
        y, new = step(**inputs, state=State(state.S, state.z), valid=valid)
        return self.read_out(y), LinearState(*new, state.position + layout.count(x), decay)


FAMILY = {
    "deltaproduct": Entry(
        DeltaProductAttention,
        LinearMixer(ProductRule, **UNIT, source="2502.10297", published=replace(BLOCK, out_gate="silu", value_ratio=2)),
    ),
}
