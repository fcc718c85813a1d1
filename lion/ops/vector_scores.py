"""Scores under a vector decay, one lambda for each key dimension (Theorem B.1 and B.2), by halving.

    s_ij = sum_d q_id k_jd M_ijd

The decay does not factor out of `q k^T`, and factoring it into q and k overflows over more than a few tokens. Blocks of
tokens are therefore halved. For a query in one half and a key in the other, the decay is the product of two factors
<= 1: the decays from each of the two tokens to the middle. All pairs across the middle are one matrix product. Short
blocks remain on the diagonal, and are computed pair by pair (`lion.ops.vector_pairs`). No lambda is divided by, and
steep decays lose no precision. Where a product of three decays could be denormal, each of them is 0.

The backward pass recomputes all products instead of storing them, and needs no gradient of the decays. For a pair with
weight w, the derivative by every log lambda between the two tokens is w itself. Over all pairs, the derivative is a
running sum over tokens: the weights of the pairs that begin at a token, minus the weights of those that end at it. A
token's own lambda adds the weights of those of its pairs whose decay includes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import bounded
from lion.ops.inductor import materialized
from lion.ops.modes import is_static
from lion.ops.tokens import ScoreSettings
from lion.ops.vector_pairs import FOLDS, late_half, pairs_of

SHORT_BLOCK = 8  # most tokens of a block that is computed pair by pair; measured on a CPU at 4, 8, 16


def vector_scores(q: Tensor, k: Tensor, log_decay: Tensor, segment_index: Tensor | None, how: ScoreSettings) -> Tensor:
    """Compute the scores (B, H, .., L, L) of q, k (B, H, .., L, D) under log_decay (b, H, .., L, D), in its dtype.

    `segment_index` (B, .., L) numbers the segments.
    """
    length, wide, narrow = q.shape[-2], log_decay.dtype, q.dtype
    padded = pad(padding_of(length), q.to(wide), k.to(wide), bounded(log_decay))
    scores = _Scores.apply(*padded, how.decay_convention, how.include_diagonal, narrow)[..., :length, :length]
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

    The length must be that of a short block, doubled any number of times. On a GPU, factors of matrix products are
    rounded to the dtype `narrow` of q and k before they were widened.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, log_decay: Tensor, decay_convention: str, include_diagonal: bool, narrow: torch.dtype
    ) -> Tensor:
        pairs = pairs_of(q, k, log_decay, short_block(q.shape[-2]), decay_convention, narrow)
        diagonal = (q * k).sum(-1) if include_diagonal else torch.zeros_like(q[..., 0])
        scores = materialized(pairs.scores(diagonal))  # (.., M, S, S); index expressions would nest in loops
        for (q1, q2), (k1, k2), _ in pairs.halvings():
            upper, lower = q1 @ k2.mT, q2 @ k1.mT  # earlier queries with later keys, and the reverse
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            rows = ([first, upper.to(first.dtype)], [lower.to(first.dtype), second])
            scores = torch.cat([torch.cat(row, -1) for row in rows], -2)
        return scores.squeeze(-3)

    @staticmethod
    def setup_context(ctx, inputs: tuple, scores: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.decay_convention, ctx.include_diagonal, ctx.narrow = inputs[3:]

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        pairs = pairs_of(q, k, log_decay, short_block(q.shape[-2]), ctx.decay_convention, ctx.narrow)
        found = []  # gradients by `pairs.tokens`, of every level
        for (q1, q2), (k1, k2), E in pairs.halvings():
            upper, lower = across_middles(grad, q1.shape[-2], q1.dtype)
            dq, dk = (upper @ k2, lower @ k1), (lower.mT @ q2, upper.mT @ q1)
            found.append([in_half(i, x[i] * E[i]) for x in (dq, dk) for i in range(2)])
        grad = diagonal_blocks(grad, pairs.size)
        found.append(pairs.gradients(grad))
        found = list(map(sum, zip(*found)))

        weights = [x * dx for x, dx in zip(pairs.tokens, found)]  # of the pairs of each token
        begin, end = weights[0] + weights[2], weights[1] + weights[3]
        da = (F.pad(begin, (0, 0, 1, 0))[..., :-1, :] - end).cumsum(-2)
        folds = (fold for folds in FOLDS[ctx.decay_convention] for fold in folds)
        da = sum((part for part, fold in zip(weights, folds) if fold), da)
        dq_early, dq_late, dk_early, dk_late = pairs.folded(found)
        dq, dk = dq_early + dq_late, dk_early + dk_late
        if ctx.include_diagonal:
            diagonal = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq, dk = dq + diagonal * k, dk + diagonal * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None, None


def short_block(length: int) -> int:
    """Return the number of tokens of a short block, for a length from `padding_of`."""
    return length >> halvings_of(length)


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


def in_half(half: int, x: Tensor) -> Tensor:
    """Return halves (.., M, n, D) as tokens (.., L, D), with 0 in the other halves."""
    late = late_half(x.device, again=True)
    return torch.where(late if half else ~late, x[..., None, :, :], 0.0).flatten(-4, -2)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """Return the blocks (.., M, size, size) on the diagonal of x (.., L, L)."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(0, -4, -2).movedim(-1, -3)


def across_middles(x: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the pairs (.., M, n, n) across the middle of each block of 2n tokens, above and below the diagonal."""
    inside = diagonal_blocks(x, 2 * n)[..., None, :, :]
    late = late_half(x.device, again=True)
    return torch.where(late, inside[..., n:, :n], inside[..., :n, n:]).to(dtype).unbind(-3)  # both in one kernel
