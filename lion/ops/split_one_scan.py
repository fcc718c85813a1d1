"""LightNet's attention of rows whose tokens are split over processes: one exchange of sums, whatever the length.

Each process computes the largest key, the sum of the weights and the state of its own tokens (`RunningSoftmax`). One
gather exchanges them. To a process, the tokens of all others in its sequence are one more key, the logarithm of their
sum of weights, with a state in place of a value. With segments, the sequence that enters a part on the left and the one
that leaves it on the right may differ, and each has sums of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.arguments import Gates, check_gates, check_tokens, no_autocast
from lion.ops.decay import exp_where
from lion.ops.dtypes import sum_dtype
from lion.ops.exchange import Part
from lion.ops.key_softmax import (
    RunningSoftmax,
    advance,
    divisor,
    finite,
    initial_state,
    masked_keys,
    normalised,
    read,
)
from lion.ops.one_scan import by_row, segment_softmax, weighted
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import CHUNK_SIZE, Settings
from lion.ops.tokens import Tokens, mask_tokens


def split_one_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    part: Part,
    angles: Tensor | None = None,
    valid: Tensor | None = None,
    segments: SegmentIndex | None = None,
    chunk_size: int = CHUNK_SIZE,
    feature_map: str | None = None,
) -> Tensor:
    """Compute `one_scan_attention` of rows whose tokens are split over the processes of a group.

    Arguments, outputs and errors are those of `split_attention` and `one_scan_attention`.
    """
    check_tokens(q, k, v)
    check_gates(q, Gates(angles=angles), Settings(chunk_size=chunk_size, normalize="none"))
    with no_autocast(q):
        masks = prepared(q, valid, part.numbered(segments))
        segment = masks.index
        tokens = Tokens(q, k, v, valid=masks.valid, segment=segment, feature_map=feature_map, angles=by_row(angles))
        first, last = border_sequences(segment)
        left, right = entering(tokens, part)
        keys = torch.cat([log_sum(left), masked_keys(tokens, left.s.dtype), log_sum(right)], 2)
        if segment is None:
            number = torch.zeros_like(q[:, 0, :, 0], dtype=torch.long)
        else:
            number = segment - segment[:, :1]
        number = torch.cat([number[:, :1], number, number[:, -1:]], 1)
        of_left, weights, of_right = segment_softmax(keys, number).split([1, q.shape[2], 1], 2)
        y = weighted(tokens, weights, chunk_size)
        y = y + read_entering(tokens, left, of_left, first).to(y.dtype)
        y = y + read_entering(tokens, right, of_right, last).to(y.dtype)
        return y.to(v.dtype)


def border_sequences(segment: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return masks (B, L) of the sequences of the first and of the last token; None if all tokens are in one."""
    if segment is None:
        return None, None
    return segment == segment[:, :1], segment == segment[:, -1:]


def read_entering(tokens: Tokens, state: RunningSoftmax, share: Tensor, sequence: Tensor | None) -> Tensor:
    """Return what the tokens of a sequence (B, L) read from other parts, whose share of the keys is (B, H, 1, D)."""
    S = state.S * twice(share, state.S.shape[-2]).mT
    y = read(normalised(state._replace(S=S)).to(sum_dtype(tokens.v)), tokens)
    return mask_tokens(y, sequence)


def log_sum_outside(k: Tensor, segments: SegmentIndex | None, part: Part, reverse: bool) -> Tensor:
    """Return `log sum exp(k)` (B, H, D) over tokens of earlier parts, for keys k (B, H, L, D) of this part.

    These tokens are in the sequence of this part's first token; with `reverse`, they are of later parts, in the
    sequence of its last token. Without such tokens, the result is minus infinity.
    """
    masks = prepared(k, None, part.numbered(segments))
    tokens = Tokens(k, k, k[..., :0], valid=masks.valid, segment=masks.index)
    before, after = entering(tokens, part)
    state = after if reverse else before
    return log_sum(state).squeeze(2)


def entering(tokens: Tokens, part: Part) -> tuple[RunningSoftmax, RunningSoftmax]:
    """Return the sums of earlier parts in the sequence of the first token, and of later parts in that of the last."""
    before, after = part.outside(tokens.q.device)
    first, last = border_sequences(tokens.segment)
    if first is None or last is None or tokens.valid is None:
        m, s, S = part.gather(*own_sums(tokens, tokens.valid))
        every = RunningSoftmax(m, s, S)
        return added(every, before), added(every, after)
    starts = own_sums(tokens, tokens.valid & first)
    stops = own_sums(tokens, tokens.valid & last)
    m, s, S, last_m, last_s, last_S = part.gather(*starts, *stops)
    return added(RunningSoftmax(last_m, last_s, last_S), before), added(RunningSoftmax(m, s, S), after)


def own_sums(tokens: Tokens, valid: Tensor | None) -> RunningSoftmax:
    """Return the sums over the valid tokens of this part."""
    return advance(initial_state(tokens), tokens._replace(valid=valid))


def added(states: RunningSoftmax, taken: Tensor) -> RunningSoftmax:
    """Add up the sums (P, B, H, ..) of the parts that are `taken` (P, B or 1)."""
    m = states.m.masked_fill(~taken[:, :, None, None, None], -torch.inf)
    top = m.amax(0)
    kept = exp_where(m - finite(top))  # (P, B, H, 1, D)
    return RunningSoftmax(top, (kept * states.s).sum(0), (twice(kept, states.S.shape[-2]).mT * states.S).sum(0))


def log_sum(state: RunningSoftmax) -> Tensor:
    """Return the logarithm of the sum of the weights `exp(k)`, (B, H, 1, D); minus infinity without tokens."""
    return (finite(state.m) + divisor(state.s).log()).masked_fill(state.s == 0, -torch.inf)


def twice(x: Tensor, width: int) -> Tensor:
    """Return x (.., 1, D) repeated to `width`, D or 2 D, for the two states of rotated keys."""
    return x if x.shape[-1] == width else torch.cat([x, x], -1)
