"""The chunk form of any decay, and all loops over pieces of a sequence.

Without gradients a long sequence is done piece by piece, so that memory beyond the output is that of one piece: what
comes into a piece from the left is carried along, what comes from the right is found on a way back before. Under
`torch.compile` the loop is one operator of the graph, whatever the length; what it does to a piece is a graph of its
own, of one shape, which all layers share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops.arguments import no_autocast, sum_dtype
from lion.ops.chunk import Entering, chunk_parts
from lion.ops.decay import make_directions
from lion.ops.delta import delta_parts
from lion.ops.full import add_diagonal
from lion.ops.rnn import State, Tokens, Wrap, hand_on, initial_state, rnn_parts, ways
from lion.ops.vector import chunk_vector_parts

WHOLE = 16  # chunks that are done at once; more are cut into pieces
PIECES = {"cpu": 6}  # chunks of a piece: in memory, 3 MiB beside the output of DeiT-T's layer at 6,085 tokens
PIECE = 64  # on a GPU, which would idle between smaller ones (not measured)
BACKEND = "inductor"  # compiles what is done to a piece

Parts = tuple[Tensor, Tensor | None]


class How(NamedTuple):
    """Settings of a form, "chunk", "rnn" or "delta" (the rnn form of the delta rule). `own`: whether a token reads its
    own key as it reads others; where not, `bonus` (H, 1, D or 1) weighs it."""

    form: str
    decay_convention: str
    direction: str
    own: bool
    rowsum: bool
    chunk_size: int


def in_pieces(tokens: Tokens, bonus: Tensor | None, how: How) -> Parts:
    """Numerator (B, H, L, E) and row sum (B, H, L)."""
    plainly = torch.is_grad_enabled() or torch.compiler.is_exporting()
    if how.form == "chunk" and (plainly or tokens.q.shape[2] <= WHOLE * how.chunk_size):
        return chunk_piece(tokens, bonus, how)[:2]
    if plainly or not torch.compiler.is_compiling():
        return LOOPS[how.form](tokens, bonus, how, lambda fn: fn)
    numerator, total = loop(*tokens, bonus, *how)
    return numerator, total if how.rowsum else None


def chunk_piece(
    tokens: Tokens, bonus: Tensor | None, how: How, enter: tuple[Entering, ...] = ()
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Numerator and row sum of tokens in chunks; with what comes in of each direction, also what goes on."""
    q, k, v, log_decay, _, run, _ = tokens.kept()
    given = dict(own=how.own, rowsum=how.rowsum, chunk_size=how.chunk_size, enter=enter)
    if log_decay.shape[-1] > 1:
        given |= dict(decay_convention=how.decay_convention, direction=how.direction)
        numerator, total, leave = chunk_vector_parts(q, k, v, log_decay, run, **given)
    else:
        directions = make_directions(log_decay, run, decay_convention=how.decay_convention, direction=how.direction)
        numerator, total, leave = chunk_parts(q, k, v, directions, **given)
    if not how.own:
        numerator, total = add_diagonal(numerator, total, q, k, v, bonus, log_decay.dtype)
    return numerator, total, leave


def back(tokens: Tokens, enter: Entering, how: How) -> State:
    """The state that goes on to the left of these tokens."""
    _, k, v, log_decay, _, run, _ = tokens.kept().to(enter.S.dtype)
    (times,) = make_directions(log_decay, run, decay_convention=how.decay_convention, direction="backward")
    return hand_on(times._replace(begin=times.begin.entered(enter.run)), k, v, State(enter.S, enter.z))


def chunk_loop(tokens: Tokens, bonus: Tensor | None, how: How, wrap: Wrap) -> Parts:
    length, names = tokens.q.shape[2], ways(how.direction)
    count = -(-length // how.chunk_size)
    pieces = -(-count // PIECES.get(tokens.q.device.type, PIECE))
    size = how.chunk_size * -(-count // pieces)  # evened out, so that little is padding
    if length % size and tokens.valid is None:  # of the last piece; all have one shape
        tokens = tokens._replace(valid=torch.ones(*tokens.q.shape[:3:2], dtype=torch.bool, device=tokens.q.device))

    def piece(n: int) -> Tokens:
        here = min(size, length - n * size)
        part = tokens.piece(n * size, here)
        return (part if here == size else part.extended(size - here)).contiguous()

    def edge(part: Tokens, place: int) -> Tensor | None:
        return None if part.run is None else part.run[:, place].contiguous()

    empty = initial_state(tokens.k, tokens.v)
    left = Entering(*empty, edge(tokens, 0))
    right = {pieces - 1: Entering(*empty, edge(tokens, -1))}  # by piece, what comes in from the right
    for n in range(pieces - 1, 0, -1) if "backward" in names else ():
        part = piece(n)
        right[n - 1] = Entering(*wrap(back)(part, right[n], how), edge(part, 0))

    numerator = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    total = tokens.k.new_empty(tokens.k.shape[:3], dtype=empty.S.dtype) if how.rowsum else None
    for n in range(pieces):
        part = piece(n)
        sides = {"forward": left, "backward": right.pop(n, None)}
        y, row, leave = wrap(chunk_piece)(part, bonus, how, tuple(sides[name] for name in names))
        if "forward" in names:
            left = Entering(*leave[0], edge(part, -1))
        here = slice(n * size, min((n + 1) * size, length))
        numerator[:, :, here] = y[:, :, : length - n * size]
        if how.rowsum:
            total[:, :, here] = row[..., : length - n * size]
        del part, y, row, leave, sides  # not held beside the next piece's
    return numerator, total


def rnn_loop(tokens: Tokens, bonus: Tensor | None, how: How, wrap: Wrap) -> Parts:
    given = dict(
        decay_convention=how.decay_convention, direction=how.direction, rowsum=how.rowsum, chunk_size=how.chunk_size
    )
    return rnn_parts(tokens, bonus, **given, wrap=wrap)


def delta_loop(tokens: Tokens, bonus: None, how: How, wrap: Wrap) -> Parts:
    return delta_parts(tokens, form="rnn", direction=how.direction, chunk_size=how.chunk_size, wrap=wrap)


LOOPS: dict[str, Callable[..., Parts]] = {"chunk": chunk_loop, "rnn": rnn_loop, "delta": delta_loop}


@functools.cache
def compiled(fn: Callable) -> Callable:
    return torch.compile(fn, backend=BACKEND, fullgraph=True, dynamic=False)


@torch.library.custom_op("lion::loop", mutates_args=())
def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    valid: Tensor | None,
    run: Tensor | None,
    phi: str | None,
    bonus: Tensor | None,
    form: str,
    decay_convention: str,
    direction: str,
    own: bool,
    rowsum: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """A loop as one operator of a graph, without gradients; the row sum is empty where there is none."""
    how = How(form, decay_convention, direction, own, rowsum, chunk_size)
    with no_autocast(q):  # the graph around it has left the region that called it
        numerator, total = LOOPS[form](Tokens(q, k, v, decay, valid, run, phi), bonus, how, compiled)
    return numerator, k.new_empty(0) if total is None else total


@loop.register_fake
def _(q, k, v, decay, valid, run, phi, bonus, form, decay_convention, direction, own, rowsum, chunk_size):
    total = k.new_empty(k.shape[:3] if rowsum else (0,), dtype=decay.dtype if rowsum else k.dtype)
    return torch.empty_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format), total
