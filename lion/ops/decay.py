"""Decay masks in log space: the one place where index conventions live.

Legend: B batch (b: B or 1), H heads, L tokens, D key dim, E value dim, C chunk, N chunks; `a_k = log lambda_k <= 0`.

The mask `M_ij` is the product of the decays between tokens i and j. Which tokens count is the
*decay convention*, and the paper prints several. For four tokens with decays a, b, c, d (row i reads column j):

    source (Eq. 14, released code)  target (Eq. 5, Theorem 3.1)     symmetric (Table 1, M*)
    | 1    b    bc   bcd |          | 1    a    ab   abc |          | 1    b    bc   bcd |
    | a    1    c    cd  |          | b    1    b    bc  |          | b    1    c    cd  |
    | ab   b    1    d   |          | bc   c    1    c   |          | bc   c    1    d   |
    | abc  bc   c    1   |          | bcd  cd   d    1   |          | bcd  cd   d    1   |

`source` multiplies the decays of the tokens being left, `target` those of the tokens that receive,
`symmetric` is target below the diagonal and source above it. With the inclusive prefix sum
`P_i = a_0 + .. + a_i` and the exclusive one `X_i = P_i - a_i`, all of them are differences:

    below (i >= j)   source: X_i - X_j    target, symmetric: P_i - P_j
    above (i <= j)   target: X_j - X_i    source, symmetric: P_j - P_i

so one direction is a *cumulative decay* `t` with `M_ij = exp(t_i - t_j)`, above the diagonal the negated prefix sum. No
exponent is positive, and none is ever exponentiated before it is masked. A decay below `least_log_decay` is exactly 0:
products of smaller ones are denormal numbers, which some processors multiply a hundred times slower.

A fourth convention, `between` (RWKV), counts only tokens strictly between the two: a token reads before the state
decays and takes it in (X_i - P_j below, X_j - P_i above), and its own key comes in by a weight of its own, `bonus`.

A lambda may be a vector, one number for each key dimension: the last axis of every cumulative decay is of size D, or of
size 1 in the scalar case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DECAY_CONVENTIONS = ("source", "target", "symmetric", "between")
DIRECTIONS = ("both", "forward", "backward")
LOG_ZERO = -1e3  # exp of it is 0 in float64; anything below would only swallow its neighbours in a sum


class CumulativeDecay(NamedTuple):
    """Sum of log decays at every token (b, H, .., L, D or 1) in one direction, and the token's segment.

    `terms` add up to the sum, the first being the larger by far (see `prefix_sums`). `segment_index` (B, 1, .., L, 1)
    numbers the segments; None where there is only one.
    """

    terms: tuple[Tensor, ...]
    segment_index: Tensor | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> CumulativeDecay:
        index = self.segment_index
        return CumulativeDecay(tuple(fn(t) for t in self.terms), None if index is None else fn(index))

    def in_segment(self, segment: Tensor | None) -> CumulativeDecay:
        """The sum (b, H, 1, D or 1) where something of a segment (B,) enters."""
        return CumulativeDecay(self.terms, None if segment is None else segment[:, None, None, None])

    def rows(self) -> CumulativeDecay:
        return self.map(lambda t: t[..., :, None, :])

    def columns(self) -> CumulativeDecay:
        return self.map(lambda t: t[..., None, :, :])


class Direction(NamedTuple):
    """Cumulative decays of one scan direction, of a token as `query` and as `key`, before the first token that is
    scanned (`start`) and after the last one (`end`), both (b, H, 1, D or 1). `reverse`: from right to left."""

    query: CumulativeDecay
    key: CumulativeDecay
    start: CumulativeDecay
    end: CumulativeDecay
    reverse: bool

    def map(self, fn: Callable[[Tensor], Tensor]) -> Direction:
        """With the tokens' sums changed."""
        return self._replace(query=self.query.map(fn), key=self.key.map(fn))


def log_decay_between(query: CumulativeDecay, key: CumulativeDecay) -> Tensor:
    """`log M` of broadcastable queries and keys, at most 0; without gradients in the memory of one result."""
    difference = query.terms[0] - key.terms[0]
    if not torch.is_grad_enabled():
        for q, k in zip(query.terms[1:], key.terms[1:]):
            difference += q - k
        return difference.clamp_(max=0)
    for q, k in zip(query.terms[1:], key.terms[1:]):
        difference = difference + (q - k)
    return difference - difference.detach().clamp(min=0)  # rounding up is cut, its gradient is not


def same_segment(query: CumulativeDecay, key: CumulativeDecay) -> Tensor | None:
    return None if query.segment_index is None else query.segment_index == key.segment_index


