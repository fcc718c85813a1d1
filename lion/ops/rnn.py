"""RNN form (Theorem 3.1): both directions advance together in one loop, with one (D, E) state each.

    S_i = lambda S_{i-1} + k_i v_i^T      z_i = lambda z_{i-1} + k_i
    y_i = (q_i S_i^F + q_i S_i^B) / (q_i z_i^F + q_i z_i^B)

`lambda` is a number per head and token, or a vector with one number for each key dimension. With both directions, each
of them counts half of `q_i k_i`, so that the diagonal is counted once.

Each step takes the next `chunk_size` tokens from the left and from the right. With one token per step, the loop is the
recurrence as printed. Beyond the outputs, memory is the states and one row sum per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.decay import Direction, bounded, decay, exp_where, make_directions, query_and_key, scan_directions
from lion.ops.full import decayed_scores
from lion.ops.tokens import ScoreSettings, State, TokenBlock, flip, initial_state
from lion.ops.vector_scores import vector_scores

Compiler = Callable[[Callable], Callable]  # wraps the function that is called for every piece


def eager(fn: Callable) -> Callable:
    return fn


class Recurrence(NamedTuple):
    """Settings of how a state is read and updated.

    Attributes:
        decay_convention: Decay convention, as in `query_and_key`.
        direction: Direction of the scan, "forward" or "backward".
        diagonal_weight: Weight of a token's own key: a number, or a tensor (H, 1, D or 1).
        rowsum: Whether row sums are computed.
    """

    decay_convention: str
    direction: str
    diagonal_weight: float | Tensor
    rowsum: bool


def rnn_parts(
    tokens: TokenBlock, bonus: Tensor | None, how: ScoreSettings, compiler: Compiler
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) in the sequential form."""
    names = scan_directions(how.direction)
    weight = (1 if bonus is None else bonus) / len(names)
    recurrences = {name: Recurrence(how.decay_convention, name, weight, how.rowsum) for name in names}
    return scan(recurrences, advance, tokens, rowsum=how.rowsum, size=how.chunk_size, compiler=compiler)


def scan(
    recurrences: dict, step: Callable, tokens: TokenBlock, *, rowsum: bool, size: int, compiler: Compiler
) -> tuple[Tensor, Tensor | None]:
    """Scan the tokens in every direction that has a recurrence, `size` tokens per step, and add up the outputs.

    A step of exactly `size` tokens runs `compiler(step)`, so that the compiled function sees one shape.
    """
    q, k, v, index = tokens.q, tokens.k, tokens.v, tokens.segment_index
    length = q.shape[2]
    size = min(size, length)
    states = {name: initial_state(k, v) for name in recurrences}
    segments = {
        name: None if index is None else index[:, 0 if name == "forward" else -1].contiguous() for name in recurrences
    }
    numerator = torch.zeros_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format)
    total = k.new_zeros(q.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32)) if rowsum else None
    for done in range(0, length, size):
        count = min(size, length - done)
        for name, recurrence in recurrences.items():
            reverse = name == "backward"
            start = length - done - count if reverse else done
            piece = tokens.slice(start, count, reverse).contiguous()
            one = compiler(step) if count == size else step
            y, row, states[name], segments[name] = one(recurrence, states[name], segments[name], piece)
            numerator[:, :, start : start + count] += flip(y, 2, reverse).to(numerator.dtype)
            if rowsum:
                total[:, :, start : start + count] += flip(row, 2, reverse)
            del piece, y, row  # free this memory before the next step
    return numerator, total


def advance(
    recurrence: Recurrence, state: State, segment: Tensor | None, tokens: TokenBlock
) -> tuple[Tensor, Tensor | None, State, Tensor | None]:
    """Read and update the state of a segment (B,) by C tokens.

    If a token's own decay applies after the state is read (the `source` convention), the state is stored already
    decayed.

    Returns:
        Numerators and row sums of the tokens, the new state, and the segment of the new state.
    """
    q, k, v, log_decay, _, index = tokens.masked().to(state.z.dtype)[:6]
    log_decay = bounded(log_decay)
    if q.shape[2] == 1:
        return _advance_one(recurrence, state, segment, q, k, v, log_decay, index)

    convention = recurrence.decay_convention
    if convention == "symmetric":  # along one scan, symmetric is target or source
        convention = "target" if recurrence.direction == "forward" else "source"
    (forward,) = make_directions(log_decay, index, decay_convention=convention, direction="forward")  # (b, h, C, D)
    forward = forward._replace(start=forward.start.in_segment(segment))
    if log_decay.shape[-1] == 1:
        weights = decayed_scores(q, k, (forward,), include_diagonal=False)  # (B, H, C, C)
    else:
        how = ScoreSettings("full", convention, "forward", False, recurrence.rowsum, 0)
        weights = vector_scores(q, k, log_decay, index, how)
    weights = weights + torch.diag_embed((q * k * recurrence.diagonal_weight).sum(-1))
    read = decay(forward.query, forward.start) * q  # (B, H, C, D)
    y = weights @ v + read @ state.S
    row = weights.sum(-1) + (read @ state.z[..., None]).squeeze(-1) if recurrence.rowsum else None
    return y, row, next_state(forward, k, v, state), None if index is None else index[:, -1]


def next_state(direction: Direction, k: Tensor, v: Tensor, state: State) -> State:
    """Return the state after these tokens."""
    kept = decay(direction.end, direction.start).mT  # (b, h, D or 1, 1)
    S, z = written(direction, k, v)
    return State(kept * state.S + S, kept.squeeze(-1) * state.z + z)


def written(direction: Direction, k: Tensor, v: Tensor) -> State:
    """Return the state after these tokens, if no state enters."""
    write = decay(direction.end, direction.key) * k  # (B, H, C, D)
    return State(write.mT @ v, write.sum(2))


def _advance_one(recurrence, state, segment, q, k, v, log_decay, index):
    """Compute `advance` for one token: the recurrence itself."""
    same = None if index is None else (index == segment[:, None])[:, None, :, None]  # (B, 1, 1, 1)
    decayed = _times(exp_where(log_decay.mT.clone(), same), state)
    kept = state if same is None else State(*(x.masked_fill(~m, 0) for x, m in zip(state, (same, same[..., 0]))))
    names = query_and_key(recurrence.decay_convention, recurrence.direction, "inclusive", "exclusive")
    read_decayed, write_decayed = (name == "inclusive" for name in names)
    S, z = decayed if read_decayed else kept
    diagonal = (q * k * recurrence.diagonal_weight).sum(-1)  # (B, H, 1)
    y = q @ S + diagonal[..., None] * v
    row = (q @ z[..., None]).squeeze(-1) + diagonal if recurrence.rowsum else None
    S, z = decayed if write_decayed else kept
    state = State(S + k.mT @ v, z + k.squeeze(2))
    if not write_decayed:
        state = _times(exp_where(log_decay.mT.clone()), state)
    return y, row, state, None if index is None else index[:, -1]


def _times(decay: Tensor, state: State) -> State:
    """Return the state times a decay (b, h, D or 1, 1)."""
    return State(decay * state.S, decay.squeeze(-1) * state.z)
