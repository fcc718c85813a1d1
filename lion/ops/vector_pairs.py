"""Decays of pairs of tokens in short blocks, and from tokens to the middle of a block, for `lion.ops.vector_scores`.

There are two ways to compute them, which agree. `Products` multiplies lambdas: a token's own lambda is folded into its
q or k (`FOLDS`), and the product `E_ij` of the lambdas strictly between i and j remains, which is computed one distance
after the other. This is the least arithmetic, for CPUs. `Sums` takes differences of precise prefix sums, which include
a token's own lambda or not. This is more arithmetic in few kernels, without intermediate results in memory, for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import exp_where, least_log_decay, prefix_sums
from lion.ops.modes import for_gpu, reuses_memory

FACTORS = 3  # decays multiplied with each other: a token's own, and from each token of a pair to the middle


class Fold(NamedTuple):
    """Membership of a token's own lambda in the decay of a pair, as the earlier and as the later token of the pair."""

    early: bool
    late: bool


FOLDS = {  # of queries, of keys
    "source": (Fold(False, False), Fold(True, True)),
    "target": (Fold(True, True), Fold(False, False)),
    "symmetric": (Fold(False, True), Fold(False, True)),
    "between": (Fold(False, False), Fold(False, False)),
}
Sum = tuple[Tensor, ...]  # terms of a prefix sum, each (.., L, D)
Halving = tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def pairs_of(q: Tensor, k: Tensor, log_decay: Tensor, size: int, decay_convention: str) -> Products | Sums:
    """Return the pairs of tokens (.., L, D), as suits the device; `size` is the length of a short block."""
    kind = Sums if for_gpu(log_decay.device) else Products
    return kind(q, k, log_decay, size, *FOLDS[decay_convention])


