"""MD-TPE of LightNet (arXiv 2405.21022, Eq. 8-9): where tokens stand, from learned one-sided sums along each axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.layers.marks import Marks
from lion.ops import no_autocast

CHUNK = (
    64  # tokens that are summed by one matrix; with as many states, what chunks hand on is no larger than the tokens
)
LEAST, MOST = 1e-3, 0.9  # of 1 - lambda, at the start


class TPE(nn.Module):
    """`y_n = sum_s sum_{m <= n_s} (sum_t w_st lambda_st^(n_s - m)) x_m`: Toeplitz sums along the axes s, added.

    Each channel has `states` weights w and decays lambda in (0, 1) an axis. Eq. 9 prints no weights; that there are
    some is inferred from the published parameter counts, which fit only with them. What is learned of w is its ratio to
    1 - lambda, the weight of a running average: steps of one size in w itself would add up over all that a slow state
    remembers. Every 1 - lambda starts log-uniform but the first, whose state alone has a weight and lets a token
    through nearly as it is, with a tenth of its neighbour. The sums take the place of the tokens, as Eq. 8 has it (the
    paper shows no residual): a token's own weight is learned among them, so a residual could say nothing more.

    Args:
        dim: Channels of a token.
        states: Hidden states e of a channel and axis.
        grid: Places along each axis, for tokens with coordinates (`Layout.coords`); a token without a place (cls) goes
            through as it is, and a place without a token adds nothing. None: one axis, as long as the sequence, on
            which padding counts as nothing, each segment is by itself, and the module streams as a block does.

    Linear in the length: chunks, and a state (B, dim, states) between them, in float32. (Measured against FFT: on a CPU
    two thirds of its time and half of its memory, and no segments there.)
    """

    def __init__(self, dim: int, states: int, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.grid, axes = grid, 1 if grid is None else len(grid)
        forgets = torch.empty(axes, dim, states).uniform_(math.log(LEAST), math.log(MOST)).exp()  # 1 - lambda
        forgets[..., 0] = MOST
        self.weight = nn.Parameter(torch.zeros_like(forgets))
        nn.init.constant_(self.weight[..., 0], 1 / (axes * MOST))
        self.decay = nn.Parameter(-torch.logit(forgets))
        self.marks = dict.fromkeys(("weight", "decay"), Marks(weight_decay=0))

    def forward(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> Tensor:
        """Tokens (B, L, dim) as they stand in `layout`.

        Raises:
            ValueError: Coordinates that do not fit the grid (on a GPU an assertion, for which nothing waits) or have
                none, or segments on one.
        """
        x = layout.clean(x)
        return self.on_line(x, layout)[0] if self.grid is None else self.on_grid(x, layout)

    def prefill(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> tuple[Tensor, Tensor]:
        self.check_causal()
        return self.on_line(layout.clean(x), layout, state=True)

    def step(self, x: Tensor, state: Tensor, context: Any = None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.new_zeros(batch, *self.weight.shape[1:], dtype=dtype)

    @property
    def causal(self) -> bool:
        return self.grid is None

    def check_causal(self) -> None:
        if not self.causal:
            raise ValueError("tpe: a grid is seen as a whole, it does not stream")

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        return layout

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """w and log lambda (axes, dim, states), in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        decay = self.decay.to(wide)
        return self.weight.to(wide) * torch.sigmoid(-decay), F.logsigmoid(decay)

    def on_line(self, x: Tensor, layout: Layout, state: bool = False) -> tuple[Tensor, Tensor | None]:
        """The sums over x (B, L, dim), clean of padding; and the state after the last segment, if asked for."""
        if layout.coords is not None:
            raise ValueError("tpe: these tokens stand on a grid, which the module must be made for")
        with no_autocast(x):
            weight, log_decay = (t[0] for t in self.kernels(x))
            wide, size = x.to(weight.dtype), min(CHUNK, x.shape[1])
            if layout.valid is None:
                y, last = toeplitz_sum(wide, weight, log_decay, size, state=state)
                return y.to(x.dtype), last
            places = in_chunks(layout, size)
            index = places.index[..., None].expand_as(x)
            dense = wide.new_zeros(len(x), places.first.shape[1] * size + 1, x.shape[2]).scatter(1, index, wide)
            y, last = toeplitz_sum(dense[:, :-1], weight, log_decay, size, first=places.first, state=state)
            return F.pad(y, (0, 0, 0, 1)).gather(1, index).to(x.dtype), last

    def on_grid(self, x: Tensor, layout: Layout) -> Tensor:
        """The same along every axis of the grid."""
        if layout.segment_index is not None:
            raise ValueError("segments: a grid has one sample a row, without segments")
        places, size = self.places(x, layout), math.prod(self.grid)
        with no_autocast(x):
            weight, log_decay = self.kernels(x)
            dense = x.new_zeros(len(x), size + 1, x.shape[2], dtype=weight.dtype)
            dense = dense.index_copy(1, places, x.to(weight.dtype))[:, :size].unflatten(1, self.grid)
            y = torch.zeros_like(dense)
            for axis, length in enumerate(self.grid, 1):
                lines = dense.movedim(axis, -2)  # (B, .., length, dim)
                sums = toeplitz_sum(lines.flatten(0, -3), weight[axis - 1], log_decay[axis - 1], min(CHUNK, length))[0]
                y = y + sums.view(lines.shape).movedim(-2, axis)
            y = F.pad(y.flatten(1, -2), (0, 0, 0, 1)).index_select(1, places).to(x.dtype)
            return torch.where(places[:, None] < size, y, x)

    def places(self, x: Tensor, layout: Layout) -> Tensor:
        """Which place of the grid, row by row, each token of x (B, L, dim) has: (L,); those without come after all."""
        coords, grid = layout.coords, " x ".join(map(str, self.grid))
        shape = (len(self.grid), x.shape[1])
        if coords is None or coords.shape != shape:
            got = None if coords is None else tuple(coords.shape)
            raise ValueError(f"layout: a grid of {grid} needs coords {shape}, got {got}")
        size, special, place, inside = math.prod(self.grid), (coords < 0).all(0), 0, True
        for length, coord in zip(self.grid, coords):
            place, inside = place * length + coord, inside & (coord >= 0) & (coord < length)
        place = torch.where(inside, place, size)
        alone = torch.zeros(size + 1, dtype=torch.long, device=x.device).index_add(0, place, torch.ones_like(place)) < 2
        wrong = ~special & ~(inside & alone[place])
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~wrong.any(), f"layout: coords that do not fit a grid of {grid}")
        elif wrong.any():
            found = wrong.nonzero()[0, 0]
            why = "two tokens of one place" if inside[found] else "outside"
            raise ValueError(f"layout: coords {tuple(coords[:, found].tolist())} do not fit a grid of {grid}: {why}")
        return place


