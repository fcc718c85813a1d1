"""Chunk form: dense inside a chunk, one (D, E) state per direction between chunks, one static graph.

    1. inside    Y_c  = (Q_c K_c^T * M_c) V_c                        quadratic in C only
    2. states    U_c  = sum_j decay(j -> edge of c) k_j v_j^T         what chunk c hands on
    3. carry     R_c  = sum_{c' before c} decay(c' -> c) U_c'         all chunks at once, see `carry`
    4. outside   Y_c += decay(edge -> i) q_i R_c

The forward edge of a chunk is its last token, the backward edge its first. Exact for any L. Tokens may be a part of a
sequence: what comes into it from either side is a state (`lion.ops.piecewise`).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_number, rounded
from lion.ops.decay import Clock, Direction, decay, hold
from lion.ops.full import pair_scores
from lion.ops.rnn import State

GROUP = 32  # chunks mixed by one dense matrix; more are carried group by group, so cost stays linear in L


class Entering(NamedTuple):
    """What comes into a part of a sequence from one side: a state S (B, H, D, E), z (B, H, D), and its segment (B,)."""

    S: Tensor
    z: Tensor
    run: Tensor | None


def chunk_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    directions: tuple[Direction, ...],
    *,
    own: bool,
    rowsum: bool,
    chunk_size: int,
    enter: tuple[Entering, ...] = (),
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Numerator (B, H, L, E) and row sum (B, H, L), with memory linear in L.

    Where these tokens are a part of a sequence, `enter` is what comes in at the `begin` of each direction, and the
    states at their `end` are returned.
    """
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
    leave = []
    for direction, entering in zip_longest(directions if enter or count > 1 else (), enter):
        more, row, state = outside(q, k, v, direction, rowsum, wide, entering)
        numerator = numerator + more
        total = total + row if rowsum else None
        leave.append(state)
        del more  # not held beside the next direction's

    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None, leave


def inside(
    q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...], own: bool, rowsum: bool
) -> tuple[Tensor, Tensor | None]:
    """What tokens of a chunk give to each other: (B, H, N, C, E), and the row sum (B, H, N, C)."""
    weights = pair_scores(q, k, directions, own)  # (B, H, N, C, C)
    return weights.to(v.dtype) @ v, weights.sum(-1) if rowsum else None


def outside(
    q: Tensor, k: Tensor, v: Tensor, direction: Direction, rowsum: bool, wide: torch.dtype, enter: Entering | None
) -> tuple[Tensor, Tensor | None, State | None]:
    """What comes into the chunks from one side, and what goes on. Its own function: what it needs on the way is freed
    on return."""
    here = border(direction, enter)
    write = k * decay(here.edge.map(last), direction.key)  # 2. what each chunk hands on
    z = z_on = None
    if rowsum or enter:
        z, z_on = carry(write.sum(3)[..., None], here, enter and enter.z[..., None])  # (B, H, N, D, 1)
    write = (write.to(v.dtype).mT @ v).to(wide)
    S, S_on = carry(write, here, enter and enter.S)  # (B, H, N, D, E)
    del write
    reach = decay(direction.query, here.before.map(last))  # 4. how far its tokens look into what comes in
    row = reach.squeeze(-1) * (q * z.mT).sum(-1) if rowsum else None
    return reach * (q @ S.to(v.dtype)), row, enter and State(S_on, z_on.squeeze(-1))


