"""Modules that read the neighbours of a token, within its segment and past padding: short convolution, token shift."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.layers.optim_factors import undecayed
from lion.layers.weights import like
from lion.ops import no_autocast
from lion.ops.dtypes import wide_dtype
from lion.ops.tokens import flip


class Row(NamedTuple):
    """The tokens of each row without the padding between them: moved to the left, followed by the padding.

    Attributes:
        order: Integer (B, L), the index of the token at each place; None: there is no padding.
        places: Integer (B, L), the place of each token; None: there is no padding.
        segments: Integer (B, L), the segment at each place; None: one segment per row.
    """

    order: Tensor | None = None
    places: Tensor | None = None
    segments: Tensor | None = None

    @staticmethod
    def of(layout: Layout) -> Row:
        if layout.valid is None:
            return Row()
        valid = layout.valid
        count = valid.sum(1, keepdim=True)
        places = torch.where(valid, valid.cumsum(1), count + (~valid).cumsum(1)) - 1
        indices = torch.arange(valid.shape[1], device=valid.device).expand_as(places)
        order = torch.zeros_like(places).scatter(1, places, indices)
        index = layout.segment_index
        return Row(order, places, None if index is None else index.gather(1, order))

    def pack(self, x: Tensor) -> Tensor:
        """Return tokens x (B, L, C) by place."""
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def unpack(self, x: Tensor) -> Tensor:
        """Return x (B, L, C), which is sorted by place, in the order of the tokens; the inverse of `pack`."""
        return x if self.places is None else x.gather(1, self.places[..., None].expand_as(x))

    def neighbour(self, x: Tensor, offset: int) -> Tensor:
        """Return the token `offset` places after each place of x (B, L, C); 0 outside the segment."""
        if offset == 0:
            return x
        length = x.shape[1]
        shifted = shift(x, offset)
        if self.segments is None:
            return shifted
        same = shift(self.segments[..., None], offset) == self.segments[..., None]
        outside = torch.arange(length, device=x.device) + offset
        same = same & ((outside >= 0) & (outside < length))[:, None]
        return shifted * same.to(x.dtype)

    def neighbours(self, x: Tensor, offsets: range) -> list[Tensor]:
        """Return `neighbour(x, s)` for each of the offsets, from one at most 0 to one at least 0.

        Without segments they are views of one padded tensor, so that a gradient stores that tensor alone.
        """
        if self.segments is not None:
            return [self.neighbour(x, offset) for offset in offsets]
        padded = F.pad(x, (0, 0, -offsets[0], offsets[-1]))
        return [padded[:, place : place + x.shape[1]] for place in range(len(offsets))]


def shift(x: Tensor, offset: int) -> Tensor:
    """Return x (B, L, C) moved by `offset` tokens to the left, filled up with 0."""
    length = x.shape[1]
    if abs(offset) >= length:
        return torch.zeros_like(x)
    return F.pad(x[:, offset:] if offset > 0 else x[:, :offset], (0, 0, *((0, offset) if offset > 0 else (-offset, 0))))


def neighbour(x: Tensor, offset: int, layout: Layout = PLAIN) -> Tensor:
    """Return, for each of tokens x (B, L, C), the token `offset` tokens later (earlier if negative).

    Padding is not counted. The result is 0 where the segment has no such token. The content of padding must be 0, as
    `layout.clean` leaves it.
    """
    x, layout, own = surrounded(x, layout, range(min(offset, 0), max(offset, 0) + 1))
    row = Row.of(layout)
    return row.unpack(row.neighbour(row.pack(x), offset))[:, own]


def surrounded(x: Tensor, layout: Layout, offsets: range) -> tuple[Tensor, Layout, slice]:
    """Return tokens x (B, L, C) between those of other processes that windows with these offsets read.

    Only rows that are split over processes change. They get the nearest -offsets[0] tokens before x, of the segment of
    its first token, and the nearest offsets[-1] tokens after x, of the segment of its last token: 0 where there is
    none. One exchange carries both. The other results are the layout of all these tokens, and the place of x among
    them. Padding must be 0 in x.
    """
    part, (valid, index) = layout.part, (layout.valid, layout.segment_index)
    if part is None:
        return x, layout, slice(None)
    before, after = -offsets[0], offsets[-1]
    borders = part.gather(border(x, layout, before, False), border(x, layout, after, True))
    sides = zip(borders, part.outside(x.device), (False, True))
    left, right = (nearest(tokens, taken, reverse) for tokens, taken, reverse in sides)
    own, x = slice(before, before + x.shape[1]), torch.cat([left, x, right], 1)
    if valid is not None:
        valid = F.pad(valid, (before, after), value=True)
    if index is not None:
        ends = index[:, :1].expand(-1, before), index[:, -1:].expand(-1, after)
        index = torch.cat([ends[0], index, ends[1]], 1)
    return x, Layout(valid=valid, segment_index=index), own


def border(x: Tensor, layout: Layout, count: int, reverse: bool) -> Tensor:
    """Return the last `count` tokens of the last segment of x (B, L, C), or the first ones of its first segment.

    The first ones are in reverse order. The last of C + 1 channels is 1 for a token, and 0 where there is none.
    """
    kept, index = layout.valid, layout.segment_index
    if kept is not None and index is not None:
        kept = kept & (index == (index[:, :1] if reverse else index[:, -1:]))
    if kept is None:  # nothing but these tokens is copied
        x = x[:, :count] if reverse else x[:, max(x.shape[1] - count, 0) :]
        kept = torch.ones_like(x[..., 0], dtype=torch.bool)
    kept, x = flip(kept, 1, reverse), flip(x * kept[..., None], 1, reverse)
    real = torch.arange(count, device=x.device) >= count - kept.sum(1, keepdim=True)
    tokens = last_tokens(x.new_zeros(len(x), count, x.shape[2]), x, kept)
    return torch.cat([tokens, real[..., None].to(x.dtype)], -1)


def nearest(borders: Tensor, taken: Tensor, reverse: bool) -> Tensor:
    """Return the last tokens (B, N, C) of the borders (P, B, N, C + 1) of the parts that are `taken` (P, B or 1).

    Borders in reverse order give the first tokens, in sequence order.
    """
    tokens = flip(borders * taken[..., None, None], 0, reverse).transpose(0, 1).flatten(1, 2)
    none = tokens.new_zeros(len(tokens), *borders.shape[2:])
    return flip(last_tokens(none, tokens, tokens[..., -1] > 0)[..., :-1], 1, reverse)


def last_tokens(before: Tensor, x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the last tokens (B, N, C) of those `before` (B, N, C) and x (B, L, C), of which `valid` are no padding."""
    row, count = Row.of(Layout(valid=valid)), before.shape[1]
    tokens = torch.cat([before.to(x.dtype), row.pack(x)], 1)
    if valid is None:
        return tokens[:, tokens.shape[1] - count :].clone()  # not a view, which would keep all tokens in memory
    last = valid.sum(1, keepdim=True) + torch.arange(count, device=x.device)
    return tokens.gather(1, last[..., None].expand(-1, -1, x.shape[-1]))


