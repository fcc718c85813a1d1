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

so one direction is a *clock* `t` with decay `exp(t_query - t_key)`, the clock above the diagonal being the negated
prefix sum. No exponent is positive, and none is ever exponentiated before it is masked. A decay below `least_decay`
is exactly 0: products of smaller ones are denormal numbers, which some processors multiply a hundred times slower.

A fourth convention, `between` (RWKV), counts only tokens strictly between the two: a token reads before the state
decays and takes it in (X_i - P_j below, X_j - P_i above), and its own key comes in by a weight of its own, `bonus`.

A lambda may be a vector, one number for each key dimension (a lane): every clock has lanes as its last axis, one
or D of them, and one lane is the scalar case.
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
FORGOTTEN = -1e3  # exp of it is 0 in float64; anything below would only swallow its neighbours in a sum


class Clock(NamedTuple):
    """Log-time of every token (b, H, .., L, D or 1) in one direction, and the segment that it belongs to.

    `terms` add up to the time, the first being the larger by far (see `prefix_sums`). The last axis holds a
    lane for each key dimension, or one for all. `run` (B, 1, .., L, 1) numbers the segments;
    None where there is only one.
    """

    terms: tuple[Tensor, ...]
    run: Tensor | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Clock:
        return Clock(tuple(fn(t) for t in self.terms), None if self.run is None else fn(self.run))

    def entered(self, run: Tensor | None) -> Clock:
        """A time (b, H, 1, D or 1) at which something of a segment (B,) comes in."""
        return Clock(self.terms, None if run is None else run[:, None, None, None])

    def rows(self) -> Clock:
        return self.map(lambda t: t[..., :, None, :])

    def columns(self) -> Clock:
        return self.map(lambda t: t[..., None, :, :])


class Direction(NamedTuple):
    """One direction of travel: when a token reads (`query`) and when it was written (`key`), and the times before its
    first token (`begin`) and after its last one (`end`), (b, H, 1, D or 1), in the order of travel."""

    query: Clock
    key: Clock
    begin: Clock
    end: Clock
    back: bool

    def map(self, fn: Callable[[Tensor], Tensor]) -> Direction:
        """With the tokens' times changed."""
        return self._replace(query=self.query.map(fn), key=self.key.map(fn))


def exponent(query: Clock, key: Clock) -> Tensor:
    """`log M` between two broadcastable clocks, at most 0; without gradients in the memory of one result."""
    difference = query.terms[0] - key.terms[0]
    if not torch.is_grad_enabled():
        for q, k in zip(query.terms[1:], key.terms[1:]):
            difference += q - k
        return difference.clamp_(max=0)
    for q, k in zip(query.terms[1:], key.terms[1:]):
        difference = difference + (q - k)
    return difference - difference.detach().clamp(min=0)  # rounding up is cut, its gradient is not


def same_run(query: Clock, key: Clock) -> Tensor | None:
    return None if query.run is None else query.run == key.run


def least_decay(dtype: torch.dtype, factors: int = 1) -> float:
    """Logarithm of the smallest decay that is not 0, where `factors` of them are multiplied with each other.

    Three quarters of the way to the smallest normal number (e^-65 in float32), so that scores, values and gradients
    multiplied by it are normal, too; far below what a sum of the dtype can tell from 0.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny) / factors


def exp_where(log_decay: Tensor, *masks: Tensor | None, factors: int = 1) -> Tensor:
    """`exp(log_decay)`, 0 below `least_decay` and where a mask is False: masked before `exp`, so that gradients stay
    finite.

    Without gradients the result takes the memory of `log_decay`.
    """
    masks, least = tuple(~mask for mask in masks if mask is not None), least_decay(log_decay.dtype, factors)
    if not torch.is_grad_enabled():
        F.threshold_(log_decay, least, -torch.inf)
        for gone in masks:
            log_decay.masked_fill_(gone, -torch.inf)
        return log_decay.exp_()
    log_decay = log_decay + torch.where(log_decay.detach() <= least, -torch.inf, 0.0)  # no mask to keep for backward
    for gone in masks:
        log_decay = log_decay.masked_fill(gone, -torch.inf)
    return log_decay.exp()


def decay(query: Clock, key: Clock, allowed: Tensor | None = None) -> Tensor:
    """Decay from the key's time to the query's; 0 across segments and where not `allowed`."""
    return exp_where(exponent(query, key), same_run(query, key), allowed)


def prefix_sums(log_decay: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inclusive and exclusive prefix sums over tokens (.., L, D or 1), as terms whose differences lose nothing.

    A float32 sum over a long or steep sequence is off by far more than its small differences. So it is taken
    in float64 and kept as float32 (high, low) pairs; float64 gates keep the rounding errors of their sum as
    the second term. Gradients flow through the first term.
    """
    log_decay = log_decay.clamp_min(FORGOTTEN)
    total = log_decay.double().cumsum(-2)
    with torch.no_grad():
        if log_decay.dtype == torch.float64:
            rest = (log_decay - total.diff(dim=-2, prepend=torch.zeros_like(total[..., :1, :]))).cumsum(-2)
        else:
            rest = (total - total.float().double()).float()
    upto = (total.to(log_decay.dtype), rest)
    before = tuple(F.pad(t, (0, 0, 1, 0))[..., :-1, :] for t in upto)
    return tuple(map(stored, upto)), tuple(map(stored, before))