def least_log_decay(dtype: torch.dtype, factors: int = 1) -> float:
    """Logarithm of the smallest decay that is not 0, where `factors` of them are multiplied with each other.

    Three quarters of the way to the smallest normal number (e^-65 in float32), so that scores, values and gradients
    multiplied by it are normal, too; far below what a sum of the dtype can tell from 0.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny) / factors


def exp_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """`exp(log_decay)`, 0 below `least_log_decay` and where a mask is False: masked before `exp`, so that gradients
    stay finite.

    Without gradients the result takes the memory of `log_decay`.
    """
    masks, least = tuple(~mask for mask in masks if mask is not None), least_log_decay(log_decay.dtype, factors)
    if not torch.is_grad_enabled():
        F.threshold_(log_decay, least, -torch.inf)
        for excluded in masks:
            log_decay.masked_fill_(excluded, -torch.inf)
        return log_decay.exp_()
    log_decay = log_decay + torch.where(log_decay.detach() <= least, -torch.inf, 0.0)  # no mask to keep for backward
    for excluded in masks:
        log_decay = log_decay.masked_fill(excluded, -torch.inf)
    return log_decay.exp()


def decay(query: CumulativeDecay, key: CumulativeDecay, allowed: Tensor | None = None) -> Tensor:
    """Decay from the key to the query; 0 across segments and where not `allowed`."""
    return exp_where(log_decay_between(query, key), same_segment(query, key), allowed)


def prefix_sums(log_decay: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inclusive and exclusive prefix sums over tokens (.., L, D or 1), as terms whose differences lose nothing.

    A float32 sum over a long or steep sequence is off by far more than its small differences. So it is taken
    in float64 and kept as float32 (high, low) pairs; float64 decays keep the rounding errors of their sum
    as the second term. Gradients flow through the first term.
    """
    exact, shared = log_decay.dtype == torch.float64, log_decay.stride(-2) == 0
    log_decay = log_decay.clamp_min(LOG_ZERO)
    if shared and not exact:
        total = multiples(log_decay)
    else:
        total = F.pad(log_decay.double(), (0, 0, 1, 0)).cumsum(-2)  # (.., L + 1, D or 1), before and after every token
    with torch.no_grad():
        if exact:
            rest = F.pad((log_decay - total.diff(dim=-2)).cumsum(-2), (0, 0, 1, 0))
        else:
            rest = (total - total.float().double()).float()
    terms = materialized(torch.stack([total.to(log_decay.dtype), rest]))
    return terms[..., 1:, :].unbind(), terms[..., :-1, :].unbind()


def multiples(log_decay: Tensor) -> Tensor:
    """Float64 sums (.., L + 1, D or 1) of decays that all tokens share (Lion-D), counted from the middle token: the
    gradient sums each token's times its place, rounding errors included, and places are half as large from there."""
    length = log_decay.shape[-2]
    places = torch.arange(length + 1, device=log_decay.device, dtype=torch.float64)[:, None] - length // 2
    return log_decay[..., :1, :].double() * places


def materialized(t: Tensor) -> Tensor:
    """The same, as a tensor that Inductor keeps in memory: else it computes a sum again for each of the L pairs that
    read it, a tenth of a forward pass, and index expressions nest."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return t
    return _Materialized.apply(t)


class _Materialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor) -> Tensor:
        t = t.contiguous()
        return t.as_strided(t.shape, t.stride())  # which Inductor does not look through

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def query_and_key(decay_convention: str, direction: str, inclusive: _Terms, exclusive: _Terms) -> tuple[_Terms, _Terms]:
    """Which prefix sums along the scan tokens have as queries, and which as keys."""
    if decay_convention == "between":
        return exclusive, inclusive
    terms = inclusive if counts_own(decay_convention, direction) else exclusive
    return terms, terms


def counts_own(decay_convention: str, direction: str) -> bool:
    """Whether along a scan the decay of the token that is reached lies between it and those before, and not theirs."""
    return decay_convention == "target" or (decay_convention == "symmetric" and direction == "forward")


def make_directions(
    log_decay: Tensor, segment_index: Tensor | None, *, decay_convention: str, direction: str
) -> tuple[Direction, ...]:
    """The directions that are on, forward first.

    `log_decay` (b, H, L, D or 1), float32 or float64; `segment_index` (B, L) non-decreasing, or None.
    """
    inclusive, exclusive = prefix_sums(log_decay)
    index = None if segment_index is None else segment_index[:, None, :, None]
    made = []
    for name in ("forward", "backward"):
        if direction not in (name, "both"):
            continue
        reverse = name == "backward"
        if reverse:  # a sum that is inclusive from the right is exclusive from the left
            inclusive, exclusive = (tuple(-t for t in terms) for terms in (exclusive, inclusive))
        query, key = query_and_key(decay_convention, name, inclusive, exclusive)
        first, last = CumulativeDecay(exclusive, index), CumulativeDecay(inclusive, index)
        ends = (first.map(lambda t: t[..., :1, :]), last.map(lambda t: t[..., -1:, :]))
        if reverse:
            ends = (first.map(lambda t: t[..., -1:, :]), last.map(lambda t: t[..., :1, :]))
        made.append(Direction(CumulativeDecay(query, index), CumulativeDecay(key, index), *ends, reverse))
    return tuple(made)


def pad_with_last(t: Tensor, padding: int) -> Tensor:
    """Cumulative decays (.., L, D), the last one repeated for `padding` more tokens, which do not decay."""
    length = t.shape[-2]
    known = torch.arange(length + padding, device=t.device)[:, None] < length  # a graph asks whether 1 is `expand`ed
    return torch.where(known, F.pad(t, (0, 0, 0, padding)), t[..., -1:, :])


def decay_mask(
    directions: tuple[Direction, ...],
    include_diagonal: bool = True,
    keys: slice = slice(None),
    positions: Tensor | None = None,
) -> Tensor:
    """The mask M of Eq. 14 and 30, (b, H, .., L, L, D or 1): diagonal 1 or 0; all columns, or those of some `keys`.

    `positions` (L,) are those of the tokens in the scan, where it does not go from left to right.
    """
    terms = directions[0].key.terms[0]
    if positions is None:
        positions = torch.arange(terms.shape[-2], device=terms.device, dtype=torch.int32)
    i, j = positions[:, None, None], positions[keys, None]
    pairs = [(d.query.rows(), d.key.map(lambda t: t[..., keys, :]).columns()) for d in directions]
    if len(directions) == 1:
        earlier = j > i if directions[0].reverse else j < i
        return decay(*pairs[0], earlier | (i == j) if include_diagonal else earlier)
    log_mask = torch.where(i >= j, log_decay_between(*pairs[0]), log_decay_between(*pairs[1]))
    return exp_where(log_mask, same_segment(*pairs[0]), None if include_diagonal else i != j)


_Terms = tuple[Tensor, ...]
