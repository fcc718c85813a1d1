"""Decayed scores, `s_ij = sum_d q_id k_jd exp(t_id - t_jd)`, of every pair of tokens.

With one lane the decay factors out, `(Q K^T) * M`. With a lambda for each key dimension (Theorem B.1 and B.2) it
does not, and factoring it into q and k overflows over more than a few tokens. So the scores are built in blocks:
between two blocks, q and k are re-based at the edge of the query's block that faces the key, where both exponents
are <= 0; a small block on the diagonal is summed element by element.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lion.ops.decay import Direction, decay, pair_mask

SIZES = (64, 16)  # of vectors: blocks of tokens and, within one on the diagonal, smaller blocks


def pair_scores(
    q: Tensor, k: Tensor, directions: tuple[Direction, ...], own: bool = True, sizes: tuple[int, ...] = SIZES
) -> Tensor:
    """Scores (B, H, .., L, L) in float32 or wider, of q, k (B, H, .., L, D) under clocks (b, H, .., L, D or 1).

    `own`: whether a token reads its own key here.
    """
    clock, length = directions[0].key, q.shape[-2]
    wide = clock.terms[0].dtype
    if clock.terms[0].shape[-1] == 1:
        return (q @ k.mT).to(wide) * pair_mask(directions, own).squeeze(-1)
    q, k = q.to(wide), k.to(wide)
    while sizes and sizes[0] >= length:
        sizes = sizes[1:]
    if not sizes:
        if not torch.is_grad_enabled():
            return _element_by_element(q, k, directions, own)
        return checkpoint(_element_by_element, q, k, directions, own, use_reentrant=False)

    size = sizes[0]
    missing = -length % size
    if missing:
        q, k = (F.pad(x, (0, 0, 0, missing)) for x in (q, k))
        directions = tuple(d.map(lambda t: hold(t, missing)) for d in directions)
    count = (length + missing) // size
    queries, keys = (x.unflatten(-2, (count, size)) for x in (q, k))  # (B, H, .., N, S, D)
    place = torch.arange(count * size, device=q.device)[:, None] // size
    block = torch.arange(count, device=q.device)[:, None, None]
    blocks, apart = [], 0
    for direction in directions:
        back = direction.back
        blocks.append(direction.map(lambda t: t.unflatten(-2, (count, size))))
        query = blocks[-1].query
        near = query.map(lambda t, back=back: t[..., -1:, :] if back else t[..., :1, :])  # the edge that faces the key
        reads = queries * decay(query, near)
        reach = decay(near, direction.key.map(lambda t: t[..., None, :, :]), place > block if back else place < block)
        apart = apart + reads @ (k[..., None, :, :] * reach).mT  # (B, H, .., N, S, L)
    inside = pair_scores(queries, keys, tuple(blocks), own, sizes[1:])  # (B, H, .., N, S, S)
    same = torch.eye(count, dtype=torch.bool, device=q.device)[:, None, :, None]
    scores = torch.where(same, inside[..., None, :], apart.unflatten(-1, (count, size)))
    return scores.flatten(-4, -3).flatten(-2)[..., :length, :length]


def _element_by_element(q: Tensor, k: Tensor, directions: tuple[Direction, ...], own: bool) -> Tensor:
    return (q[..., :, None, :] * k[..., None, :, :] * pair_mask(directions, own)).sum(-1)


def hold(t: Tensor, missing: int) -> Tensor:
    """Let time (.., L, D) stand still for `missing` more tokens."""
    return torch.cat([t, t[..., -1:, :].expand(*t.shape[:-2], missing, t.shape[-1])], -2)
