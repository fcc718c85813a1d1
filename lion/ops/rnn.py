"""RNN form (Theorem 3.1): both directions advance together in one loop, with one (D, E) state each.

    S_i = lambda S_{i-1} + k_i v_i^T      z_i = lambda z_{i-1} + k_i
    y_i = (q_i S_i^F + q_i S_i^B) / (q_i z_i^F + q_i z_i^B)

`lambda` is a number per head and token, or a vector with one number for each key dimension. With both directions, each
of them counts half of `q_i k_i`, so that the diagonal is counted once.

Each step takes the next `chunk_size` tokens from the left and from the right. With one token per step, the loop is the
recurrence as printed (`one_token`). Beyond the outputs, memory is the states and one row sum per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lion.ops.decay import Direction, bounded, exp_where, includes_query_decay, make_directions, scan_directions
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.full import decayed_scores, weighted_sum, with_own_keys
from lion.ops.settings import Settings
from lion.ops.tokens import EnteringState, State, Sums, Tokens, initial_state
from lion.ops.vector_scores import vector_scores

Compiler = Callable[[Callable], Callable]  # wraps the function that is called for every piece


def eager(fn: Callable) -> Callable:
    return fn


def rnn_sums(tokens: Tokens, settings: Settings, compiler: Compiler) -> Sums:
    """Compute the sums over keys (B, H, L, ..) in the sequential form."""
    if settings.direction == "both":
        bonus = tokens.bonus
        if bonus is None:
            wide = wide_dtype(tokens.k)
            bonus = torch.ones(1, 1, 1, dtype=wide, device=tokens.k.device)
        tokens = tokens._replace(bonus=bonus / 2)
    return scan(advance, tokens, settings, compiler)


def scan(step: Callable, tokens: Tokens, settings: Settings, compiler: Compiler) -> Sums:
    """Scan the tokens in every active direction, `chunk_size` tokens per step, and add up the outputs.

    A step of exactly `chunk_size` tokens runs `compiler(step)`, so that the compiled function sees one shape.
    """
    k, v = tokens.k, tokens.v
    length = k.shape[2]
    size = min(settings.chunk_size, length)
    numerator = torch.zeros_like(v, dtype=sum_dtype(v), memory_format=torch.contiguous_format)
    row_sum = None
    if settings.row_sums:
        row_sum = k.new_zeros(k.shape[:3], dtype=wide_dtype(k))
    along, states = {}, {}
    for name in scan_directions(settings.direction):
        along[name] = replace(settings, direction=name)
        states[name] = empty_state(tokens, along[name])
    for done in range(0, length, size):
        count = min(size, length - done)
        one = compiler(step) if count == size else step
        for name in along:
            start = length - done - count if name == "backward" else done
            piece = tokens.slice(start, count)
            sums, states[name] = one(piece, along[name], states[name])
            numerator[:, :, start : start + count] += sums.numerator.to(numerator.dtype)
            if row_sum is not None:
                row_sum[:, :, start : start + count] += sums.row_sum
            del piece, sums  # free this memory before the next step
    return Sums(numerator, row_sum)


def empty_state(tokens: Tokens, settings: Settings) -> EnteringState:
    """Return the state that enters a whole sequence in one direction."""
    state = initial_state(tokens.k, tokens.v)
    return EnteringState(state.S, state.z, segment_at(tokens, -1 if settings.direction == "backward" else 0))


def segment_at(tokens: Tokens, place: int) -> Tensor | None:
    """Return the segments (B,) of one token of every row."""
    if tokens.segment is None:
        return None
    return tokens.segment[:, place].contiguous()


def advance(tokens: Tokens, settings: Settings, state: EnteringState) -> tuple[Sums, EnteringState]:
    """Read and update the state by C tokens, in one direction.

    If a token's own decay applies after the state is read (the `source` convention), the state is stored already
    decayed.
    """
    tokens = tokens.masked().to(state.S.dtype)
    if tokens.q.shape[2] == 1:
        return one_token(tokens, settings, state)
    direction = direction_of(tokens, settings)
    sums = sums_among(tokens, settings, direction)
    from_start = direction.from_start()
    if tokens.segment is not None and state.segment is not None:
        other = tokens.segment != state.segment[:, None]
        from_start = from_start.masked_fill(other[:, None, :, None], 0)
    read = from_start * tokens.q  # (B, H, C, D)
    row_sum = None
    if settings.row_sums:
        row_sum = (read @ state.z[..., None]).squeeze(-1)
    return sums.plus(Sums(read @ state.S, row_sum)), after_tokens(tokens, settings, direction, state)


def sums_among(tokens: Tokens, settings: Settings, direction: Direction) -> Sums:
    """Compute the sums over the keys of these tokens alone (B, H, C, ..), in one direction."""
    q, k, segment = tokens.q, tokens.k, tokens.segment
    bonus = tokens.bonus
    if tokens.vector:
        scores = vector_scores(q, k, tokens.decays(), segment, settings, bonus is None)
    else:
        scores = decayed_scores(q, k, (direction,), segment, bonus is None)
    sums = weighted_sum(scores, tokens.v, settings)
    return with_own_keys(sums, tokens, settings)


def one_token(tokens: Tokens, settings: Settings, state: EnteringState) -> tuple[Sums, EnteringState]:
    """Compute `advance` for one token: the recurrence itself."""
    q, k, v = tokens.q, tokens.k, tokens.v
    S, z = state.S, state.z
    if tokens.segment is not None and state.segment is not None:
        other = tokens.segment != state.segment[:, None]  # (B, 1)
        S = S.masked_fill(other[:, None, :, None], 0)
        z = z.masked_fill(other[:, None], 0)
    kept = State(S, z)
    decay = torch.ones_like(z[:1, :1, :1, None])
    if tokens.log_decay is not None:
        decay = exp_where(bounded(tokens.log_decay)).mT  # (b, h, D or 1, 1)
    decayed = decayed_state(kept, decay)
    between = settings.decay_convention == "between"
    includes_query = includes_query_decay(settings.decay_convention, settings.direction)
    read = decayed if includes_query else kept
    write = decayed if includes_query or between else kept
    own = q * k
    if tokens.bonus is not None:
        own = own * tokens.bonus
    own = own.sum(-1)  # (B, H, 1)
    numerator = q @ read.S + own[..., None] * v
    row_sum = None
    if settings.row_sums:
        row_sum = (q @ read.z[..., None]).squeeze(-1) + own
    new = State(write.S + k.mT @ v, write.z + k.squeeze(2))
    if not includes_query and not between:  # source: the state is stored already decayed
        new = decayed_state(new, decay)
    return Sums(numerator, row_sum), EnteringState(new.S, new.z, leaving_segment(tokens, settings))


def decayed_state(state: State, decay: Tensor) -> State:
    """Return a state after a decay (b, h, D or 1, 1)."""
    return State(decay * state.S, decay.squeeze(-1) * state.z)


def next_state(tokens: Tokens, settings: Settings, state: EnteringState) -> EnteringState:
    """Return the state after these tokens in one direction, without their outputs."""
    tokens = tokens.masked().to(state.S.dtype)
    return after_tokens(tokens, settings, direction_of(tokens, settings), state)


def after_tokens(tokens: Tokens, settings: Settings, direction: Direction, state: EnteringState) -> EnteringState:
    kept = direction.kept().mT  # (b, h, D or 1, 1)
    last = leaving_segment(tokens, settings)
    if last is not None and state.segment is not None:
        kept = kept.masked_fill(state.segment.ne(last)[:, None, None, None], 0)
    written = written_state(tokens, direction)
    S = kept * state.S + written.S
    z = kept.squeeze(-1) * state.z + written.z
    return EnteringState(S, z, last)


def written_state(tokens: Tokens, direction: Direction) -> State:
    """Return the state after masked tokens (B, H, L, D) in one direction, if no state enters."""
    to_end = direction.to_end()
    segment = tokens.segment
    if segment is not None:
        last = segment[:, :1] if direction.reverse else segment[:, -1:]
        to_end = to_end.masked_fill((segment != last)[:, None, :, None], 0)
    write = to_end * tokens.k
    return State(write.mT @ tokens.v, write.sum(2))


def direction_of(tokens: Tokens, settings: Settings) -> Direction:
    """Return the cumulative decays of tokens in one direction."""
    return make_directions(tokens.decays(), settings.decay_convention, settings.direction)[0]


def leaving_segment(tokens: Tokens, settings: Settings) -> Tensor | None:
    """Return the segments (B,) of the state that leaves the tokens in one direction."""
    return segment_at(tokens, 0 if settings.direction == "backward" else -1)
