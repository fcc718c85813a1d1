"""Decay masks in log space: the only module that defines index conventions.

Legend: B batch (b: B or 1), H heads, L tokens, D key dim, E value dim, C chunk, N chunks; `a_k = log lambda_k <= 0`.

The mask `M_ij` is the product of the decays between tokens i and j. The *decay convention* determines which tokens
count, and the paper prints several conventions. For four tokens with decays a, b, c, d (row: query i, column: key j):

    source (Eq. 14, released code)  target (Eq. 5, Theorem 3.1)     symmetric (Table 1, M*)
    | 1    b    bc   bcd |          | 1    a    ab   abc |          | 1    b    bc   bcd |
    | a    1    c    cd  |          | b    1    b    bc  |          | b    1    c    cd  |
    | ab   b    1    d   |          | bc   c    1    c   |          | bc   c    1    d   |
    | abc  bc   c    1   |          | bcd  cd   d    1   |          | bcd  cd   d    1   |

From the key j to the query i, `source` multiplies the decays of all tokens that are left, j included and i excluded.
`target` multiplies the decays of all tokens that are reached, i included and j excluded. `symmetric` is `target` below
the diagonal and `source` above it.

With the inclusive prefix sum `P_i = a_0 + .. + a_i` and the exclusive one `X_i = P_i - a_i`, all log masks are
differences:

    below (i >= j)   source: X_i - X_j    target, symmetric: P_i - P_j
    above (i <= j)   target: X_j - X_i    source, symmetric: P_j - P_i

One direction is therefore a *cumulative decay* `t` with `M_ij = exp(t_i - t_j)`. Above the diagonal, t is the negated
prefix sum. No exponent is positive, and every exponent is masked before `exp`. A decay whose logarithm is below
`least_log_decay` is exactly 0: products of smaller decays are denormal numbers, which some processors multiply a
hundred times slower.

A fourth convention, `between` (RWKV), counts only the tokens strictly between i and j: X_i - P_j below, X_j - P_i
above. A token reads the state before the state decays and takes in the token's key. The token's own key has a separate
weight, `bonus`.

A lambda may be a vector, one number for each key dimension. The last axis of every cumulative decay has size D, or size
1 in the scalar case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.inductor import joined_differences, materialized
from lion.ops.modes import is_static, reuses_memory

DECAY_CONVENTIONS = ("source", "target", "symmetric", "between")
DIRECTIONS = ("both", "forward", "backward")
LOG_ONE = 1e-30  # as good as 0 in all sums; torch's `clamp` at 0 itself drops the gradient of a value of exactly 0
ONE_TERM_UP_TO = 512  # tokens of bfloat16; the error of their decays is then at most a rounding, 2^-8


def scan_directions(direction: str) -> list[str]:
    """Return the directions in which the tokens are scanned: "forward", "backward", or one after the other."""
    return [name for name in ("forward", "backward") if direction in (name, "both")]


def bounded(log_decay: Tensor) -> Tensor:
    """Return log decays between `log_zero` and 0 (`LOG_ONE`)."""
    return log_decay.clamp(log_zero(log_decay.dtype), LOG_ONE)


def log_zero(dtype: torch.dtype) -> float:
    """Return the log decay that counts as 0; lower values would only reduce the precision of sums."""
    return math.log(torch.finfo(dtype).tiny)


class CumulativeDecay(NamedTuple):
    """Cumulative log decays of all tokens in one direction, and the segments of the tokens.

    Attributes:
        terms: Tensors (b, H, .., L, D or 1) that add up to the sum, the first by far the largest (see `prefix_sums`).
        segment_index: Segment numbers (B, 1, .., L, 1), or None if there is only one segment.
    """

    terms: tuple[Tensor, ...]
    segment_index: Tensor | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> CumulativeDecay:
        index = self.segment_index
        return CumulativeDecay(tuple(fn(t) for t in self.terms), None if index is None else fn(index))

    def in_segment(self, segment: Tensor | None) -> CumulativeDecay:
        """Return the sum (b, H, 1, D or 1) at a point where a state of segment `segment` (B,) enters."""
        return CumulativeDecay(self.terms, None if segment is None else segment[:, None, None, None])

    def rows(self) -> CumulativeDecay:
        return self.map(lambda t: t[..., :, None, :])

    def columns(self) -> CumulativeDecay:
        return self.map(lambda t: t[..., None, :, :])


class Direction(NamedTuple):
    """Cumulative decays of one scan direction.

    Attributes:
        query: Cumulative decay of each token as a query.
        key: Cumulative decay of each token as a key.
        start: Cumulative decay before the first token of the scan (b, H, 1, D or 1).
        end: Cumulative decay after the last token of the scan (b, H, 1, D or 1).
        reverse: Whether the scan goes from right to left.
    """

    query: CumulativeDecay
    key: CumulativeDecay
    start: CumulativeDecay
    end: CumulativeDecay
    reverse: bool

    def map(self, fn: Callable[[Tensor], Tensor]) -> Direction:
        """Apply `fn` to the cumulative decays of the tokens; `start` and `end` stay unchanged."""
        return self._replace(query=self.query.map(fn), key=self.key.map(fn))

    def with_queries(self, count: int) -> Direction:
        """Return the direction with the first `count` tokens as queries, and all as keys."""
        return self._replace(query=self.query.map(lambda t: t[..., :count, :]))


def log_decay_between(query: CumulativeDecay, key: CumulativeDecay) -> Tensor:
    """Return `log M` of broadcastable queries and keys that precede them, up to rounding errors.

    Without gradients all terms are added to one result in place.
    """
    difference = query.terms[0] - key.terms[0]
    for q, k in zip(query.terms[1:], key.terms[1:]):
        difference = difference.add_(q - k) if reuses_memory() else difference + (q - k)
    return difference


def at_most_0(log_decay: Tensor) -> Tensor:
    """Return log decays of which those rounded above 0 are cut off; their gradients are not."""
    return log_decay.clamp_(max=0) if reuses_memory() else log_decay - log_decay.detach().clamp(min=0)


def same_segment(query: CumulativeDecay, key: CumulativeDecay) -> Tensor | None:
    return None if query.segment_index is None else query.segment_index == key.segment_index


def least_log_decay(dtype: torch.dtype, factors: int = 1) -> float:
    """Return the logarithm of the smallest decay that is not 0, where `factors` decays are multiplied with each other.

    The product of `factors` such decays is three quarters of the way to the smallest normal number (e^-65 in float32).
    Scores, values and gradients multiplied by it are therefore normal numbers, too. This is far below the values that a
    sum of the dtype can distinguish from 0.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny) / factors


