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
from lion.ops.exchange import Part
from lion.ops.key_softmax import (
    RunningSoftmax,
    advance,
    divisor,
    finite,
    initial_state,
    masked,
    masked_keys,
    normalised,
    read,
)
from lion.ops.one_scan import segment_softmax, turning, weighted
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import Settings
from lion.ops.tokens import TokenBlock


def split_one_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    part: Part,
    angles: Tensor | None = None,
    valid: Tensor | None = None,
    segments: SegmentIndex | None = None,
    chunk_size: int = 64,
    feature_map: str | None = None,
) -> Tensor:
    """Compute `one_scan_attention` of rows whose tokens are split over the processes of a group.

    Arguments, outputs and errors are those of `split_attention` and `one_scan_attention`.
    """
    check_tokens(q, k, v)
    check_gates(q, Gates(None, angles=angles), Settings(chunk_size=chunk_size, normalize="none"))
    with no_autocast(q):
        index, valid = prepared(q, valid, part.numbered(segments))
        tokens = TokenBlock(q, k, v, turning(q, angles), valid, index, feature_map)
        ends = (None, None) if index is None else (index == index[:, :1], index == index[:, -1:])
        left, right = entering(tokens, ends, part)
        keys = torch.cat([log_sum(left), masked_keys(tokens, left.s.dtype), log_sum(right)], 2)
        number = torch.zeros_like(q[:, 0, :, 0], dtype=torch.long) if index is None else index - index[:, :1]
        number = torch.cat([number[:, :1], number, number[:, -1:]], 1)
        of_left, weights, of_right = segment_softmax(keys, number).split([1, q.shape[2], 1], 2)
        y = weighted(tokens, weights, chunk_size)
        for state, share, end in zip((left, right), (of_left, of_right), ends):
            S = normalised(state._replace(S=state.S * twice(share, state.S.shape[-2]).mT)).to(y.dtype)
            y = y + masked(read(S, tokens).to(y.dtype), end)
        return y.to(v.dtype)


def log_sum_outside(k: Tensor, segments: SegmentIndex | None, part: Part, reverse: bool) -> Tensor:
    """Return `log sum exp(k)` (B, H, D) over tokens of earlier parts, for keys k (B, H, L, D) of this part.

    These tokens are in the sequence of this part's first token; with `reverse`, they are of later parts, in the
    sequence of its last token. Without such tokens, the result is minus infinity.
    """
    index, valid = prepared(k, None, part.numbered(segments))
    ends = (None, None) if index is None else (index == index[:, :1], index == index[:, -1:])
    tokens = TokenBlock(k, k, k[..., :0], turning(k, None), valid, index)
    return log_sum(entering(tokens, ends, part)[1 if reverse else 0]).squeeze(2)


def entering(
    tokens: TokenBlock, ends: tuple[Tensor | None, Tensor | None], part: Part
) -> tuple[RunningSoftmax, RunningSoftmax]:
    """Return the sums of earlier parts in the sequence of the first token, and of later parts in that of the last one.

    `ends` are masks (B, L) of these two sequences in this part; None if all tokens are in one sequence.
    """
    valid = tokens.valid
    masks = [valid] if ends[0] is None else [valid & end for end in ends]
    own = [advance(initial_state(tokens), tokens._replace(valid=mask)) for mask in masks]
    every = part.gather(*(x for state in own for x in state))
    starts, stops = RunningSoftmax(*every[:3]), RunningSoftmax(*every[-3:])
    before, after = part.outside(tokens.q.device)
    return added(stops, before), added(starts, after)


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
