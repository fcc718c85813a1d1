"""Chunk form: dense inside a chunk, one (D, E) state per direction between chunks, one static graph.

    1. inside    Y_c  = (Q_c K_c^T * M_c) V_c                        quadratic in C only
    2. states    U_c  = sum_j decay(j -> end of c) k_j v_j^T          the state that chunk c passes on
    3. carry     R_c  = sum_{c' before c} decay(c' -> c) U_c'         all chunks at once, see `carry`
    4. outside   Y_c += decay(start of c -> i) q_i R_c

Start and end are those of the scan: a scan from right to left enters a chunk at its last token. The form is exact for
any L. The tokens may be a part of a sequence: states then enter from either side (`lion.ops.piecewise`). A decay for
each key dimension differs in the pairs inside a chunk alone (`lion.ops.vector`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import round_up
from lion.ops.decay import Direction, bounded, decay_mask, make_directions
from lion.ops.full import decayed_scores, weighted_sum, with_own_keys
from lion.ops.inductor import outer_sum
from lion.ops.modes import exporting, is_static
from lion.ops.settings import Settings
from lion.ops.tokens import EnteringState, State, Sums, Tokens, padded_segments
from lion.ops.vector import ChunkScan, vector_scans, vector_sums
from lion.ops.vector_scores import halving_padding

GROUP = 32  # chunks per group; above two groups, chunks are carried group by group, so that cost stays linear in L


def chunk_sums(
    tokens: Tokens, settings: Settings, entering: tuple[EnteringState, ...] = ()
) -> tuple[Sums, list[State]]:
    """Compute the sums over keys (B, H, L, ..) in memory linear in L.

    If the tokens are a part of a sequence, `entering` holds the state that enters in each direction. The second result
    then holds the states that leave.
    """
    tokens = tokens.masked()
    length = tokens.q.shape[2]
    size, count = chunk_grid(length, settings.chunk_size)
    if tokens.vector:
        size += halving_padding(size)
    chunks = tokens._replace(log_decay=bounded(tokens.decays())).in_chunks(size, count)
    log_decay = chunks.decays()
    passing = count > 1 or len(entering) > 0
    scans: list[ChunkScan] = []
    if tokens.vector:
        sums = vector_sums(chunks, settings)
        if passing:
            scans = vector_scans(chunks, settings)
    else:
        directions = make_directions(log_decay, settings.decay_convention, settings.direction)
        include_diagonal = tokens.bonus is None
        scores = decayed_scores(chunks.q, chunks.k, directions, chunks.segment, include_diagonal)
        sums = weighted_sum(scores, chunks.v, settings)
        if passing:
            scans = [scalar_scan(chunks, direction) for direction in directions]
    decays: list[tuple[Direction, ...]] = []
    if passing:
        decays = level_decays(log_decay.sum(-2), settings.direction)
    leaving: list[State] = []
    for place, scan in enumerate(scans):
        state = entering[place] if entering else None
        own_decays = [directions[place] for directions in decays]
        outside, left = between_chunks(scan, own_decays, chunks, settings, state)
        sums = sums.plus(outside)
        if left is not None:
            leaving.append(left)
        del outside  # free this memory before the next direction
    numerator = sums.numerator.to(tokens.v.dtype).flatten(2, 3)[:, :, :length]
    row_sum = sums.row_sum
    if row_sum is not None:
        row_sum = row_sum.flatten(2, 3)[..., :length]
    return with_own_keys(Sums(numerator, row_sum), tokens, settings), leaving


def scalar_scan(chunks: Tokens, direction: Direction) -> ChunkScan:
    """Return the scan over chunks (B, H, N, C, D) under one decay for all key dimensions."""
    return ChunkScan(
        q=chunks.q,
        k=chunks.k,
        from_start=direction.from_start(),
        to_end=direction.to_end(),
        reverse=direction.reverse,
    )


class Borders(NamedTuple):
    """Segments (B, .., N) of the states that enter and leave each chunk, along the scan."""

    entering: Tensor
    leaving: Tensor


def borders_of(segment: Tensor | None, reverse: bool, entering: EnteringState | None) -> Borders | None:
    """Return the segments at the borders of chunks, for segment numbers (B, N, C)."""
    if segment is None:
        return None
    first, last = segment[..., 0], segment[..., -1]
    if reverse:
        first, last = last, first
    outer = first[:, -1:] if reverse else first[:, :1]
    if entering is not None and entering.segment is not None:
        outer = entering.segment[:, None]
    if reverse:
        return Borders(torch.cat([last[:, 1:], outer], 1), last)
    return Borders(torch.cat([outer, last[:, :-1]], 1), last)


def between_chunks(
    scan: ChunkScan, decays: list[Direction], chunks: Tokens, settings: Settings, entering: EnteringState | None
) -> tuple[Sums, State | None]:
    """Compute what the tokens of chunks read from the states that enter, and the state that leaves the last chunk.

    `decays` are those of one direction from `level_decays`. This is a separate function so that its intermediate
    results are freed on return.
    """
    v, segment = chunks.v, chunks.segment
    borders = borders_of(segment, scan.reverse, entering)
    write = scan.k * scan.to_end  # 2. states
    from_start = scan.from_start
    if segment is not None and borders is not None:
        segment = segment[:, None, ..., None]  # (B, 1, N, C, 1)
        write = write.masked_fill(segment != borders.leaving[:, None, :, None, None], 0)
        from_start = from_start.masked_fill(segment != borders.entering[:, None, :, None, None], 0)
    levels = levels_of(decays, borders)
    z = left = entering_S = entering_z = None
    if entering is not None:
        entering_S, entering_z = entering.S, entering.z[..., None]
    if settings.row_sums or entering is not None:
        written = write.sum(3)[..., None]  # (B, H, N, D, 1)
        z = carry(written, levels, entering_z)
    states = outer_sum(write.to(v.dtype), v)  # (B, H, N, D, E)
    S = carry(states, levels, entering_S)  # 3. carry
    if entering is not None:
        left = State(levels[0].left(states, entering.S), levels[0].left(written, entering.z[..., None]).squeeze(-1))
        del written
    del write, states
    S = S.to(v.dtype)
    if from_start.shape[-1] == 1:  # 4. outside
        numerator = from_start * (scan.q @ S)
        read = scan.q
    else:
        read = scan.q * from_start
        numerator = read.to(v.dtype) @ S
    if z is None or not settings.row_sums:
        return Sums(numerator, None), left
    row_sum = (read * z.mT).sum(-1)
    if from_start.shape[-1] == 1:
        row_sum = from_start.squeeze(-1) * row_sum
    return Sums(numerator, row_sum), left


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


class Level(NamedTuple):
    """Chunks that are combined by one matrix: all chunks of a sequence, or those of each group.

    A chunk reads the states of the chunks before it, and passes on its own: the decays between are those of the chunks
    strictly between the two (the convention "between").

    Attributes:
        mask: Decays of the states of all chunks (columns) up to each chunk (rows), (b, H, .., N, N, D or 1).
        direction: Cumulative decays of whole chunks (T, b, H, .., N, D or 1).
        borders: Segments (B, .., N) at the borders of chunks, or None.
    """

    mask: Tensor
    direction: Direction
    borders: Borders | None

    @staticmethod
    def of(direction: Direction, borders: Borders | None) -> Level:
        mask = decay_mask((direction,), include_diagonal=False)
        if borders is not None:
            mask = within(mask, borders.entering[..., :, None], borders.leaving[..., None, :])
        return Level(mask, direction, borders)

    @property
    def first(self) -> int:
        """Return the place of the chunk that the scan enters first."""
        return -1 if self.direction.reverse else 0

    @property
    def last(self) -> int:
        return 0 if self.direction.reverse else -1

    def written(self, states: Tensor) -> Tensor:
        """Return the state (B, H, .., D, E) that leaves the last chunk, if no state enters."""
        to_end = self.direction.to_end()
        if self.borders is not None:
            to_end = within(to_end, self.borders.leaving, self.borders.leaving[..., self.last, None])
        return mix(to_end[..., None, :, :], states).squeeze(-3)

    def from_start(self) -> Tensor:
        """Return the decays (b, H, .., N, D or 1, 1) of the state that enters the first chunk, up to each chunk."""
        from_start = self.direction.from_start()
        if self.borders is not None:
            from_start = within(from_start, self.borders.entering, self.borders.entering[..., self.first, None])
        return from_start[..., None]

    def left(self, states: Tensor, entering: Tensor) -> Tensor:
        """Return the state (B, H, D, E) that leaves the last chunk, if the state `entering` enters the first one."""
        kept = self.direction.kept()  # (b, H, 1, D or 1)
        if self.borders is not None:
            first = self.borders.entering[..., self.first, None]
            kept = within(kept, first, self.borders.leaving[..., self.last, None])
        return self.written(states.to(entering.dtype)) + kept.mT * entering


def within(decay: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return decays (b, H, .., D or 1), 0 where the segments (B, ..) of query and key differ."""
    return decay.masked_fill((query != key)[:, None, ..., None], 0)


