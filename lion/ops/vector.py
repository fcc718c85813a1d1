"""Vector decay: one lambda for each key dimension (Theorem B.1 and B.2).

    s_ij = sum_d q_id k_jd M_ijd

The decay does not factor out of `q k^T`, and factoring it into q and k overflows over more than a few tokens. Here
every gate convention is brought to one: a token's own lambda is folded into its q or k (`FOLDS`), and what is left is
the product `E_ij` of the lambdas strictly between i and j, the same for both directions. Then blocks are halved: for
a query in one half and a key in the other, E is what lies between each and the middle, two factors <= 1, and all
pairs across the middle are one matrix product. What is left are short blocks on the diagonal, done one distance
after the other. No lambda is divided by, and lambdas are multiplied, not summed up and subtracted as logarithms, so
steep decays lose nothing.

The backward pass computes all products again instead of storing them, and needs no gradient of E: for a pair with
weight w the derivative by every log lambda between is w itself, so that of all pairs is a sum over the tokens at
which pairs begin less one over those at which they end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lion.ops import chunk
from lion.ops.decay import FORGOTTEN, Clock, prefix_sums

SHORT = 8  # tokens of a block at most that is done by distance
FOLDS = {  # whether lambda is folded into q, into k, of the earlier and of the later token of a pair
    "source": ((False, False), (True, True)),
    "target": ((True, True), (False, False)),
    "symmetric": ((False, True), (False, True)),
    "between": ((False, False), (False, False)),
}


def vector_scores(
    q: Tensor, k: Tensor, log_decay: Tensor, run: Tensor | None, *, gate: str, direction: str, own: bool
) -> Tensor:
    """Scores (B, H, .., L, L) of q, k (B, H, .., L, D) under log_decay (b, H, .., L, D), in its dtype.

    `run` (B, .., L) numbers the segments; `own`: whether a token reads its own key here.
    """
    length = q.shape[-2]
    missing = -length % 2 ** halvings_of(length)
    q, k, log_decay = q.to(log_decay.dtype), k.to(log_decay.dtype), log_decay.clamp_min(FORGOTTEN)
    if missing:
        q, k, log_decay = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, log_decay))
    scores = _Scores.apply(q, k, log_decay, gate, own)[..., :length, :length]
    if direction != "both":
        scores = scores.tril() if direction == "forward" else scores.triu()
    return scores if run is None else scores.masked_fill(run[:, None, ..., :, None] != run[:, None, ..., None, :], 0)


def full_vector_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    run: Tensor | None,
    *,
    gate: str,
    direction: str,
    own: bool,
    rowsum: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L), dense in L; log_decay (b, H, L, D), run (B, L) or None."""
    weights = vector_scores(q, k, log_decay, run, gate=gate, direction=direction, own=own)
    total = weights.sum(-1) if rowsum else None
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ v, total


def chunk_vector_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    run: Tensor | None,
    *,
    gate: str,
    direction: str,
    own: bool,
    rowsum: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """The same, linear in L: what `lion.ops.chunk` does, every key dimension decaying on its own."""
    length, wide = q.shape[2], log_decay.dtype
    size, count = chunk.chunk_grid(length, chunk_size)
    missing = size * count - length
    q, k, v, log_decay = (
        (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (count, size)) for x in (q, k, v, log_decay)
    )  # (B, H, N, C, D)
    log_decay = log_decay.clamp_min(FORGOTTEN)
    if run is not None:  # the padding belongs to the last segment
        run = torch.cat([run, run[:, -1:].expand(-1, missing)], 1).unflatten(1, (count, size))

    weights = vector_scores(q, k, log_decay, run, gate=gate, direction=direction, own=own)  # (B, H, N, C, C)
    numerator = weights.to(v.dtype) @ v
    total = weights.sum(-1) if rowsum else None

    if count > 1:
        (q_early, q_late), (k_early, k_late) = (fold(x, log_decay.exp(), f) for x, f in zip((q, k), FOLDS[gate]))
        since, until = before(log_decay).exp(), before(log_decay.flip(-2)).flip(-2).exp()  # to the chunk's ends
        upto, start = prefix_sums(log_decay.sum(-2))  # (b, H, N, D), of whole chunks
        ways = []
        if direction != "backward":
            ways.append((q_late * since, k_early * until, upto, start, False))
        if direction != "forward":
            negated = (tuple(-t for t in terms) for terms in (start, upto))
            ways.append((q_early * until, k_late * since, *negated, True))
        for reads, write, *times, back in ways:
            here = None
            if run is not None:
                edge = run[..., 0] if back else run[..., -1]  # (B, N)
                behind = torch.cat([edge[:, 1:], edge[:, -1:]] if back else [edge[:, :1], edge[:, :-1]], 1)
                write = write.masked_fill((run != edge[..., None])[:, None, ..., None], 0)
                reads = reads.masked_fill((run != behind[..., None])[:, None, ..., None], 0)
                here = [x[:, None, :, None] for x in (edge, behind)]
            border = chunk.Border(*(Clock(t, here and here[i]) for i, t in enumerate(times)), back)
            states = chunk.carry((write.to(v.dtype).mT @ v).to(wide), border)  # (B, H, N, D, E)
            numerator = numerator + reads.to(v.dtype) @ states.to(v.dtype)
            if rowsum:
                z = chunk.carry(write.sum(3)[..., None], border).mT  # (B, H, N, 1, D)
                total = total + (reads * z).sum(-1)
    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None


