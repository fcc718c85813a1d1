"""MD-TPE of LightNet (arXiv 2405.21022, Eq. 8-9): token positions from learned one-sided sums along each axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.layers.optim_factors import undecayed
from lion.layers.shares import by_heads, check_share
from lion.ops import no_autocast
from lion.ops.dtypes import wide_dtype
from lion.ops.modes import holds

# tokens summed by one matrix; with at most as many states, the states between chunks are no larger than the tokens
CHUNK = 64
LEAST, MOST = 1e-3, 0.9  # range of 1 - lambda at the start


class TPE(nn.Module):
    """Toeplitz sums along the axes s, added: `y_n = sum_s sum_{m <= n_s} (sum_t w_st lambda_st^(n_s - m)) x_m`.

    For each axis, a channel has `states` weights w and decays lambda in (0, 1). Eq. 9 prints no weights. They are
    inferred from the published parameter counts, which fit only with weights.

    The learned parameter of w is its ratio to 1 - lambda, the weight of a running average. If w itself were learned,
    an optimizer step of one size would add up over everything that a slow state remembers.

    The first 1 - lambda starts at 0.9, and all others start log-uniform. Only the first state has a nonzero weight at
    the start. It passes a token through almost unchanged, plus a tenth of its neighbour.

    The sums replace the tokens, as in Eq. 8 (the paper shows no residual). A residual would add nothing, because the
    sums include the token itself with a learned weight.

    Args:
        dim: Channels of a token.
        states: Number e of hidden states per channel and axis.
        grid: Number of positions along each axis, for tokens with coordinates (`Layout.coords`). A token without
            coordinates (cls) passes through unchanged, and a position without a token adds nothing. None: one axis, the
            sequence. Padding is then ignored, segments are independent, and the module streams like a block.

    The cost is linear in the length: chunks, and a state (B, dim, states) between them, in float32. Measured on a CPU,
    this takes two thirds of the time and half of the memory of an FFT, which does not support segments.
    """

    def __init__(self, dim: int, states: int, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.grid, axes = grid, 1 if grid is None else len(grid)
        forgets = torch.empty(axes, dim, states).uniform_(math.log(LEAST), math.log(MOST)).exp()  # 1 - lambda
        forgets[..., 0] = MOST
        self.weight = nn.Parameter(torch.zeros_like(forgets))
        nn.init.constant_(self.weight[..., 0], 1 / (axes * MOST))
        self.decay = nn.Parameter(-torch.logit(forgets))
        self.optim_factors = undecayed("weight", "decay")

    def forward(
        self, x: Tensor, layout: Layout = PLAIN, context: Any = None, grid: tuple[int, ...] | None = None
    ) -> Tensor:
        """Sum tokens x (B, L, dim) along the axes of `layout`; `grid` is that of this call, by default the module's.

        Raises:
            ValueError: No tokens, coordinates that do not fit the grid, coordinates without a grid, or segments on a
                grid. On a GPU and in a compiled graph, coordinates that do not fit raise an asynchronous assertion.
        """
        if x.shape[1] == 0:
            raise ValueError(f"x: expected tokens (B, L >= 1, dim), got shape {tuple(x.shape)}")
        x = layout.clean(x)
        grid = self.grid if grid is None else grid
        if layout.part is None:
            return self.summed(x, layout, grid)
        own = self.weight.shape[1] // layout.part.count  # channels are independent of each other
        channels = slice(own * layout.part.rank, own * (layout.part.rank + 1))
        return by_heads(lambda x, rows: self.summed(x.mT, rows, grid, channels).mT, layout, x.mT).mT

    def summed(self, x: Tensor, layout: Layout, grid: tuple[int, ...] | None, channels: slice = slice(None)) -> Tensor:
        """Sum whole rows x (B, L, C) of these channels; padding is 0."""
        if grid is None:
            return self.on_line(x, layout, channels)
        return self.on_grid(x, layout, grid, channels)

    def check_split(self, count: int) -> None:
        """Check that `count` processes can share the channels.

        Raises:
            ValueError: The number of processes does not divide the number of channels.
        """
        check_share("dim", self.weight.shape[1], count)

    def prefill(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> tuple[Tensor, Tensor]:
        self.check_causal()
        check_line(layout)
        x = layout.clean(x)
        with no_autocast(x):
            weight, log_decay = self.kernels(x)
            line = Line.of(x.to(weight.dtype), layout)
            powers = powers_of(log_decay[0], line.chunks.shape[2])
            entering, state = states_between(line.chunks, powers, line.first)
            y = within_chunks(line.chunks, weight[0], powers) + from_states(entering, weight[0], powers)
            return line.tokens(y).to(x.dtype), state

    def step(
        self, x: Tensor, state: Tensor, *, context: Any = None, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.check_causal()
        x, outputs = Layout.of(x, valid).clean(x), []
        with no_autocast(x):
            weight, log_decay = (t[0] for t in self.kernels(x))
            decay = log_decay.exp()
            for i, token in enumerate(x.unbind(1)):
                new = torch.addcmul(token[..., None].to(state.dtype), decay, state)
                state = new if valid is None else torch.where(valid[:, i, None, None], new, state)
                outputs.append((weight * state).sum(-1))
        return torch.stack(outputs, 1).to(x.dtype), state

    def initial_state(self, batch: int) -> Tensor:
        dtype = wide_dtype(self.weight)
        return self.weight.new_zeros(batch, *self.weight.shape[1:], dtype=dtype)

    @property
    def causal(self) -> bool:
        return self.grid is None

    def check_causal(self) -> None:
        if not self.causal:
            raise ValueError("tpe: a grid is processed as a whole, it does not stream")

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        return layout

    def kernels(self, x: Tensor, channels: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return w and log lambda, both (axes, channels, states), in float32 or wider."""
        wide = wide_dtype(x)
        decay = self.decay[:, channels].to(wide)
        return self.weight[:, channels].to(wide) * torch.sigmoid(-decay), F.logsigmoid(decay)

    def on_line(self, x: Tensor, layout: Layout, channels: slice = slice(None)) -> Tensor:
        """Sum x (B, L, dim), with zeros for padding, along the sequence."""
        check_line(layout)
        with no_autocast(x):
            weight, log_decay = self.kernels(x, channels)
            line = Line.of(x.to(weight.dtype), layout)
            return line.tokens(toeplitz_sum(line, weight[0], log_decay[0])).to(x.dtype)

    def on_grid(self, x: Tensor, layout: Layout, grid: tuple[int, ...], channels: slice) -> Tensor:
        """Sum x (B, L, dim) along every axis of the grid."""
        if layout.segment_index is not None:
            raise ValueError("segments: a grid has one sample per row, without segments")
        places, size = places_on_grid(x, layout, grid), math.prod(grid)
        with no_autocast(x):
            weight, log_decay = self.kernels(x, channels)
            dense = x.new_zeros(x.shape[0], size + 1, x.shape[2], dtype=weight.dtype)
            dense = dense.index_copy(1, places, x.to(weight.dtype))[:, :size].unflatten(1, grid)
            y = torch.zeros_like(dense)
            for axis in range(len(grid)):
                lines = dense.movedim(axis + 1, -2)  # (B, .., length, dim)
                line = Line.of(lines.flatten(0, -3))
                sums = line.tokens(toeplitz_sum(line, weight[axis], log_decay[axis]))
                y = y + sums.view(lines.shape).movedim(-2, axis + 1)
            y = F.pad(y.flatten(1, -2), (0, 0, 0, 1)).index_select(1, places).to(x.dtype)
            return torch.where(places[:, None] < size, y, x)


