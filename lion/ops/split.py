"""Linear attention of rows whose tokens are split over processes, with one exchange of states for both directions.

Linear attention is linear in its state. Each process computes, from empty states, its outputs and, in each direction,
the state that leaves its part and the total decay of the part. One gather exchanges these, whatever the length. The
states of all earlier (later) parts, decayed to the border, are the state that enters from the left (right):

    S_r = sum_{p < r} (prod_{p < s < r} lambda_s) U_p            y_i += (q_i under the decays from the border to i) S_r

The exchange overlaps with the outputs of the own part, which do not depend on it. Forward and backward, a process sends
`B H (2 D E + 2 D + 1)` numbers in both directions: S, the row sums' z, and one decay (D of them for a vector decay).

A delta rule is a map of states, affine instead of a decay, so `D (D + E)` numbers per head and direction are exchanged
(`lion.ops.delta`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lion.ops.api import row_scale
from lion.ops.arguments import Gates, check_gates, check_tokens, no_autocast, take_gates
from lion.ops.chunk import mix, strictly_before
from lion.ops.decay import Direction, bounded, decay, make_directions
from lion.ops.delta import delta_parts
from lion.ops.exchange import Part
from lion.ops.rnn import written
from lion.ops.scores import ScoreSet, finished, score_parts, score_sets
from lion.ops.segments import SegmentIndex
from lion.ops.settings import DEFAULTS, Settings, with_fields
from lion.ops.tokens import State

Parts = tuple[Tensor, Tensor | None]


def split_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    part: Part,
    valid: Tensor | None = None,
    segments: SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> Tensor:
    """Compute `linear_attention` of rows whose tokens are split over the processes of a group.

    Every process calls this function with its own tokens, at least one. Parts may differ in length. The result is that
    of `linear_attention` on whole rows, in every form and direction, and so are the gradients.

    Args:
        q, k, v, gates, settings, fields: As in `linear_attention`, for the tokens of this process. Angles are those of
            the positions in the whole row.
        part: The part that this process holds, with the segments at its borders if there are segments.
        valid: Boolean (B, L), False for padding.
        segments: Segments of the whole rows, cut to the tokens of this process (`SegmentIndex.part`).

    Returns:
        Outputs (B, H, L, E) of the tokens of this process, in the dtype of `v`.

    Raises:
        ValueError: As in `linear_attention`; dropout of scores; or segments that are not numbered over whole rows.
    """
    gates = take_gates(gates, fields)
    settings = with_fields(settings, fields, unused=("scan_merge",))
    check_tokens(q, k, v)
    check_gates(q, gates, settings)
    given = gates._replace(floor=None, prefix=None)
    parts = split_attention_parts(q, k, v, given, part=part, valid=valid, segments=segments, settings=settings)
    with no_autocast(q):
        scale = functools.partial(row_scale, settings=settings, dim=q.shape[-1], floor=gates.floor)
        return finished(parts, scale)[0].to(v.dtype)


def split_attention_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    part: Part,
    valid: Tensor | None = None,
    segments: SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> Parts:
    """Compute `linear_attention_parts` of rows whose tokens are split over the processes of a group.

    Arguments and errors are those of `split_attention`, without the gates `prefix` and `floor`.

    Returns:
        The numerator (B, H, L, E) and the row sum (B, H, L) of the tokens of this process, see
        `linear_attention_parts`.
    """
    gates = take_gates(gates, fields, prefix=False)
    settings = with_fields(settings, fields, unused=("scan_merge",))
    check_tokens(q, k, v)
    check_gates(q, gates, settings)
    if gates.floor is not None:
        raise ValueError("floor: split_attention_parts does not divide")
    if settings.dropout_p:
        raise ValueError("dropout_p: scores between parts are not computed, so they cannot be dropped")
    with no_autocast(q):
        scores, sums = score_sets(q, k, v, gates, valid, part.numbered(segments), settings)
        if gates.delta:
            return delta_parts(scores.tokens, scores.how, part=part)
        return split_parts(scores, sums, part)


def split_parts(scores: ScoreSet, sums: ScoreSet | None, part: Part) -> Parts:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) of a part, with the states that enter it."""
    sets = [each._replace(tokens=each.tokens.masked()) for each in (scores, sums) if each is not None]
    directions = [directions_of(each) for each in sets]
    leaving = [leaving_state(each, one) for each, several in zip(sets, directions) for one in several]
    finish = part.start(total_decay(sets[0]), *(x for state in leaving for x in state))
    parts = [score_parts(each) for each in sets]
    log_decay, *states = finish()
    log_decay, states = log_decay.squeeze(-2).movedim(0, 2), iter(states)  # (b, H, P, D or 1)
    for i, each in enumerate(sets):
        decays = torch.zeros_like(log_decay[..., :1]) if each.no_decay else log_decay
        for direction in directions[i]:
            more, row = read(each, direction, decays, State(next(states), next(states)), part)
            parts[i] = parts[i][0] + more, parts[i][1] + row if each.how.rowsum else None
    return parts[0][0], parts[-1][1]


