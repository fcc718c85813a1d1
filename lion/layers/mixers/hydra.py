"""Hydra (arXiv 2407.09941): a quasi-separable mixer, with its convolution, its gated norm and its projections.

For tokens u, `z, x, B, C = inputs(u)` and `dt = softplus(steps(u) + b)`. A short convolution and SiLU precede x, B and
C. Each direction has its own B, C and dt, which all heads share except dt, and scans the values x of every head:

    h_i = exp(A dt_i) h_{i-1} + dt_i B_i x_i^T,    y_i = C_i h_i        (forward; backward from the last token)

The outputs are then shifted by one token, so that row i reads the state, the query and the decay of token i - 1 (of
token i + 1 in the backward direction), and nothing of token i itself. Token i enters by the free diagonal
`(d(x_i) + D) x_i`. The mask of both directions together is quasi-separable. RMSNorm, the gate `silu(z)` and the output
projection follow.

The shift stays within a segment and skips padding, at which the released code lets one token through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import present, setting
from lion.layers.convolution import Row, ShortConvolution, last_tokens, neighbour
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers.base import MixerInfo, check_state, state_type
from lion.layers.mixers.decay import fold
from lion.layers.mixers.linear_transformers import inverse_softplus_steps
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.state_space import StateSpaceConfig, StateSpaceMixer
from lion.layers.norms import RMSNorm
from lion.layers.weights import linear
from lion.ops import FORMS, State, initial_state, linear_attention, no_autocast, prefill, split_attention, step
from lion.ops.decay import scan_directions
from lion.ops.dtypes import wide_dtype

HYDRA = "hydra"
NORM_EPS = 1e-5
NEIGHBOURS = {"forward": -1, "backward": 1}  # of token i, the token whose output of the scan it reads
SCAN: dict[str, Any] = {"normalize": "none", "decay_convention": "target", "scale": 1.0, "feature_map": None}


@dataclass
class HydraConfig(StateSpaceConfig):
    """Settings of a Hydra layer.

    `expand` is the width of all heads together divided by that of the tokens, `state` the number of key dimensions of a
    head. The convolution of `conv_width` tokens, by default 7, is centred in direction "both". In one direction the
    layer has one scan, and the convolution sees no token beyond it.
    """

    state: int = setting(64, min=1, max=65_536)

    usual_width: ClassVar[int] = 7


@state_type
class HydraState(NamedTuple):
    """The state of a causal layer.

    Attributes:
        tokens: The last tokens (B, conv_width - 1, channels) before the convolution.
        S, z: State of the scan.
        last: Output (B, 1, expand * dim) of the scan at the last token, which the next token reads.
    """

    tokens: Tensor
    S: Tensor
    z: Tensor
    last: Tensor


class Streams(NamedTuple):
    """The inputs of the scans: the gate z and the values x (B, L, expand * dim), and (q, k, v, log_decay) per scan."""

    z: Tensor
    x: Tensor
    scans: list[tuple[Tensor, Tensor, Tensor, Tensor]]


class HydraAttention(StateSpaceMixer):
    """Hydra's quasi-separable mixer, in every form and direction.

    Args:
        dim: Width of the tokens, a multiple of `num_heads`.
        num_heads: Number of heads H, of the width `expand * dim / H`; published models have heads of width 64.
        mixer: "hydra".
        config: Settings; **settings are settings by name, which override `config`.

    Raises:
        ValueError: A value out of its range, or a setting that Hydra does not have.
    """

    Config = HydraConfig
    config: HydraConfig
    forms = FORMS
    memory = ("a", "step_bias")  # parameters of the decays

    def __init__(
        self, dim: int, num_heads: int, mixer: str = HYDRA, config: HydraConfig | None = None, **settings: Any
    ) -> None:
        super().__init__(dim, num_heads, mixer, config, **settings)
        c = self.config
        self.num_heads, self.sides = num_heads, scan_directions(c.direction)
        inner, vectors = c.expand * dim, 2 * c.state * len(self.sides)
        self.split = (inner, vectors)
        self.inputs = nn.Linear(dim, 2 * inner + vectors, bias=False)  # z, x, then B and C of each direction
        self.steps = nn.Linear(dim, num_heads * len(self.sides), bias=False)
        self.step_bias = nn.Parameter(inverse_softplus_steps(num_heads))
        self.a = nn.Parameter(torch.zeros(num_heads))  # A = -exp(a) starts at -1
        self.convolution = ShortConvolution(
            inner + vectors, present(c.conv_width, "conv_width"), c.direction, bias=True
        )
        self.diagonal = nn.Linear(inner, num_heads, bias=False)
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(inner, eps=NORM_EPS)
        self.proj = nn.Linear(inner, dim, bias=False)

    @staticmethod
    def info(name: str) -> MixerInfo:
        return MixerInfo("Hydra, 2407.09941", "a token and head", left_out="nothing")

    def forward(self, x: Tensor, layout: Layout | Tensor | None = PLAIN) -> Tensor:
        layout = Layout.given(x, layout)
        x = self.cleaned(x, layout)
        z, wide = self.project(x)
        streams = self.streams(x, z, self.convolution(wide, layout))
        settings = {**SCAN, "form": self.form, "chunk_size": self.chunk_size, "segments": layout.segments}
        scan = linear_attention
        if layout.part is not None:
            scan = partial(split_attention, part=layout.part)
        reads = []
        for side, tokens in zip(self.sides, streams.scans):
            y = scan(*tokens, **settings, direction=side)
            reads.append(neighbour(joined(y), NEIGHBOURS[side], layout))
        return self.merge(streams, sum(reads[1:], reads[0]))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate z (B, L, expand * dim) and the input of the convolution, of x (B, L, dim)."""
        inner, vectors = self.split
        return self.inputs(x).split([inner, inner + vectors], -1)

    def streams(self, x: Tensor, z: Tensor, wide: Tensor) -> Streams:
        """Return the inputs of the scans, from tokens x (B, L, dim), their gate and the output of the convolution."""
        values, vectors = F.silu(wide).split(self.split, -1)
        with no_autocast(x):
            given = x.to(wide_dtype(x))
            logits = linear(self.steps, given).unflatten(-1, (len(self.sides), -1))
            dt = F.softplus(logits + self.step_bias.to(given.dtype)).permute(2, 0, 3, 1)  # (sides, B, H, L)
            log_decays = -self.a.to(given.dtype).exp()[:, None] * dt
        heads = values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, L, E)
        pairs = vectors.unflatten(-1, (len(self.sides), 2, 1, -1)).permute(2, 3, 0, 4, 1, 5)
        pairs = pairs.expand(-1, -1, -1, self.num_heads, -1, -1)  # (sides, 2, B, H, L, D)
        scans = [(c, b, fold(heads, dt[i]), log_decays[i]) for i, (b, c) in enumerate(pairs)]
        return Streams(z, values, scans)

    def merge(self, streams: Streams, read: Tensor) -> Tensor:
        """Return the output (B, L, dim) from the shifted outputs of the scans, summed, (B, L, expand * dim)."""
        weight = self.diagonal(streams.x) + self.skip
        own = streams.x.unflatten(-1, (self.num_heads, -1)) * weight[..., None]
        return self.proj(self.norm(read + own.flatten(2)) * F.silu(streams.z))

    def initial_state(self, batch: int) -> HydraState:
        self.check_causal()
        inner, weight = self.split[0], self.like
        q = weight.new_zeros(batch, self.num_heads, 1, self.config.state)
        state = initial_state(q, weight.new_zeros(batch, self.num_heads, 1, inner // self.num_heads))
        return HydraState(self.convolution.initial_state(batch), *state, weight.new_zeros(batch, 1, inner))

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, HydraState]:
        self.check_causal()
        layout = Layout.given(x, layout)
        x = self.cleaned(x, layout)
        z, wide = self.project(x)
        wide, tokens = self.convolution.prefill(wide, layout)
        streams = self.streams(x, z, wide)
        y, state = prefill(*streams.scans[0], **SCAN, chunk_size=self.chunk_size, segments=layout.segments)
        y = joined(y)
        last = last_tokens(y.new_zeros(y.shape[0], 1, y.shape[2]), y, layout.valid)
        return self.merge(streams, neighbour(y, -1, layout)), HydraState(tokens, *state, last)

    def step(self, x: Tensor, state: HydraState, valid: Tensor | None = None) -> tuple[Tensor, HydraState]:
        self.check_causal()
        check_state(state, HydraState, x)
        layout = Layout.of(x, valid)
        x = self.cleaned(x, layout)
        z, wide = self.project(x)
        wide, tokens = self.convolution.step(wide, state.tokens, valid)
        streams = self.streams(x, z, wide)
        y, new = step(*streams.scans[0][:3], State(state.S, state.z), streams.scans[0][3], **SCAN, valid=valid)
        y, row = joined(y), Row.of(layout)
        earlier = torch.cat([state.last.to(y.dtype), row.pack(y)], 1)[:, :-1]
        last = last_tokens(state.last, y, valid)
        return self.merge(streams, row.unpack(earlier)), HydraState(tokens, *new, last)


def joined(y: Tensor) -> Tensor:
    """Concatenate the heads: (B, H, L, E) -> (B, L, H E)."""
    return y.transpose(1, 2).flatten(2)


FAMILY = {HYDRA: Entry(HydraAttention)}
