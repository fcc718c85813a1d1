"""Vector decay in the full and chunk forms: like `full.py` and `chunk.py`, but each key dimension decays separately."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lion.ops import chunk
from lion.ops.chunk import EnteringState
from lion.ops.decay import CumulativeDecay, bounded, exp_where, prefix_sums
from lion.ops.full import pad_segments, weighted_sum
from lion.ops.inductor import outer_sum
from lion.ops.tokens import ScoreSettings, State, TokenBlock
from lion.ops.vector_pairs import FACTORS, lambdas, sides_of
from lion.ops.vector_scores import pad, padding_of, vector_scores
from lion.ops.vector_sums import vector_row_sums


def full_vector_parts(tokens: TokenBlock, how: ScoreSettings, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), dense in L, under a decay (b, H, L, D)."""
    length = tokens.q.shape[2]
    padding = padding_of(length)
    q, k, v, log_decay = pad(padding, *tokens[:4])
    index = pad_segments(tokens.segment_index, padding)
    if not v.shape[-1] and how.rowsum:
        return tokens.v, vector_row_sums(q, k, log_decay, index, how)[..., :length]
    weights = vector_scores(q, k, log_decay, index, how)
    numerator, total = weighted_sum(weights, v, rowsum=how.rowsum, dropout_p=dropout_p)
    return numerator[:, :, :length], None if total is None else total[..., :length]


def chunk_vector_parts(
    tokens: TokenBlock, how: ScoreSettings, entering: tuple[EnteringState, ...] = ()
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), linear in L, under a decay (b, H, L, D).

    Arguments and results are those of `lion.ops.chunk.chunk_parts`.
    """
    q, k, v, log_decay, _, index = tokens[:6]
    length = q.shape[2]
    size, count = chunk.chunk_grid(length, how.chunk_size)
    size += padding_of(size)
    padding = size * count - length
    q, k, v, log_decay = (
        x.unflatten(2, (count, size)) for x in pad(padding, q, k, v, bounded(log_decay))
    )  # (B, H, N, C, D)
    if index is not None:
        index = pad_segments(index, padding).unflatten(1, (count, size))

    if v.shape[-1] or not how.rowsum:
        weights = vector_scores(q, k, log_decay, index, how)  # (B, H, N, C, C)
        numerator, total = weights.to(v.dtype) @ v, weights.sum(-1) if how.rowsum else None
    else:
        numerator, total = v, vector_row_sums(q, k, log_decay, index, how)

    leaving = []
    scans = chunk_scans(q, k, log_decay, how) if count > 1 or entering else ()
    for scan, state in zip_longest(scans, entering):
        more, row, state = between_chunks(scan, v, index, how, state)
        numerator = numerator + more
        total = total + row if how.rowsum else None
        leaving.append(state)
        del more  # free this memory before the next direction
    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if how.rowsum else None, leaving


class ChunkScan(NamedTuple):
    """One direction of a scan over chunks of tokens (B, H, N, C, D).

    Attributes:
        query: Queries, decayed from the edge of the chunk before theirs.
        key: Keys, decayed to the edge of their chunk.
        edge: Terms of the cumulative decay at the edge of each chunk, (b, H, N, D).
        previous: Terms of the cumulative decay at the edge before each edge, along the scan.
        reverse: Whether the scan goes from right to left.
    """

    query: Tensor
    key: Tensor
    edge: tuple[Tensor, ...]
    previous: tuple[Tensor, ...]
    reverse: bool


def chunk_scans(q: Tensor, k: Tensor, log_decay: Tensor, how: ScoreSettings) -> list[ChunkScan]:
    """Return the scans of all directions over chunks of tokens (B, H, N, C, D)."""
    before, after = exclusive_sum(log_decay), exclusive_sum(log_decay.flip(-2)).flip(-2)
    from_start, to_end = (exp_where(x, factors=FACTORS) for x in (before, after))  # decays to the chunk's ends
    inclusive, exclusive = prefix_sums(log_decay.sum(-2))  # (b, H, N, D), of whole chunks
    scans = []
    for name, (early, late) in sides_of(q, k, lambdas(log_decay), how.decay_convention, how.direction).items():
        early, late = early * to_end, late * from_start
        if name == "forward":
            scans.append(ChunkScan(late, early, inclusive, exclusive, False))
        else:
            edge, previous = (tuple(-t for t in terms) for terms in (exclusive, inclusive))
            scans.append(ChunkScan(early, late, edge, previous, True))
    return scans


def between_chunks(
    scan: ChunkScan, v: Tensor, index: Tensor | None, how: ScoreSettings, entering: EnteringState | None
) -> tuple[Tensor, Tensor | None, State | None]:
    """Compute the contribution of the states that enter chunks from one side, and the state that leaves the last chunk.

    Arguments are the values (B, H, N, C, E) and the segments (B, N, C), or None. This is a separate function so that
    its intermediate results are freed on return.
    """
    read, write, edge, previous, reverse = scan
    edge_index, start, end = None, None, None
    if index is not None:
        edge_index = (index[..., 0] if reverse else index[..., -1])[:, None, :, None]  # (B, 1, N, 1)
        write = write.masked_fill(index[:, None, ..., None] != edge_index[..., None], 0)
    edge = CumulativeDecay(edge, edge_index)
    if entering is not None:
        first, last = (slice(-1, None), slice(0, 1)) if reverse else (slice(0, 1), slice(-1, None))
        start = CumulativeDecay(tuple(t[..., first, :] for t in previous), None).in_segment(entering.segment)
        end = edge.map(lambda t: t[..., last, :])
    previous = CumulativeDecay(previous, chunk.previous_edge(edge, reverse, start).segment_index)
    if index is not None:
        read = read.masked_fill(index[:, None, ..., None] != previous.segment_index[..., None], 0)
    edges = chunk.ChunkEdges(edge, previous, reverse, start, end)
    S, S_leaving = chunk.carry(outer_sum(write.to(v.dtype), v), edges, entering and entering.S)
    more, row, leaving = read.to(v.dtype) @ S.to(v.dtype), None, None  # S (B, H, N, D, E)
    if how.rowsum or entering:
        z, z_leaving = chunk.carry(write.sum(3)[..., None], edges, entering and entering.z[..., None])
        row = (read * z.mT).sum(-1) if how.rowsum else None  # z (B, H, N, D, 1)
        leaving = entering and State(S_leaving, z_leaving.squeeze(-1))
    return more, row, leaving


def exclusive_sum(x: Tensor) -> Tensor:
    """Return the exclusive prefix sum over tokens (.., L, D)."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)