def exp_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """Return `exp(log_decay)`, or 0 below `least_log_decay` and where a mask is False.

    Without gradients the result reuses the memory of `log_decay`.
    """
    return exponential(log_where(log_decay, *masks, factors=factors))


def exponential(log_decay: Tensor) -> Tensor:
    return log_decay.exp_() if reuses_memory() else log_decay.exp()


def log_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """Return log decays, or -inf below `least_log_decay` and where a mask is False.

    Masks come before `exp`, so that gradients stay finite. Without gradients the result is `log_decay` itself.
    """
    masks, least = tuple(~mask for mask in masks if mask is not None), least_log_decay(log_decay.dtype, factors)
    if reuses_memory():
        F.threshold_(log_decay, least, -torch.inf)
        for excluded in masks:
            log_decay.masked_fill_(excluded, -torch.inf)
        return log_decay
    log_decay = log_decay + torch.where(log_decay.detach() <= least, -torch.inf, 0.0)  # no mask stored for backward
    for excluded in masks:
        log_decay = log_decay.masked_fill(excluded, -torch.inf)
    return log_decay


def decay(query: CumulativeDecay, key: CumulativeDecay, allowed: Tensor | None = None) -> Tensor:
    """Return the decay from the key to the query; 0 across segments and where `allowed` is False."""
    return exp_where(at_most_0(log_decay_between(query, key)), same_segment(query, key), allowed)


def prefix_sums(log_decay: Tensor, one_term: bool = False) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute inclusive and exclusive prefix sums over tokens (.., L, D or 1), as terms whose differences are precise.

    Over a long or steep sequence, the error of a float32 sum is far larger than the small differences between its
    values. The sum is therefore computed in float64 and kept as float32 (high, low) pairs. For float64 decays, the
    second term holds the rounding errors of their sum. Gradients flow through the first term. With `one_term`, there is
    no second one.

    Values above 0 count as 0, because the forms would disagree on a lambda above 1.
    """
    exact, shared = log_decay.dtype == torch.float64, log_decay.stride(-2) == 0
    if shared and not exact:
        total = multiples(log_decay)
    else:  # bounded after padding, in the kernel of the sum
        padded = bounded(F.pad(log_decay, (0, 0, 1, 0)))
        total = padded.double().cumsum(-2)  # (.., L + 1, D or 1), before and after every token
    if exact:
        with torch.no_grad():
            found = total, F.pad((padded[..., 1:, :] - total.diff(dim=-2)).cumsum(-2), (0, 0, 1, 0))
    else:
        found = two_terms(total)
    terms = [materialized(t) for t in found[: 1 if one_term else 2]]
    return tuple(t[..., 1:, :] for t in terms), tuple(t[..., :-1, :] for t in terms)


def two_terms(total: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 sums as float32 numbers and their rounding errors, through which no gradient flows."""
    high = total.float()
    return high, (total.detach() - high.detach()).float()


def multiples(log_decay: Tensor) -> Tensor:
    """Return the float64 sums (.., L + 1, D or 1) of a decay that all tokens share (Lion-D).

    The sums are multiples of the decay, counted from the middle token. The gradient adds up each token's gradient times
    its position, rounding errors included, and positions counted from the middle are half as large.
    """
    length = log_decay.shape[-2]
    places = torch.arange(length + 1, device=log_decay.device, dtype=torch.float64)[:, None] - length // 2
    return bounded(log_decay[..., :1, :]).double() * places


