"""Chunk form: dense inside a chunk, one (D, E) state per direction between chunks, one static graph.

    1. inside    Y_c  = (Q_c K_c^T * M_c) V_c                        quadratic in C only
    2. states    U_c  = sum_j decay(j -> edge of c) k_j v_j^T         the state that chunk c passes on
    3. carry     R_c  = sum_{c' before c} decay(c' -> c) U_c'         all chunks at once, see `carry`
    4. outside   Y_c += decay(edge -> i) q_i R_c

The forward edge of a chunk is its last token, and the backward edge is its first token. The form is exact for any L.
The tokens may be a part of a sequence: states then enter from either side (`lion.ops.piecewise`).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import round_up
from lion.ops.decay import CumulativeDecay, Direction, decay, make_directions, pad_with_last
from lion.ops.full import decayed_scores, weighted_sum
from lion.ops.inductor import outer_sum
from lion.ops.modes import exporting, is_static
from lion.ops.tokens import ScoreSettings, State, TokenBlock

GROUP = 32  # chunks per group; above two groups, chunks are carried group by group, so that cost stays linear in L


class EnteringState(NamedTuple):
    """State that enters a part of a sequence from one side: S (B, H, D, E), z (B, H, D) and its segment (B,)."""

    S: Tensor
    z: Tensor
    segment: Tensor | None


def chunk_parts(
    tokens: TokenBlock, how: ScoreSettings, entering: tuple[EnteringState, ...] = ()
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) in memory linear in L, under a decay (b, H, L, 1).

    If the tokens are a part of a sequence, `entering` holds the states at the `start` of each direction. The third
    result then holds the states at the `end` of each direction.
    """
    length = tokens.q.shape[2]
    q, k, v, directions = in_chunks(tokens, how, *chunk_grid(length, how.chunk_size))

    numerator, total = within_chunks(q, k, v, directions, how)
    leaving = []
    for direction, state in zip_longest(directions if entering or q.shape[2] > 1 else (), entering):
        more, row, state = between_chunks(q, k, v, direction, how, state)
        numerator = numerator + more
        total = total + row if how.rowsum else None
        leaving.append(state)
        del more  # free this memory before the next direction

    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if how.rowsum else None, leaving


def in_chunks(
    tokens: TokenBlock, how: ScoreSettings, size: int, count: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Direction, ...]]:
    """Split tokens into `count` chunks of `size` tokens: q, k, v (B, H, N, C, D) and their cumulative decays."""
    q, k, v, log_decay, _, index = tokens[:6]
    directions = make_directions(log_decay, index, decay_convention=how.decay_convention, direction=how.direction)
    padding = size * count - q.shape[2]

    def chunked(x: Tensor) -> Tensor:  # zero keys at the end add nothing
        return (F.pad(x, (0, 0, 0, padding)) if padding else x).unflatten(2, (count, size))

    def chunked_decay(t: Tensor) -> Tensor:  # padding does not decay
        return (pad_with_last(t, padding) if padding else t).unflatten(2, (count, size))

    return chunked(q), chunked(k), chunked(v), tuple(d.map(chunked_decay) for d in directions)


def within_chunks(
    q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...], how: ScoreSettings
) -> tuple[Tensor, Tensor | None]:
    """Compute the contribution of tokens in the same chunk: numerator (B, H, N, C, E) and row sum (B, H, N, C)."""
    weights = decayed_scores(q, k, directions, how.include_diagonal)  # (B, H, N, C, C)
    return weighted_sum(weights, v, rowsum=how.rowsum)


def between_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    direction: Direction,
    how: ScoreSettings,
    entering: EnteringState | None,
) -> tuple[Tensor, Tensor | None, State | None]:
    """Compute the contribution of the states that enter chunks from one side, and the state that leaves the last chunk.

    This is a separate function so that its intermediate results are freed on return.
    """
    edges = chunk_edges(direction, entering)
    write = k * decay(edges.edge.map(as_token), direction.key)  # 2. states
    z = z_leaving = None
    if how.rowsum or entering:
        z, z_leaving = carry(write.sum(3)[..., None], edges, entering and entering.z[..., None])  # (B, H, N, D, 1)
    write = outer_sum(write.to(v.dtype), v)
    S, S_leaving = carry(write, edges, entering and entering.S)  # (B, H, N, D, E)
    del write
    reach = decay(direction.query, edges.previous.map(as_token))  # 4. decay from the previous edge to each token
    row = reach.squeeze(-1) * (q * z.mT).sum(-1) if how.rowsum else None
    return reach * (q @ S.to(v.dtype)), row, entering and State(S_leaving, z_leaving.squeeze(-1))