def check_line(layout: Layout) -> None:
    """Check that tokens have no coordinates, for a module without a grid.

    Raises:
        ValueError: They have.
    """
    if layout.coords is not None:
        raise ValueError("tpe: these tokens have coordinates on a grid, but this module was made without a grid")


def places_on_grid(x: Tensor, layout: Layout, grid: tuple[int, ...]) -> Tensor:
    """Return the index (L,) of each token of x (B, L, dim) on the grid, in row-major order.

    Tokens without coordinates get the index after the last position.
    """
    coords, name = layout.coords, " x ".join(map(str, grid))
    shape = (len(grid), x.shape[1])
    if coords is None or coords.shape != shape:
        got = None if coords is None else tuple(coords.shape)
        raise ValueError(f"layout: a grid of {name} needs coords {shape}, got {got}")
    size, special = math.prod(grid), (coords < 0).all(0)
    place, inside = torch.zeros_like(coords[0]), torch.ones_like(special)
    for length, coord in zip(grid, coords):
        place, inside = place * length + coord, inside & (coord >= 0) & (coord < length)
    place = torch.where(inside, place, size)
    alone = torch.zeros(size + 1, dtype=torch.long, device=x.device).index_add(0, place, torch.ones_like(place)) < 2
    right = special | (inside & alone[place])
    if not holds(right.all(), f"layout: coords do not fit a grid of {name}"):
        found = (~right).nonzero()[0, 0]
        why = "two tokens at one position" if inside[found] else "outside"
        raise ValueError(f"layout: coords {tuple(coords[:, found].tolist())} do not fit a grid of {name}: {why}")
    return place


def powers_of(log_decay: Tensor, size: int) -> Tensor:
    """Return the powers 0 .. `size` of lambda (dim, e), as (dim, e, size + 1)."""
    n = torch.arange(size + 1, device=log_decay.device)
    return (log_decay[..., None] * n).exp()


