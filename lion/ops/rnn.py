"""RNN form (Theorem 3.1): both directions advance together in one loop, a (D, E) state each.

    S_i = lambda S_{i-1} + k_i v_i^T      z_i = lambda z_{i-1} + k_i
    y_i = (q_i S_i^F + q_i S_i^B) / (q_i z_i^F + q_i z_i^B)

`lambda` is a number a head and token, or a vector with one for each key dimension.
With both directions on, each counts half of `q_i k_i`, so the diagonal is counted once. Step t takes the
next `chunk_size` tokens from the left and from the right; one token a step is the recurrence as printed.
Beyond the outputs, memory is the states and one row sum a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.decay import Direction, decay, exp_where, make_directions, read_and_write
from lion.ops.features import apply_feature_map
from lion.ops.full import pair_scores
from lion.ops.vector_scores import vector_scores

Wrap = Callable[[Callable], Callable]  # what is done to the function that is called for every piece


class State(NamedTuple):
    """What a recurrence remembers: `S` (B, H, D, E) and `z` (B, H, D), float32 or wider."""

    S: Tensor
    z: Tensor


def initial_state(k: Tensor, v: Tensor) -> State:
    """The empty state for keys (B, H, L, D) and values (B, H, L, E)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    return State(k.new_zeros(shape, dtype=wide), k.new_zeros(shape[:-1], dtype=wide))


class Tokens(NamedTuple):
    """Consecutive tokens in order of travel: q, k (B, H, C, D), v (B, H, C, E), gate (b, h, C, D or 1), masks (B, C).

    `gate` is the log decay, or the delta rule's beta; `phi` the feature map that q and k have yet to go through.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    valid: Tensor | None = None
    run: Tensor | None = None
    phi: str | None = None

    def piece(self, begin: int, size: int, back: bool = False) -> Tokens:
        """`size` tokens from `begin`, last one first for a traveller backward."""
        dims = (2, 2, 2, 2, 1, 1)
        parts = (x if x is None else turn(x.narrow(d, begin, size), d, back) for x, d in zip(self, dims))
        return Tokens(*parts, phi=self.phi)

    def contiguous(self) -> Tokens:
        """With strides that do not tell how long the whole sequence is: a compiled step looks at them."""
        return Tokens(*(x if x is None else x.contiguous() for x in self[:6]), phi=self.phi)

    def mapped(self) -> Tokens:
        """With the feature map applied; what invalid tokens hold does not go through it."""
        if self.phi is None:
            return self
        gone = None if self.valid is None else ~self.valid[:, None, :, None]
        q, k = (apply_feature_map(self.phi, x if gone is None else x.masked_fill(gone, 0)) for x in self[:2])
        return self._replace(q=q, k=k, phi=None)

    def kept(self) -> Tokens:
        """The same, and without what invalid tokens hold: a key of 0 that does not decay is as good as deleted."""
        tokens = self.mapped()
        if self.valid is None:
            return tokens
        gone = ~self.valid[:, None, :, None]  # select, never multiply: padding may hold NaN
        return Tokens(*(x.masked_fill(gone, 0) for x in tokens[:4]), run=self.run)

    def extended(self, missing: int) -> Tokens:
        """With tokens behind them that are not valid."""
        run = None if self.run is None else torch.cat([self.run, self.run[:, -1:].expand(-1, missing)], 1)
        wide = (F.pad(x, (0, 0, 0, missing)) for x in self[:4])
        return Tokens(*wide, F.pad(self.valid, (0, missing)), run, self.phi)

    def to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(*(x.to(dtype) for x in self[:4]), *self[4:])


def turn(x: Tensor, dim: int, back: bool) -> Tensor:
    return x.flip(dim) if back and x.shape[dim] > 1 else x


class Recurrence(NamedTuple):
    """How a state is read and updated: the index convention (`read_and_write`) of a direction, and the weight of a
    token's own key, a number or one for each key dimension (H, 1, D)."""

    decay_convention: str
    direction: str
    own: float | Tensor
    rowsum: bool