def level_decays(log_decay: Tensor, direction: str) -> list[tuple[Direction, ...]]:
    """Return the cumulative decays of chunks and, above 2 `GROUP` chunks, of groups, and of groups of groups.

    Args:
        log_decay: Log decays of whole chunks (b, H, N, D or 1).
        direction: Entry of `DIRECTIONS`.
    """
    count = log_decay.shape[2]
    if count <= 2 * GROUP:
        return [make_directions(log_decay, "between", direction)]
    groups, size = group_grid(count)
    padding = groups * size - count  # only at upper levels: `chunk_grid` rounds the first level
    if padding:
        log_decay = F.pad(log_decay, (0, 0, 0, padding))
    log_decay = log_decay.unflatten(2, (groups, size))  # (b, H, n, G, D or 1)
    return [make_directions(log_decay, "between", direction), *level_decays(log_decay.sum(-2), direction)]


def levels_of(decays: list[Direction], borders: Borders | None) -> list[Level]:
    """Return the levels at which the states of chunks are carried, from chunks to groups of groups."""
    levels = []
    for direction in decays[:-1]:
        of_groups = None
        if borders is not None:
            borders, of_groups = grouped(borders, direction)
        levels.append(Level.of(direction, borders))
        borders = of_groups
    levels.append(Level.of(decays[-1], borders))
    return levels


