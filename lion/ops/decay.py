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
prefix sum. The first axis T of a cumulative decay holds its terms: one, or two whose sum it is (`prefix_sums`). No
exponent is positive, and every exponent is masked before `exp`. A decay whose logarithm is below `least_log_decay` is
exactly 0: products of smaller decays are denormal numbers, which some processors multiply a hundred times slower.

A fourth convention, `between` (RWKV), counts only the tokens strictly between i and j: X_i - P_j below, X_j - P_i
above. A token reads the state before the state decays and takes in the token's key. The token's own key has a separate
weight, `bonus`.

A lambda may be a vector, one number for each key dimension. The last axis of every cumulative decay has size D, or size
1 in the scalar case.
"""

from __future__ import annotations

import math
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


class Direction(NamedTuple):
    """Cumulative decays t of one scan: `M_ij = exp(query_i - key_j)` for a query i and a key j before it.

    Attributes:
        query: t of each token as a query (T, b, H, .., L, D or 1).
        key: t of each token as a key (T, b, H, .., L, D or 1).
        start: t before the first token of the scan (T, b, H, .., 1, D or 1).
        end: t after the last token of the scan (T, b, H, .., 1, D or 1).
        reverse: Whether the scan goes from right to left.
    """

    query: Tensor
    key: Tensor
    start: Tensor
    end: Tensor
    reverse: bool

    def from_start(self) -> Tensor:
        """Return the decays from the start of the scan to each query, (b, H, .., L, D or 1)."""
        return decay_between(self.query, self.start)

    def to_end(self) -> Tensor:
        """Return the decays from each key to the end of the scan, (b, H, .., L, D or 1)."""
        return decay_between(self.end, self.key)

    def kept(self) -> Tensor:
        """Return the decay over all tokens, (b, H, .., 1, D or 1)."""
        return decay_between(self.end, self.start)


def scan_directions(direction: str) -> tuple[str, ...]:
    """Return the directions in which the tokens are scanned: "forward", "backward", or one after the other."""
    if direction == "both":
        return ("forward", "backward")
    return (direction,)


def make_directions(
    log_decay: Tensor, decay_convention: str, direction: str, dtype: torch.dtype | None = None
) -> tuple[Direction, ...]:
    """Return the cumulative decays of the active directions, forward first.

    Args:
        log_decay: Decays (b, H, .., L, D or 1), float32 or float64.
        decay_convention: Entry of `DECAY_CONVENTIONS`.
        direction: Entry of `DIRECTIONS`.
        dtype: Dtype of the tokens. The sums of a short sequence in bfloat16 have one term: half of the work for a pair.
    """
    length = log_decay.shape[-2]
    narrow = dtype == torch.bfloat16 and log_decay.dtype == torch.float32
    one_term = narrow and is_static(length) and length <= ONE_TERM_UP_TO
    t = prefix_sums(log_decay, one_term)
    made = []
    if direction != "backward":
        made.append(along_scan(t, decay_convention, "forward"))
    if direction != "forward":
        made.append(along_scan(-t, decay_convention, "backward"))
    return tuple(made)


def along_scan(t: Tensor, decay_convention: str, direction: str) -> Direction:
    """Return the direction with the cumulative decays t (T, .., L + 1, D or 1) at the borders of tokens.

    Above the diagonal, t is the negated prefix sum, and the border before a token is the one on its right.
    """
    reverse = direction == "backward"
    before, after = t[..., :-1, :], t[..., 1:, :]
    start, end = t[..., :1, :], t[..., -1:, :]
    if reverse:
        before, after = after, before
        start, end = end, start
    if decay_convention == "between":
        return Direction(query=before, key=after, start=start, end=end, reverse=reverse)
    if includes_query_decay(decay_convention, direction):
        return Direction(query=after, key=after, start=start, end=end, reverse=reverse)
    return Direction(query=before, key=before, start=start, end=end, reverse=reverse)


def includes_query_decay(decay_convention: str, direction: str) -> bool:
    """Return whether M_ij along a scan includes the decay of query i in place of that of key j."""
    return decay_convention == "target" or (decay_convention == "symmetric" and direction == "forward")


def prefix_sums(log_decay: Tensor, one_term: bool = False) -> Tensor:
    """Compute prefix sums of decays (.., L, D or 1) before and after every token, (T, .., L + 1, D or 1).

    Over a long or steep sequence, the error of a float32 sum is far larger than the small differences between its
    values. The sum is therefore computed in float64 and kept as float32 (high, low) pairs. For float64 decays, the
    second term holds the rounding errors of their sum. Gradients flow through the first term. With `one_term`, there is
    no second one.

    Values above 0 count as 0, because the forms would disagree on a lambda above 1.
    """
    if log_decay.dtype == torch.float64:
        log_decay = bounded(F.pad(log_decay, (0, 0, 1, 0)))
        high = log_decay.cumsum(-2)
        with torch.no_grad():
            errors = log_decay[..., 1:, :] - high.diff(dim=-2)
            low = F.pad(errors.cumsum(-2), (0, 0, 1, 0))
        return torch.stack([high, low])
    if log_decay.stride(-2) == 0:
        total = multiples(log_decay)
    else:
        total = bounded(F.pad(log_decay, (0, 0, 1, 0))).double().cumsum(-2)  # bounded after padding: one kernel
    if one_term:
        return materialized(total.float()[None])
    return materialized(torch.stack(two_terms(total)))


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


def bounded(log_decay: Tensor) -> Tensor:
    """Return log decays between `log_zero` and 0 (`LOG_ONE`)."""
    return log_decay.clamp(log_zero(log_decay.dtype), LOG_ONE)


def log_zero(dtype: torch.dtype) -> float:
    """Return the log decay that counts as 0; lower values would only reduce the precision of sums."""
    return math.log(torch.finfo(dtype).tiny)


def least_log_decay(dtype: torch.dtype, factors: int = 1) -> float:
    """Return the logarithm of the smallest decay that is not 0, where `factors` decays are multiplied with each other.

    The product of `factors` such decays is three quarters of the way to the smallest normal number (e^-65 in float32).
    Scores, values and gradients multiplied by it are therefore normal numbers, too. This is far below the values that a
    sum of the dtype can distinguish from 0.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny) / factors