class Window(nn.Module):
    """A module that computes a token from the tokens around it, at fixed offsets.

    Padding is skipped, as if it were not there, and segments are independent. If no offset is positive, the module
    streams: the state is the tokens before the next one that it will read.

    Args:
        channels: Number of channels C of a token.
        offsets: Offsets of the tokens that are read, from the first to the last, among them 0.
    """

    def __init__(self, channels: int, offsets: range) -> None:
        super().__init__()
        self.channels, self.offsets = channels, offsets

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        """Map tokens x (B, L, C), where padding is 0."""
        x, layout, own = surrounded(x, layout, self.offsets)
        row = Row.of(layout)
        return row.unpack(self.combine(row.pack(x), row))[:, own]

    def combine(self, x: Tensor, row: Row) -> Tensor:
        """Map x (B, L, C), sorted by place."""
        raise NotImplementedError

    def initial_state(self, batch: int) -> Tensor:
        """Return the state (B, tokens before, C) before the first token."""
        return like(self).new_zeros(batch, -self.offsets[0], self.channels)

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, Tensor]:
        """Map a prompt x (B, L, C). Return the output, and the state after the last segment."""
        valid = layout.in_last_segment()
        last = x if valid is None else x.masked_fill(~valid[..., None], 0)
        return self(x, layout), last_tokens(self.initial_state(len(x)).to(x.dtype), last, layout.valid)

    def step(self, x: Tensor, state: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map the next tokens x (B, C', C); `valid` (B, C') is False for padding, which is 0 in x."""
        before = state.shape[1]
        row = Row.of(Layout(valid=valid))
        y = self.combine(torch.cat([state.to(x.dtype), row.pack(x)], 1), Row())
        return row.unpack(y[:, before:]), last_tokens(state, x, valid)


class ShortConvolution(Window):
    """Depthwise convolution over tokens, `y_i = b + sum_s w_s * x_{i + s}`, for each channel.

    The offsets s are -(width - 1) .. 0 in direction "forward", 0 .. width - 1 in "backward", and centred in "both":
    -(width // 2) .. (width - 1) // 2.

    Args:
        channels: Number of channels C.
        width: Number of tokens that an output sees.
        direction: "forward", "backward" or "both".
        bias: Whether each channel has a bias b.

    Weights start like those of a PyTorch convolution: uniform in +-1/sqrt(width).
    """

    def __init__(self, channels: int, width: int, direction: str = "forward", bias: bool = False) -> None:
        if width < 1:
            raise ValueError(f"width: expected at least 1, got {width}")
        before = {"forward": width - 1, "backward": 0, "both": width // 2}[direction]
        super().__init__(channels, range(-before, width - before))
        bound = width**-0.5
        # one weight vector per offset, in the order of the offsets
        self.weight = nn.Parameter(torch.empty(width, channels).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def combine(self, x: Tensor, row: Row) -> Tensor:
        with no_autocast(x):
            wide = wide_dtype(x)
            tokens = row.neighbours(x, self.offsets)
            y = sum(w.to(wide) * token.to(wide) for w, token in zip(self.weight, tokens))
            return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)


class Shift(Window):
    """A module that reads the token before each token, the token after it, or both, by its direction."""

    def __init__(self, channels: int, direction: str = "forward") -> None:
        super().__init__(channels, {"forward": range(-1, 1), "backward": range(2), "both": range(-1, 2)}[direction])

    def other(self, x: Tensor, row: Row) -> Tensor:
        """Return the other token of each place of x (B, L, C), or the mean of both; 0 outside the segment."""
        others = [row.neighbour(x, s) for s in self.offsets if s]
        if len(others) == 1:
            return others[0]
        return (others[0] + others[1]) / 2


class TokenShift(Shift):
    """RWKV's token shift, `y^m_i = x_i + mu^m * (x' - x_i)` for each of several outputs m, concatenated.

    x' is the token before (direction "forward"), the token after ("backward"), or the mean of both ("both"); a missing
    token is 0. The weights mu (outputs, C) start at 1/2.
    """

    def __init__(self, channels: int, outputs: int, direction: str = "forward") -> None:
        super().__init__(channels, direction)
        self.mix = nn.Parameter(torch.full((outputs, channels), 0.5))
        self.optim_factors = undecayed("mix")

    def combine(self, x: Tensor, row: Row) -> Tensor:
        other = self.other(x, row)
        return torch.lerp(x[:, :, None], other[:, :, None], self.weights(x, other).to(x.dtype)).flatten(2)

    def weights(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the weights (outputs, C) or (B, L, outputs, C) of `other` (B, L, C), beside x (B, L, C)."""
        return self.mix


class AdaptiveTokenShift(TokenShift):
    """RWKV-6's token shift (arXiv 2404.05892), `mu^m + tanh((x_i + mu * (x' - x_i)) A^m) B^m` in place of `mu^m`.

    A and B have the rank 32. A starts at 0, so that the shift starts as a `TokenShift`.
    """

    def __init__(self, channels: int, outputs: int, direction: str = "forward", rank: int = 32) -> None:
        super().__init__(channels, outputs, direction)
        self.first = nn.Parameter(torch.full((channels,), 0.5))
        self.down = nn.Parameter(torch.zeros(channels, outputs, rank))
        self.up = nn.Parameter(torch.empty(outputs, rank, channels).uniform_(-0.01, 0.01))
        self.optim_factors = undecayed("mix", "first", "down", "up")

    def weights(self, x: Tensor, other: Tensor) -> Tensor:
        low = torch.einsum("blc,cmr->blmr", torch.lerp(x, other, self.first.to(x.dtype)), self.down.to(x.dtype))
        return self.mix + torch.einsum("blmr,mrc->blmc", low.tanh(), self.up.to(low.dtype))


class KeyValueShift(Shift):
    """FoX's shift (arXiv 2503.02130) of k and v, `y_i = a_i y' + (1 - a_i) y_i`, with `a_i = sigmoid(W x_i)` per head.

    y' is as in `TokenShift`. The channels are those of k and v, followed by the logits `self.share(x)` of a.

    Args:
        dim: Width of x.
        heads: Number of heads of k and of v.
        sizes: Head dimension of k and of v.
        direction: "forward", "backward" or "both".
    """

    def __init__(self, dim: int, heads: tuple[int, int], sizes: tuple[int, int], direction: str = "forward") -> None:
        super().__init__(sum(n * size for n, size in zip(heads, sizes)) + sum(heads), direction)
        self.heads, self.sizes = heads, sizes
        self.share = nn.Linear(dim, sum(heads), bias=False)

    def combine(self, x: Tensor, row: Row) -> Tensor:
        x, logits = x.tensor_split((x.shape[-1] - sum(self.heads),), -1)
        shares = zip(torch.sigmoid(logits).split(self.heads, -1), self.sizes)
        return torch.lerp(x, self.other(x, row), torch.cat([a.repeat_interleave(n, -1) for a, n in shares], -1))