def rnn_parts(
    tokens: Tokens,
    bonus: Tensor | None,
    *,
    decay_convention: str,
    direction: str,
    rowsum: bool,
    chunk_size: int,
    wrap: Wrap,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of the sequential form."""
    names = ways(direction)
    own = (1 if bonus is None else bonus) / len(names)
    how = {name: Recurrence(decay_convention, name, own, rowsum) for name in names}
    return travel(how, advance, tokens, rowsum=rowsum, size=chunk_size, wrap=wrap)


def ways(direction: str) -> list[str]:
    return [name for name in ("forward", "backward") if direction in (name, "both")]


def travel(
    ways: dict, step: Callable, tokens: Tokens, *, rowsum: bool, size: int, wrap: Wrap
) -> tuple[Tensor, Tensor | None]:
    """Send one traveller each way, `size` tokens a step; what they read at a token is added up.

    A step of that many tokens is `wrap(step)`, so that what compiles it sees one shape.
    """
    q, k, v, run = tokens.q, tokens.k, tokens.v, tokens.run
    length = q.shape[2]
    size = min(size, length)
    states = {name: initial_state(k, v) for name in ways}
    runs = {name: None if run is None else run[:, 0 if name == "forward" else -1].contiguous() for name in ways}
    numerator = torch.zeros_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format)
    total = k.new_zeros(q.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32)) if rowsum else None
    for start in range(0, length, size):
        count = min(size, length - start)
        for name, way in ways.items():
            back = name == "backward"
            begin = length - start - count if back else start
            piece = tokens.piece(begin, count, back).contiguous()
            one = wrap(step) if count == size else step
            y, row, states[name], runs[name] = one(way, states[name], runs[name], piece)
            numerator[:, :, begin : begin + count] += turn(y, 2, back).to(numerator.dtype)
            if rowsum:
                total[:, :, begin : begin + count] += turn(row, 2, back)
            del piece, y, row  # not held beside the next step's
    return numerator, total


def advance(
    way: Recurrence, state: State, state_run: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor | None, State, Tensor | None]:
    """Read and update a state by C tokens; returns their numerators, row sums, and the new state with its segment.

    Where a token's own decay applies after it is read (the `source` convention) the state is kept already decayed.
    """
    q, k, v, log_decay, _, run, _ = tokens.kept().to(state.z.dtype)
    log_decay = log_decay.clamp_max(0)  # see `as_lanes`
    if q.shape[2] == 1:
        return _advance_one(way, state, state_run, q, k, v, log_decay, run)

    decay_convention = way.decay_convention
    if decay_convention == "symmetric":  # in the order of travel it is one of the two
        decay_convention = "target" if way.direction == "forward" else "source"
    (times,) = make_directions(
        log_decay, run, decay_convention=decay_convention, direction="forward"
    )  # (b, h, C, D or 1)
    times = times._replace(begin=times.begin.entered(state_run))
    if log_decay.shape[-1] == 1:
        weights = pair_scores(q, k, (times,), own=False)  # (B, H, C, C)
    else:
        weights = vector_scores(q, k, log_decay, run, decay_convention=decay_convention, direction="forward", own=False)
    weights.diagonal(dim1=-2, dim2=-1).add_((q * k * way.own).sum(-1))
    read = decay(times.query, times.begin) * q  # (B, H, C, D)
    y = weights @ v + read @ state.S
    row = weights.sum(-1) + (read @ state.z[..., None]).squeeze(-1) if way.rowsum else None
    return y, row, hand_on(times, k, v, state), None if run is None else run[:, -1]


def hand_on(times: Direction, k: Tensor, v: Tensor, state: State) -> State:
    """The state after these tokens."""
    write, kept = decay(times.end, times.key) * k, decay(times.end, times.begin).mT  # (B, H, C, D), (b, h, D or 1, 1)
    return State(kept * state.S + write.mT @ v, kept.squeeze(-1) * state.z + write.sum(2))


def _advance_one(way, state, state_run, q, k, v, log_decay, run):
    """`advance` for one token: the recurrence itself."""
    same = None if run is None else (run == state_run[:, None])[:, None, :, None]  # (B, 1, 1, 1)
    decayed = _times(exp_where(log_decay.mT.clone(), same), state)
    here = state if same is None else State(*(x.masked_fill(~m, 0) for x, m in zip(state, (same, same[..., 0]))))
    read_decayed, write_decayed = (
        x == "upto" for x in read_and_write(way.decay_convention, way.direction, "upto", "before")
    )
    S, z = decayed if read_decayed else here
    own = (q * k * way.own).sum(-1)  # (B, H, 1)
    y = q @ S + own[..., None] * v
    row = (q @ z[..., None]).squeeze(-1) + own if way.rowsum else None
    S, z = decayed if write_decayed else here
    state = State(S + k.mT @ v, z + k.squeeze(2))
    if not write_decayed:
        state = _times(exp_where(log_decay.mT.clone()), state)
    return y, row, state, None if run is None else run[:, -1]


def _times(kept: Tensor, state: State) -> State:
    """The state times a decay (b, h, D or 1, 1)."""
    return State(kept * state.S, kept.squeeze(-1) * state.z)