def toeplitz_sum(
    x: Tensor, weight: Tensor, log_decay: Tensor, size: int, *, first: Tensor | None = None, state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`y_n = sum_{m <= n} (sum_t w_t lambda_t^(n - m)) x_m` of x (B, L, dim), in chunks of `size` tokens.

    Args:
        weight, log_decay: (dim, e).
        first: Boolean (B, chunks), which chunks begin anew.
        state: Whether the sums (B, dim, e) of the states after the last token are asked for.
    """
    padding = -x.shape[1] % size
    x = F.pad(x, (0, 0, padding, 0)).unflatten(1, (-1, size))  # (B, N, C, dim), zeros in front add nothing
    count, n = x.shape[1], torch.arange(size + 1, device=x.device)
    powers = (log_decay[..., None] * n).exp()  # (dim, e, C + 1)
    distance = n[:size, None] - n[:size]
    kernel = torch.einsum("de,dec->dc", weight, powers[..., :size])
    matrix = kernel[:, distance.clamp_min(0)].masked_fill(distance < 0, 0)  # (dim, C, C)
    y = torch.einsum("dij,bnjd->bnid", matrix, x)
    last = None
    if count > 1 or state:
        written = torch.einsum("dej,bnjd->nbde", powers[..., :size].flip(-1), x)
        last, entering = torch.zeros_like(written[0]), []
        for i, new in enumerate(written.unbind(0)):
            last = last if first is None else last.masked_fill(first[:, i, None, None], 0)
            entering.append(last)
            last = torch.addcmul(new, powers[..., size], last)
        if count > 1:
            y = y + torch.einsum("dei,nbde->bnid", weight[..., None] * powers[..., 1:], torch.stack(entering))
    return y.flatten(1, 2)[:, padding:], last


class Chunked(NamedTuple):
    """Where tokens (B, L) go in chunks of their own segment: `index` (B, L), padding behind all; and which chunks are a
    segment's `first` (B, N)."""

    index: Tensor
    first: Tensor


def in_chunks(layout: Layout, size: int) -> Chunked:
    """The tokens of a layout with padding in chunks of `size`, each segment up to the end of its last chunk, and each
    row up to the end of all."""
    valid, length = layout.valid, layout.valid.shape[1]
    segment = valid.long() * 0 if layout.segment_index is None else layout.segment_index
    tokens = valid.new_zeros(len(valid), length + 1, dtype=torch.long).scatter_add(1, segment, valid.long())
    chunks = -(-tokens // size)  # (B, L + 1), of each segment
    ends = chunks.cumsum(1)
    total = ends[:, -1:]
    count = -(-length // size)
    if layout.segment_index is not None and not valid.is_meta:  # whose segments nobody knows
        count = max(1, int(total.max()))
    ends = ends + count - total
    place = ends.gather(1, segment) * size - tokens.gather(1, segment) + layout.positions
    first = valid.new_zeros(len(valid), count + 1).scatter(1, (ends - chunks).gather(1, segment), True)
    return Chunked(place.masked_fill(~valid, count * size), first[:, :count])
