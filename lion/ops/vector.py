"""Vector decay: one lambda per key dimension (Theorem B.1 and B.2).

    s_ij = sum_d q_id k_jd exp(t_id - t_jd)        Y = S V

The decay does not factor out of `q k^T`, and factoring it into q and k overflows over more than a few tokens.
So the scores are built in blocks: between two blocks, q and k are re-based at the edge of the query's block that
faces the key, where both exponents are <= 0; a small block on the diagonal is summed element by element.

Clocks carry the key dimension before time, (b, H, D, .., L): each is a clock like any other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lion.ops import chunk
from lion.ops.chunk import chunk_grid, hold, side
from lion.ops.decay import Clock, decay, pair_mask

SIZES = (64, 16)  # blocks of tokens and, within one on the diagonal, smaller blocks


def lanes(weights: Tensor) -> Tensor:
    """Weights (b, H, D, ..) of clocks as factors of q and k (b, H, .., D)."""
    return weights.movedim(2, -1)


def pair_scores(
    q: Tensor, k: Tensor, forward: Clock | None, backward: Clock | None, sizes: tuple[int, ...] = SIZES
) -> Tensor:
    """Decayed scores (B, H, .., L, L) of q, k (B, H, .., L, D) under clocks (b, H, D or 1, .., L)."""
    length = q.shape[-2]
    if (forward or backward).terms[0].shape[2] == 1:  # one lane: the decay factors out of q k^T
        return (q @ k.mT) * pair_mask(forward, backward).squeeze(2)
    while sizes and sizes[0] >= length:
        sizes = sizes[1:]
    if not sizes:
        if not torch.is_grad_enabled():
            return _element_by_element(q, k, forward, backward)
        return checkpoint(_element_by_element, q, k, forward, backward, use_reentrant=False)

    size = sizes[0]
    missing = -length % size
    if missing:
        q, k = (F.pad(x, (0, 0, 0, missing)) for x in (q, k))
        forward, backward = (None if c is None else c.map(lambda t: hold(t, missing)) for c in (forward, backward))
    count = (length + missing) // size
    queries, keys = (x.unflatten(-2, (count, size)) for x in (q, k))  # (B, H, .., N, S, D)
    block, place = torch.arange(count, device=q.device)[:, None], torch.arange(count * size, device=q.device) // size
    blocks, apart = [], 0
    for clock, back in ((forward, False), (backward, True)):
        blocks.append(None if clock is None else clock.map(lambda t: t.unflatten(-1, (count, size))))
        if clock is None:
            continue
        edge = slice(-1, None) if back else slice(0, 1)
        near = blocks[-1].map(lambda t, edge=edge: t[..., edge])  # the edge that faces the key
        reads = queries * lanes(decay(blocks[-1], near))
        reach = decay(near, clock.map(lambda t: t[..., None, :]), place > block if back else place < block)
        apart = apart + reads @ (k[..., None, :, :] * lanes(reach)).mT  # (B, H, .., N, S, L)
    inside = pair_scores(queries, keys, *blocks, sizes[1:])  # (B, H, .., N, S, S)
    same = torch.eye(count, dtype=torch.bool, device=q.device)[:, None, :, None]
    scores = torch.where(same, inside[..., None, :], apart.unflatten(-1, (count, size)))
    return scores.flatten(-4, -3).flatten(-2)[..., :length, :length]


def _element_by_element(q: Tensor, k: Tensor, forward: Clock | None, backward: Clock | None) -> Tensor:
    pairs = lanes(pair_mask(forward, backward))  # (b, H, .., L, L, D)
    return (q[..., :, None, :] * k[..., None, :, :] * pairs).sum(-1)


def full_vector_parts(
    q: Tensor, k: Tensor, v: Tensor, forward: Clock | None, backward: Clock | None, *, rowsum: bool, dropout_p: float
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L), dense in L."""
    wide = forward.terms[0].dtype if forward else backward.terms[0].dtype
    weights = pair_scores(q.to(wide), k.to(wide), forward, backward)
    total = weights.sum(-1) if rowsum else None
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ v, total


def chunk_vector_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Clock | None,
    backward: Clock | None,
    *,
    rowsum: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """The same, linear in L: as `chunk_parts`, every key dimension travelling by its own clock."""
    length = q.shape[2]
    size, count = chunk_grid(length, chunk_size)
    missing = size * count - length
    wide = forward.terms[0].dtype if forward else backward.terms[0].dtype
    heads, dim = q.shape[1], q.shape[-1]

    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) for x in (q.to(wide), k.to(wide), v))
    forward, backward = (
        None if c is None else c.map(lambda t: hold(t, missing).unflatten(-1, (count, size)))
        for c in (forward, backward)
    )

    weights = pair_scores(q, k, forward, backward)  # (B, H, N, C, C)
    numerator = weights.to(v.dtype) @ v
    total = weights.sum(-1) if rowsum else None
    if count > 1:
        for clock, back in ((forward, False), (backward, True)):
            if clock is None:
                continue
            here = side(clock, back)  # (b, H, D, N)
            write = k * lanes(decay(here.edge.map(lambda t: t[..., None]), clock))  # (B, H, N, C, D)
            reads = q * lanes(decay(clock, here.before.map(lambda t: t[..., None])))
            # a key dimension is carried like a head of its own
            folded = here._replace(edge=here.edge.map(fold), before=here.before.map(fold))

            def carried(states: Tensor, folded=folded) -> Tensor:  # (B, H, N, D, E) -> the same, entering each chunk
                lanes_first = states.transpose(2, 3).flatten(1, 2)[:, :, :, None]  # (B, H D, N, 1, E)
                return chunk.carry(lanes_first, folded).squeeze(3).unflatten(1, (heads, dim)).transpose(2, 3)

            states = carried((write.to(v.dtype).mT @ v).to(wide))
            numerator = numerator + reads.to(v.dtype) @ states.to(v.dtype)
            if rowsum:
                z = carried(write.sum(3)[..., None])  # (B, H, N, D, 1)
                total = total + (reads * z.mT).sum(-1)
    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None


def fold(t: Tensor) -> Tensor:
    """(b, h, D, N) -> (b, h D, N); the segments of a clock are the same in all lanes."""
    return t.flatten(1, 2)