def directions_of(scores: ScoreSet) -> tuple[Direction, ...]:
    tokens, how = scores.tokens, scores.how
    return make_directions(
        tokens.gate, tokens.segment_index, decay_convention=how.decay_convention, direction=how.direction
    )


def total_decay(scores: ScoreSet) -> Tensor:
    """Return the log decay (b, H, 1, D or 1) of all tokens of a part."""
    return bounded(scores.tokens.gate).sum(-2, keepdim=True)


def leaving_state(scores: ScoreSet, direction: Direction) -> State:
    """Return the state that leaves a part, without an entering state; z is empty if there are no row sums."""
    tokens = scores.tokens
    _, k, v = tokens.to(tokens.gate.dtype)[:3]
    state = written(direction, k, v)
    return state if scores.how.rowsum else State(state.S, state.z[..., :0])


def read(scores: ScoreSet, direction: Direction, log_decay: Tensor, states: State, part: Part) -> Parts:
    """Compute what the tokens of a part read from the state that enters it in one direction.

    Args:
        log_decay: Log decays of all parts (b, H, P, D or 1).
        states: States that leave all parts, S (P, B, H, D, E) and z (P, B, H, D).

    Returns:
        Their contribution to the numerator (B, H, L, E) and to the row sum (B, H, L).
    """
    q, _, v = scores.tokens[:3]
    weights, segment = border(log_decay, direction.reverse, part)
    q = decay(direction.query, direction.start.in_segment(segment)) * q  # (B, H, L, D)
    S = mix(weights, states.S.movedim(0, 2)).squeeze(2)  # (B, H, D, E)
    y = q.to(v.dtype) @ S.to(v.dtype)
    if not scores.how.rowsum:
        return y, None
    z = mix(weights, states.z.movedim(0, 2)[..., None]).squeeze(2)  # (B, H, D, 1)
    return y, (q @ z).squeeze(-1)


def border(log_decay: Tensor, reverse: bool, part: Part) -> tuple[Tensor, Tensor | None]:
    """Return the decays (.., 1, P, D or 1) of the states of all parts up to the border where this part is entered.

    Parts that the scan visits later have the decay 0. The second result is the segment (B,) of the state that enters.
    """
    name = "backward" if reverse else "forward"
    (scan,) = make_directions(log_decay, None, decay_convention="between", direction=name)
    here, there = scan.query.map(lambda t: t[..., part.rank : part.rank + 1, :]).rows(), scan.key.columns()
    segment = part.entering_segment(reverse)
    if segment is not None:
        left = part.first if reverse else part.last  # (B, P), segments of the states that leave
        here = here._replace(segment_index=segment[:, None, None, None, None])
        there = there._replace(segment_index=left[:, None, None, :, None])
    before = strictly_before(part.count, reverse, log_decay.device)[part.rank]
    return decay(here, there, before), segment