def query_and_key(decay_convention: str, direction: str, inclusive: _Terms, exclusive: _Terms) -> tuple[_Terms, _Terms]:
    """Return the prefix sums along the scan that tokens have as queries, and those that they have as keys."""
    if decay_convention == "between":
        return exclusive, inclusive
    terms = inclusive if includes_query_decay(decay_convention, direction) else exclusive
    return terms, terms


def includes_query_decay(decay_convention: str, direction: str) -> bool:
    """Return whether M_ij along a scan includes the decay of query i in place of that of key j."""
    return decay_convention == "target" or (decay_convention == "symmetric" and direction == "forward")


def make_directions(
    log_decay: Tensor,
    segment_index: Tensor | None,
    *,
    decay_convention: str,
    direction: str,
    dtype: torch.dtype | None = None,
) -> tuple[Direction, ...]:
    """Return the active directions, forward first.

    Args:
        log_decay: Decays (b, H, .., L, D or 1), float32 or float64.
        segment_index: Segment numbers (B, .., L), non-decreasing, or None.
        dtype: Dtype of the tokens. The sums of a short sequence in bfloat16 have one term: half of the work for a pair.
    """
    length = log_decay.shape[-2]
    narrow = dtype == torch.bfloat16 and log_decay.dtype == torch.float32
    one_term = narrow and is_static(length) and length <= ONE_TERM_UP_TO
    inclusive, exclusive = prefix_sums(log_decay, one_term)
    index = None if segment_index is None else segment_index[:, None, ..., None]
    made = []
    for name in scan_directions(direction):
        reverse = name == "backward"
        if reverse:  # up to a constant, an inclusive sum from the right is minus the exclusive sum from the left
            inclusive, exclusive = (tuple(-t for t in terms) for terms in (exclusive, inclusive))
        query, key = query_and_key(decay_convention, name, inclusive, exclusive)
        first, last = CumulativeDecay(exclusive, index), CumulativeDecay(inclusive, index)
        ends = (first.map(lambda t: t[..., :1, :]), last.map(lambda t: t[..., -1:, :]))
        if reverse:
            ends = (first.map(lambda t: t[..., -1:, :]), last.map(lambda t: t[..., :1, :]))
        made.append(Direction(CumulativeDecay(query, index), CumulativeDecay(key, index), *ends, reverse))
    return tuple(made)


def pad_with_last(t: Tensor, padding: int) -> Tensor:
    """Repeat the last of the cumulative decays (.., L, D) for `padding` more tokens, which do not decay."""
    length = t.shape[-2]
    known = torch.arange(length + padding, device=t.device)[:, None] < length  # `expand` would add a guard on size 1
    return torch.where(known, F.pad(t, (0, 0, 0, padding)), t[..., -1:, :])


def decay_mask(
    directions: tuple[Direction, ...],
    include_diagonal: bool = True,
    keys: slice = slice(None),
    positions: Tensor | None = None,
) -> Tensor:
    """Return the mask M of Eq. 14 and 30, (b, H, .., L, L', D or 1), for all L' tokens or the first L as queries.

    Args:
        include_diagonal: Whether the diagonal is 1; otherwise it is 0.
        keys: Columns to compute, by default all.
        positions: Positions (L',) of the tokens in the scan, if the scan does not go from left to right.
    """
    return exponential(log_decay_mask(directions, include_diagonal, keys, positions))


def log_decay_mask(
    directions: tuple[Direction, ...],
    include_diagonal: bool = True,
    keys: slice = slice(None),
    positions: Tensor | None = None,
) -> Tensor:
    """Return the logarithm of `decay_mask`, -inf where the mask is 0."""
    queries, terms = directions[0].query.terms[0].shape[-2], directions[0].key.terms[0]
    if positions is None:
        positions = torch.arange(terms.shape[-2], device=terms.device, dtype=torch.int32)
    i, j = positions[:queries, None, None], positions[keys, None]
    pairs = [(d.query.rows(), d.key.map(lambda t: t[..., keys, :]).columns()) for d in directions]
    if len(directions) == 1:
        earlier = j > i if directions[0].reverse else j < i
        allowed = earlier | (i == j) if include_diagonal else earlier
        return log_where(at_most_0(log_decay_between(*pairs[0])), same_segment(*pairs[0]), allowed)
    if len(pairs[0][0].terms) == 1:
        log_mask = joined_differences(i >= j, *(c.terms[0] for pair in pairs for c in pair))
    else:
        log_mask = torch.where(i >= j, log_decay_between(*pairs[0]), log_decay_between(*pairs[1]))
    return log_where(at_most_0(log_mask), same_segment(*pairs[0]), None if include_diagonal else i != j)


_Terms = tuple[Tensor, ...]