def grouped(borders: Borders, direction: Direction) -> tuple[Borders, Borders]:
    """Return the borders (B, n, G) of the chunks of each group, and the borders (B, n) of the groups."""
    groups, size = direction.key.shape[-3:-1]
    padding = groups * size - borders.leaving.shape[1]
    entering, leaving = borders.entering, borders.leaving
    if padding:
        entering, leaving = padded_segments(entering, padding), padded_segments(leaving, padding)
    entering, leaving = entering.unflatten(1, (groups, size)), leaving.unflatten(1, (groups, size))
    first, last = (-1, 0) if direction.reverse else (0, -1)
    return Borders(entering, leaving), Borders(entering[..., first], leaving[..., last])


def carry(states: Tensor, levels: list[Level], entering: Tensor | None = None) -> Tensor:
    """Return the states (B, H, N, D, E) that enter each chunk.

    Args:
        states: States that leave each chunk if none enters (B, H, N, D, E).
        levels: See `levels_of`.
        entering: For a part of a sequence, which has one level, the state (B, H, D, E) that enters. The result then has
            its dtype, because it passes through many pieces.
    """
    level = levels[0]
    if entering is not None:
        inside = mix(level.mask, states.to(entering.dtype))
        return inside + level.from_start() * entering[:, :, None]
    if len(levels) == 1:
        return mix(level.mask, states)
    count = states.shape[2]
    groups, size = level.direction.key.shape[-3:-1]
    padding = groups * size - count
    if padding:
        states = F.pad(states, (0, 0, 0, 0, 0, padding))
    states = states.unflatten(2, (groups, size))  # (B, H, n, G, D, E)
    before = carry(level.written(states), levels[1:])[:, :, :, None]  # (B, H, n, 1, D, E)
    inside = mix(level.mask, states)
    from_start = level.from_start().to(inside.dtype)  # (b, H, n, G, D or 1, 1)
    inside = torch.addcmul(inside, from_start.expand_as(inside), before.expand_as(inside))
    return inside.flatten(2, 3)[:, :, :count]


def mix(weights: Tensor, states: Tensor) -> Tensor:
    """Return `sum_j weights[.., i, j, d] states[.., j, d, :]` in the dtype of `states`.

    The last axis of the weights has size D, or size 1 for a scalar decay. Products of bfloat16 are accumulated in
    float32.
    """
    weights = weights.to(states.dtype)
    if weights.shape[-1] == 1:
        return (weights.squeeze(-1) @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    return (weights.movedim(-1, -3) @ states.transpose(-2, -3)).transpose(-2, -3)
