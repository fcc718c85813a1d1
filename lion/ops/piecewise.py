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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lion.ops.arguments import no_autocast
from lion.ops.chunk import chunk_sums
from lion.ops.delta import delta_rnn_sums
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.key_softmax import one_scan_sums
from lion.ops.modes import exporting
from lion.ops.rnn import Compiler, eager, empty_state, next_state, rnn_sums, segment_at
from lion.ops.settings import Settings
from lion.ops.tokens import EnteringState, Sums, Tokens

WHOLE = 16  # most chunks that are processed at once; more are cut into pieces
PIECES = {"cpu": 6}  # chunks per piece: takes 3 MiB beyond the output of DeiT-T's layer at 6,085 tokens
PIECE = 64  # chunks per piece on a GPU, which would idle between smaller pieces (not measured)
BACKEND = "inductor"  # compiles the function that processes a piece

log = logging.getLogger("lion")


def in_pieces(tokens: Tokens, settings: Settings, form: str) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of a form in `LOOPS`."""
    at_once = torch.is_grad_enabled() or exporting()
    if form == "chunk" and (at_once or tokens.q.shape[2] <= WHOLE * settings.chunk_size):
        return chunk_sums(tokens, settings)[0]
    if at_once or not torch.compiler.is_compiling():
        return LOOPS[form](tokens, settings, eager)
    numerator, row_sum = loop(
        **tokens._asdict(),
        form=form,
        direction=settings.direction,
        normalize=settings.normalize,
        decay_convention=settings.decay_convention,
        chunk_size=settings.chunk_size,
        undecayed_erase=settings.undecayed_erase,
    )
    return Sums(numerator, row_sum if settings.row_sums else None)


def chunk_loop(tokens: Tokens, settings: Settings, compiler: Compiler) -> Sums:
    """Compute the chunk form piece by piece: first the states from the right, then all outputs from the left."""
    length = tokens.q.shape[2]
    count = -(-length // settings.chunk_size)
    pieces = -(-count // PIECES.get(tokens.q.device.type, PIECE))
    size = settings.chunk_size * -(-count // pieces)  # pieces of equal size, so that little is padding
    if length % size and tokens.valid is None:  # masks the padding of the last piece: all pieces have one shape
        valid = torch.ones(tokens.q.shape[0], length, dtype=torch.bool, device=tokens.q.device)
        tokens = tokens._replace(valid=valid)
    from_right = states_from_right(tokens, settings, size, pieces, compiler)
    numerator = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    row_sum = None
    if settings.row_sums:
        row_sum = tokens.k.new_empty(tokens.k.shape[:3], dtype=wide_dtype(tokens.k))
    left = empty_state(tokens, replace(settings, direction="forward"))
    for n in range(pieces):
        piece = piece_of(tokens, n, size)
        entering = []
        if settings.direction != "backward":
            entering.append(left)
        if settings.direction != "forward":
            entering.append(from_right.pop(n))
        sums, leaving = compiler(chunk_sums)(piece, settings, tuple(entering))
        if settings.direction != "backward":
            left = EnteringState(leaving[0].S, leaving[0].z, segment_at(piece, -1))
        here = slice(n * size, min((n + 1) * size, length))
        numerator[:, :, here] = sums.numerator[:, :, : length - n * size]
        if row_sum is not None:
            row_sum[:, :, here] = sums.row_sum[..., : length - n * size]
        del piece, sums, leaving, entering  # free this memory before the next piece
    return Sums(numerator, row_sum)


def states_from_right(
    tokens: Tokens, settings: Settings, size: int, pieces: int, compiler: Compiler
) -> dict[int, EnteringState]:
    """Return the states that enter each piece from the right; none in the forward direction."""
    if settings.direction == "forward":
        return {}
    backward = replace(settings, direction="backward")
    states = {pieces - 1: empty_state(tokens, backward)}
    for n in range(pieces - 1, 0, -1):
        states[n - 1] = compiler(next_state)(piece_of(tokens, n, size), backward, states[n])
    return states


def piece_of(tokens: Tokens, n: int, size: int) -> Tokens:
    """Return piece n of `size` tokens; the last one is padded."""
    here = min(size, tokens.q.shape[2] - n * size)
    return tokens.slice(n * size, here).padded(size - here)


LOOPS: dict[str, Callable[[Tokens, Settings, Compiler], Sums]] = {
    "chunk": chunk_loop,
    "rnn": rnn_sums,
    "delta_rnn": delta_rnn_sums,
    "one_scan": one_scan_sums,
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
    log_decay: Tensor | None,
    valid: Tensor | None,
    segment: Tensor | None,
    feature_map: str | None,
    bonus: Tensor | None,
    angles: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    read: Tensor | None,
    form: str,
    direction: str,
    normalize: str,
    decay_convention: str,
    chunk_size: int,
    undecayed_erase: bool,
) -> tuple[Tensor, Tensor]:
    """Run a loop as one operator of a graph, without gradients; without row sums, the second result is empty."""
    tokens = Tokens(q, k, v, log_decay, valid, segment, feature_map, bonus, angles, beta, erase, read)
    settings = Settings(
        direction=direction,
        normalize=normalize,
        decay_convention=decay_convention,
        chunk_size=chunk_size,
        undecayed_erase=undecayed_erase,
    )
    with no_autocast(q):  # a graph runs this operator outside of its caller's `no_autocast`
        sums = LOOPS[form](tokens, settings, compiled)
    if sums.row_sum is None:
        return sums.numerator, k.new_empty(0)
    return sums.numerator, sums.row_sum


@loop.register_fake
def _(
    q,
    k,
    v,
    log_decay,
    valid,
    segment,
    feature_map,
    bonus,
    angles,
    beta,
    erase,
    read,
    form,
    direction,
    normalize,
    decay_convention,
    chunk_size,
    undecayed_erase,
):
    numerator = torch.empty_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format)
    if normalize == "none":
        return numerator, k.new_empty(0)
    return numerator, k.new_empty(k.shape[:3], dtype=wide_dtype(k))
