"""Attention layers: the projections around the mixing of heads."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.convolution import KeyValueShift, ShortConvolution, TokenShift, Window
from lion.layers.layout import MASK_OF_TOKENS, PLAIN, Layout
from lion.layers.mixers.base import Mixer, check_state, check_width, state_type
from lion.layers.mixers.config import ALTERNATING, AttentionConfig, streams
from lion.layers.mixers.parts import (
    HEAD_NORMS,
    NO_PART,
    OUT_GATES,
    Parts,
    make_gate,
)
from lion.layers.norms import NO_NORM, NORMS, check_causal
from lion.layers.optim_factors import undecayed
from lion.layers.rotations import NO_ROTATION, ROTATIONS
from lion.layers.weights import is_plain
from lion.ops.features import apply_feature_map


@state_type
class BlockState(NamedTuple):
    """The state of a causal layer with a token shift, a convolution, or a shift of keys and values.

    Attributes:
        heads: State of the mixing of heads.
        shift: The last token, (B, 1, dim); empty without token shift.
        conv: The tokens (B, width - 1, C) that the next convolution reads; empty without convolution.
        kv: The last key and value before their shift, (B, 1, C); empty without a shift.
    """

    heads: Any
    shift: Tensor
    conv: Tensor
    kv: Tensor


class Inputs(NamedTuple):
    """Inputs of the mixing of heads.

    Attributes:
        x: Tokens (B, L, dim) that decays read.
        q, k, v: Queries and keys (B, H, L, D), values (B, H, L, E).
        gate: Tokens (B, L, dim) that the output gate reads.
        convolved: Tokens (B, L, dim) after a first convolution, or None.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    convolved: Tensor | None = None


