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

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import bounded
from lion.ops.full import pad
from lion.ops.inductor import materialized
from lion.ops.modes import is_static
from lion.ops.settings import Settings
from lion.ops.vector_pairs import FOLDS, Side, Sides, folded, late_half, pairs_of

SHORT_BLOCK = 8  # most tokens of a block that is computed pair by pair; measured on a CPU at 4, 8, 16


def vector_scores(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    segment: Tensor | None,
    settings: Settings,
    include_diagonal: bool = True,
) -> Tensor:
    """Compute the scores (B, H, .., L, L) of q, k (B, H, .., L, D) under log_decay (b, H, .., L, D), in its dtype.

    `segment` (B, .., L) numbers the segments. `settings` determine the decay convention and the direction.
    """
    length = q.shape[-2]
    padding = halving_padding(length)
    wide, narrow = log_decay.dtype, q.dtype
    q = pad(q.to(wide), padding)
    k = pad(k.to(wide), padding)
    log_decay = pad(bounded(log_decay), padding)
    scores = _Scores.apply(q, k, log_decay, settings.decay_convention, settings.direction, include_diagonal, narrow)
    scores = scores[..., :length, :length]
    if segment is None:
        return scores
    segment = segment[:, None]  # (B, 1, .., L)
    return scores.masked_fill(segment[..., :, None] != segment[..., None, :], 0)


class _Scores(torch.autograd.Function):
    """Scores of the pairs of one direction or both, with their diagonal or 0.

    The length must be that of a short block, doubled any number of times. On a GPU, factors of matrix products are
    rounded to the dtype `narrow` of q and k before they were widened.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        log_decay: Tensor,
        decay_convention: str,
        direction: str,
        include_diagonal: bool,
        narrow: torch.dtype,
    ) -> Tensor:
        pairs = pairs_of(q, k, log_decay, short_block(q.shape[-2]), decay_convention, direction, narrow)
        diagonal = (q * k).sum(-1) if include_diagonal else torch.zeros_like(q[..., 0])
        scores = materialized(pairs.scores(diagonal))  # (.., M, S, S); index expressions would nest in loops
        for sides, _ in pairs.halvings():
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            below, above = (sides.get(name) for name in ("forward", "backward"))
            lower = torch.zeros_like(first) if below is None else (below.late @ below.early.mT).to(first.dtype)
            upper = torch.zeros_like(first) if above is None else (above.early @ above.late.mT).to(first.dtype)
            scores = torch.cat([torch.cat(row, -1) for row in ([first, upper], [lower, second])], -2)
        return scores.squeeze(-3)

    @staticmethod
    def setup_context(ctx, inputs: tuple, scores: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.decay_convention, ctx.direction, ctx.include_diagonal, ctx.narrow = inputs[3:]

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        pairs = pairs_of(q, k, log_decay, short_block(q.shape[-2]), ctx.decay_convention, ctx.direction, ctx.narrow)
        found = {name: [] for name in pairs.tokens}  # gradients by `pairs.tokens`, of every level
        for sides, E in pairs.halvings():
            weights = across_middles(grad, E.early.shape[-2], pairs.narrow, sides)
            for name, side in sides.items():
                early, late = weights[name].mT @ side.late, weights[name] @ side.early
                found[name].append(Side(in_half(0, early * E.early), in_half(1, late * E.late)))
        grad = diagonal_blocks(grad, pairs.size)
        for name, side in pairs.gradients(grad).items():
            found[name] = Side(*map(total, zip(*found[name], side)))

        tokens = {name: Side(*map(torch.mul, side, found[name])) for name, side in pairs.tokens.items()}
        begin, end = map(total, zip(*tokens.values()))  # weights of the pairs of each token
        da = (F.pad(begin, (0, 0, 1, 0))[..., :-1, :] - end).cumsum(-2)
        folds = FOLDS[ctx.decay_convention]
        da = total([da, *(x for name in tokens for x, fold in zip(tokens[name], folds[name]) if fold)])
        dq, dk = queries_and_keys(folded(found, pairs.lam, ctx.decay_convention))
        if ctx.include_diagonal:
            diagonal = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq, dk = dq + diagonal * k, dk + diagonal * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None, None, None


def short_block(length: int) -> int:
    """Return the number of tokens of a short block, for a length from `halving_padding`."""
    return length >> halvings_of(length)


def halvings_of(length: int) -> int:
    """Return how often `length` is halved until a block is short."""
    return (-(-length // SHORT_BLOCK) - 1).bit_length()


def halving_padding(length: int) -> int:
    """Return the number of tokens that extend `length` so that it halves into short blocks.

    A symbolic length is extended to a power of two, so that there is one graph for each power of two.
    """
    if is_static(length):
        return -length % 2 ** halvings_of(length)
    size = SHORT_BLOCK
    while size <= length:
        size *= 2
    return size - length


def queries_and_keys(sides: Sides) -> tuple[Tensor, Tensor]:
    """Return the gradients by q and k, from those by their sides."""
    queries = [side.late if name == "forward" else side.early for name, side in sides.items()]
    keys = [side.early if name == "forward" else side.late for name, side in sides.items()]
    return total(queries), total(keys)


def total(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)  # `sum` begins with 0, which is one more addition


def in_half(half: int, x: Tensor) -> Tensor:
    """Return halves (.., M, n, D) as tokens (.., L, D), with 0 in the other halves."""
    late = late_half(x.device, again=True)
    return torch.where(late if half else ~late, x[..., None, :, :], 0.0).flatten(-4, -2)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """Return the blocks (.., M, size, size) on the diagonal of x (.., L, L)."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(0, -4, -2).movedim(-1, -3)


def across_middles(x: Tensor, n: int, dtype: torch.dtype, directions: Iterable[str]) -> dict[str, Tensor]:
    """Return the pairs (.., M, n, n) across the middle of each block of 2n tokens, later tokens as rows."""
    inside = diagonal_blocks(x, 2 * n)
    found = {"forward": inside[..., n:, :n], "backward": inside[..., :n, n:]}
    found = {name: found[name] for name in directions}
    if len(found) == 2:  # both in one kernel
        both = torch.where(late_half(x.device, again=True), *(part[..., None, :, :] for part in found.values()))
        found = dict(zip(("backward", "forward"), both.to(dtype).unbind(-3)))
    return {name: part.to(dtype) if name == "forward" else part.to(dtype).mT for name, part in found.items()}
