"""Chunk form of any decay, and all loops over pieces of a sequence.

Without gradients a long sequence is processed piece by piece, so that memory beyond the output is that of one piece.
The state that enters a piece from the left is carried along. The state that enters from the right comes from an earlier
scan. Under `torch.compile` the loop is one operator of the graph, whatever the length. The function that processes a
piece is a separate graph of one shape, which all layers share.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lion.ops.arguments import no_autocast, sum_dtype
from lion.ops.chunk import EnteringState, chunk_parts
from lion.ops.decay import make_directions, scan_directions
from lion.ops.delta import delta_parts
from lion.ops.full import add_diagonal
from lion.ops.key_softmax import one_scan_loop
from lion.ops.modes import exporting
from lion.ops.rnn import Compiler, eager, next_state, rnn_parts
from lion.ops.tokens import ScoreSettings, State, TokenBlock, initial_state
from lion.ops.vector import chunk_vector_parts

WHOLE = 16  # most chunks that are processed at once; more are cut into pieces
PIECES = {"cpu": 6}  # chunks per piece: takes 3 MiB beyond the output of DeiT-T's layer at 6,085 tokens
PIECE = 64  # chunks per piece on a GPU, which would idle between smaller pieces (not measured)
BACKEND = "inductor"  # compiles the function that processes a piece

log = logging.getLogger("lion")
Parts = tuple[Tensor, Tensor | None]


def in_pieces(tokens: TokenBlock, bonus: Tensor | None, how: ScoreSettings) -> Parts:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) of a form in `LOOPS`.

    Without `how.include_diagonal`, the weight of a token's own key is `bonus` (H, 1, D or 1), or 1.
    """
    at_once = torch.is_grad_enabled() or exporting()
    if how.form == "chunk" and (at_once or tokens.q.shape[2] <= WHOLE * how.chunk_size):
        return chunk_piece(tokens, bonus, how)[:2]
    if at_once or not torch.compiler.is_compiling():
        return LOOPS[how.form](tokens, bonus, how, eager)
    numerator, total = loop(*tokens, bonus, *how)
    return numerator, total if how.rowsum else None


