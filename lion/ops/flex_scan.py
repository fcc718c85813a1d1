"""Scans of chunks as fused attention kernels, in all directions at once (`lion.ops.flex`).

All S directions are one call of `flex_attention`. They are heads of it, which read the same queries, keys and values.

Each direction is a softmax of its own, because the gradient of the decays needs the gradients of the keys and queries
of each direction apart. The cumulative decays t, `log M_ij = t_i - t_j` along a scan, are constants in the kernels. The
kernels would otherwise add up the gradients of t pair by pair, in any order. These four atomic additions per pair would
read and write 49 times the bytes of q at 197 tokens. The gradients come from the products `q_i dL/dq_i - k_i dL/dk_i`
instead (`lion.ops.prefix`). A rounding error in a pair's gradient is the same in both products. It cancels in the
gradient of a token's decay if both tokens of the pair lie on the same side of that token.

A state (S, z) that enters a chunk is D more keys `z_d e_d` with the values `S_d / z_d`, because
`q S = sum_d (q_d z_d) (S_d / z_d)`. The unit vectors e_d are in the keys, and log z_d is added to the scores, like a
decay. The state that leaves a chunk is what the queries e_d read from its last token, because `S_d = sum_j k_jd v_j`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lion.ops.chunk import ChunkEdges, carry
from lion.ops.decay import CumulativeDecay, Direction, materialized
from lion.ops.prefix import gradient_to

LEAST_SCORE = 1e-25  # added to scores before their logarithm
LEAST_LOG = -1e30  # replaces the logarithm of an empty sum, so that differences are finite
BLOCK = 128  # tokens; blocks of pairs on the wrong side of the diagonal are skipped
WHOLE = 1 << 30  # one block for all pairs


def scan(q: Tensor, k: Tensor, v: Tensor, directions: tuple[Direction, ...]) -> tuple[Tensor, Tensor]:
    """Attend from the queries q (B, H, N, C, D) of chunks to all keys before them, in each of S directions.

    Returns:
        The outputs (F, S, C, E), divided by their row sums, and the logarithms of the row sums (F, S, C), with
        F = B * H * N.
    """
    batch, _, count, size, dim = k.shape
    reverse = tuple(direction.reverse for direction in directions)
    terms = [[of_batch(t, batch) for t in direction.key.terms] for direction in directions]
    sides = tuple("backward" if r else "forward" for r in reverse)
    index, decays = directions[0].query.segment_index, constants([t for each in terms for t in each])

    prefixes = [first for first, *_ in terms]  # these receive the gradients
    queries, keys = ([gradient_to(t, x, sign) for t in prefixes] for x, sign in ((q, 1), (k, -1)))
    values = [v.view_as(v) for _ in directions]  # Dynamo refuses a tensor that is passed twice
    queries = windows(reverse, q, queries)
    if count == 1:
        pairs = Pairs(sides, index, size, block_lists(sides, size, size, 0, k.device), decays)
        return attend(queries, windows(reverse, k, keys), windows(reverse, v, values), pairs)

    unit = torch.eye(dim, dtype=k.dtype, device=k.device).expand(*k.shape[:3], dim, dim)
    rows = beside(reverse, k, [unit] * len(reverse))
    if reverse == (True,):
        tokens, units = rows[:, :, :, :size], rows[:, :, :, size:]
    else:
        units, tokens = rows[:, :, :, :dim], rows[:, :, :, dim : dim + size]
    lists = block_lists((*sides, "both"), size, size + dim, dim, k.device)
    pairs = Pairs(sides, index, size, lists[-1:], decays, leaving=True)
    edges = [(t.expand(-1, -1, -1, dim, -1) for t in outermost(t, r)) for t, r in zip(prefixes, reverse)]
    first, last = zip(*edges)
    units = windows(reverse, units, [_GradientToUnits.apply(t, unit) for t in last])
    leaving = attend(units, windows(reverse, tokens, keys), windows(reverse, v, values), pairs)
    means, log_sums = entering_states(*leaving, k.shape[:3], directions)

    states = [_GradientToUnits.apply(z - t, unit) for t, z in zip(first, log_sums)]
    pairs = pairs._replace(blocks=lists[:-1], states=constants(log_sums), leaving=False)
    keys, values = windows(reverse, rows, keys, states), windows(reverse, beside(reverse, v, means), values, means)
    return attend(queries, keys, values, pairs)


def outermost(t: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the last token (.., 1, D) of chunks along a scan, out of t (.., C, D)."""
    left, right = t[..., :1, :], t[..., -1:, :]
    return (right, left) if reverse else (left, right)


