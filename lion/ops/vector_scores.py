"""Scores under a vector decay, one lambda for each key dimension (Theorem B.1 and B.2), by halving.

    s_ij = sum_d q_id k_jd M_ijd

The decay does not factor out of `q k^T`, and factoring it into q and k overflows over more than a few tokens. Here
every decay convention is brought to one: a token's own lambda is folded into its q or k (`FOLDS`), and what is left is
the product `E_ij` of the lambdas strictly between i and j, the same for both directions. Then blocks are halved: for
a query in one half and a key in the other, E is what lies between each and the middle, two factors <= 1, and all
pairs across the middle are one matrix product. What is left are short blocks on the diagonal, done one distance
after the other. No lambda is divided by, and lambdas are multiplied, not summed up and subtracted as logarithms, so
steep decays lose nothing. A token's lambda and the two factors are 0 where a product of three such numbers could be
denormal.

The backward pass computes all products again instead of storing them, and needs no gradient of E: for a pair with
weight w the derivative by every log lambda between is w itself, so that of all pairs is a sum over the tokens at
which pairs begin less one over those at which they end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lion.ops.arguments import is_number
from lion.ops.decay import FORGOTTEN, exp_where, least_decay

FACTORS = 3  # decays multiplied with each other: a token's own, and from each token of a pair to the middle
SHORT = 8  # tokens of a block at most that is done by distance; measured at 4, 8, 16
FOLDS = {  # whether lambda is folded into q, into k, of the earlier and of the later token of a pair
    "source": ((False, False), (True, True)),
    "target": ((True, True), (False, False)),
    "symmetric": ((False, True), (False, True)),
    "between": ((False, False), (False, False)),
}


def vector_scores(
    q: Tensor, k: Tensor, log_decay: Tensor, run: Tensor | None, *, decay_convention: str, direction: str, own: bool
) -> Tensor:
    """Scores (B, H, .., L, L) of q, k (B, H, .., L, D) under log_decay (b, H, .., L, D), in its dtype.

    `run` (B, .., L) numbers the segments; `own`: whether a token reads its own key here.
    """
    length = q.shape[-2]
    q, k, log_decay = q.to(log_decay.dtype), k.to(log_decay.dtype), log_decay.clamp_min(FORGOTTEN)
    padded = pad(missing_of(length), q, k, log_decay)
    scores = _Scores.apply(*padded, decay_convention, own)[..., :length, :length]
    if direction != "both":
        scores = scores.tril() if direction == "forward" else scores.triu()
    return scores if run is None else scores.masked_fill(run[:, None, ..., :, None] != run[:, None, ..., None, :], 0)


def pad(missing: int, *xs: Tensor) -> list[Tensor]:
    """Each (.., L, D) with `missing` zeros more: keys that add nothing."""
    return [F.pad(x, (0, 0, 0, missing)) if missing else x for x in xs]


class _Scores(torch.autograd.Function):
    """Both triangles of the scores and, with `own`, their diagonal. The length is a short block, doubled some times."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, log_decay: Tensor, decay_convention: str, own: bool) -> Tensor:
        ctx.save_for_backward(q, k, log_decay)
        ctx.decay_convention, ctx.own = decay_convention, own
        lam, size = lambdas(log_decay), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = fold_both(q, k, lam, decay_convention)

        qe, ql, ke, kl, l = (blocks(x, size) for x in (q_early, q_late, k_early, k_late, lam))  # (.., M, S, D)
        diagonal = (q * k).sum(-1) if own else torch.zeros_like(q[..., 0])
        below, above = [], []  # by distance, at the later token
        for far, E in distances(l):
            below.append((ql * down(ke, far) * E).sum(-1))
            above.append((down(qe, far) * kl * E).sum(-1))
        by_distance = torch.stack([diagonal.unflatten(-1, (-1, size)), *below, *above], -1)  # (.., M, S, 2S - 1)
        i, j = torch.arange(size, device=q.device)[:, None], torch.arange(size, device=q.device)
        scores = by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]  # (.., M, S, S)

        for n, E in halvings(lam, size):
            q2, k2 = halves(q_early, q_late, n) * E, halves(k_early, k_late, n) * E  # (.., M, 2, n, D)
            corners = q2 @ k2.flip(-3).mT  # (.., M, 2, n, n): earlier queries with later keys, and the reverse
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            upper, lower = corners.unbind(-3)
            scores = torch.cat([torch.cat([first, upper], -1), torch.cat([lower, second], -1)], -2)
        return scores.squeeze(-3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        lam, size = lambdas(log_decay), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = fold_both(q, k, lam, ctx.decay_convention)
        dq_early = dq_late = dk_early = dk_late = torch.zeros_like(q)  # (.., L, D), of the folded ones
        none, late = torch.zeros((), dtype=q.dtype, device=q.device), second_half(q.device)

        grad = grad[..., None, :, :]  # (.., M, 2n, 2n)
        for n, E in reversed(list(halvings(lam, size))):
            q2, k2 = halves(q_early, q_late, n) * E, halves(k_early, k_late, n) * E
            corners = torch.stack([grad[..., :n, n:], grad[..., n:, :n]], -3)
            dq, dk = (corners @ k2.flip(-3)) * E, (corners.mT @ q2).flip(-3) * E
            dq_early, dq_late = dq_early + joined(dq.where(~late, none)), dq_late + joined(dq.where(late, none))
            dk_early, dk_late = dk_early + joined(dk.where(~late, none)), dk_late + joined(dk.where(late, none))
            grad = torch.stack([grad[..., :n, :n], grad[..., n:, n:]], -3).flatten(-4, -3)

        qe, ql, ke, kl, l = (blocks(x, size) for x in (q_early, q_late, k_early, k_late, lam))
        for far, E in distances(l):
            below, above = (F.pad(grad.diagonal(d, -2, -1), (far, 0))[..., None] for d in (-far, far))
            dq_late = dq_late + (below * down(ke, far) * E).flatten(-3, -2)
            dk_late = dk_late + (above * down(qe, far) * E).flatten(-3, -2)
            dk_early = dk_early + up(below * ql * E, far).flatten(-3, -2)
            dq_early = dq_early + up(above * kl * E, far).flatten(-3, -2)

        of_q, of_k = (q_early * dq_early, q_late * dq_late), (k_early * dk_early, k_late * dk_late)
        begin, end = of_q[0] + of_k[0], of_q[1] + of_k[1]
        da = (F.pad(begin, (0, 0, 1, 0))[..., :-1, :] - end).cumsum(-2)
        folds = [*FOLDS[ctx.decay_convention][0], *FOLDS[ctx.decay_convention][1]]
        da = sum((part for part, folded in zip((*of_q, *of_k), folds) if folded), da)
        parts = (x * lam if folded else x for x, folded in zip((dq_early, dq_late, dk_early, dk_late), folds))
        dq, dk = next(parts) + next(parts), next(parts) + next(parts)
        if ctx.own:
            own = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq, dk = dq + own * k, dk + own * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None


def lambdas(log_decay: Tensor) -> Tensor:
    """Each token's own decay (.., L, D); the logarithms stay as they are."""
    return exp_where(log_decay.clone() if not torch.is_grad_enabled() else log_decay, factors=FACTORS)


def flushed(decay: Tensor) -> Tensor:
    """Products of decays, 0 where they have become too small."""
    return decay.masked_fill(decay < math.exp(least_decay(decay.dtype, FACTORS)), 0)


def halvings_of(length: int) -> int:
    """How often `length` is halved until a block is short."""
    return (-(-length // SHORT) - 1).bit_length()


def missing_of(length: int) -> int:
    """How many places more make a length that halves into short blocks; of a symbol up to a power of two, so that
    there is one graph for each of these."""
    if is_number(length):
        return -length % 2 ** halvings_of(length)
    size = SHORT
    while size <= length:
        size *= 2
    return size - length


def fold_both(
    q: Tensor, k: Tensor, lam: Tensor, decay_convention: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """q, and k, of a pair's earlier and of its later token."""
    return tuple(tuple(x * lam if own else x for own in folds) for x, folds in zip((q, k), FOLDS[decay_convention]))


def blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, size))


def joined(halves: Tensor) -> Tensor:
    """(.., M, 2, n, D) -> (.., L, D)"""
    return halves.flatten(-4, -2)


def down(x: Tensor, far: int) -> Tensor:
    """x_{i - far} in place of x_i, 0 where there is none."""
    return F.pad(x[..., :-far, :], (0, 0, far, 0))


def up(x: Tensor, far: int) -> Tensor:
    return F.pad(x[..., far:, :], (0, 0, 0, far))


def distances(lam: Tensor) -> Iterator[tuple[int, Tensor | float]]:
    """Every distance inside blocks (.., S, D), and E between a token and the one as far before it."""
    E = 1.0
    for far in range(1, lam.shape[-2]):
        if far > 1:
            E = flushed(E * down(lam, far - 1))
        yield far, E


def halvings(lam: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """From blocks of `size` up: the size n, and E between each token and the middle of 2n (.., M, 2, n, D)."""
    late, one = second_half(lam.device), torch.ones((), dtype=lam.dtype, device=lam.device)
    l = blocks(lam, size)
    since, until = [torch.ones_like(l[..., 0, :])], [torch.ones_like(l[..., 0, :])]  # to the ends of a block
    for i in range(size - 1):
        since.append(flushed(since[-1] * l[..., i, :]))
        until.append(flushed(until[-1] * l[..., size - 1 - i, :]))
    total = flushed(since[-1] * l[..., size - 1, :])  # (.., M, D)
    since, until = torch.stack(since, -2).flatten(-3, -2), torch.stack(until[::-1], -2).flatten(-3, -2)
    while size < lam.shape[-2]:
        since, until = (x.unflatten(-2, (-1, 2, size)) for x in (since, until))
        yield size, torch.where(late, since, until)
        first, second = total.unflatten(-2, (-1, 2))[..., None, :].split(1, -3)  # (.., M, 1, 1, D)
        since = joined(flushed(since * torch.where(late, first, one)))
        until = joined(flushed(until * torch.where(late, one, second)))
        total = flushed(first * second)[..., 0, 0, :]
        size *= 2


def halves(early: Tensor, late: Tensor, size: int) -> Tensor:
    """x (.., L, D) of earlier and of later tokens as (.., M, 2, n, D): each half in the role that it has."""
    early, late = (x.unflatten(-2, (-1, 2, size)) for x in (early, late))
    return torch.where(second_half(late.device), late, early)


def second_half(device: torch.device) -> Tensor:
    """(2, 1, 1)"""
    return torch.arange(2, device=device).bool()[:, None, None]
