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

from typing import Any

import torch
from torch import Tensor

from lion.ops.arguments import Gates, check_call, no_autocast
from lion.ops.chunk import mix
from lion.ops.decay import Direction, bounded, decay_mask, make_directions
from lion.ops.delta import delta_sums
from lion.ops.dtypes import wide_dtype
from lion.ops.exchange import Part
from lion.ops.forms import Scores, prepare, sums_of
from lion.ops.rnn import written_state
from lion.ops.scale import normalized
from lion.ops.segments import SegmentIndex
from lion.ops.settings import DEFAULTS, Settings
from lion.ops.tokens import State, Sums


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
    gates, settings = check_call(q, k, v, gates, settings, fields)
    with no_autocast(q):
        sums = sums_of_part(q, k, v, gates._replace(prefix=None), part, valid, segments, settings)
        return normalized(sums, settings, q.shape[-1], gates.floor).to(v.dtype)


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
) -> Sums:
    """Compute `linear_attention_parts` of rows whose tokens are split over the processes of a group.

    Arguments and errors are those of `split_attention`, without the gates `prefix` and `floor`.

    Returns:
        The numerator (B, H, L, E) and the row sum (B, H, L) of the tokens of this process, see
        `linear_attention_parts`.
    """
    gates, settings = check_call(q, k, v, gates, settings, fields, prefix=False)
    if gates.floor is not None:
        raise ValueError("floor: split_attention_parts does not divide")
    with no_autocast(q):
        return sums_of_part(q, k, v, gates, part, valid, segments, settings)


def sums_of_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    part: Part,
    valid: Tensor | None,
    segments: SegmentIndex | None,
    settings: Settings,
) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of checked arguments."""
    if settings.dropout_p:
        raise ValueError("dropout_p: scores between parts are not computed, so they cannot be dropped")
    scores, of_rows = prepare(q, k, v, gates, valid, part.numbered(segments), settings)
    if gates.delta:
        return delta_sums(scores.tokens, settings, scores.form, part)
    return split_sums(scores, of_rows, part)


def split_sums(scores: Scores, of_rows: Scores | None, part: Part) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of a part, with the states that enter it.

    `of_rows` are the scores of the row sums, if they differ from those of the numerator.
    """
    sets = [scores] if of_rows is None else [scores, of_rows]
    sets = [each._replace(tokens=each.tokens.masked()) for each in sets]
    directions = [directions_of(each) for each in sets]
    leaving: list[Tensor] = []
    for each, several in zip(sets, directions):
        for direction in several:
            leaving.extend(leaving_state(each, direction))
    log_decay = sets[0].tokens.decays()
    finish = part.start(bounded(log_decay).sum(-2, keepdim=True), *leaving)
    sums = [sums_of(each) for each in sets]
    log_decay, *gathered = finish()
    log_decay = log_decay.squeeze(-2).movedim(0, 2)  # (b, H, P, D or 1), of all parts
    states = iter(gathered)
    for i, each in enumerate(sets):
        decays = log_decay
        if each.tokens.log_decay is None:
            decays = torch.zeros_like(log_decay[..., :1])
        for direction in directions[i]:
            state = State(next(states), next(states))
            sums[i] = sums[i].plus(read_entering(each, direction, decays, state, part))
    return Sums(sums[0].numerator, sums[-1].row_sum)


def directions_of(scores: Scores) -> tuple[Direction, ...]:
    tokens, settings = scores.tokens, scores.settings
    return make_directions(tokens.decays(), settings.decay_convention, settings.direction)


def leaving_state(scores: Scores, direction: Direction) -> State:
    """Return the state that leaves a part, without an entering state; z is empty if there are no row sums."""
    tokens = scores.tokens
    state = written_state(tokens.to(wide_dtype(tokens.k)), direction)
    if scores.settings.row_sums:
        return state
    return State(state.S, state.z[..., :0])


def read_entering(scores: Scores, direction: Direction, log_decay: Tensor, states: State, part: Part) -> Sums:
    """Compute what the tokens of a part read from the state that enters it in one direction.

    Args:
        log_decay: Log decays of all parts (b, H, P, D or 1).
        states: States that leave all parts, S (P, B, H, D, E) and z (P, B, H, D).
    """
    tokens = scores.tokens
    segment = part.entering_segment(direction.reverse)
    weights = border_decays(log_decay, direction.reverse, segment, part)
    from_start = direction.from_start()
    if segment is not None and tokens.segment is not None:
        other = tokens.segment.ne(segment[:, None])
        from_start = from_start.masked_fill(other[:, None, :, None], 0)
    q = from_start * tokens.q  # (B, H, L, D)
    S = mix(weights, states.S.movedim(0, 2)).squeeze(2)  # (B, H, D, E)
    numerator = q.to(tokens.v.dtype) @ S.to(tokens.v.dtype)
    if not scores.settings.row_sums:
        return Sums(numerator, None)
    z = mix(weights, states.z.movedim(0, 2)[..., None]).squeeze(2)  # (B, H, D, 1)
    return Sums(numerator, (q @ z).squeeze(-1))


def border_decays(log_decay: Tensor, reverse: bool, segment: Tensor | None, part: Part) -> Tensor:
    """Return the decays (b, H, 1, P, D or 1) of the states of all parts up to the border where this part is entered.

    Parts that the scan visits later have the decay 0, and so do the states of other segments than `segment` (B,).
    """
    directions = make_directions(log_decay, "between", "backward" if reverse else "forward")
    mask = decay_mask(directions, include_diagonal=False)[..., part.rank : part.rank + 1, :, :]
    if segment is None:
        return mask
    left = part.first if reverse else part.last  # (B, P), segments of the states that leave
    if left is None:
        return mask
    return mask.masked_fill(left.ne(segment[:, None])[:, None, None, :, None], 0)