def stored(t: Tensor) -> Tensor:
    """The same, as a tensor that Inductor keeps: else it computes a time again for each of the L pairs that read it,
    a tenth of a forward pass. With gradients it is left alone: this has a slow derivative."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.is_grad_enabled():
        return t
    t = t.contiguous()
    return t.as_strided(t.shape, t.stride())


def read_and_write(decay_convention: str, direction: str, upto: _Terms, before: _Terms) -> tuple[_Terms, _Terms]:
    """The times at which tokens read and are written, of sums in the order of travel."""
    if decay_convention == "between":
        return before, upto
    terms = (
        upto if decay_convention == "target" or (decay_convention == "symmetric" and direction == "forward") else before
    )
    return terms, terms


def make_directions(
    log_decay: Tensor, run: Tensor | None, *, decay_convention: str, direction: str
) -> tuple[Direction, ...]:
    """The directions that are on, forward first.

    `log_decay` (b, H, L, D or 1), float32 or float64; `run` (B, L) non-decreasing, or None.
    """
    upto, before = prefix_sums(log_decay)
    run = None if run is None else run[:, None, :, None]
    made = []
    for name in ("forward", "backward"):
        if direction not in (name, "both"):
            continue
        back = name == "backward"
        if back:  # a sum that is inclusive from the right is exclusive from the left
            upto, before = (tuple(-t for t in terms) for terms in (before, upto))
        query, key = read_and_write(decay_convention, name, upto, before)
        first, last = (Clock(before, run), Clock(upto, run))
        ends = (first.map(lambda t: t[..., :1, :]), last.map(lambda t: t[..., -1:, :]))
        if back:
            ends = (first.map(lambda t: t[..., -1:, :]), last.map(lambda t: t[..., :1, :]))
        made.append(Direction(Clock(query, run), Clock(key, run), *ends, back))
    return tuple(made)


def hold(t: Tensor, missing: int) -> Tensor:
    """Let time (.., L, D) stand still for `missing` more places."""
    length = t.shape[-2]
    known = torch.arange(length + missing, device=t.device)[:, None] < length  # a graph asks whether 1 is `expand`ed
    return torch.where(known, F.pad(t, (0, 0, 0, missing)), t[..., -1:, :])


def pair_mask(
    directions: tuple[Direction, ...], own: bool = True, keys: slice = slice(None), places: Tensor | None = None
) -> Tensor:
    """The mask M of Eq. 14 and 30, (b, H, .., L, L, D or 1): diagonal 1, or 0 without `own`; some columns, or all.

    `places` (L,) says as the how manieth each token is visited, where that is not the order in which they stand.
    """
    clock = directions[0].key
    if places is None:
        places = torch.arange(clock.terms[0].shape[-2], device=clock.terms[0].device, dtype=torch.int32)
    i, j = places[:, None, None], places[keys, None]
    pairs = [(d.query.rows(), d.key.map(lambda t: t[..., keys, :]).columns()) for d in directions]
    if len(directions) == 1:
        before = j > i if directions[0].back else j < i
        return decay(*pairs[0], before | (i == j) if own else before)
    log_mask = torch.where(i >= j, exponent(*pairs[0]), exponent(*pairs[1]))
    return exp_where(log_mask, same_run(*pairs[0]), None if own else i != j)


_Terms = tuple[Tensor, ...]
