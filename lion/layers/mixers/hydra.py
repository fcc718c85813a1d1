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

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import check_settings, fill, setting
from lion.layers.convolution import Row, ShortConvolution, last_tokens, neighbour
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers.attention import ALTERNATING, AttentionConfig
from lion.layers.mixers.base import Mixer, MixerInfo, check_state, state_type
from lion.layers.mixers.decay import fold, linear
from lion.layers.mixers.linear_transformers import inverse_softplus_steps
from lion.layers.mixers.registry import Entry
from lion.layers.norms import NO_NORM, RMSNorm
from lion.layers.rotations import NO_ROTATION
from lion.ops import FORMS, State, initial_state, linear_attention, no_autocast, prefill, step

HYDRA = "hydra"
CONV_WIDTH, NORM_EPS = 7, 1e-5
SIDES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}
NEIGHBOURS = {"forward": -1, "backward": 1}  # of token i, the token whose output of the scan it reads
SCAN = {"normalize": "none", "decay_convention": "target", "scale": 1.0, "feature_map": None}
OFF = (None, 0, False, "none")  # values of settings that turn a part off, which Hydra does not have anyway


@dataclass
class HydraConfig(AttentionConfig):
    """Settings of a Hydra layer.

    `expand` is the width of all heads together divided by that of the tokens, `state` the number of key dimensions of a
    head. The convolution has `conv_width` tokens, by default 7, and is centred in direction "both". In one direction
    the layer has one scan, and the convolution sees no token beyond it.
    """

    expand: int = setting(2, min=1, max=64)
    state: int = setting(64, min=1, max=65_536)

    def label(self) -> str:
        usual = HydraConfig()
        return ", ".join(f"{name} {getattr(self, name)}" for name in OWN if getattr(self, name) != getattr(usual, name))


OWN = tuple(HydraConfig.__annotations__)
SHARED = ("conv_width", "direction", "form", "chunk_size")


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


class HydraAttention(Mixer):
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
    forms = FORMS

    def __init__(
        self, dim: int, num_heads: int, mixer: str = HYDRA, config: HydraConfig | None = None, **settings: Any
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.config = c = self.resolve(mixer, replace(config or HydraConfig(), **settings))
        if c.direction == ALTERNATING:
            raise ValueError(f"direction: {ALTERNATING!r} is for a model, a single layer is 'forward' or 'backward'")
        self.num_heads, self.sides = num_heads, SIDES[c.direction]
        self.form, self.chunk_size = c.form, c.chunk_size
        inner, vectors = c.expand * dim, 2 * c.state * len(self.sides)
        self.split = (inner, vectors)
        self.inputs = nn.Linear(dim, 2 * inner + vectors, bias=False)  # z, x, then B and C of each direction
        self.steps = nn.Linear(dim, num_heads * len(self.sides), bias=False)
        self.step_bias = nn.Parameter(inverse_softplus_steps(num_heads))
        self.a = nn.Parameter(torch.zeros(num_heads))  # A = -exp(a) starts at -1
        self.convolution = ShortConvolution(inner + vectors, c.conv_width, c.direction, bias=True)
        self.diagonal = nn.Linear(inner, num_heads, bias=False)
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = RMSNorm(inner, eps=NORM_EPS)
        self.proj = nn.Linear(inner, dim, bias=False)

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> HydraConfig:
        if not isinstance(config, HydraConfig):
            config = HydraConfig(**vars(config))
        check_settings(config)
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name not in (*OWN, *SHARED) and value != field.default and value not in OFF:
                raise ValueError(
                    f"{field.name}: not available with mixer {name!r}, which has {', '.join((*OWN, *SHARED))}"
                )
        if config.conv_width == 0:
            raise ValueError(f"conv_width: mixer {name!r} has a convolution, expected at least 1")
        return fill(config, {"rotation": NO_ROTATION, "out_norm": NO_NORM, "conv_width": CONV_WIDTH})

    @staticmethod
    def info(name: str) -> MixerInfo:
        return MixerInfo("Hydra, 2407.09941", "a token and head", left_out="nothing")

    @staticmethod
    def knows_order(name: str, config: AttentionConfig) -> bool:
        return True

    @property
    def causal(self) -> bool:
        return self.config.direction == "forward"

    def check_causal(self) -> None:
        if not self.causal:
            raise ValueError(f"direction: only 'forward' streams, this layer has {self.config.direction!r}")

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        self.form = form
        self.chunk_size = self.config.chunk_size if chunk_size is None else chunk_size

    def forward(self, x: Tensor, layout: Layout | Tensor | None = PLAIN) -> Tensor:
        layout = Layout.given(x, layout)
        x = layout.clean(x)
        z, wide = self.project(x)
        streams = self.streams(x, z, self.convolution(wide, layout))
        settings = {**SCAN, "form": self.form, "chunk_size": self.chunk_size, "segments": layout.segments}
        read = 0
        for side, tokens in zip(self.sides, streams.scans):
            y = linear_attention(*tokens, **settings, direction=side)
            read = read + neighbour(joined(y), NEIGHBOURS[side], layout)
        return self.merge(streams, read)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gate z (B, L, expand * dim) and the input of the convolution, of x (B, L, dim)."""
        if x.dim() != 3 or x.shape[-1] != self.inputs.in_features:
            raise ValueError(f"x: expected tokens (B, L, {self.inputs.in_features}), got shape {tuple(x.shape)}")
        inner, vectors = self.split
        return self.inputs(x).split([inner, inner + vectors], -1)

    def streams(self, x: Tensor, z: Tensor, wide: Tensor) -> Streams:
        """Return the inputs of the scans, from tokens x (B, L, dim), their gate and the output of the convolution."""
        values, vectors = F.silu(wide).split(self.split, -1)
        with no_autocast(x):
            given = x.to(torch.promote_types(x.dtype, torch.float32))
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
        inner, weight = self.split[0], self.proj.weight
        q = weight.new_zeros(batch, self.num_heads, 1, self.config.state)
        state = initial_state(q, weight.new_zeros(batch, self.num_heads, 1, inner // self.num_heads))
        return HydraState(self.convolution.initial_state(batch), *state, weight.new_zeros(batch, 1, inner))

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, HydraState]:
        self.check_causal()
        layout = Layout.given(x, layout)
        x = layout.clean(x)
        z, wide = self.project(x)
        wide, tokens = self.convolution.prefill(wide, layout)
        streams = self.streams(x, z, wide)
        y, state = prefill(*streams.scans[0], **SCAN, chunk_size=self.chunk_size, segments=layout.segments)
        y = joined(y)
        last = last_tokens(y.new_zeros(y.shape[0], 1, y.shape[2]), y, layout.valid)
        return self.merge(streams, neighbour(y, -1, layout)), HydraState(tokens, *state, last)

    def step(self, x: Tensor, state: HydraState, valid: Tensor | None = None) -> tuple[Tensor, HydraState]:
        self.check_causal()
        check_state(state, HydraState)
        layout = Layout.of(x, valid)
        x = layout.clean(x)
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