def chunk_grid(length: int, chunk_size: int) -> tuple[int, int]:
    """Return (tokens per chunk, number of chunks).

    A chunk has at most `chunk_size` tokens. All chunks have the same size, chosen so that little is padding.
    """
    if not is_static(length):
        count = round_up(length, chunk_size) // chunk_size
        # without one more, an exported graph refuses rows shorter than a chunk; torch 2.11 adds no bool to a symbol
        return chunk_size, count + int(exporting())
    count = -(-length // chunk_size)
    even = -(-length // count)
    size = min(chunk_size, -(-even // 8) * 8)
    count = -(-length // size)
    if count > 2 * GROUP:
        groups, members = group_grid(count)
        count = groups * members
    return size, count


def group_grid(count: int) -> tuple[int, int]:
    """Return (number of groups, chunks per group).

    A group has at most `GROUP` chunks. All groups have the same size, chosen so that little is padding.
    """
    if not is_static(count):
        return round_up(count, GROUP) // GROUP, GROUP
    groups = -(-count // GROUP)
    return groups, -(-count // groups)


class ChunkEdges(NamedTuple):
    """Edges of chunks in one direction, at which states are passed on.

    Attributes:
        edge: Cumulative decay at the edge of each chunk (b, H, N, D or 1).
        previous: Cumulative decay at the edge before each edge, along the scan (b, H, N, D or 1).
        reverse: Whether the scan goes from right to left.
        start: For a part of a sequence, the edge before the first chunk (b, H, 1, D or 1).
        end: For a part of a sequence, the edge after the last token (b, H, 1, D or 1).
    """

    edge: CumulativeDecay
    previous: CumulativeDecay
    reverse: bool
    start: CumulativeDecay | None = None
    end: CumulativeDecay | None = None


def chunk_edges(direction: Direction, entering: EnteringState | None) -> ChunkEdges:
    """Return the edges of chunks (b, H, N, C, D or 1): the last token of each chunk along the scan."""
    reverse = direction.reverse
    edge = direction.key.map(lambda t: t[..., 0, :] if reverse else t[..., -1, :])
    if entering is None:
        return ChunkEdges(edge, previous_edge(edge, reverse), reverse)
    start = direction.start.in_segment(entering.segment)
    return ChunkEdges(edge, previous_edge(edge, reverse, start), reverse, start, direction.end)


def previous_edge(edge: CumulativeDecay, reverse: bool, start: CumulativeDecay | None = None) -> CumulativeDecay:
    """Return the edge before each of the edges (b, H, N, D or 1) along the scan.

    The edge before the first one is `start`. Without `start`, the first edge is repeated, and that value is never used.
    """
    count, first = edge.terms[0].shape[-2], edge if start is None else start
    outermost = torch.arange(count, device=edge.terms[0].device)[:, None] == (count - 1 if reverse else 0)

    def shifted(t: Tensor, first: Tensor) -> Tensor:  # no concatenation, which costs kernel launches on a GPU
        return torch.where(outermost, first, t.roll(-1 if reverse else 1, -2))

    index = None if edge.segment_index is None else shifted(edge.segment_index, first.segment_index)
    return CumulativeDecay(tuple(shifted(*pair) for pair in zip(edge.terms, first.terms)), index)


def carry(states: Tensor, edges: ChunkEdges, entering: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the states (B, H, N, D, E) that enter each chunk, decayed to the edge of the chunk before it.

    Up to 2 `GROUP` chunks are combined by one (N, N) matrix. More chunks are combined inside groups, and this same
    function carries the totals of the groups.

    A part of a sequence has at most 2 `GROUP` chunks. There, `entering` (B, H, D, E) is included, and the second result
    is the state that leaves. Both have the dtype of `entering`, because that state passes through many pieces.
    """
    if entering is not None:
        states = states.to(entering.dtype)
    edge, previous, reverse, start, end = edges
    count = states.shape[2]
    if count <= 2 * GROUP:
        within = mix(decay(previous.rows(), edge.columns(), strictly_before(count, reverse, states.device)), states)
        if entering is None:
            return within, None
        entering = entering[:, :, None]  # (B, H, 1, D, E)
        leaving = mix(decay(end.rows(), edge.columns()), states) + decay(end, start)[..., None] * entering
        return within + decay(previous, start)[..., None] * entering, leaving.squeeze(2)

    groups, members = group_grid(count)
    padding = groups * members - count
    if padding:  # only at upper levels: `chunk_grid` rounds the first level
        states = F.pad(states, (0, 0, 0, 0, 0, padding))
        edge, previous = (c.map(lambda t: pad_with_last(t, padding)) for c in (edge, previous))
    states = states.unflatten(2, (groups, members))  # (B, H, n, G, D, E)
    edge, previous = (c.map(lambda t: t.unflatten(2, (groups, members))) for c in (edge, previous))  # (b, H, n, G, D)
    group_edge = edge.map(lambda t: t[..., 0, :] if reverse else t[..., -1, :])
    group = ChunkEdges(group_edge, previous_edge(group_edge, reverse), reverse)

    within = mix(decay(previous.rows(), edge.columns(), strictly_before(members, reverse, states.device)), states)
    total = mix(decay(group.edge.map(as_token).rows(), edge.columns()), states).squeeze(3)
    from_groups = carry(total, group)[0][:, :, :, None]  # (B, H, n, 1, D, E)
    reach = decay(previous, group.previous.map(as_token))[..., None].to(within.dtype)  # (b, H, n, G, D or 1, 1)
    within = torch.addcmul(within, reach.expand_as(within), from_groups.expand_as(within))
    return within.flatten(2, 3)[:, :, :count], None


def mix(weights: Tensor, states: Tensor) -> Tensor:
    """Return `sum_j weights[.., i, j, d] states[.., j, d, :]` in the dtype of `states`.

    The last axis of the weights has size D, or size 1 for a scalar decay. Products of bfloat16 are accumulated in
    float32.
    """
    weights = weights.to(states.dtype)
    if weights.shape[-1] == 1:
        return (weights.squeeze(-1) @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    return (weights.movedim(-1, -3) @ states.transpose(-2, -3)).transpose(-2, -3)


def as_token(t: Tensor) -> Tensor:
    """Return an edge (.., D) as a token (.., 1, D), to broadcast over the tokens of its chunk."""
    return t[..., None, :]


def strictly_before(count: int, reverse: bool, device: torch.device) -> Tensor:
    """Return a mask (N, N, 1) of pairs (i, j) where j comes before i in the scan."""
    i, j = torch.arange(count, device=device)[:, None, None], torch.arange(count, device=device)[:, None]
    return j > i if reverse else j < i