def chunk_piece(
    tokens: TokenBlock, bonus: Tensor | None, how: ScoreSettings, entering: tuple[EnteringState, ...] = ()
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Compute the numerator and the row sum of tokens in chunks.

    With states that enter in each direction, the third result holds the states that leave.
    """
    tokens = tokens.masked()
    parts = chunk_vector_parts if tokens.gate.shape[-1] > 1 else chunk_parts
    numerator, total, leaving = parts(tokens, how, entering)
    if not how.include_diagonal:
        q, k, v, log_decay = tokens[:4]
        numerator, total = add_diagonal(numerator, total, q, k, v, bonus, log_decay.dtype)
    return numerator, total, leaving


def state_backward(tokens: TokenBlock, entering: EnteringState, how: ScoreSettings) -> State:
    """Return the state that leaves these tokens on the left."""
    _, k, v, log_decay, _, index = tokens.masked().to(entering.S.dtype)[:6]
    (backward,) = make_directions(log_decay, index, decay_convention=how.decay_convention, direction="backward")
    backward = backward._replace(start=backward.start.in_segment(entering.segment))
    return next_state(backward, k, v, State(entering.S, entering.z))


def chunk_loop(tokens: TokenBlock, bonus: Tensor | None, how: ScoreSettings, compiler: Compiler) -> Parts:
    length, names = tokens.q.shape[2], scan_directions(how.direction)
    count = -(-length // how.chunk_size)
    pieces = -(-count // PIECES.get(tokens.q.device.type, PIECE))
    size = how.chunk_size * -(-count // pieces)  # pieces of equal size, so that little is padding
    if length % size and tokens.valid is None:  # masks the padding of the last piece: all pieces have one shape
        tokens = tokens._replace(valid=torch.ones(*tokens.q.shape[:3:2], dtype=torch.bool, device=tokens.q.device))

    def piece(n: int) -> TokenBlock:
        here = min(size, length - n * size)
        part = tokens.slice(n * size, here)
        return (part if here == size else part.padded(size - here)).contiguous()

    def segment(part: TokenBlock, token: int) -> Tensor | None:
        return None if part.segment_index is None else part.segment_index[:, token].contiguous()

    empty = initial_state(tokens.k, tokens.v)
    left = EnteringState(*empty, segment(tokens, 0))
    right = {pieces - 1: EnteringState(*empty, segment(tokens, -1))}  # by piece, the state from the right
    for n in range(pieces - 1, 0, -1) if "backward" in names else ():
        part = piece(n)
        right[n - 1] = EnteringState(*compiler(state_backward)(part, right[n], how), segment(part, 0))

    numerator = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    total = tokens.k.new_empty(tokens.k.shape[:3], dtype=empty.S.dtype) if how.rowsum else None
    for n in range(pieces):
        part = piece(n)
        sides = {"forward": left, "backward": right.pop(n, None)}
        y, row, leaving = compiler(chunk_piece)(part, bonus, how, tuple(sides[name] for name in names))
        if "forward" in names:
            left = EnteringState(*leaving[0], segment(part, -1))
        here = slice(n * size, min((n + 1) * size, length))
        numerator[:, :, here] = y[:, :, : length - n * size]
        if how.rowsum:
            total[:, :, here] = row[..., : length - n * size]
        del part, y, row, leaving, sides  # free this memory before the next piece
    return numerator, total


def delta_loop(tokens: TokenBlock, bonus: None, how: ScoreSettings, compiler: Compiler) -> Parts:
    return delta_parts(tokens, how, compiler)


LOOPS: dict[str, Callable[..., Parts]] = {
    "chunk": chunk_loop,
    "rnn": rnn_parts,
    "delta_rnn": delta_loop,
    "one_scan": one_scan_loop,
}


@functools.cache
def compiled(fn: Callable, batch_dim: int = 0) -> Callable:
    """Return `fn` compiled, with one graph for each shape of a piece; the batch size is symbolic above 1.

    Shapes beyond PyTorch's limit on graphs (`torch._dynamo.config.recompile_limit`) run eagerly, after one warning.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit  # takes a second, which programs without graphs do not wait

    graphs = torch.compile(fn, backend=BACKEND, fullgraph=True, dynamic=False)
    warn = functools.cache(
        lambda: log.warning(
            "%s: runs eagerly, since its shapes exceed torch._dynamo.config.recompile_limit", fn.__name__
        )
    )

    def run(*args: Any) -> Any:
        for x in tree_leaves(args):
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() > batch_dim:
                torch._dynamo.maybe_mark_dynamic(x, batch_dim)
        try:
            return graphs(*args)
        except FailOnRecompileLimitHit:
            warn()
            return fn(*args)

    return run


@torch.library.custom_op("lion::loop", mutates_args=())
def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    valid: Tensor | None,
    segment_index: Tensor | None,
    feature_map: str | None,
    beta: Tensor | None,
    erase: Tensor | None,
    read: Tensor | None,
    bonus: Tensor | None,
    form: str,
    decay_convention: str,
    direction: str,
    include_diagonal: bool,
    rowsum: bool,
    chunk_size: int,
    undecayed_erase: bool,
) -> tuple[Tensor, Tensor]:
    """Run a loop as one operator of a graph, without gradients; without row sums, the second result is empty."""
    tokens = TokenBlock(q, k, v, gate, valid, segment_index, feature_map, beta, erase, read)
    how = ScoreSettings(form, decay_convention, direction, include_diagonal, rowsum, chunk_size, undecayed_erase)
    with no_autocast(q):  # a graph runs this operator outside of its caller's `no_autocast`
        numerator, total = LOOPS[form](tokens, bonus, how, compiled)
    return numerator, k.new_empty(0) if total is None else total


@loop.register_fake
def _(
    q,
    k,
    v,
    gate,
    valid,
    segment_index,
    feature_map,
    beta,
    erase,
    read,
    bonus,
    form,
    decay_convention,
    direction,
    include_diagonal,
    rowsum,
    chunk_size,
    undecayed_erase,
):
    total = k.new_empty(k.shape[:3] if rowsum else (0,), dtype=gate.dtype if rowsum else k.dtype)
    return torch.empty_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format), total