class Windows:
    """Runs of the parts of a layer that read neighbouring tokens, on whole rows."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.after: dict[str, Tensor] = {}  # states of the parts after these tokens, in a stream

    def run(self, name: str, part: Window, tokens: Tensor) -> Tensor:
        """Return the outputs of a part, whose state is called `name` in `BlockState`."""
        return part(tokens, self.layout)


class Prompt(Windows):
    """Runs on a prompt, which keep the states after it."""

    def run(self, name: str, part: Window, tokens: Tensor) -> Tensor:
        y, self.after[name] = part.prefill(tokens, self.layout)
        return y


class Step(Windows):
    """Runs on the next tokens of a stream, with the states `before` them."""

    def __init__(self, layout: Layout, before: dict[str, Tensor], valid: Tensor | None) -> None:
        super().__init__(layout)
        self.before = before
        self.valid = valid

    def run(self, name: str, part: Window, tokens: Tensor) -> Tensor:
        y, self.after[name] = part.step(tokens, self.before[name], self.valid)
        return y


class Attention(Mixer):
    """Projections to q, k and v, a mixing of heads, and the output projection, with the parts of published blocks.

    A subclass defines the mixing of heads: `mix`, and if it streams, `prefill_heads`, `step_heads` and `initial_heads`.
    """

    parts: Parts
    Shift: ClassVar[type[TokenShift]] = TokenShift
    shifts: ClassVar[int] = 5  # outputs of the token shift: those that q, k, v, the decay and the output gate read
    head_eps: ClassVar[float] = 1e-5  # of `head_norm`

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig, parts: Parts) -> None:
        super().__init__()
        check_width(dim, num_heads)
        if config.direction == ALTERNATING:
            raise ValueError(f"direction: {ALTERNATING!r} is for a model, a single layer is 'forward' or 'backward'")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.config = config
        self.parts = parts
        self.key_heads = parts.key_heads or num_heads
        self.value_dim = self.head_dim * parts.value_ratio
        if num_heads % self.key_heads:
            raise ValueError(f"num_heads: expected a multiple of the {self.key_heads} heads of keys, got {num_heads}")
        keys, width = self.key_heads * self.head_dim, num_heads * self.value_dim
        self.widths = self.projected(keys, width)
        self.token_shift = None
        if parts.token_shift:
            self.token_shift = self.Shift(dim, self.shifts, config.direction)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=config.qkv_bias)
        self.conv: ShortConvolution | None = None
        self.conv_skip: nn.Parameter | None = None
        self.kv_shift: KeyValueShift | None = None
        if parts.conv_width:
            channels = dim if parts.conv_first else sum(self.widths)
            self.conv = ShortConvolution(channels, parts.conv_width, config.direction, config.qkv_bias)
        if parts.conv_first:
            self.conv_skip = nn.Parameter(torch.ones(dim))
        if parts.kv_shift:
            sizes = self.head_dim, self.value_dim
            heads = self.widths[1] // self.head_dim, self.widths[2] // self.value_dim
            self.kv_shift = KeyValueShift(dim, heads, sizes, config.direction)
        self.proj = nn.Linear(width, dim)
        self.rotation = None
        rotation = ROTATIONS.get(config.rotation or NO_ROTATION)
        if rotation is not None:
            self.rotation = rotation(num_heads, self.head_dim)
        self.qk_norm: nn.ModuleList | None = None
        self.skip: nn.Parameter | None = None
        self.bonus: nn.Parameter | None = None
        self.head_norm: nn.Module | None = None
        self.out_norm: nn.Module | None = None
        self.out_gate: nn.Module | None = None
        if parts.qk_norm != NO_PART:
            norm = HEAD_NORMS[parts.qk_norm]
            self.qk_norm = nn.ModuleList([norm(num_heads, self.head_dim), norm(num_heads, self.head_dim)])
        if parts.skip:
            self.skip = nn.Parameter(torch.ones(num_heads))
        if parts.bonus:
            self.bonus = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.optim_factors = undecayed("bonus")
        if parts.head_norm != NO_PART:
            self.head_norm = HEAD_NORMS[parts.head_norm](num_heads, self.value_dim, self.head_eps)
        out_norm = NORMS.get(parts.out_norm or NO_NORM)
        if out_norm is not None:
            self.out_norm = out_norm(width, eps=1e-5)
        if parts.out_gate != NO_PART:
            rank = self.head_dim if parts.out_gate_rank == 0 else parts.out_gate_rank
            self.out_gate = make_gate(dim, width, rank, parts.out_gate)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, direction={self.config.direction!r}"

    def forward(self, x: Tensor, layout: Layout | Tensor | None = PLAIN, **unknown: Any) -> Tensor:
        """Mix tokens x (B, L, dim).

        `layout` describes padding and segments. A mask (B, L) that is True for tokens is accepted as well.

        Raises:
            TypeError: Another argument, such as the `key_padding_mask` of PyTorch, which is True for padding.
        """
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: unknown argument. {MASK_OF_TOKENS}")
        layout = Layout.given(x, layout)
        if layout.part is not None:
            self.check_split(layout.part.count)
        inputs = self.read(x, Windows(layout))
        return self.merge(inputs, self.mix(inputs.x, inputs.q, inputs.k, inputs.v, layout), layout)

    def prefill(self, x: Tensor, layout: Layout | Tensor | None = PLAIN) -> tuple[Tensor, Any]:
        self.check_causal()
        layout = Layout.given(x, layout)
        if layout.part is not None:
            raise ValueError("layout: a stream is not split over processes")
        windows = Prompt(layout)
        inputs = self.read(x, windows)
        y, state = self.prefill_heads(inputs.x, inputs.q, inputs.k, inputs.v, layout)
        return self.merge(inputs, y, layout), self.block_state(state, windows.after)

    def step(self, x: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        self.check_causal()
        layout = Layout.of(x, valid)
        before: dict[str, Tensor] = {}
        if self.neighbours:
            check_state(state, BlockState, x)
            before = state._asdict()
            state = state.heads
        windows = Step(layout, before, valid)
        inputs = self.read(x, windows)
        y, state = self.step_heads(inputs.x, inputs.q, inputs.k, inputs.v, state, valid)
        return self.merge(inputs, y, layout), self.block_state(state, windows.after)

    def initial_state(self, batch: int) -> Any:
        found = {}
        for name, part in self.windows().items():
            found[name] = part.initial_state(batch)
        return self.block_state(self.initial_heads(batch), found)

    def block_state(self, heads: Any, windows: dict[str, Tensor]) -> Any:
        """Return the state of the layer: that of the heads, with those of the parts that read neighbours, if any."""
        if not self.neighbours:
            return heads
        some = next(iter(windows.values()))
        none = some.new_zeros(len(some), 0, 0)
        shift, conv, kv = windows.get("shift", none), windows.get("conv", none), windows.get("kv", none)
        return BlockState(heads, shift, conv, kv)

    def windows(self) -> dict[str, Window]:
        """Return the parts that read neighbouring tokens, by the names of their states in `BlockState`."""
        found: dict[str, Window] = {}
        if self.token_shift is not None:
            found["shift"] = self.token_shift
        if self.conv is not None:
            found["conv"] = self.conv
        if self.kv_shift is not None:
            found["kv"] = self.kv_shift
        return found

    @property
    def neighbours(self) -> bool:
        """Return whether the projections read neighbouring tokens."""
        return len(self.windows()) > 0

    def projected(self, keys: int, values: int) -> tuple[int, int, int]:
        """Return the widths of the projections to q, k and v, for the widths of the keys and values of all heads."""
        return keys, keys, values

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Return the outputs (B, H, L, E) of the heads for tokens x (B, L, dim), where padding is 0."""
        raise NotImplementedError

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Any]:
        """Return the outputs (B, H, L, E) of the heads, and the state after the last segment."""
        raise NotImplementedError

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, valid: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Return the outputs (B, H, C, E) of the heads for the next tokens x (B, C, dim), and the new state."""
        raise NotImplementedError

    def initial_heads(self, batch: int) -> Any:
        """Return the state of the heads before the first token."""
        raise NotImplementedError

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k (B, H, L, D) and v (B, H, L, E) of tokens x (B, L, dim)."""
        inputs = self.read(x, Windows(PLAIN))
        return inputs.q, inputs.k, inputs.v

    def read(self, x: Tensor, windows: Windows) -> Inputs:
        """Return the inputs of the heads for tokens x (B, L, dim); `windows` run the parts that read neighbours."""
        dim = self.qkv.in_features
        if x.dim() != 3 or x.shape[-1] != dim or x.shape[1] == 0:
            raise ValueError(f"x: expected tokens (B, L >= 1, {dim}), got shape {tuple(x.shape)}")
        layout = windows.layout
        tokens = gate = x = layout.clean(x)
        convolved = None
        if self.token_shift is not None:
            shifted = windows.run("shift", self.token_shift, x)  # (B, L, shifts * dim)
            for_q, for_k, for_v = shifted[..., : 3 * dim].split(dim, -1)
            x = shifted[..., 3 * dim : -dim]
            gate = shifted[..., -dim:]
            qkv = self.projections(for_q, for_k, for_v)
        elif self.parts.conv_first and self.conv is not None:
            convolved = F.silu(windows.run("conv", self.conv, x))
            qkv = self.projections(convolved, convolved, x)
        else:
            qkv = self.qkv(x)
        if self.conv is not None and convolved is None:
            qkv = windows.run("conv", self.conv, layout.clean(qkv))
        if self.kv_shift is not None:
            q, kv = qkv.tensor_split((self.widths[0],), -1)
            kv = layout.clean(torch.cat([kv, self.kv_shift.share(tokens)], -1))
            qkv = torch.cat([q, windows.run("kv", self.kv_shift, kv)], -1)
        q, k, v = qkv.split(self.widths, -1)
        q = self.by_head(q, self.key_heads)
        k = self.by_head(k, self.key_heads)
        if self.qk_norm is not None:
            q = self.qk_norm[0](q).to(q.dtype)
            k = self.qk_norm[1](k).to(k.dtype)
        if self.parts.value_map != "identity":
            v = apply_feature_map(self.parts.value_map, v)
        return Inputs(x, q, k, self.by_head(v, self.num_heads), gate, convolved)

    def projections(self, for_q: Tensor, for_k: Tensor, for_v: Tensor) -> Tensor:
        """Return q, k and v (B, L, the sum of their widths), which read different tokens (B, L, dim)."""
        if not is_plain(self.qkv):  # an adapter or hook: the whole layer, for each of q, k and v
            q, _, _ = self.qkv(for_q).split(self.widths, -1)
            _, k, _ = self.qkv(for_k).split(self.widths, -1)
            _, _, v = self.qkv(for_v).split(self.widths, -1)
            return torch.cat([q, k, v], -1)
        biases = (None, None, None)
        if self.qkv.bias is not None:
            biases = self.qkv.bias.split(self.widths)
        weights = self.qkv.weight.split(self.widths)
        q = F.linear(for_q, weights[0], biases[0])
        k = F.linear(for_k, weights[1], biases[1])
        v = F.linear(for_v, weights[2], biases[2])
        return torch.cat([q, k, v], -1)

    def by_head(self, x: Tensor, heads: int) -> Tensor:
        """Return x (B, L, heads * D) as (B, H, L, D), where each of `heads` serves a group of the H heads."""
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        if heads == self.num_heads:
            return x
        return x.repeat_interleave(self.num_heads // heads, 1)

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        if self.rotation is None or not self.rotation.shared or layout.angles is not None:
            return layout
        return layout._replace(angles=self.rotation(x, layout))

    def angles(self, x: Tensor, layout: Layout, more: Tensor | None = None) -> Tensor | None:
        """Return the rotation angles of tokens x (B, L, dim), plus the angles `more`; None if there are neither."""
        if self.rotation is None:
            return more
        angles = layout.angles
        if angles is None or not self.rotation.shared:
            angles = self.rotation(x, layout)
        if more is None:
            return angles
        return angles + more

    def merge(self, inputs: Inputs, y: Tensor, layout: Layout = PLAIN) -> Tensor:
        """Map the outputs y (B, H, L, E) of the heads to (B, L, dim): skip, norms, gate and output projection."""
        if self.skip is not None:
            y = y + (self.skip[:, None, None] * inputs.v).to(y.dtype)
        if self.head_norm is not None:
            y = self.head_norm(y)
        if self.bonus is not None:
            weight = (inputs.q * self.bonus_keys(inputs) * self.bonus[:, None]).sum(-1, keepdim=True)
            y = y + (weight * inputs.v).to(y.dtype)
        y = y.transpose(1, 2).flatten(2)
        if self.conv_skip is not None and inputs.convolved is not None:
            y = y + (self.conv_skip * inputs.convolved).to(y.dtype)
        gate = None
        if self.out_gate is not None:
            gate = OUT_GATES[self.parts.out_gate](self.out_gate(inputs.gate))
        if gate is not None and self.parts.gate_first:
            y = y * gate
        if self.out_norm is not None:
            y = self.out_norm(y, layout)
        if gate is not None and not self.parts.gate_first:
            y = y * gate
        return self.proj(y)

    def bonus_keys(self, inputs: Inputs) -> Tensor:
        """Return the keys (B, H, L, D) of the bonus."""
        return inputs.k

    @property
    def causal(self) -> bool:
        return streams(self.config)

    def check_causal(self) -> None:
        if self.config.direction != "forward":
            raise ValueError(f"direction: only 'forward' streams, this layer has {self.config.direction!r}")
        check_causal(self.config.out_norm, "out_norm")
