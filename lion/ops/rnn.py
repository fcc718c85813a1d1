"""RNN form (Theorem 3.1): both directions advance together in one loop, a (D, E) state each.

    S_i = lambda S_{i-1} + k_i v_i^T      z_i = lambda z_{i-1} + k_i
    y_i = (q_i S_i^F + q_i S_i^B) / (q_i z_i^F + q_i z_i^B)

`lambda` is a number a head and token or a vector with one for each key dimension, which is a number in as many lanes.
With both directions on, each counts half of `q_i k_i`, so the diagonal is counted once. Step t takes the
next `chunk_size` tokens from the left and from the right; one token a step is the recurrence as printed.
Beyond the outputs, memory is the states and one row sum a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops.decay import Clock, decay, exp_where, inclusive, prefix_sums
from lion.ops.vector import pair_scores


class State(NamedTuple):
    """What a recurrence remembers: `S` (B, H, D, E) and `z` (B, H, D), float32 or wider."""

    S: Tensor
    z: Tensor


def initial_state(k: Tensor, v: Tensor) -> State:
    """The empty state for keys (B, H, L, D) and values (B, H, L, E)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
    return State(k.new_zeros(shape, dtype=wide), k.new_zeros(shape[:-1], dtype=wide))


def rnn_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    valid: Tensor | None,
    run: Tensor | None,
    *,
    gate: str,
    direction: str,
    rowsum: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of the sequential form.

    `log_decay` (B or 1, H or 1, L, D or 1); `valid` (B, L) and `run` (B, L) or None.
    """
    length = q.shape[2]
    names = [name for name in ("forward", "backward") if direction in (name, "both")]
    flags = [inclusive(gate, name) for name in names]
    diagonal = 1 / len(names)
    states = [initial_state(k, v) for _ in names]
    runs = [None if run is None else run[:, 0 if name == "forward" else -1] for name in names]
    numerator = torch.zeros_like(v)
    total = states[0].z.new_zeros(q.shape[:3]) if rowsum else None

    everything = Tokens(q, k, v, log_decay, valid, run)
    for start in range(0, length, chunk_size):
        size = min(chunk_size, length - start)
        for side, name in enumerate(names):
            back = name == "backward"
            begin = length - start - size if back else start
            y, row, states[side], runs[side] = advance(
                states[side],
                runs[side],
                everything.piece(begin, size, back),
                inclusive=flags[side],
                diagonal=diagonal,
                rowsum=rowsum,
            )
            numerator[:, :, begin : begin + size] += turn(y, 2, back).to(v.dtype)
            if rowsum:
                total[:, :, begin : begin + size] += turn(row, 2, back)
    return numerator, total


class Tokens(NamedTuple):
    """Consecutive tokens in order of travel: q, k (B, H, C, D), v (B, H, C, E), log_decay (b, h, C, D or 1),
    masks (B, C)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    valid: Tensor | None = None
    run: Tensor | None = None

    def piece(self, begin: int, size: int, back: bool) -> Tokens:
        """`size` tokens from `begin`, last one first for a traveller backward."""
        dims = (2, 2, 2, 2, 1, 1)
        return Tokens(*(x if x is None else turn(x.narrow(d, begin, size), d, back) for x, d in zip(self, dims)))


def turn(x: Tensor, dim: int, back: bool) -> Tensor:
    return x.flip(dim) if back and x.shape[dim] > 1 else x


def advance(
    state: State, state_run: Tensor | None, tokens: Tokens, *, inclusive: bool, diagonal: float, rowsum: bool
) -> tuple[Tensor, Tensor | None, State, Tensor | None]:
    """Read and update a state by C tokens; returns their numerators, row sums, and the new state with its segment.

    `inclusive`: a token's own decay applies before it is read (the `target` gate), else after (`source`:
    the state is kept already decayed).
    """
    q, k, v, log_decay, valid, run = tokens
    wide = state.z.dtype
    if valid is not None:
        q, k, v, log_decay = (x.masked_fill(~valid[:, None, :, None], 0) for x in (q, k, v, log_decay))
    q, k, v, log_decay = q.to(wide), k.to(wide), v.to(wide), log_decay.to(wide)

    if q.shape[2] == 1:
        return _advance_one(state, state_run, q, k, v, log_decay, run, inclusive, diagonal, rowsum)

    upto, before = prefix_sums(log_decay.mT)  # (b, h, D or 1, C)
    clock_run = None if run is None else run[:, None, None]  # (B, 1, 1, C)
    clock = Clock(upto if inclusive else before, clock_run)
    end = Clock(tuple(t[..., -1:] for t in upto), None if run is None else clock_run[..., -1:])
    begin = Clock(
        tuple(torch.zeros_like(t) for t in end.terms), None if run is None else state_run[:, None, None, None]
    )

    weights = pair_scores(q, k, clock, None)  # (B, H, C, C)
    if diagonal != 1:
        weights.diagonal(dim1=-2, dim2=-1).mul_(diagonal)
    read = decay(clock, begin).mT * q  # (B, H, C, D)
    write = decay(end, clock).mT * k
    kept = decay(end, begin)  # (b, h, D or 1, 1)

    y = weights @ v + read @ state.S
    row = weights.sum(-1) + (read @ state.z[..., None]).squeeze(-1) if rowsum else None
    state = State(kept * state.S + write.mT @ v, kept.squeeze(-1) * state.z + write.sum(2))
    return y, row, state, None if run is None else run[:, -1]


def _advance_one(state, state_run, q, k, v, log_decay, run, inclusive, diagonal, rowsum):
    """`advance` for one token: the recurrence itself."""
    same = None if run is None else (run == state_run[:, None])[:, None, None]  # (B, 1, 1, 1)
    kept = exp_where(log_decay.mT, same)  # (b, h, D or 1, 1)
    if inclusive:
        S, z = kept * state.S, kept.squeeze(-1) * state.z
    elif same is not None:
        S, z = state.S.masked_fill(~same, 0), state.z.masked_fill(~same[..., 0], 0)
    else:
        S, z = state
    own = (q * k).sum(-1)  # (B, H, 1)
    y = q @ S + (diagonal * own)[..., None] * v
    row = (q @ z[..., None]).squeeze(-1) + diagonal * own if rowsum else None
    S, z = S + k.mT @ v, z + k.squeeze(2)
    if not inclusive:
        after = log_decay.mT.exp()
        S, z = after * S, after.squeeze(-1) * z
    return y, row, State(S, z), None if run is None else run[:, -1]
