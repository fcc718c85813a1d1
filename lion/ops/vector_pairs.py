"""Decays of pairs of tokens in short blocks, and from tokens to the middle of a block, for `lion.ops.vector_scores`.

A token's own lambda is folded into its q or k (`FOLDS`); the decay `E_ij` of the tokens strictly between i and j
remains. There are two ways to compute it, which agree. `Products` multiplies lambdas, one distance after the other:
the least arithmetic, for CPUs. `Sums` adds log lambdas: more arithmetic in few kernels, without intermediate results in
memory, for GPUs. All summands have one sign, so that float32 sums are as precise as products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops import modes
from lion.ops.decay import exp_where, least_log_decay, scan_directions

FACTORS = 3  # decays multiplied with each other: a token's own, and from each token of a pair to the middle


class Side(NamedTuple):
    """Tokens (.., L, D) of the pairs of one direction, as the earlier and as the later token of a pair.

    Forward, a later query reads an earlier key; backward, an earlier query reads a later key.
    """

    early: Tensor
    late: Tensor


Sides = dict[str, Side]  # by direction
FOLDS = {  # whether the decay of a pair includes the lambda of its earlier and of its later token
    "source": {"forward": (True, False), "backward": (False, True)},
    "target": {"forward": (False, True), "backward": (True, False)},
    "symmetric": {"forward": (False, True), "backward": (False, True)},
    "between": {"forward": (False, False), "backward": (False, False)},
}


def sides_of(q: Tensor, k: Tensor, lam: Tensor, decay_convention: str, direction: str) -> Sides:
    """Return q and k as sides, multiplied by the lambdas that decays include."""
    every = {"forward": Side(early=k, late=q), "backward": Side(early=q, late=k)}
    return folded({name: every[name] for name in scan_directions(direction)}, lam, decay_convention)


def folded(sides: Sides, lam: Tensor, decay_convention: str) -> Sides:
    """Return sides, or gradients by them, multiplied by the lambdas that decays include."""
    folds = FOLDS[decay_convention]
    return {name: Side(*(x * lam if fold else x for x, fold in zip(side, folds[name]))) for name, side in sides.items()}


def pairs_of(
    q: Tensor, k: Tensor, log_decay: Tensor, size: int, decay_convention: str, direction: str, narrow: torch.dtype
) -> Products | Sums:
    """Return the pairs of tokens (.., L, D), as suits the device.

    Args:
        size: Length of a short block.
        narrow: Dtype of the results of `halvings` on a GPU, whose products of float32 take several times as long.
    """
    gpu, lam = modes.for_gpu(log_decay.device), lambdas(log_decay)
    tokens = sides_of(q, k, lam, decay_convention, direction)
    return (Sums if gpu else Products)(tokens, log_decay, lam, size, narrow if gpu else q.dtype)


class Pairs:
    """Pairs of tokens.

    Attributes:
        tokens: Sides of q and k, multiplied by the lambdas that decays include.
    """

    def __init__(self, tokens: Sides, log_decay: Tensor, lam: Tensor, size: int, narrow: torch.dtype) -> None:
        self.tokens, self.log_decay, self.lam, self.size, self.narrow = tokens, log_decay, lam, size, narrow

    def in_blocks(self) -> Sides:
        """Return the sides in short blocks (.., M, S, D)."""
        return {name: Side(*(blocks(x, self.size) for x in side)) for name, side in self.tokens.items()}

    def halvings(self) -> Iterator[tuple[Sides, Side]]:
        """Yield the sides, multiplied by the decays to the middle of their blocks, and these decays.

        Earlier tokens are those of all first halves (.., M, n, D), and later tokens those of all second halves. The
        size n of a half doubles from one result to the next.
        """
        size, length, late = self.size, self.lam.shape[-2], late_half(self.lam.device)
        from_start, to_end, total = self.to_ends()
        while size < length:
            yield self.decayed(size, to_end, from_start)
            first, second = total.unflatten(-2, (-1, 2))[..., None, :].split(1, -3)  # (.., M, 1, 1, D)
            from_start, to_end = (x.unflatten(-2, (-1, 2, size)) for x in (from_start, to_end))
            from_start = self.join(from_start, torch.where(late, first, self.none)).flatten(-4, -2)
            to_end = self.join(to_end, torch.where(late, self.none, second)).flatten(-4, -2)
            total = self.join(first, second)[..., 0, 0, :]
            size *= 2


class Products(Pairs):
    """Pairs whose decays are products of lambdas. A product that could be denormal is 0."""

    none = 1.0  # the product of no lambdas

    def scores(self, diagonal: Tensor) -> Tensor:
        """Return the scores of short blocks (.., M, S, S), with the given diagonal (.., L), and 0 for other pairs."""
        size, sides, diagonal = self.size, self.in_blocks(), diagonal.unflatten(-1, (-1, self.size))
        columns: dict[str, list[Tensor]] = {name: [] for name in sides}  # for each distance, at the later token
        for distance, E in self.distances():
            for name, side in sides.items():
                columns[name].append((side.late * shift_later(side.early, distance) * E).sum(-1))
        absent = [torch.zeros_like(diagonal)] * (size - 1)
        below, above = (columns.get(name, absent) for name in ("forward", "backward"))
        by_distance = torch.stack([diagonal, *below, *above], -1)  # (.., M, S, 2S - 1)
        i, j = torch.arange(size, device=diagonal.device)[:, None], torch.arange(size, device=diagonal.device)
        return by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]

    def gradients(self, grad: Tensor) -> Sides:
        """Return the gradients by `tokens`, from those of the result of `scores`."""
        sides = self.in_blocks()
        found = {name: Side(*map(torch.zeros_like, side)) for name, side in sides.items()}
        for distance, E in self.distances():
            for name, (early, late) in sides.items():
                weights = grad.diagonal(-distance if name == "forward" else distance, -2, -1)
                weights = F.pad(weights, (distance, 0))[..., None]
                found[name] = Side(
                    found[name].early + shift_earlier(weights * late * E, distance),
                    found[name].late + weights * shift_later(early, distance) * E,
                )
        return {name: Side(*(x.flatten(-3, -2) for x in side)) for name, side in found.items()}

    def distances(self) -> Iterator[tuple[int, Tensor | float]]:
        """Yield every distance in a block, and the decays between each token and the token that far before it."""
        lam, E = blocks(self.lam, self.size), 1.0
        for distance in range(1, self.size):
            if distance > 1:
                E = flush_denormals(E * shift_later(lam, distance - 1))
            yield distance, E

    def to_ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return decays (.., L, D) from the start and to the end of a token's short block, and of blocks (.., M, D).

        `Sums` returns their logarithms. A token's own lambda is not included.
        """
        lam = blocks(self.lam, self.size)
        from_start, to_end = [torch.ones_like(lam[..., 0, :])], [torch.ones_like(lam[..., 0, :])]
        for i in range(self.size - 1):
            from_start.append(self.join(from_start[-1], lam[..., i, :]))
            to_end.append(self.join(to_end[-1], lam[..., self.size - 1 - i, :]))
        total = self.join(from_start[-1], lam[..., self.size - 1, :])
        return torch.stack(from_start, -2).flatten(-3, -2), torch.stack(to_end[::-1], -2).flatten(-3, -2), total

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the decay over two adjacent groups of tokens."""
        return flush_denormals(a * b)

    def decayed(self, size: int, to_end: Tensor, from_start: Tensor) -> tuple[Sides, Side]:
        """Return the result of `halvings` for halves of `size` tokens, from decays (.., L, D) to their ends."""

        def chosen(early: Tensor, late: Tensor) -> Side:
            return Side(halves(early, size)[0], halves(late, size)[1])

        E = chosen(to_end, from_start)
        return {name: Side(*map(torch.mul, chosen(*side), E)) for name, side in self.tokens.items()}, E


class Sums(Pairs):
    """Pairs whose decays are exponentials of sums of log lambdas, not of differences of prefix sums."""

    none = 0.0  # the sum of no log lambdas

    def between(self, j: int, again: bool = False) -> Tensor:
        """Return the decays (.., M, S, D) of the tokens strictly between each token and token j of its block.

        `again` is that of `places`.
        """
        i, sign = places(self.size, self.lam.device, again), -1 if again else 1
        inside = (((t < i) if t > j else (i < t), t) for t in range(1, self.size - 1) if t != j)
        return (sign * self.total(inside, sign)).exp()

    def scores(self, diagonal: Tensor) -> Tensor:
        sides, i, columns = self.in_blocks(), places(self.size, diagonal.device), []
        below, above = (sides.get(name) for name in ("forward", "backward"))
        for j in range(self.size):
            later = 0.0 if below is None else below.late * token(below.early, j)
            earlier = 0.0 if above is None else above.early * token(above.late, j)
            columns.append((torch.where(i > j, later, earlier) * self.between(j)).sum(-1))
        return torch.where(i == i.mT, diagonal.unflatten(-1, (-1, self.size, 1)), torch.stack(columns, -1))

    def gradients(self, grad: Tensor) -> Sides:
        def total(weights: Tensor, x: Tensor) -> Tensor:
            parts = (weights[..., j, None] * token(x, j) * self.between(j, again=True) for j in range(self.size))
            return sum(parts).flatten(-3, -2)

        weights = {"forward": grad.tril(-1), "backward": grad.triu(1).mT}  # of later tokens (rows) and earlier ones
        return {
            name: Side(total(weights[name].mT, late), total(weights[name], early))
            for name, (early, late) in self.in_blocks().items()
        }

    def to_ends(self) -> tuple[Tensor, Tensor, Tensor]:
        i, last = places(self.size, self.lam.device), self.size - 1
        from_start = self.total((t < i, t) for t in range(last))
        to_end = self.total((t > i, t) for t in range(1, self.size))
        total = (from_start + blocks(self.log_decay, self.size))[..., last, :]
        return from_start.flatten(-3, -2), to_end.flatten(-3, -2), total

    def total(self, chosen: Iterable[tuple[Tensor, int]], sign: int = 1) -> Tensor:
        """Sum the log lambdas, times `sign`, of tokens t of a block (.., M, S, D), where a condition (S, 1) holds."""
        steps = sign * blocks(self.log_decay, self.size)
        parts = (torch.where(condition, token(steps, t), 0.0) for condition, t in chosen)
        return sum(parts, torch.zeros_like(steps))

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def decayed(self, size: int, to_end: Tensor, from_start: Tensor) -> tuple[Sides, Side]:
        late = late_half(self.lam.device)

        def chosen(side: Side) -> Tensor:  # of both halves, as one kernel
            return torch.where(late, *(x.unflatten(-2, (-1, 2, size)) for x in reversed(side)))

        E = chosen(Side(to_end, from_start)).exp()
        sides = {name: (chosen(side) * E).to(self.narrow) for name, side in self.tokens.items()}
        return {name: Side(*x.unbind(-3)) for name, x in sides.items()}, Side(*E.unbind(-3))


def places(size: int, device: torch.device, again: bool = False) -> Tensor:
    """Return the places (size, 1) of tokens or halves in a block.

    With `again`, the expression differs: a graph computes its result twice, where it would store a common one.
    """
    return torch.arange(size, dtype=torch.int32 if again else torch.int64, device=device)[:, None]


def late_half(device: torch.device, again: bool = False) -> Tensor:
    """Return whether a half (2, 1, 1) of a block is the second; `again` is that of `places`."""
    return places(2, device, again).bool()[..., None]


def token(x: Tensor, j: int) -> Tensor:
    """Return token j of every block."""
    return x[..., j : j + 1, :]


def lambdas(log_decay: Tensor) -> Tensor:
    """Return each token's own decay (.., L, D); `log_decay` stays unchanged."""
    return exp_where(log_decay.clone() if modes.reuses_memory() else log_decay, factors=FACTORS)


def flush_denormals(decay: Tensor) -> Tensor:
    """Return products of decays, with 0 in place of those that are too small."""
    return decay.masked_fill(decay < math.exp(least_log_decay(decay.dtype, FACTORS)), 0)


def blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, size))


def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second halves (.., M, n, D) of blocks of 2n tokens of x (.., L, D)."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def shift_later(x: Tensor, distance: int) -> Tensor:
    """Return x_{i - distance} in place of x_i, 0 where there is none."""
    return F.pad(x[..., :-distance, :], (0, 0, distance, 0))


def shift_earlier(x: Tensor, distance: int) -> Tensor:
    return F.pad(x[..., distance:, :], (0, 0, 0, distance))
