"""Vim (2401.09417): a selective scan of each channel in both directions; in one direction Mamba's block (2312.00752).

For tokens x, `u, z = inputs(x)` are channels and their gate. Each direction has its own convolution, projections and
rates A. With `v = silu(convolution(u))`, a low-rank step `dt = softplus(step(low) + b)`, and the vectors B and C, which
all channels share, `(low, B, C) = select(v)`:

    h_t = exp(dt_t A) h_{t-1} + dt_t v_t B_t^T,    y_t = h_t C_t + D v_t        (backward from the last token)

The output is `proj(y silu(z))`, with the mean y of the directions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lion.config import present
from lion.layers.convolution import ShortConvolution, surrounded
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers.base import MixerInfo, check_state, state_type
from lion.layers.mixers.config import MixerConfig
from lion.layers.mixers.linear_transformers import inverse_softplus_steps
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.state_space import StateSpaceMixer
from lion.layers.optim_factors import undecayed
from lion.layers.weights import is_plain, linear
from lion.ops import Part, no_autocast
from lion.ops.decay import scan_directions
from lion.ops.dtypes import wide_dtype
from lion.ops.modes import transforms_active
from lion.ops.segments import segment_starts
from lion.ops.selective_scan import selective_scan
from lion.ops.split_selective_scan import entering_states
from lion.ops.tokens import flip

VIM = "vim"
LARGEST = 80.0  # exp(80) is finite in float32


@state_type
class VimState(NamedTuple):
    """The state of a causal layer.

    Attributes:
        tokens: The last tokens (B, conv_width - 1, E) before the convolution.
        h: State (B, E, N) of the scan, float32 or wider.
    """

    tokens: Tensor
    h: Tensor


class Selection(NamedTuple):
    """The arguments of a scan, in the order in which it visits the tokens, or of all scans, stacked.

    Attributes:
        x: Channels (B, L, E).
        dt: Steps (B, L, E), 0 for padding.
        B, C: Vectors (B, L, N) that write to the state and read from it.
        start: Boolean (B, L), True where a segment begins; None without segments.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    start: Tensor | None