def difference(query: Tensor, key: Tensor) -> Tensor:
    """Return `log M` of cumulative decays (T, ..) of queries and of keys before them, up to rounding errors.

    Without gradients the terms are added to one result in place.
    """
    if len(query) == 1:
        return (query - key).squeeze(0)
    high = query[0] - key[0]
    low = (query[1] - key[1]).detach()
    if reuses_memory():
        return high.add_(low)
    return high + low


def decay_between(query: Tensor, key: Tensor) -> Tensor:
    """Return the decays from keys to queries after them, whose cumulative decays (T, ..) broadcast."""
    return exp_where(at_most_0(difference(query, key)))


def at_most_0(log_decay: Tensor) -> Tensor:
    """Return log decays of which those rounded above 0 are cut off; their gradients are not."""
    if reuses_memory():
        return log_decay.clamp_(max=0)
    return log_decay - log_decay.detach().clamp(min=0)


def exp_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """Return `exp(log_decay)`, or 0 below `least_log_decay` and where a mask is False.

    Without gradients the result reuses the memory of `log_decay`.
    """
    return exponential(log_where(log_decay, *masks, factors=factors))


def exponential(log_decay: Tensor) -> Tensor:
    if reuses_memory():
        return log_decay.exp_()
    return log_decay.exp()


def log_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """Return log decays, or -inf below `least_log_decay` and where a mask is False.

    Masks come before `exp`, so that gradients stay finite. Without gradients the result is `log_decay` itself.
    """
    least = least_log_decay(log_decay.dtype, factors)
    if reuses_memory():
        F.threshold(log_decay, least, -torch.inf, inplace=True)
    else:
        log_decay = log_decay + torch.where(log_decay.detach() <= least, -torch.inf, 0.0)  # stores no mask for backward
    for mask in masks:
        if mask is not None:
            log_decay = log_decay.masked_fill(~mask, -torch.inf)
    return log_decay


def decay_mask(
    directions: tuple[Direction, ...],
    segment: Tensor | None = None,
    include_diagonal: bool = True,
    queries: int | None = None,
    keys: slice = slice(None),
    positions: Tensor | None = None,
) -> Tensor:
    """Return the mask M of Eq. 14 and 30, (b, H, .., L, L', D or 1).

    Args:
        directions: Cumulative decays of one scan or both.
        segment: Segment numbers (B, .., L'); the decay across segments is 0.
        include_diagonal: Whether the diagonal is 1; otherwise it is 0.
        queries: Number of tokens, from the first, that are queries, by default all.
        keys: Columns to compute, by default all.
        positions: Positions (L',) of the tokens in the scan, if the scan does not go from left to right.
    """
    return exponential(log_decay_mask(directions, segment, include_diagonal, queries, keys, positions))


def log_decay_mask(
    directions: tuple[Direction, ...],
    segment: Tensor | None = None,
    include_diagonal: bool = True,
    queries: int | None = None,
    keys: slice = slice(None),
    positions: Tensor | None = None,
) -> Tensor:
    """Return the logarithm of `decay_mask`, -inf where the mask is 0."""
    first = directions[0]
    if positions is None:
        positions = torch.arange(first.key.shape[-2], device=first.key.device, dtype=torch.int32)
    i, j = positions[:queries, None, None], positions[keys, None]
    same = None
    if segment is not None:
        segment = segment[:, None]
        same = (segment[..., :queries, None] == segment[..., None, keys])[..., None]  # (B, 1, .., L, L', 1)
    rows = first.query[..., :queries, None, :]
    columns = first.key[..., None, keys, :]
    if len(directions) == 1:
        allowed = j > i if first.reverse else j < i
        if include_diagonal:
            allowed = allowed | (i == j)
        return log_where(at_most_0(difference(rows, columns)), same, allowed)
    other_rows = directions[1].query[..., :queries, None, :]
    other_columns = directions[1].key[..., None, keys, :]
    if len(rows) == 1:
        terms = (rows, columns, other_rows, other_columns)
        log_mask = joined_differences(i >= j, *(t.squeeze(0) for t in terms))
    else:
        log_mask = torch.where(i >= j, difference(rows, columns), difference(other_rows, other_columns))
    others = None if include_diagonal else i != j
    return log_where(at_most_0(log_mask), same, others)


def pad_with_last(t: Tensor, padding: int) -> Tensor:
    """Repeat the last of the cumulative decays (.., L, D) for `padding` more tokens, which do not decay."""
    length = t.shape[-2]
    known = torch.arange(length + padding, device=t.device)[:, None] < length  # `expand` would add a guard on size 1
    return torch.where(known, F.pad(t, (0, 0, 0, padding)), t[..., -1:, :])
