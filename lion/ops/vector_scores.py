"""Scores under a vector decay, one lambda for each key dimension (Theorem B.1 and B.2), by halving.

    s_ij = sum_d q_id k_jd M_ijd

The decay does not factor out of `q k^T`, and factoring it into q and k overflows over more than a few tokens. All decay
conventions are therefore reduced to one: a token's own lambda is folded into its q or k (`FOLDS`). What remains is the
product `E_ij` of the lambdas strictly between i and j, the same for both directions.

Blocks are then halved. For a query in one half and a key in the other, E is the product of two factors <= 1: the decays
from each of the two tokens to the middle. All pairs across the middle are one matrix product. Short blocks remain on
the diagonal, and are computed one distance after the other. No lambda is divided by. Lambdas are multiplied, not added
and subtracted as logarithms, so steep decays lose no precision. A token's lambda and the two factors are 0 where a
product of three such numbers could be denormal.

The backward pass recomputes all products instead of storing them, and needs no gradient of E. For a pair with weight w,
the derivative by every log lambda between the two tokens is w itself. Over all pairs, the derivative is a running
sum over tokens: the weights of the pairs that begin at a token, minus the weights of those that end at it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.arguments import is_static
from lion.ops.decay import bounded, exp_where, least_log_decay, materialized
from lion.ops.modes import reuses_memory
from lion.ops.tokens import ScoreSettings

FACTORS = 3  # decays multiplied with each other: a token's own, and from each token of a pair to the middle
SHORT_BLOCK = 8  # most tokens of a block that is computed by distance; measured at 4, 8, 16
FOLDS = {  # whether lambda is folded into (q, q) and (k, k) of the (earlier, later) token of a pair
    "source": ((False, False), (True, True)),
    "target": ((True, True), (False, False)),
    "symmetric": ((False, True), (False, True)),
    "between": ((False, False), (False, False)),
}


def vector_scores(q: Tensor, k: Tensor, log_decay: Tensor, segment_index: Tensor | None, how: ScoreSettings) -> Tensor:
    """Compute the scores (B, H, .., L, L) of q, k (B, H, .., L, D) under log_decay (b, H, .., L, D), in its dtype.

    `segment_index` (B, .., L) numbers the segments.
    """
    length = q.shape[-2]
    q, k, log_decay = q.to(log_decay.dtype), k.to(log_decay.dtype), bounded(log_decay)
    padded = pad(padding_of(length), q, k, log_decay)
    scores = _Scores.apply(*padded, how.decay_convention, how.include_diagonal)[..., :length, :length]
    if how.direction != "both":
        scores = scores.tril() if how.direction == "forward" else scores.triu()
    if segment_index is None:
        return scores
    index = segment_index[:, None]  # (B, 1, .., L)
    return scores.masked_fill(index[..., :, None] != index[..., None, :], 0)


def pad(padding: int, *xs: Tensor) -> list[Tensor]:
    """Append `padding` zeros to each (.., L, D): keys of 0 add nothing."""
    return [F.pad(x, (0, 0, 0, padding)) if padding else x for x in xs]


class _Scores(torch.autograd.Function):
    """Scores of both triangles, with their diagonal or 0.

    The length must be that of a short block, doubled any number of times.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, log_decay: Tensor, decay_convention: str, include_diagonal: bool) -> Tensor:
        lam, size = lambdas(log_decay), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = fold_both(q, k, lam, decay_convention)

        qe, ql, ke, kl, l = (blocks(x, size) for x in (q_early, q_late, k_early, k_late, lam))  # (.., M, S, D)
        diagonal = (q * k).sum(-1) if include_diagonal else torch.zeros_like(q[..., 0])
        below, above = [], []  # for each distance, at the later token
        for distance, E in distances(l):
            below.append((ql * shift_later(ke, distance) * E).sum(-1))
            above.append((shift_later(qe, distance) * kl * E).sum(-1))
        by_distance = torch.stack([diagonal.unflatten(-1, (-1, size)), *below, *above], -1)  # (.., M, S, 2S - 1)
        i, j = torch.arange(size, device=q.device)[:, None], torch.arange(size, device=q.device)
        scores = by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]  # (.., M, S, S)
        scores = materialized(scores)  # for GPUs Inductor merges loops, and with this index in them it would not finish

        for n, E in halvings(lam, size):
            q2, k2 = halves(q_early, q_late, n) * E, halves(k_early, k_late, n) * E  # (.., M, 2, n, D)
            corners = q2 @ k2.flip(-3).mT  # (.., M, 2, n, n): earlier queries with later keys, and the reverse
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            upper, lower = corners.unbind(-3)
            scores = torch.cat([torch.cat([first, upper], -1), torch.cat([lower, second], -1)], -2)
        return scores.squeeze(-3)

    @staticmethod
    def setup_context(ctx, inputs: tuple, scores: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.decay_convention, ctx.include_diagonal = inputs[3:]

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        lam, size = lambdas(log_decay), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = fold_both(q, k, lam, ctx.decay_convention)
        dq_early = dq_late = dk_early = dk_late = torch.zeros_like(q)  # (.., L, D), gradients of the folded q and k
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
        for distance, E in distances(l):
            below, above = (F.pad(grad.diagonal(d, -2, -1), (distance, 0))[..., None] for d in (-distance, distance))
            dq_late = dq_late + (below * shift_later(ke, distance) * E).flatten(-3, -2)
            dk_late = dk_late + (above * shift_later(qe, distance) * E).flatten(-3, -2)
            dk_early = dk_early + shift_earlier(below * ql * E, distance).flatten(-3, -2)
            dq_early = dq_early + shift_earlier(above * kl * E, distance).flatten(-3, -2)

        of_q, of_k = (q_early * dq_early, q_late * dq_late), (k_early * dk_early, k_late * dk_late)
        begin, end = of_q[0] + of_k[0], of_q[1] + of_k[1]
        da = (F.pad(begin, (0, 0, 1, 0))[..., :-1, :] - end).cumsum(-2)
        folds = [*FOLDS[ctx.decay_convention][0], *FOLDS[ctx.decay_convention][1]]
        da = sum((part for part, folded in zip((*of_q, *of_k), folds) if folded), da)
        parts = (x * lam if folded else x for x, folded in zip((dq_early, dq_late, dk_early, dk_late), folds))
        dq, dk = next(parts) + next(parts), next(parts) + next(parts)
        if ctx.include_diagonal:
            diagonal = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq, dk = dq + diagonal * k, dk + diagonal * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None


def lambdas(log_decay: Tensor) -> Tensor:
    """Return each token's own decay (.., L, D); `log_decay` stays unchanged."""
    return exp_where(log_decay.clone() if reuses_memory() else log_decay, factors=FACTORS)


def flush_denormals(decay: Tensor) -> Tensor:
    """Return products of decays, with 0 in place of those that are too small."""
    return decay.masked_fill(decay < math.exp(least_log_decay(decay.dtype, FACTORS)), 0)


def halvings_of(length: int) -> int:
    """Return how often `length` is halved until a block is short."""
    return (-(-length // SHORT_BLOCK) - 1).bit_length()


def padding_of(length: int) -> int:
    """Return the number of tokens that extend `length` so that it halves into short blocks.

    A symbolic length is extended to a power of two, so that there is one graph for each power of two.
    """
    if is_static(length):
        return -length % 2 ** halvings_of(length)
    size = SHORT_BLOCK
    while size <= length:
        size *= 2
    return size - length


def fold_both(
    q: Tensor, k: Tensor, lam: Tensor, decay_convention: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return q and k, each for the earlier and for the later token of a pair, with lambda folded in by `FOLDS`."""
    folds = zip((q, k), FOLDS[decay_convention])
    return tuple(tuple(x * lam if folded else x for folded in pair) for x, pair in folds)


def blocks(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-2, (-1, size))


def joined(halves: Tensor) -> Tensor:
    """Join halves (.., M, 2, n, D) to (.., L, D)."""
    return halves.flatten(-4, -2)


def shift_later(x: Tensor, distance: int) -> Tensor:
    """Return x_{i - distance} in place of x_i, 0 where there is none."""
    return F.pad(x[..., :-distance, :], (0, 0, distance, 0))


def shift_earlier(x: Tensor, distance: int) -> Tensor:
    return F.pad(x[..., distance:, :], (0, 0, 0, distance))


def distances(lam: Tensor) -> Iterator[tuple[int, Tensor | float]]:
    """Yield every distance inside blocks (.., S, D), and E between each token and the token that far before it."""
    E = 1.0
    for distance in range(1, lam.shape[-2]):
        if distance > 1:
            E = flush_denormals(E * shift_later(lam, distance - 1))
        yield distance, E


def halvings(lam: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the size n of half a block, from `size` upwards, and E between each token and the middle of its block.

    E is (.., M, 2, n, D), for M blocks of 2n tokens.
    """
    late, one = second_half(lam.device), torch.ones((), dtype=lam.dtype, device=lam.device)
    l = blocks(lam, size)
    from_start, to_end = [torch.ones_like(l[..., 0, :])], [torch.ones_like(l[..., 0, :])]  # decays to block ends
    for i in range(size - 1):
        from_start.append(flush_denormals(from_start[-1] * l[..., i, :]))
        to_end.append(flush_denormals(to_end[-1] * l[..., size - 1 - i, :]))
    total = flush_denormals(from_start[-1] * l[..., size - 1, :])  # (.., M, D)
    from_start, to_end = torch.stack(from_start, -2).flatten(-3, -2), torch.stack(to_end[::-1], -2).flatten(-3, -2)
    while size < lam.shape[-2]:
        from_start, to_end = (x.unflatten(-2, (-1, 2, size)) for x in (from_start, to_end))
        yield size, torch.where(late, from_start, to_end)
        first, second = total.unflatten(-2, (-1, 2))[..., None, :].split(1, -3)  # (.., M, 1, 1, D)
        from_start = joined(flush_denormals(from_start * torch.where(late, first, one)))
        to_end = joined(flush_denormals(to_end * torch.where(late, one, second)))
        total = flush_denormals(first * second)[..., 0, 0, :]
        size *= 2


def halves(early: Tensor, late: Tensor, size: int) -> Tensor:
    """Return halves (.., M, 2, n, D) of x (.., L, D).

    The first half of a block comes from `early`, x as the earlier token of a pair, and the second half from `late`.
    """
    early, late = (x.unflatten(-2, (-1, 2, size)) for x in (early, late))
    return torch.where(second_half(late.device), late, early)


def second_half(device: torch.device) -> Tensor:
    """Return a mask (2, 1, 1) that is True for the second half."""
    return torch.arange(2, device=device).bool()[:, None, None]
