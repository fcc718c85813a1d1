"""Decays of pairs of tokens in short blocks, and from tokens to the middle of a block, for `lion.ops.vector_scores`.

A token's own lambda is folded into its q or k (`FOLDS`); the decay `E_ij` of the tokens strictly between i and j
remains. There are two ways to compute it, which agree. `Products` multiplies lambdas, one distance after the other:
the least arithmetic, for CPUs. `Sums` adds log lambdas: more arithmetic in few kernels, without intermediate results in
memory, for GPUs. All summands have one sign, so that float32 sums are as precise as products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops import modes
from lion.ops.decay import exp_where, least_log_decay

FACTORS = 3  # decays multiplied with each other: a token's own, and from each token of a pair to the middle


class Side(NamedTuple):
    """Tokens (.., L, D) of the pairs of one direction, as the earlier and as the later token of a pair.

    Forward, a later query reads an earlier key; backward, an earlier query reads a later key.
    """

    early: Tensor
    late: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Side:
        return Side(change(self.early), change(self.late))

    def times(self, other: Side) -> Side:
        return Side(self.early * other.early, self.late * other.late)

    def plus(self, other: Side) -> Side:
        return Side(self.early + other.early, self.late + other.late)


class Fold(NamedTuple):
    """Lambdas that the decay of a pair includes: that of its earlier token, and that of its later token."""

    early: bool
    late: bool


Sides = dict[str, Side]  # by direction
FOLDS = {
    "source": {"forward": Fold(True, False), "backward": Fold(False, True)},
    "target": {"forward": Fold(False, True), "backward": Fold(True, False)},
    "symmetric": {"forward": Fold(False, True), "backward": Fold(False, True)},
    "between": {"forward": Fold(False, False), "backward": Fold(False, False)},
}


def sides_of(q: Tensor, k: Tensor, lam: Tensor, decay_convention: str, direction: str) -> Sides:
    """Return q and k as sides, multiplied by the lambdas that decays include."""
    sides = {}
    if direction != "backward":
        sides["forward"] = Side(early=k, late=q)
    if direction != "forward":
        sides["backward"] = Side(early=q, late=k)
    return folded(sides, lam, decay_convention)


def folded(sides: Sides, lam: Tensor, decay_convention: str) -> Sides:
    """Return sides, or gradients by them, multiplied by the lambdas that decays include."""
    found = {}
    for name, side in sides.items():
        fold = FOLDS[decay_convention][name]
        early, late = side
        if fold.early:
            early = early * lam
        if fold.late:
            late = late * lam
        found[name] = Side(early, late)
    return found


def map_sides(sides: Sides, change: Callable[[Side], Side]) -> Sides:
    return {name: change(side) for name, side in sides.items()}


def pairs_of(
    q: Tensor, k: Tensor, log_decay: Tensor, size: int, decay_convention: str, direction: str, narrow: torch.dtype
) -> Products | Sums:
    """Return the pairs of tokens (.., L, D), as suits the device.

    Args:
        size: Length of a short block.
        narrow: Dtype of the results of `halvings` on a GPU, whose products of float32 take several times as long.
    """
    lam = lambdas(log_decay)
    tokens = sides_of(q, k, lam, decay_convention, direction)
    if modes.for_gpu(log_decay.device):
        return Sums(tokens, log_decay, lam, size, narrow)
    return Products(tokens, log_decay, lam, size, q.dtype)


class Pairs:
    """Pairs of tokens.

    Attributes:
        tokens: Sides of q and k, multiplied by the lambdas that decays include.
        log_decay: Log decays (.., L, D).
        lam: Decays (.., L, D).
        size: Length of a short block.
        narrow: Dtype of the results of `halvings`.
    """

    none: float  # decay over no tokens, in the numbers that `join` combines

    def __init__(self, tokens: Sides, log_decay: Tensor, lam: Tensor, size: int, narrow: torch.dtype) -> None:
        self.tokens = tokens
        self.log_decay = log_decay
        self.lam = lam
        self.size = size
        self.narrow = narrow

    def scores(self, diagonal: Tensor) -> Tensor:
        """Return the scores of short blocks (.., M, S, S), with the given diagonal (.., L), and 0 for other pairs."""
        raise NotImplementedError

    def gradients(self, grad: Tensor) -> Sides:
        """Return the gradients by `tokens`, from those of the result of `scores`."""
        raise NotImplementedError

    def to_ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return decays (.., L, D) from the start and to the end of a token's short block, and of blocks (.., M, D).

        `Sums` returns their logarithms. A token's own lambda is not included.
        """
        raise NotImplementedError

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the decay over two adjacent groups of tokens."""
        raise NotImplementedError

    def decayed(self, size: int, to_end: Tensor, from_start: Tensor) -> tuple[Sides, Side]:
        """Return the result of `halvings` for halves of `size` tokens, from decays (.., L, D) to their ends."""
        raise NotImplementedError

    def in_blocks(self) -> Sides:
        """Return the sides in short blocks (.., M, S, D)."""
        return map_sides(self.tokens, lambda side: side.map(lambda x: blocks(x, self.size)))

    def halvings(self) -> Iterator[tuple[Sides, Side]]:
        """Yield the sides, multiplied by the decays to the middle of their blocks, and these decays.

        Earlier tokens are those of all first halves (.., M, n, D), and later tokens those of all second halves. The
        size n of a half doubles from one result to the next.
        """
        size, length = self.size, self.lam.shape[-2]
        late = late_half(self.lam.device)
        from_start, to_end, total = self.to_ends()
        while size < length:
            yield self.decayed(size, to_end, from_start)
            first, second = total.unflatten(-2, (-1, 2))[..., None, :].split(1, -3)  # (.., M, 1, 1, D)
            from_start = from_start.unflatten(-2, (-1, 2, size))
            to_end = to_end.unflatten(-2, (-1, 2, size))
            from_start = self.join(from_start, torch.where(late, first, self.none)).flatten(-4, -2)
            to_end = self.join(to_end, torch.where(late, self.none, second)).flatten(-4, -2)
            total = self.join(first, second)[..., 0, 0, :]
            size *= 2


class Products(Pairs):
    """Pairs whose decays are products of lambdas. A product that could be denormal is 0."""

    none = 1.0

    def scores(self, diagonal: Tensor) -> Tensor:
        size = self.size
        sides = self.in_blocks()
        diagonal = diagonal.unflatten(-1, (-1, size))
        absent = [torch.zeros_like(diagonal)] * (size - 1)
        columns = {"forward": absent, "backward": absent}  # for each distance, at the later token
        for name in sides:
            columns[name] = []
        for distance, E in self.distances():
            for name, side in sides.items():
                columns[name].append((side.late * shift_later(side.early, distance) * E).sum(-1))
        by_distance = torch.stack([diagonal] + columns["forward"] + columns["backward"], -1)  # (.., M, S, 2S - 1)
        j = torch.arange(size, device=diagonal.device)
        i = torch.arange(size, device=diagonal.device)[:, None]
        return by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]

    def gradients(self, grad: Tensor) -> Sides:
        sides = self.in_blocks()
        found = map_sides(sides, lambda side: side.map(torch.zeros_like))
        for distance, E in self.distances():
            for name, side in sides.items():
                offset = -distance if name == "forward" else distance
                weights = F.pad(grad.diagonal(offset, -2, -1), (distance, 0))[..., None]
                of_early = shift_earlier(weights * side.late * E, distance)
                of_late = weights * shift_later(side.early, distance) * E
                found[name] = found[name].plus(Side(of_early, of_late))
        return map_sides(found, lambda side: side.map(lambda x: x.flatten(-3, -2)))

    def distances(self) -> Iterator[tuple[int, Tensor | float]]:
        """Yield every distance in a block, and the decays between each token and the token that far before it."""
        lam = blocks(self.lam, self.size)
        E: Tensor | float = 1.0
        for distance in range(1, self.size):
            if distance > 1:
                E = flush_denormals(E * shift_later(lam, distance - 1))
            yield distance, E

    def to_ends(self) -> tuple[Tensor, Tensor, Tensor]:
        lam = blocks(self.lam, self.size)
        last = self.size - 1
        from_start = [torch.ones_like(lam[..., 0, :])]
        to_end = [torch.ones_like(lam[..., 0, :])]
        for i in range(last):
            from_start.append(self.join(from_start[-1], lam[..., i, :]))
            to_end.append(self.join(to_end[-1], lam[..., last - i, :]))
        total = self.join(from_start[-1], lam[..., last, :])
        return torch.stack(from_start, -2).flatten(-3, -2), torch.stack(to_end[::-1], -2).flatten(-3, -2), total

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return flush_denormals(a * b)

    def decayed(self, size: int, to_end: Tensor, from_start: Tensor) -> tuple[Sides, Side]:
        E = in_halves(Side(early=to_end, late=from_start), size)
        return map_sides(self.tokens, lambda side: in_halves(side, size).times(E)), E


class Sums(Pairs):
    """Pairs whose decays are exponentials of sums of log lambdas, not of differences of prefix sums."""

    none = 0.0

    def between(self, j: int, again: bool = False) -> Tensor:
        """Return the decays (.., M, S, D) of the tokens strictly between each token and token j of its block.

        `again` is that of `places`.
        """
        i = places(self.size, self.lam.device, again)
        sign = -1 if again else 1
        inside = []
        for t in range(1, self.size - 1):
            if t < j:
                inside.append((i < t, t))
            if t > j:
                inside.append((t < i, t))
        return (sign * self.total(inside, sign)).exp()

    def scores(self, diagonal: Tensor) -> Tensor:
        sides = self.in_blocks()
        i = places(self.size, diagonal.device)
        columns = []
        for j in range(self.size):
            later: Tensor | float = 0.0
            earlier: Tensor | float = 0.0
            if "forward" in sides:
                later = sides["forward"].late * token(sides["forward"].early, j)
            if "backward" in sides:
                earlier = sides["backward"].early * token(sides["backward"].late, j)
            columns.append((torch.where(i > j, later, earlier) * self.between(j)).sum(-1))
        diagonal = diagonal.unflatten(-1, (-1, self.size, 1))
        return torch.where(i == i.mT, diagonal, torch.stack(columns, -1))

    def gradients(self, grad: Tensor) -> Sides:
        found = {}
        sides = self.in_blocks()
        if "forward" in sides:
            found["forward"] = self.gradients_of(sides["forward"], grad.tril(-1))
        if "backward" in sides:
            found["backward"] = self.gradients_of(sides["backward"], grad.triu(1).mT)
        return found

    def gradients_of(self, side: Side, weights: Tensor) -> Side:
        """Return the gradients by one side; `weights` are those of pairs of a later token (rows) and an earlier one."""
        return Side(self.weighted(weights.mT, side.late), self.weighted(weights, side.early))

    def weighted(self, weights: Tensor, x: Tensor) -> Tensor:
        """Return the sums over tokens x (.., M, S, D) under weights (.., M, S, S) and decays, for each token."""
        total = torch.zeros_like(x)
        for j in range(self.size):
            total = total + weights[..., j, None] * token(x, j) * self.between(j, again=True)
        return total.flatten(-3, -2)

    def to_ends(self) -> tuple[Tensor, Tensor, Tensor]:
        i, last = places(self.size, self.lam.device), self.size - 1
        from_start = self.total([(t < i, t) for t in range(last)])
        to_end = self.total([(t > i, t) for t in range(1, self.size)])
        total = (from_start + blocks(self.log_decay, self.size))[..., last, :]
        return from_start.flatten(-3, -2), to_end.flatten(-3, -2), total

    def total(self, chosen: list[tuple[Tensor, int]], sign: int = 1) -> Tensor:
        """Sum the log lambdas, times `sign`, of tokens t of a block (.., M, S, D), where a condition (S, 1) holds."""
        steps = sign * blocks(self.log_decay, self.size)
        total = torch.zeros_like(steps)
        for condition, t in chosen:
            total = total + torch.where(condition, token(steps, t), 0.0)
        return total

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def decayed(self, size: int, to_end: Tensor, from_start: Tensor) -> tuple[Sides, Side]:
        late = late_half(self.lam.device)

        def chosen(side: Side) -> Tensor:  # of both halves, as one kernel
            return torch.where(late, side.late.unflatten(-2, (-1, 2, size)), side.early.unflatten(-2, (-1, 2, size)))

        E = chosen(Side(early=to_end, late=from_start)).exp()
        sides = {}
        for name, side in self.tokens.items():
            early, later = (chosen(side) * E).to(self.narrow).unbind(-3)
            sides[name] = Side(early, later)
        early, later = E.unbind(-3)
        return sides, Side(early, later)


def in_halves(side: Side, size: int) -> Side:
    """Return the earlier tokens of the first and the later tokens of the second halves (.., M, n, D) of blocks."""
    early = side.early.unflatten(-2, (-1, 2, size)).select(-3, 0)
    late = side.late.unflatten(-2, (-1, 2, size)).select(-3, 1)
    return Side(early, late)


def places(size: int, device: torch.device, again: bool = False) -> Tensor:
    """Return the places (size, 1) of tokens or halves in a block.

    With `again`, the expression differs: a graph computes its result twice, where it would store a common one.
    """
    dtype = torch.int32 if again else torch.int64
    return torch.arange(size, dtype=dtype, device=device)[:, None]


def late_half(device: torch.device, again: bool = False) -> Tensor:
    """Return whether a half (2, 1, 1) of a block is the second; `again` is that of `places`."""
    return places(2, device, again).bool()[..., None]


def token(x: Tensor, j: int) -> Tensor:
    """Return token j of every block."""
    return x[..., j : j + 1, :]


def lambdas(log_decay: Tensor) -> Tensor:
    """Return each token's own decay (.., L, D); `log_decay` stays unchanged."""
    if modes.reuses_memory():
        log_decay = log_decay.clone()
    return exp_where(log_decay, factors=FACTORS)


def flush_denormals(decay: Tensor) -> Tensor:
    """Return products of decays, with 0 in place of those that are too small."""
    return decay.masked_fill(decay < math.exp(least_log_decay(decay.dtype, FACTORS)), 0)


def blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, size))


def shift_later(x: Tensor, distance: int) -> Tensor:
    """Return x_{i - distance} in place of x_i, 0 where there is none."""
    return F.pad(x[..., :-distance, :], (0, 0, distance, 0))


def shift_earlier(x: Tensor, distance: int) -> Tensor:
    return F.pad(x[..., distance:, :], (0, 0, 0, distance))
