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

from lion.ops.decay import Clock, decay, pair_mask

GROUP = 32  # chunks mixed by one dense matrix; more are carried group by group, so cost stays linear in L


def chunk_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Clock | None,
    backward: Clock | None,
    *,
    rowsum: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L), with memory linear in L."""
    length = q.shape[2]
    size, count = chunk_grid(length, chunk_size)
    missing = size * count - length

    def chunked(x: Tensor) -> Tensor:  # (B, H, L, D) -> (B, H, N, C, D); zero keys at the end add nothing
        return F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) if missing else x.unflatten(2, (count, size))

    def chunked_clock(t: Tensor) -> Tensor:  # (b, H, L) -> (b, H, N, C); time stands still in the padding
        return (hold(t, missing) if missing else t).unflatten(-1, (count, size))

    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = chunked(q), chunked(k), chunked(v)
    forward, backward = (None if c is None else c.map(chunked_clock) for c in (forward, backward))

    # 1. inside the chunks
    weights = (q @ k.mT).to(wide) * pair_mask(forward, backward)  # (B, H, N, C, C)
    numerator = weights.to(v.dtype) @ v
    total = weights.sum(-1) if rowsum else None  # (B, H, N, C)

    if count > 1:
        for clock, back in ((forward, False), (backward, True)):
            if clock is None:
                continue
            here = side(clock, back)
            write = scale(k, decay(here.edge.map(last), clock))  # 2. what each chunk hands on
            states = carry((write.to(v.dtype).mT @ v).to(wide), here)  # (B, H, N, D, E)
            reach = decay(clock, here.before.map(last))  # 4. and how far its tokens look into what comes in
            numerator = numerator + reach[..., None] * (q @ states.to(v.dtype))
            if rowsum:
                z = carry(write.sum(3)[..., None], here).mT  # (B, H, N, 1, D)
                total = total + reach * (q * z).sum(-1)

    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None


def chunk_grid(length: int, chunk_size: int) -> tuple[int, int]:
    """(tokens per chunk, chunks): at most `chunk_size` tokens, evened out so that little is padding."""
    count = -(-length // chunk_size)
    even = -(-length // count)
    size = min(chunk_size, -(-even // 8) * 8)
    count = -(-length // size)
    if count > 2 * GROUP:
        count = -(-count // GROUP) * GROUP
    return size, count


class Side(NamedTuple):
    """One direction of travel, at each chunk's edge and at the edge before it (b, H, N)."""

    edge: Clock
    before: Clock
    back: bool


def side(clock: Clock, back: bool) -> Side:
    """Edges of chunks (b, H, N, C): the last token that a traveller forward sees, the first one backward."""
    edge = clock.map(lambda t: t[..., 0] if back else t[..., -1])
    return Side(edge, edge.map(lambda t: shift(t, back)), back)


def carry(states: Tensor, here: Side) -> Tensor:
    """States (B, H, N, D, E) that enter each chunk, decayed to the edge of the chunk before it.

    Up to 2 `GROUP` chunks are mixed by one (N, N) matrix; more are mixed inside groups, and the groups'
    totals are carried by this same function.
    """
    edge, before, back = here
    count = states.shape[2]
    if count <= 2 * GROUP:
        return mix(decay(before.rows(), edge.columns(), strict(count, back, states.device)), states)

    missing = -count % GROUP
    if missing:  # only in upper levels: `chunk_grid` rounds the first
        states = F.pad(states, (0, 0, 0, 0, 0, missing))
        edge, before = (c.map(lambda t: hold(t, missing)) for c in (edge, before))
    states = states.unflatten(2, (-1, GROUP))  # (B, H, n, G, D, E)
    edge, before = (c.map(lambda t: t.unflatten(-1, (-1, GROUP))) for c in (edge, before))  # (b, H, n, G)
    group = side(edge, back)

    inside = mix(decay(before.rows(), edge.columns(), strict(GROUP, back, states.device)), states)
    total = mix(decay(group.edge.map(last).rows(), edge.columns()), states).squeeze(3)
    entering = carry(total, group)  # (B, H, n, D, E)
    reach = decay(before, group.before.map(last))[..., None, None]  # (b, H, n, G, 1, 1)
    return (inside + reach * entering[:, :, :, None]).flatten(2, 3)[:, :, :count]


def mix(weights: Tensor, states: Tensor) -> Tensor:
    """`sum_j weights[.., i, j] states[.., j, :, :]`."""
    return (weights @ states.flatten(-2)).unflatten(-1, states.shape[-2:])


def scale(x: Tensor, weights: Tensor) -> Tensor:
    """`x` (.., D) times one float32 (or float64) weight a row."""
    return x.to(weights.dtype) * weights[..., None]


def shift(t: Tensor, back: bool) -> Tensor:
    """The last axis one place earlier in the direction of travel; the first place repeats and is never read."""
    return torch.cat([t[..., 1:], t[..., -1:]] if back else [t[..., :1], t[..., :-1]], -1)


def hold(t: Tensor, missing: int) -> Tensor:
    """Let time stand still for `missing` more places."""
    return torch.cat([t, t[..., -1:].expand(*t.shape[:-1], missing)], -1)


def last(t: Tensor) -> Tensor:
    return t[..., None]


def strict(count: int, back: bool, device: torch.device) -> Tensor:
    """Pairs (i, j) of places where j comes before i in the direction of travel."""
    i, j = torch.arange(count, device=device)[:, None], torch.arange(count, device=device)
    return j > i if back else j < i