class Side(nn.Module):
    """The parameters of one direction, "forward" or "backward".

    Args:
        channels: Number of channels E.
        state: Number of state dimensions N of a channel.
        rank: Rank of the steps.
        width: Tokens of the convolution.
        direction: The direction.

    As published, A = -exp(a) starts at -1, .., -N in every channel, the steps in [0.001, 0.1], the weights of `step`
    uniform in +-1/sqrt(rank), and D (`skip`) at 1, in both directions. (In the released code the steps of the backward
    direction keep PyTorch's start with bias 0, which makes them 0.7.) A has no weight decay. An initialisation of a
    model other than `vim` replaces the start of all linear layers, that of `step` among them.
    """

    memory = ("a", "step_bias")  # parameters of the decays

    def __init__(self, channels: int, state: int, rank: int, width: int, direction: str) -> None:
        super().__init__()
        self.reverse, self.split = direction == "backward", (rank, state, state)
        self.convolution = ShortConvolution(channels, width, direction, bias=True)
        self.select = nn.Linear(channels, sum(self.split), bias=False)
        self.step = nn.Linear(rank, channels, bias=False)
        nn.init.uniform_(self.step.weight, -(rank**-0.5), rank**-0.5)
        self.step_bias = nn.Parameter(inverse_softplus_steps(channels))
        rates = torch.arange(1, state + 1, dtype=torch.get_default_dtype())
        self.a = nn.Parameter(rates.log().repeat(channels, 1))
        self.skip = nn.Parameter(torch.ones(channels))
        self.optim_factors = undecayed("a")

    def selection(self, v: Tensor, layout: Layout) -> Selection:
        """Return the arguments of the scan over channels v (B, L, E)."""
        with no_autocast(v):
            wide = v.to(wide_dtype(v))
            low, B, C = linear(self.select, wide).split(self.split, -1)
            dt = F.softplus(linear(self.step, low) + self.step_bias.to(wide.dtype))
        if layout.valid is not None:
            dt = dt.masked_fill(~layout.valid[..., None], 0)
        v, dt, B, C = (flip(part, 1, self.reverse) for part in (v, dt, B, C))
        index, start = layout.segment_index, None
        if index is not None:
            index = flip(index, 1, self.reverse)
            start = segment_starts(index)
        return Selection(v, dt, B, C, start)

    def rates(self, dtype: torch.dtype) -> Tensor:
        """Return A (E, N), which is finite, because its product with a step of 0 is 0."""
        return -self.a.to(dtype).clamp(max=LARGEST).exp()

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the outputs of this side in sequence order, from its channels x and their outputs y of the scan."""
        return flip(y + (self.skip * x).to(y.dtype), 1, self.reverse)


class VimMixer(StateSpaceMixer):
    """The mixer of Vim, in direction "forward" the block of Mamba, which streams.

    Both forms are one loop with `chunk_size` tokens per step (`lion.ops.selective_scan`, at most 8 on a CPU). There is
    no full form: its L x L matrices would be separate for each channel and state dimension.

    Args:
        dim: Width of the tokens.
        num_heads: Not used; a divisor of `dim`, for models that compare mixers.
        mixer: "vim".
        config: Settings; **settings are settings by name, which override `config`.

    Raises:
        ValueError: A value out of its range, or a setting that Vim does not have.
    """

    forms = ("chunk", "rnn")

    def __init__(
        self, dim: int, num_heads: int, mixer: str = VIM, config: MixerConfig | None = None, **settings: Any
    ) -> None:
        super().__init__(dim, num_heads, mixer, config, **settings)
        c = self.config
        channels, rank = c.expand * dim, math.ceil(dim / 16)
        self.inputs = nn.Linear(dim, 2 * channels, bias=False)
        self.sides = nn.ModuleList()
        for direction in scan_directions(c.direction):
            self.sides.append(Side(channels, c.state, rank, present(c.conv_width, "conv_width"), direction))
        self.proj = nn.Linear(channels, dim, bias=False)

    @staticmethod
    def info(name: str) -> MixerInfo:
        source = "Vim, 2401.09417; in one direction Mamba, 2312.00752"
        return MixerInfo(source, "a token, channel and state dimension", left_out="nothing")

    @property
    def unrolled(self) -> bool:
        return True

    def forward(self, x: Tensor, layout: Layout | Tensor | None = PLAIN) -> Tensor:
        layout = Layout.given(x, layout)
        u, z = self.inputs(self.cleaned(x, layout)).chunk(2, -1)
        sides = self.directions()
        offsets = [side.convolution.offsets for side in sides]
        u, around, own = surrounded(u, layout, range(min(o[0] for o in offsets), max(o[-1] for o in offsets) + 1))

        def convolved_and_selected(u: Tensor) -> Selection:
            return self.selection([side.convolution(u, around)[:, own] for side in sides], layout)

        # the backward pass computes these again, which takes little time beside its scan; `torch.func` cannot
        if torch.is_grad_enabled() and not transforms_active():
            draws = not all(is_plain(layer) for side in sides for layer in (side.select, side.step))
            selection = checkpoint(convolved_and_selected, u, use_reentrant=False, preserve_rng_state=draws)
        else:
            selection = convolved_and_selected(u)
        state = None if layout.part is None else self.entering(selection, layout.part)
        return self.scanned(selection, z, state)[0]

    def directions(self) -> list[Side]:
        """Return the parameters of each direction."""
        return cast("list[Side]", list(self.sides))

    def rates(self, dtype: torch.dtype) -> Tensor:
        """Return A (sides, E, N)."""
        return torch.stack([side.rates(dtype) for side in self.directions()])

    def entering(self, selection: Selection, part: Part) -> Tensor:
        """Return the states (sides, B, E, N) that enter a part of the rows, from a scan of every part without them."""
        s = selection
        A = self.rates(s.dt.dtype)
        _, left = selective_scan(s.x, s.dt, A, s.B, s.C, start=s.start, chunk_size=self.chunk_size)
        return entering_states(left, s.dt.sum(2), A, part, [side.reverse for side in self.directions()])

    def selection(self, convolved: list[Tensor], layout: Layout) -> Selection:
        """Return the arguments of all scans, stacked, from the outputs (B, L, E) of the convolution of each side."""
        found = [side.selection(F.silu(v), layout) for side, v in zip(self.directions(), convolved)]
        starts = [s.start for s in found if s.start is not None]
        return Selection(
            x=torch.stack([s.x for s in found]),
            dt=torch.stack([s.dt for s in found]),
            B=torch.stack([s.B for s in found]),
            C=torch.stack([s.C for s in found]),
            start=torch.stack(starts) if starts else None,
        )

    def scanned(self, selection: Selection, z: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output (B, L, dim) for the gate z (B, L, E), and the states (sides, B, E, N) after the last token.

        `state` are the states before the first token.
        """
        s = selection
        A = self.rates(s.dt.dtype)
        y, state = selective_scan(s.x, s.dt, A, s.B, s.C, start=s.start, state=state, chunk_size=self.chunk_size)
        first, *others = [side.output(s.x[i], y[i]) for i, side in enumerate(self.directions())]
        mean = sum(others, first) / len(self.sides)
        return self.proj(mean * F.silu(z)), state

    def initial_state(self, batch: int) -> VimState:
        self.check_causal()
        (side,) = self.directions()
        wide = wide_dtype(side.a)
        return VimState(side.convolution.initial_state(batch), side.a.new_zeros(batch, *side.a.shape, dtype=wide))

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, VimState]:
        self.check_causal()
        layout = Layout.given(x, layout)
        u, z = self.inputs(self.cleaned(x, layout)).chunk(2, -1)
        (side,) = self.directions()
        convolved, tokens = side.convolution.prefill(u, layout)
        y, state = self.scanned(self.selection([convolved], layout), z)
        return y, VimState(tokens, state[0])

    def step(self, x: Tensor, state: VimState, valid: Tensor | None = None) -> tuple[Tensor, VimState]:
        self.check_causal()
        check_state(state, VimState, x)
        layout = Layout.of(x, valid)
        u, z = self.inputs(self.cleaned(x, layout)).chunk(2, -1)
        (side,) = self.directions()
        convolved, tokens = side.convolution.step(u, state.tokens, valid)
        y, after = self.scanned(self.selection([convolved], layout), z, state.h[None])
        return y, VimState(tokens, after[0])


FAMILY = {VIM: Entry(VimMixer)}
