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
        diagonal = torch.zeros_like(q[..., 0])
        if include_diagonal:
            diagonal = (q * k).sum(-1)
        scores = materialized(pairs.scores(diagonal))  # (.., M, S, S); index expressions would nest in loops
        for sides, _ in pairs.halvings():
            first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
            lower = upper = torch.zeros_like(first)
            if "forward" in sides:
                lower = (sides["forward"].late @ sides["forward"].early.mT).to(first.dtype)
            if "backward" in sides:
                upper = (sides["backward"].early @ sides["backward"].late.mT).to(first.dtype)
            rows = torch.cat([first, upper], -1), torch.cat([lower, second], -1)
            scores = torch.cat(rows, -2)
        return scores.squeeze(-3)

    @staticmethod
    def setup_context(ctx, inputs: tuple, scores: Tensor) -> None:
        q, k, log_decay, ctx.decay_convention, ctx.direction, ctx.include_diagonal, ctx.narrow = inputs
        ctx.save_for_backward(q, k, log_decay)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, log_decay = ctx.saved_tensors
        pairs = pairs_of(q, k, log_decay, short_block(q.shape[-2]), ctx.decay_convention, ctx.direction, ctx.narrow)
        found: Sides = {}  # gradients by `pairs.tokens`
        for sides, E in pairs.halvings():
            weights = across_middles(grad, E.early.shape[-2], pairs.narrow, sides)
            for name, side in sides.items():
                early = weights[name].mT @ side.late
                late = weights[name] @ side.early
                more = Side(in_half(0, early * E.early), in_half(1, late * E.late))
                found[name] = found[name].plus(more) if name in found else more
        grad = diagonal_blocks(grad, pairs.size)
        for name, more in pairs.gradients(grad).items():
            found[name] = found[name].plus(more) if name in found else more

        weights_of = {name: side.times(found[name]) for name, side in pairs.tokens.items()}  # of the pairs of tokens
        da = decay_gradient(weights_of, ctx.decay_convention)
        dq, dk = queries_and_keys(folded(found, pairs.lam, ctx.decay_convention))
        if ctx.include_diagonal:
            diagonal = grad.diagonal(0, -2, -1).flatten(-2)[..., None]
            dq = dq + diagonal * k
            dk = dk + diagonal * q
        return dq, dk, da.sum_to_size(log_decay.shape), None, None, None, None


def decay_gradient(weights: Sides, decay_convention: str) -> Tensor:
    """Return the gradient by log lambdas (.., L, D), from the weights of the pairs of each token."""
    begin = add([side.early for side in weights.values()])
    end = add([side.late for side in weights.values()])
    da = (F.pad(begin, (0, 0, 1, 0))[..., :-1, :] - end).cumsum(-2)
    for name, side in weights.items():
        fold = FOLDS[decay_convention][name]
        if fold.early:
            da = da + side.early
        if fold.late:
            da = da + side.late
    return da


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
    queries, keys = [], []
    if "forward" in sides:
        queries.append(sides["forward"].late)
        keys.append(sides["forward"].early)
    if "backward" in sides:
        queries.append(sides["backward"].early)
        keys.append(sides["backward"].late)
    return add(queries), add(keys)


def add(parts: list[Tensor]) -> Tensor:
    """Return the sum of one tensor or two."""
    if len(parts) == 1:
        return parts[0]
    return parts[0] + parts[1]


def in_half(half: int, x: Tensor) -> Tensor:
    """Return halves (.., M, n, D) as tokens (.., L, D), with 0 in the other halves."""
    chosen = late_half(x.device, again=True)
    if half == 0:
        chosen = ~chosen
    return torch.where(chosen, x[..., None, :, :], 0.0).flatten(-4, -2)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """Return the blocks (.., M, size, size) on the diagonal of x (.., L, L)."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(0, -4, -2).movedim(-1, -3)


def across_middles(x: Tensor, n: int, dtype: torch.dtype, directions: Sides) -> dict[str, Tensor]:
    """Return the pairs (.., M, n, n) across the middle of each block of 2n tokens, later tokens as rows.

    `directions` are the keys of the result.
    """
    inside = diagonal_blocks(x, 2 * n)
    lower, upper = inside[..., n:, :n], inside[..., :n, n:]
    if len(directions) == 2:  # both in one kernel
        late = late_half(x.device, again=True)
        both = torch.where(late, lower[..., None, :, :], upper[..., None, :, :])
        upper, lower = both.to(dtype).unbind(-3)
    found = {}
    if "forward" in directions:
        found["forward"] = lower.to(dtype)
    if "backward" in directions:
        found["backward"] = upper.to(dtype).mT
    return found