class Products:
    """Pairs whose decays are products of lambdas. A product that could be denormal is 0.

    Attributes:
        tokens: q as the earlier and as the later token of a pair, and the same of k, each (.., L, D), multiplied by the
            token's own lambda where the decay of a pair includes it.
    """

    def __init__(self, q: Tensor, k: Tensor, log_decay: Tensor, size: int, of_q: Fold, of_k: Fold) -> None:
        self.lam, self.size, self.folds = lambdas(log_decay), size, (*of_q, *of_k)
        self.tokens = self.folded((q, q, k, k))

    def folded(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Multiply q_early, q_late, k_early and k_late, or gradients by them, by the lambdas that decays include."""
        return tuple(x * self.lam if fold else x for x, fold in zip(xs, self.folds))

    def scores(self, diagonal: Tensor) -> Tensor:
        """Return the scores of short blocks (.., M, S, S), with the given diagonal (.., L)."""
        size, below, above = self.size, [], []  # for each distance, at the later token
        qe, ql, ke, kl = (blocks(x, size) for x in self.tokens)
        for distance, E in self.distances():
            below.append((ql * shift_later(ke, distance) * E).sum(-1))
            above.append((shift_later(qe, distance) * kl * E).sum(-1))
        by_distance = torch.stack([diagonal.unflatten(-1, (-1, size)), *below, *above], -1)  # (.., M, S, 2S - 1)
        i, j = torch.arange(size, device=ql.device)[:, None], torch.arange(size, device=ql.device)
        return by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients (.., L, D) by `tokens`, from those of the result of `scores`."""
        qe, ql, ke, kl = (blocks(x, self.size) for x in self.tokens)
        dq_early = dq_late = dk_early = dk_late = torch.zeros_like(ql)
        for distance, E in self.distances():
            below, above = (F.pad(grad.diagonal(d, -2, -1), (distance, 0))[..., None] for d in (-distance, distance))
            dq_late = dq_late + below * shift_later(ke, distance) * E
            dk_late = dk_late + above * shift_later(qe, distance) * E
            dk_early = dk_early + shift_earlier(below * ql * E, distance)
            dq_early = dq_early + shift_earlier(above * kl * E, distance)
        return tuple(x.flatten(-3, -2) for x in (dq_early, dq_late, dk_early, dk_late))

    def distances(self) -> Iterator[tuple[int, Tensor | float]]:
        """Yield every distance in a block, and the decays between each token and the token that far before it."""
        lam, E = blocks(self.lam, self.size), 1.0
        for distance in range(1, self.size):
            if distance > 1:
                E = flush_denormals(E * shift_later(lam, distance - 1))
            yield distance, E

    def halvings(self) -> Iterator[Halving]:
        """Yield the size n of half a block, upwards, and the decays (.., M, n, D) between its tokens and its middle.

        These are two pairs, of queries and of keys in first halves, and in second halves.
        """
        size, length = self.size, self.lam.shape[-2]
        lam, one = blocks(self.lam, size), torch.ones((), dtype=self.lam.dtype, device=self.lam.device)
        late = torch.arange(2, device=lam.device).bool()[:, None, None]
        from_start, to_end = [torch.ones_like(lam[..., 0, :])], [torch.ones_like(lam[..., 0, :])]  # to block ends
        for i in range(size - 1):
            from_start.append(flush_denormals(from_start[-1] * lam[..., i, :]))
            to_end.append(flush_denormals(to_end[-1] * lam[..., size - 1 - i, :]))
        total = flush_denormals(from_start[-1] * lam[..., size - 1, :])  # (.., M, D)
        from_start, to_end = torch.stack(from_start, -2).flatten(-3, -2), torch.stack(to_end[::-1], -2).flatten(-3, -2)
        while size < length:
            from_start, to_end = (x.unflatten(-2, (-1, 2, size)) for x in (from_start, to_end))
            yield size, (to_end[..., 0, :, :],) * 2, (from_start[..., 1, :, :],) * 2
            of_first, of_second = total.unflatten(-2, (-1, 2))[..., None, :].split(1, -3)  # (.., M, 1, 1, D)
            from_start = flush_denormals(from_start * torch.where(late, of_first, one)).flatten(-4, -2)
            to_end = flush_denormals(to_end * torch.where(late, one, of_second)).flatten(-4, -2)
            total = flush_denormals(of_first * of_second)[..., 0, 0, :]
            size *= 2


class Sums:
    """Pairs whose decays are exponentials of differences of prefix sums (`lion.ops.decay.prefix_sums`).

    Attributes:
        tokens: As in `Products`, but without lambdas, which the sums include.
        early: Sums of q and of k as earlier tokens.
        late: The same as later tokens.
    """

    def __init__(self, q: Tensor, k: Tensor, log_decay: Tensor, size: int, of_q: Fold, of_k: Fold) -> None:
        inclusive, exclusive = prefix_sums(log_decay)
        self.tokens, self.size, self.length = (q, q, k, k), size, q.shape[-2]
        self.early = tuple(exclusive if fold.early else inclusive for fold in (of_q, of_k))
        self.late = tuple(inclusive if fold.late else exclusive for fold in (of_q, of_k))
        self.middle = inclusive

    def folded(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(xs)

    def in_blocks(self) -> tuple[Tensor, Tensor, list[Sum], list[Sum]]:
        """Return q, k and the sums `early`, `late` in short blocks (.., M, S, D)."""
        sums = ([tuple(blocks(t, self.size) for t in terms) for terms in both] for both in (self.early, self.late))
        return blocks(self.tokens[0], self.size), blocks(self.tokens[2], self.size), *sums

    def scores(self, diagonal: Tensor) -> Tensor:
        q, k, (q_early, k_early), (q_late, k_late) = self.in_blocks()
        below, above = [], []  # for each key of a block; values on the other side of the diagonal have no meaning
        for j in range(self.size):
            pairs = q * k[..., j : j + 1, :]
            below.append((pairs * between(q_late, token(k_early, j))).sum(-1))
            above.append((pairs * between(token(k_late, j), q_early)).sum(-1))
        scores = torch.stack(below, -1).tril(-1) + torch.stack(above, -1).triu(1)
        same = torch.eye(self.size, dtype=torch.bool, device=q.device)
        return torch.where(same, diagonal.unflatten(-1, (-1, self.size, 1)), scores)

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, (q_early, k_early), (q_late, k_late) = self.in_blocks()
        below, above = grad.tril(-1), grad.triu(1)

        def total(weights: Tensor, x: Tensor, decays: Callable[[int], Tensor]) -> Tensor:
            parts = (weights[..., j, None] * x[..., j : j + 1, :] * decays(j) for j in range(self.size))
            return sum(parts).flatten(-3, -2)

        return (
            total(above, k, lambda j: between_again(token(k_late, j), q_early)),
            total(below, k, lambda j: between_again(q_late, token(k_early, j))),
            total(below.mT, q, lambda j: between_again(token(q_late, j), k_early)),
            total(above.mT, q, lambda j: between_again(k_late, token(q_early, j))),
        )

    def halvings(self) -> Iterator[Halving]:
        size = self.size
        while size < self.length:
            middle = tuple(halves(t, size)[0][..., -1:, :] for t in self.middle)
            first, second = (
                [tuple(halves(t, size)[half] for t in terms) for terms in sums]
                for half, sums in enumerate((self.early, self.late))
            )
            yield size, tuple(between(middle, x) for x in first), tuple(between(x, middle) for x in second)
            size *= 2


def token(terms: Sum, j: int) -> Sum:
    """Return the sum at token j of every block."""
    return tuple(t[..., j : j + 1, :] for t in terms)


def between(late: Sum, early: Sum) -> Tensor:
    """Return the decay between an earlier and a later token with these sums."""
    return difference(late, early).clamp(max=0).exp()


def between_again(late: Sum, early: Sum) -> Tensor:
    """Return `between` by another expression, which a graph computes again, where it would keep a common result."""
    return difference(early, late).clamp(min=0).neg().exp()


def difference(a: Sum, b: Sum) -> Tensor:
    return sum((x - y for x, y in zip(a[1:], b[1:])), a[0] - b[0])


def lambdas(log_decay: Tensor) -> Tensor:
    """Return each token's own decay (.., L, D); `log_decay` stays unchanged."""
    return exp_where(log_decay.clone() if reuses_memory() else log_decay, factors=FACTORS)


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