class _Scores(torch.autograd.Function):
    """Both triangles of the scores and, with `own`, their diagonal. The length is a short block, doubled some times."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, log_decay: Tensor, gate: str, own: bool) -> Tensor:
        ctx.save_for_backward(q, k, log_decay)
        ctx.gate, ctx.own = gate, own
        lam, size = log_decay.exp(), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = (fold(x, lam, folds) for x, folds in zip((q, k), FOLDS[gate]))

        qe, ql, ke, kl, l = (blocks(x, size) for x in (q_early, q_late, k_early, k_late, lam))  # (.., M, S, D)
        diagonal = (q * k).sum(-1) if own else torch.zeros_like(q[..., 0])
        below, above = [], []  # by distance, at the later token
        for far, E in distances(l):
            below.append((ql * down(ke, far) * E).sum(-1))
            above.append((down(qe, far) * kl * E).sum(-1))
        by_distance = torch.stack([diagonal.unflatten(-1, (-1, size)), *below, *above], -1)  # (.., M, S, 2S - 1)
        i, j = torch.arange(size, device=q.device)[:, None], torch.arange(size, device=q.device)
        scores = by_distance[..., torch.maximum(i, j), torch.where(i >= j, i - j, size - 1 + j - i)]  # (.., M, S, S)

        for late, E in halvings(lam, size):
            q2, k2 = (
                halves(q_early, q_late, E.shape[-2]) * E,
                halves(k_early, k_late, E.shape[-2]) * E,
            )  # (.., M, 2, n, D)
            corners = q2 @ k2.flip(-3).mT  # (.., M, 2, n, n): earlier queries with later keys, and the reverse
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            upper, lower = corners.unbind(-3)
            scores = torch.cat([torch.cat([first, upper], -1), torch.cat([lower, second], -1)], -2)
        return scores.squeeze(-3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        lam, size = log_decay.exp(), q.shape[-2] >> halvings_of(q.shape[-2])
        (q_early, q_late), (k_early, k_late) = (fold(x, lam, folds) for x, folds in zip((q, k), FOLDS[ctx.gate]))
        dq_early = dq_late = dk_early = dk_late = 0  # (.., L, D), of the folded ones
        none = torch.zeros((), dtype=q.dtype, device=q.device)

        grad = grad[..., None, :, :]  # (.., M, 2n, 2n)
        for late, E in reversed(list(halvings(lam, size))):
            n = E.shape[-2]
            q2, k2 = halves(q_early, q_late, E.shape[-2]) * E, halves(k_early, k_late, E.shape[-2]) * E
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
        folds_q, folds_k = FOLDS[ctx.gate]
        da = sum((part for part, folded in zip((*of_q, *of_k), (*folds_q, *folds_k)) if folded), da)
        dq = sum(fold(x, lam, folds)[i] for i, (x, folds) in enumerate(((dq_early, folds_q), (dq_late, folds_q))))
        dk = sum(fold(x, lam, folds)[i] for i, (x, folds) in enumerate(((dk_early, folds_k), (dk_late, folds_k))))
        if ctx.own:
            own = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq, dk = dq + own * k, dk + own * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None


def halvings_of(length: int) -> int:
    """How often `length` is halved until a block is short."""
    return (-(-length // SHORT) - 1).bit_length()


def fold(x: Tensor, lam: Tensor, folds: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """x of a pair's earlier and of its later token."""
    return x * lam if folds[0] else x, x * lam if folds[1] else x


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


def before(x: Tensor) -> Tensor:
    """The exclusive prefix sum over tokens."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)


def distances(lam: Tensor) -> Iterator[tuple[int, Tensor | float]]:
    """Every distance inside blocks (.., S, D), and E between a token and the one as far before it."""
    E = 1.0
    for far in range(1, lam.shape[-2]):
        if far > 1:
            E = E * down(lam, far - 1)
        yield far, E


def halvings(lam: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """From blocks of `size` up: which half of a pair of blocks is the later (2, 1, 1), and E between each token and
    the middle (.., M, 2, n, D)."""
    late = torch.arange(2, device=lam.device).bool()[:, None, None]
    one = torch.ones((), dtype=lam.dtype, device=lam.device)
    l = blocks(lam, size)
    since, until = [torch.ones_like(l[..., 0, :])], [torch.ones_like(l[..., 0, :])]
    for i in range(size - 1):
        since.append(since[-1] * l[..., i, :])
        until.append(until[-1] * l[..., size - 1 - i, :])
    total = since[-1] * l[..., size - 1, :]  # (.., M, D)
    since, until = torch.stack(since, -2).flatten(-3, -2), torch.stack(until[::-1], -2).flatten(-3, -2)
    while size < lam.shape[-2]:
        since, until = (x.unflatten(-2, (-1, 2, size)) for x in (since, until))
        yield late, torch.where(late, since, until)
        totals = total.unflatten(-2, (-1, 2))[..., None, :]  # (.., M, 2, 1, D)
        since = joined(since * torch.where(late, totals[..., :1, :, :], one))
        until = joined(until * torch.where(late, one, totals[..., 1:, :, :]))
        total = total.unflatten(-2, (-1, 2)).prod(-2)
        size *= 2


def halves(early: Tensor, late: Tensor, size: int) -> Tensor:
    """x (.., L, D) of earlier and later tokens as (.., M, 2, n, D): each half in the role that it has."""
    early, later = (x.unflatten(-2, (-1, 2, size)) for x in (early, late))
    is_late = torch.arange(2, device=later.device).bool()[:, None, None]
    return torch.where(is_late, later, early)