def chunk_grid(length: int, chunk_size: int) -> tuple[int, int]:
    """(tokens per chunk, chunks): at most `chunk_size` tokens, evened out so that little is padding."""
    if not is_number(length):
        return chunk_size, rounded(length, chunk_size) // chunk_size
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
    if not is_number(count):
        return rounded(count, GROUP) // GROUP, GROUP
    groups = -(-count // GROUP)
    return groups, -(-count // groups)


class Border(NamedTuple):
    """Where states are handed on in one direction: each chunk's edge and the edge before it (b, H, N, D or 1), and, of
    a part of a sequence, its `begin`, which is the edge before the first chunk, and its `end` (b, H, 1, D or 1)."""

    edge: Clock
    before: Clock
    back: bool
    begin: Clock | None = None
    end: Clock | None = None


def border(direction: Direction, enter: Entering | None) -> Border:
    """Of chunks (b, H, N, C, D or 1): the last token that a traveller forward sees, the first one backward."""
    back = direction.back
    edge = direction.key.map(lambda t: t[..., 0, :] if back else t[..., -1, :])
    if enter is None:
        return Border(edge, earlier(edge, back), back)
    begin = direction.begin.entered(enter.run)
    return Border(edge, earlier(edge, back, begin), back, begin, direction.end)


def earlier(edge: Clock, back: bool, begin: Clock | None = None) -> Clock:
    """The edges (b, H, N, D or 1) one place earlier in the direction of travel; before the first is `begin`, or that
    edge again, which is never read."""
    first = edge.map(lambda t: t[..., -1:, :] if back else t[..., :1, :]) if begin is None else begin

    def shifted(t: Tensor, first: Tensor) -> Tensor:  # cut last: graphs would ask whether one place is left
        return torch.cat([t, first], -2)[..., 1:, :] if back else torch.cat([first, t], -2)[..., :-1, :]

    run = None if edge.run is None else shifted(edge.run, first.run)
    return Clock(tuple(shifted(*pair) for pair in zip(edge.terms, first.terms)), run)


def carry(states: Tensor, here: Border, enter: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """States (B, H, N, D, E) that enter each chunk, decayed to the edge of the chunk before it.

    Up to 2 `GROUP` chunks are mixed by one (N, N) matrix; more are mixed inside groups, and the groups'
    totals are carried by this same function. Of a part of a sequence (so many chunks at most) `enter` (B, H, D, E)
    comes in, and what goes on is returned, too.
    """
    edge, before, back, begin, end = here
    count = states.shape[2]
    if count <= 2 * GROUP:
        within = mix(decay(before.rows(), edge.columns(), strict(count, back, states.device)), states)
        if enter is None:
            return within, None
        enter = enter[:, :, None]  # (B, H, 1, D, E)
        leave = mix(decay(end.rows(), edge.columns()), states) + decay(end, begin)[..., None] * enter
        return within + decay(before, begin)[..., None] * enter, leave.squeeze(2)

    groups, members = group_grid(count)
    missing = groups * members - count
    if missing:  # only in upper levels: `chunk_grid` rounds the first
        states = F.pad(states, (0, 0, 0, 0, 0, missing))
        edge, before = (c.map(lambda t: hold(t, missing)) for c in (edge, before))
    states = states.unflatten(2, (groups, members))  # (B, H, n, G, D, E)
    edge, before = (c.map(lambda t: t.unflatten(2, (groups, members))) for c in (edge, before))  # (b, H, n, G, D or 1)
    outer = edge.map(lambda t: t[..., 0, :] if back else t[..., -1, :])
    group = Border(outer, earlier(outer, back), back)

    within = mix(decay(before.rows(), edge.columns(), strict(members, back, states.device)), states)
    total = mix(decay(group.edge.map(last).rows(), edge.columns()), states).squeeze(3)
    entering = carry(total, group)[0][:, :, :, None]  # (B, H, n, 1, D, E)
    reach = decay(before, group.before.map(last))[..., None]  # (b, H, n, G, D or 1, 1)
    within = torch.addcmul(within, reach.expand_as(within), entering.expand_as(within))
    return within.flatten(2, 3)[:, :, :count], None


def mix(weights: Tensor, states: Tensor) -> Tensor:
    """`sum_j weights[.., i, j, d] states[.., j, d, :]`, one lane or D of them."""
    if weights.shape[-1] == 1:
        return (weights.squeeze(-1) @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    return (weights.movedim(-1, -3) @ states.transpose(-2, -3)).transpose(-2, -3)


def last(t: Tensor) -> Tensor:
    """An edge (.., D) as a time (.., 1, D)."""
    return t[..., None, :]


def strict(count: int, back: bool, device: torch.device) -> Tensor:
    """Pairs (i, j, 1) of places where j comes before i in the direction of travel."""
    i, j = torch.arange(count, device=device)[:, None, None], torch.arange(count, device=device)[:, None]
    return j > i if back else j < i
