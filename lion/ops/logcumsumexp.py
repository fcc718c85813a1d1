"""Logarithm of a running sum of exponentials, and its gradient, in work that is linear in the length.

Tokens are cut into blocks. Each block is summed up, and this same function carries the sums from block to block. Inside
all blocks at once, the recurrence

    y_i = log(exp(y_{i-1}) + exp(x_i))

runs token by token. No positive exponent is exponentiated, forward or backward. The gradient of x_j is
`sum_{i >= j} g_i exp(x_j - y_i) = exp(x_j - y_j) G_j`, with the recurrence `G_i = g_i + exp(y_i - y_{i+1}) G_{i+1}`
from right to left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import round_up
from lion.ops.modes import is_static

BLOCK = 8  # tokens per block, processed one after the other


def logcumsumexp(x: Tensor, segment_index: Tensor | None = None) -> Tensor:
    """Compute `log sum_{j <= i} exp(x_j)` over the tokens of x (B, H, L, D), separately for each segment.

    Tokens of minus infinity add nothing. Before the first token above minus infinity, the result is minus infinity.

    Args:
        segment_index: Integers (B, L), the same for all tokens of a segment; the tokens of a segment are contiguous.
    """
    return _LogCumSumExp.apply(x, segment_index)


class _LogCumSumExp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, segment_index: Tensor | None) -> Tensor:
        none = lowest(x)  # replaces minus infinity, so that differences are not NaN
        y = running(x.clamp_min(none), segment_index)
        return y.masked_fill(y == none, -torch.inf)

    @staticmethod
    def setup_context(ctx, inputs: tuple, y: Tensor) -> None:
        ctx.save_for_backward(inputs[0], y, inputs[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, y, index = ctx.saved_tensors
        y = y.clamp_min(lowest(y))
        return decayed(x, y) * from_right(grad, y, index), None


def lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Return `log(exp(a) + exp(b))` of finite numbers, by operations that Inductor vectorises.

    Inductor does not vectorise `logaddexp`.
    """
    larger = torch.maximum(a, b)
    return larger + (1 + (torch.minimum(a, b) - larger).exp()).log()  # `log1p` is many times slower


def decayed(earlier: Tensor, later: Tensor) -> Tensor:
    """Return `exp(earlier - later)`, at most 1 in spite of rounding."""
    return (earlier - later).clamp_max(0).exp()


def running(x: Tensor, index: Tensor | None) -> Tensor:
    """Compute `logcumsumexp` of finite x (B, H, L, D), with segments `index`."""
    length, none = x.shape[2], lowest(x)
    x = in_blocks(x, none)  # (B, H, N, S, D)
    index = in_blocks_of_index(index)  # (B, 1, N, S, 1)
    y = before = None  # sum before a token, and its segment
    if x.shape[2] > 1:
        y = sums_before_blocks(x, index)
        if index is not None:
            before = F.pad(index[:, :, :-1, -1], (0, 0, 1, 0), value=-1)
    out = []
    for i in range(x.shape[3]):
        here = x[..., i, :]
        if y is None:
            y = here
        else:
            if index is not None and before is not None:
                y = y.masked_fill(index[..., i, :].ne(before), none)
            y = log_add(y, here)
        if index is not None:
            before = index[..., i, :]
        out.append(y)
    return torch.stack(out, 3).flatten(2, 3)[:, :, :length]


def sums_before_blocks(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the logarithm (B, H, N, D) of the sum that enters each block of x (B, H, N, S, D)."""
    none = lowest(x)
    last = x
    segments = None
    if index is not None:
        last = x.masked_fill(index != index[..., -1:, :], none)
        segments = index[:, 0, :, -1, 0]
    largest = last.amax(-2)
    total = largest + (last - largest[..., None, :]).exp().sum(-2).log()
    return F.pad(running(total, segments)[:, :, :-1], (0, 0, 1, 0), value=none)


def from_right(g: Tensor, y: Tensor, index: Tensor | None) -> Tensor:
    """Compute `G_i = g_i + exp(y_i - y_{i+1}) G_{i+1}` from right to left, for g and y (B, H, L, D)."""
    length = y.shape[2]
    g, y = in_blocks(g, 0.0), in_blocks(y, 0.0)
    index = in_blocks_of_index(index)
    G = later = after = None  # G, y and the segment of the next token
    if y.shape[2] > 1:
        G = gradients_after_blocks(g, y, index)
        later = F.pad(y[:, :, 1:, 0], (0, 0, 0, 1))
        if index is not None:
            after = F.pad(index[:, :, 1:, 0], (0, 0, 0, 1), value=-1)
    out = []
    for i in reversed(range(y.shape[3])):
        here = g[..., i, :]
        if G is not None and later is not None:
            carried = decayed(y[..., i, :], later) * G
            if index is not None and after is not None:
                carried = carried.masked_fill(index[..., i, :].ne(after), 0)
            here = here + carried
        G = here
        later = y[..., i, :]
        if index is not None:
            after = index[..., i, :]
        out.append(G)
    return torch.stack(out[::-1], 3).flatten(2, 3)[:, :, :length]


def gradients_after_blocks(g: Tensor, y: Tensor, index: Tensor | None) -> Tensor:
    """Return G (B, H, N, D) of the token after each block, for g and y (B, H, N, S, D)."""
    first = g * decayed(y[..., :1, :], y)
    segments = None
    if index is not None:
        first = first.masked_fill(index != index[..., :1, :], 0)
        segments = index[:, 0, :, 0, 0]
    G = from_right(first.sum(-2), y[..., 0, :], segments)
    return F.pad(G[:, :, 1:], (0, 0, 0, 1))


def in_blocks(x: Tensor, value: float) -> Tensor:
    """Cut tokens (B, H, L, D) into blocks (B, H, N, S, D), padded with `value` at the end.

    A graph of all lengths has whole blocks, and one for each number of levels of blocks: one for each power of eight.
    """
    length = x.shape[2]
    size = BLOCK
    if is_static(length):
        size = min(BLOCK, length)
    padding = round_up(length, size) - length
    if padding:
        x = F.pad(x, (0, 0, 0, padding), value=value)
    return x.unflatten(2, (-1, size))


def in_blocks_of_index(index: Tensor | None) -> Tensor | None:
    if index is None:
        return None
    return in_blocks(index[:, None, :, None], -1)