def entering_states(
    means: Tensor, log_sums: Tensor, lead: tuple[int, ...], directions: tuple[Direction, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states (S, z) that enter each chunk, as S / z (B, H, N, D, E) and log z (B, H, N, D, 1).

    Args:
        means, log_sums: The states that leave the chunks, as S / z (F, S, D, E) and log z (F, S, D).
        lead: The numbers (B, H, N) of samples, heads and chunks.
        directions: Cumulative decays of the tokens (b, H, N, C, 1).
    """
    z = log_sums.exp()[..., None]
    S, z = (x.unflatten(0, lead).unbind(3) for x in ((means * z).to(means.dtype), z))

    def along(each: Iterable[Tensor]) -> Tensor:  # (b, H * S, N, ..) in the order of the scans
        return torch.stack([x.flip(2) if d.reverse else x for x, d in zip(each, directions)], 2).flatten(1, 2)

    def edges(first: bool) -> CumulativeDecay:
        at = [d.key.map(lambda t, r=d.reverse: outermost(t, r)[0 if first else 1].squeeze(3)) for d in directions]
        index = at[0].segment_index
        if index is not None:
            index = along(edge.segment_index.expand(-1, lead[1], -1, -1) for edge in at)
        return CumulativeDecay(tuple(along(terms) for terms in zip(*(edge.terms for edge in at))), index)

    at = ChunkEdges(edges(first=False), edges(first=True), reverse=False)
    S, z = (carry(along(x), at)[0] for x in (S, z))
    z = z.clamp_min(LEAST_SCORE)
    entering = ((S / z).to(means.dtype), z.log())
    each = (zip(x.unflatten(1, (lead[1], -1)).unbind(2), directions) for x in entering)
    means, log_sums = ([x.flip(2) if d.reverse else x for x, d in some] for some in each)
    return means, log_sums


class _GradientToUnits(torch.autograd.Function):
    """`gradient_to` for unit vectors (.., D, D): their products with their gradients are a diagonal (.., D, 1)."""

    @staticmethod
    def forward(ctx, prefix: Tensor, unit: Tensor) -> Tensor:
        ctx.dtype = prefix.dtype
        return unit.view_as(unit)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.diagonal(dim1=-2, dim2=-1)[..., None].to(ctx.dtype), None


class _Windows(torch.autograd.Function):
    """Rows (B, H, N, R, D) that each direction reads through a window of its own.

    The rows are tokens, or the result of `beside`. The parts of a direction are its tokens and, in the second case, its
    state. All parts hold the values of `rows`, and only their gradients differ: those of the windows stay apart, and
    hold no zeros in place of the other state.
    """

    @staticmethod
    def forward(
        ctx,
        reverse: tuple[bool, ...],
        rows: Tensor,
        first: Tensor,
        second: Tensor | None = None,
        third: Tensor | None = None,
        fourth: Tensor | None = None,
    ) -> Tensor:
        # each part has a name: without gradients, Dynamo drops `ctx` if there are two `*parts`
        parts = [part for part in (first, second, third, fourth) if part is not None]
        states = parts[len(reverse) :]
        ctx.reverse, ctx.size, ctx.width = reverse, parts[0].shape[3], states[0].shape[3] if states else 0
        if not states:
            return rows[:, :, :, None].expand(-1, -1, -1, len(reverse), -1, -1)
        *lead, row, column = rows.stride()
        shape = (*rows.shape[:3], len(reverse), ctx.size + ctx.width, rows.shape[4])
        return rows.as_strided(shape, (*lead, ctx.width * row, row, column))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        size, width = ctx.size, ctx.width
        each = [*zip(ctx.reverse, gradient.unbind(3))]
        tokens = [dx.narrow(3, 0 if r else width, size) for r, dx in each]
        return None, None, *tokens, *([dx.narrow(3, size if r else 0, width) for r, dx in each] if width else ())


def windows(reverse: tuple[bool, ...], rows: Tensor, tokens: list[Tensor], states: Iterable[Tensor] = ()) -> Tensor:
    """Return the rows of each direction (B, H, N, S, C', D); see `_Windows`.

    Rows are copied here if B, H and N are not one axis in memory: `flex_attention` would copy every direction.
    """
    rows = rows.detach().flatten(0, 2).unflatten(0, rows.shape[:3])
    return _Windows.apply(reverse, rows, *tokens, *states)


def beside(reverse: tuple[bool, ...], x: Tensor, states: list[Tensor]) -> Tensor:
    """Return tokens (B, H, N, C, D), and beside them the state of each direction, on the side where it enters."""
    parts = {None: x, **dict(zip(reverse, states))}
    return torch.cat([parts[side] for side in (False, None, True) if side in parts], 3)


class Pairs(NamedTuple):
    """Pairs of queries and keys in chunks of tokens, for each of S directions.

    Attributes:
        sides: Directions of the scan, "forward" and "backward", or "both" alone. The first has the diagonal.
        segment_index: Segments of the tokens (B, 1, N, C, 1), or None.
        size: Tokens C in a chunk.
        blocks: Lists of the blocks of pairs, see `block_lists`.
        decays: Terms of the cumulative decays of the tokens (F, S * terms, C), constants, or None.
        states: Logarithms of z (F, S, D), constants, if a state (S, z) enters each chunk: as D keys beside the token
            that it meets first. A key decays like that token.
        leaving: Whether the queries read all keys from the last token of the scan, to compute the state that leaves.
    """

    sides: tuple[str, ...]
    segment_index: Tensor | None
    size: int
    blocks: Tensor
    decays: Tensor | None = None
    states: Tensor | None = None
    leaving: bool = False

    @property
    def width(self) -> int:
        """Return the number of keys of a state."""
        return 0 if self.states is None else self.states.shape[-1]

    def ahead(self, h: Tensor, count: int) -> Tensor | int:
        """Return `count` in a forward direction, and 0 in others."""
        return count * (1 - h) if len(self.sides) == 2 else count * (self.sides[0] == "forward")

    def query(self, h: Tensor, i: Tensor) -> Tensor:
        """Return the token at which query i of direction h reads."""
        return 0 * i + self.ahead(h, self.size - 1) if self.leaving else i

    def key(self, h: Tensor, j: Tensor) -> Tensor:
        """Return the token whose decay and segment key j of direction h has."""
        return (j - self.ahead(h, self.width)).clamp(0, self.size - 1) if self.width else j

    def state(self, h: Tensor, j: Tensor) -> Tensor:
        """Return the place of key j of direction h in the state; keys that are tokens have a place outside of it."""
        return j - self.size + self.ahead(h, self.size)

    def ordered(self, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return whether key j comes before query i in direction h."""
        forward, backward = j - self.width <= i, (i < j if len(self.sides) == 2 else i <= j)
        if len(self.sides) == 1:
            return forward if self.sides[0] == "forward" else backward
        return torch.where(h == 0, forward, backward)


def attend(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Attend from queries (B, H, N, S, C, D) to keys (B, H, N, S, C', D) and values in each of S directions.

    Returns:
        The outputs (F, S, C, E), divided by their row sums, and the logarithms of the row sums (F, S, C), with
        F = B * H * N.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # imports sympy: only when compiling

    decays, states, width = pairs.decays, pairs.states, pairs.width  # closures must not capture q, k or v
    terms = 0 if decays is None else decays.shape[1] // len(pairs.sides)
    segments = pairs.segment_index
    if segments is not None:
        segments = segments.squeeze(-1).expand(-1, q.shape[1], -1, -1).flatten(0, 2)  # (F, C)

    anywhere = pairs.leaving or pairs.sides == ("both",)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = torch.log(s.to(torch.promote_types(s.dtype, torch.float32)) + LEAST_SCORE)
        if decays is None:
            return s
        i, token = pairs.query(h, i), pairs.key(h, j)
        between = sum(decays[b, h * terms + n, i] - decays[b, h * terms + n, token] for n in range(terms))
        s = s + torch.clamp_max(between, 0)  # also for masked pairs, where `between` may be positive
        if states is None:
            return s
        place = pairs.state(h, j)
        return s + torch.where((place >= 0) & (place < width), states[b, h, place.clamp(0, width - 1)], 0.0)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ordered = b >= 0 if anywhere else pairs.ordered(h, i, j)
        if segments is None:
            return ordered
        return ordered & (segments[b, pairs.query(h, i)] == segments[b, pairs.key(h, j)])

    mask = block_mask(pairs.blocks, q.shape[4], k.shape[4], anywhere, allowed)
    given = dict(score_mod=score, block_mask=mask, scale=1.0, kernel_options={"BACKEND": "TRITON"})
    outputs, more = flex_attention(*(x.flatten(0, 2) for x in (q, k, v)), **given, return_aux=AuxRequest(lse=True))
    return outputs, more.lse.clamp_min(LEAST_LOG)


def constants(each: Iterable[Tensor]) -> Tensor:
    """Return tensors (B, H, N, C, 1) as constants of the kernels, in one tensor (F, .., C) in memory."""
    return materialized(torch.stack([t.detach().squeeze(-1).flatten(0, 2) for t in each], 1))


def of_batch(t: Tensor, batch: int) -> Tensor:
    """Return t (b, ..) as (B, ..): a gradient is then summed over the other axes first, in the kernel that makes it."""
    return t.expand(batch, *t.shape[1:])


def block_lists(sides: Iterable[str], queries: int, keys: int, states: int, device: torch.device) -> Tensor:
    """Return lists of the blocks of pairs in each direction, in one tensor.

    `states` of the keys come before the first token or, backward, after the last one. The direction "both" is one block
    of all pairs.

    Returns:
        Lists by row and by column of blocks (S, 2, n + 1, n), with n blocks on the longer side. The last line has the
        length of each list.
    """
    rows, columns, ahead = (-(-n // BLOCK) for n in (queries, keys, states))
    most = max(rows, columns) if set(sides) != {"both"} else 1
    line, entry = (torch.arange(n, dtype=torch.int32, device=device) for n in (most + 1, most))

    def least(x: Tensor, end: int) -> Tensor:  # `clamp` would be part of Inductor's index expressions, where it fails
        return torch.where(x < end, x, end)

    def of_rows(side: str, x: Tensor) -> tuple[Any, Any]:  # the first block of each row, and the end of its blocks
        return (x if side == "backward" else 0), (least(x + ahead + 1, columns) if side == "forward" else columns)

    def of_columns(side: str, x: Tensor) -> tuple[Any, Any]:
        first = torch.where(x < ahead, 0, x - ahead) if side == "forward" else 0
        return first, (least(x + 1, rows) if side == "backward" else rows)

    def listed(ends: Callable[..., tuple[Any, Any]], side: str, count: int) -> Tensor:
        if side == "both":
            return torch.where(line[:, None] < most, 0, 1).to(torch.int32).expand(most + 1, most)
        first, end = ends(side, entry)
        blocks = least(ends(side, line[:, None])[0] + entry, count - 1)
        return torch.where(line[:, None] < most, blocks, end - first).expand(most + 1, most)

    lists = [listed(*kind) for side in sides for kind in ((of_rows, side, columns), (of_columns, side, rows))]
    return materialized(torch.stack(lists).unflatten(0, (-1, 2)))


def block_mask(blocks: Tensor, queries: int, keys: int, whole: bool, allowed: Callable[..., Tensor]) -> Any:
    """Build a mask of pairs from lists of its blocks; `create_block_mask` would sort them."""
    from torch.nn.attention.flex_attention import BlockMask

    size = WHOLE if whole else BLOCK
    rows, columns = (-(-n // size) for n in (queries, keys))
    by_row, by_column = blocks[None].unbind(2)
    lists = (by_row[:, :, -1, :rows], by_row[:, :, :rows, :columns], None, None)
    lists += (by_column[:, :, -1, :columns], by_column[:, :, :columns, :rows], None, None)
    return BlockMask((queries, keys), *lists, BLOCK_SIZE=(size, size), mask_mod=allowed)