def toeplitz_sum(line: Line, weight: Tensor, log_decay: Tensor) -> Tensor:
    """Compute `y_n = sum_{m <= n} (sum_t w_t lambda_t^(n - m)) x_m` of the chunks (B, N, C, dim) of a line.

    `weight` and `log_decay` are w and log lambda, (dim, e).
    """
    x = line.chunks
    powers = powers_of(log_decay, x.shape[2])
    y = within_chunks(x, weight, powers)
    if x.shape[1] == 1:
        return y
    entering, _ = states_between(x, powers, line.first)
    return y + from_states(entering, weight, powers)


def within_chunks(x: Tensor, weight: Tensor, powers: Tensor) -> Tensor:
    """Return the sums over the tokens of the same chunk, for chunks x (B, N, C, dim)."""
    size = x.shape[2]
    n = torch.arange(size, device=x.device)
    distance = n[:, None] - n
    kernel = torch.einsum("de,dec->dc", weight, powers[..., :size])
    matrix = kernel[:, distance.clamp_min(0)].masked_fill(distance < 0, 0)  # (dim, C, C)
    return torch.einsum("dij,bnjd->bnid", matrix, x)


def from_states(entering: Tensor, weight: Tensor, powers: Tensor) -> Tensor:
    """Return the sums over the chunks before, from the states (N, B, dim, e) that enter the chunks."""
    return torch.einsum("dei,nbde->bnid", weight[..., None] * powers[..., 1:], entering)


def states_between(x: Tensor, powers: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states (N, B, dim, e) that enter the chunks x (B, N, C, dim), and the one after the last chunk.

    Chunks that are `first` (B, N) start from an empty state.
    """
    size = x.shape[2]
    written = torch.einsum("dej,bnjd->nbde", powers[..., :size].flip(-1), x)
    state, entering = torch.zeros_like(written[0]), []
    for i, new in enumerate(written.unbind(0)):
        if first is not None:
            state = state.masked_fill(first[:, i, None, None], 0)
        entering.append(state)
        state = torch.addcmul(new, powers[..., size], state)
    return torch.stack(entering), state


class Line(NamedTuple):
    """Tokens in chunks, each of which belongs to one segment.

    The last token of a row has the last place of the last chunk.

    Attributes:
        chunks: Tokens (B, N, C, dim), 0 where there is none.
        length: Number of tokens L of a row.
        place: Integer (B, L), the place of each token; that of padding is after all chunks. None without a mask.
        first: Boolean (B, N), True for the first chunk of a segment. None without a mask.
    """

    chunks: Tensor
    length: int
    place: Tensor | None = None
    first: Tensor | None = None

    @staticmethod
    def of(x: Tensor, layout: Layout = PLAIN) -> Line:
        """Return the chunks of tokens x (B, L, dim). Each segment is aligned to the end of its last chunk."""
        length = x.shape[1]
        size = min(CHUNK, length)
        if layout.valid is None:
            chunks = F.pad(x, (0, 0, -length % size, 0)).unflatten(1, (-1, size))
            return Line(chunks, length)
        place, first = places_in_chunks(layout, layout.valid, size)
        dense = x.new_zeros(x.shape[0], first.shape[1] * size + 1, x.shape[2])
        dense = dense.scatter(1, place[..., None].expand_as(x), x)
        return Line(dense[:, :-1].unflatten(1, (-1, size)), length, place, first)

    def tokens(self, y: Tensor) -> Tensor:
        """Return the tokens (B, L, dim) of chunks y (B, N, C, dim); padding is 0."""
        y = y.flatten(1, 2)
        if self.place is None:
            return y[:, y.shape[1] - self.length :]
        index = self.place[..., None].expand(-1, -1, y.shape[2])
        return F.pad(y, (0, 0, 0, 1)).gather(1, index)


def places_in_chunks(layout: Layout, valid: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the place (B, L) of each token in chunks of `size` tokens, and the first chunks (B, N) of segments."""
    length = valid.shape[1]
    positions = layout.positions_of(valid)
    segment = torch.zeros_like(valid, dtype=torch.long)
    if layout.segment_index is not None:
        segment = layout.segment_index
    tokens = valid.new_zeros(valid.shape[0], length + 1, dtype=torch.long).scatter_add(1, segment, valid.long())
    chunks = -(-tokens // size)  # (B, L + 1), chunks of each segment
    ends = chunks.cumsum(1)
    total = ends[:, -1:]
    count = -(-length // size)
    if layout.segment_index is not None and not valid.is_meta:  # segments of meta tensors are unknown
        count = max(1, int(total.max()))
    ends = ends + count - total
    place = ends.gather(1, segment) * size - tokens.gather(1, segment) + positions
    first = valid.new_zeros(valid.shape[0], count + 1).scatter(1, (ends - chunks).gather(1, segment), True)
    return place.masked_fill(~valid, count * size), first[:, :count]
