"""Modules that read the neighbours of a token, within its segment and past padding: short convolution, token shift."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.layers.optim_factors import OptimFactors
from lion.ops import no_autocast


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
    row = Row.of(layout)
    return row.unpack(row.neighbour(row.pack(x), offset))


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
        row = Row.of(layout)
        return row.unpack(self.combine(row.pack(x), row))

    def combine(self, x: Tensor, row: Row) -> Tensor:
        """Map x (B, L, C), sorted by place."""
        raise NotImplementedError

    def initial_state(self, batch: int) -> Tensor:
        """Return the state (B, tokens before, C) before the first token."""
        return next(self.parameters()).new_zeros(batch, -self.offsets[0], self.channels)

    def prefill(self, x: Tensor, layout: Layout = PLAIN) -> tuple[Tensor, Tensor]:
        """Map a prompt x (B, L, C). Return the output, and the state after the last segment."""
        valid = layout.valid if layout.segment_index is None else layout.in_last_segment()
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
            wide = torch.promote_types(x.dtype, torch.float32)
            tokens = row.neighbours(x, self.offsets)
            y = sum(w.to(wide) * token.to(wide) for w, token in zip(self.weight, tokens))
            return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)


class TokenShift(Window):
    """RWKV's token shift, `y^m_i = x_i + mu^m * (x' - x_i)` for each of several outputs m, concatenated.

    x' is the token before (direction "forward"), the token after ("backward"), or the mean of both ("both"); a missing
    token is 0. The weights mu (outputs, C) start at 1/2.
    """

    def __init__(self, channels: int, outputs: int, direction: str = "forward") -> None:
        super().__init__(channels, {"forward": range(-1, 1), "backward": range(2), "both": range(-1, 2)}[direction])
        self.mix = nn.Parameter(torch.full((outputs, channels), 0.5))
        self.optim_factors = {"mix": OptimFactors(weight_decay=0)}

    def combine(self, x: Tensor, row: Row) -> Tensor:
        others = [row.neighbour(x, s) for s in self.offsets if s]
        before = sum(others) / len(others)
        return torch.lerp(x[:, :, None], before[:, :, None], self.mix.to(x.dtype)).flatten(2)
