"""Chunk form: dense inside a chunk, one (D, E) state per direction between chunks, one static graph.

    1. inside    Y_c  = (Q_c K_c^T * M_c) V_c                        quadratic in C only
    2. states    U_c  = sum_j decay(j -> edge of c) k_j v_j^T         what chunk c hands on
    3. carry     R_c  = sum_{c' before c} decay(c' -> c) U_c'         all chunks at once, see `carry`
    4. outside   Y_c += decay(edge -> i) q_i R_c

The forward edge of a chunk is its last token, the backward edge its first. Exact for any L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import Clock, Direction, decay, hold
from lion.ops.full import pair_scores

GROUP = 32  # chunks mixed by one dense matrix; more are carried group by group, so cost stays linear in L


def chunk_parts(
    q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...], *, own: bool, rowsum: bool, chunk_size: int
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L), with memory linear in L."""
    length = q.shape[2]
    size, count = chunk_grid(length, chunk_size)
    missing = size * count - length
    wide = directions[0].key.terms[0].dtype

    def chunked(x: Tensor) -> Tensor:  # (B, H, L, D) -> (B, H, N, C, D); zero keys at the end add nothing
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (count, size))

    def chunked_time(t: Tensor) -> Tensor:  # time stands still in the padding
        return (hold(t, missing) if missing else t).unflatten(2, (count, size))

    q, k, v = chunked(q), chunked(k), chunked(v)
    directions = tuple(d.map(chunked_time) for d in directions)

    numerator, total = inside(q, k, v, directions, own, rowsum)
    for direction in directions if count > 1 else ():
        more, row = outside(q, k, v, direction, rowsum, wide)
        numerator = numerator + more
        total = total + row if rowsum else None
        del more  # not held beside the next direction's

    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None


def inside(
    q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...], own: bool, rowsum: bool
) -> tuple[Tensor, Tensor | None]:
    """What tokens of a chunk give to each other: (B, H, N, C, E), and the row sum (B, H, N, C)."""
    weights = pair_scores(q, k, directions, own)  # (B, H, N, C, C)
    return weights.to(v.dtype) @ v, weights.sum(-1) if rowsum else None


def outside(
    q: Tensor, k: Tensor, v: Tensor, direction: Direction, rowsum: bool, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What comes into the chunks from one side. Its own function: what it needs on the way is freed on return."""
    query, key, back = direction
    here = border(key, back)
    write = k * decay(here.edge.map(last), key)  # 2. what each chunk hands on
    z = carry(write.sum(3)[..., None], here).mT if rowsum else None  # (B, H, N, 1, D)
    write = (write.to(v.dtype).mT @ v).to(wide)
    states = carry(write, here)  # (B, H, N, D, E)
    del write
    reach = decay(query, here.before.map(last))  # 4. how far its tokens look into what comes in
    row = reach.squeeze(-1) * (q * z).sum(-1) if rowsum else None
    return reach * (q @ states.to(v.dtype)), row


def chunk_grid(length: int, chunk_size: int) -> tuple[int, int]:
    """(tokens per chunk, chunks): at most `chunk_size` tokens, evened out so that little is padding."""
    count = -(-length // chunk_size)
    even = -(-length // count)
    size = min(chunk_size, -(-even // 8) * 8)
    count = -(-length // size)
    if count > 2 * GROUP:
        groups, members = group_grid(count)
        count = groups * members
    return size, count


def group_grid(count: int) -> tuple[int, int]:
    """(groups, chunks a group): at most `GROUP`, evened out like the chunks."""
    groups = -(-count // GROUP)
    return groups, -(-count // groups)


class Border(NamedTuple):
    """Where states are handed on in one direction: each chunk's edge and the edge before it (b, H, N, D or 1)."""

    edge: Clock
    before: Clock
    back: bool


def border(clock: Clock, back: bool) -> Border:
    """Of chunks (b, H, N, C, D or 1): the last token that a traveller forward sees, the first one backward."""
    edge = clock.map(lambda t: t[..., 0, :] if back else t[..., -1, :])
    return Border(edge, edge.map(lambda t: shift(t, back)), back)


def carry(states: Tensor, here: Border) -> Tensor:
    """States (B, H, N, D, E) that enter each chunk, decayed to the edge of the chunk before it.

    Up to 2 `GROUP` chunks are mixed by one (N, N) matrix; more are mixed inside groups, and the groups'
    totals are carried by this same function.
    """
    edge, before, back = here
    count = states.shape[2]
    if count <= 2 * GROUP:
        return mix(decay(before.rows(), edge.columns(), strict(count, back, states.device)), states)

    groups, members = group_grid(count)
    missing = groups * members - count
    if missing:  # only in upper levels: `chunk_grid` rounds the first
        states = F.pad(states, (0, 0, 0, 0, 0, missing))
        edge, before = (c.map(lambda t: hold(t, missing)) for c in (edge, before))
    states = states.unflatten(2, (groups, members))  # (B, H, n, G, D, E)
    edge, before = (c.map(lambda t: t.unflatten(2, (groups, members))) for c in (edge, before))  # (b, H, n, G, D or 1)
    group = border(edge, back)

    within = mix(decay(before.rows(), edge.columns(), strict(members, back, states.device)), states)
    total = mix(decay(group.edge.map(last).rows(), edge.columns()), states).squeeze(3)
    entering = carry(total, group)[:, :, :, None]  # (B, H, n, 1, D, E)
    reach = decay(before, group.before.map(last))[..., None]  # (b, H, n, G, D or 1, 1)
    within = torch.addcmul(within, reach.expand_as(within), entering.expand_as(within))
    return within.flatten(2, 3)[:, :, :count]


def mix(weights: Tensor, states: Tensor) -> Tensor:
    """`sum_j weights[.., i, j, d] states[.., j, d, :]`, one lane or D of them."""
    if weights.shape[-1] == 1:
        return (weights.squeeze(-1) @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    return (weights.movedim(-1, -3) @ states.transpose(-2, -3)).transpose(-2, -3)


def shift(t: Tensor, back: bool) -> Tensor:
    """Chunks (.., N, D) one place earlier in the direction of travel; the first place repeats and is never read."""
    return torch.cat([t[..., 1:, :], t[..., -1:, :]] if back else [t[..., :1, :], t[..., :-1, :]], -2)


def last(t: Tensor) -> Tensor:
    """An edge (.., D) as a time (.., 1, D)."""
    return t[..., None, :]


def strict(count: int, back: bool, device: torch.device) -> Tensor:
    """Pairs (i, j, 1) of places where j comes before i in the direction of travel."""
    i, j = torch.arange(count, device=device)[:, None, None], torch.arange(count, device=device)[:, None]
    return j > i if back else j < i
