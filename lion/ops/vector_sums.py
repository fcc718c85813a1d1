"""Row sums under a vector decay, without scores: a scan of the keys.

    z_i = sum_{j < i} E_ij k_j = lambda_{i-1} z_{i-1} + k_{i-1},        row sum_i = q_i z_i + the same of later tokens

With rotation, the numerator uses scores of rotated queries and keys, and the row sums those of unrotated ones. A state
of D numbers per token yields these sums at a fraction of the cost of a second set of scores. E is defined in
`lion.ops.vector_pairs`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lion.ops.decay import bounded, least_log_decay, log_zero
from lion.ops.full import pad
from lion.ops.segments import segment_starts
from lion.ops.settings import Settings
from lion.ops.vector_pairs import blocks, flush_denormals, lambdas, shift_later, sides_of

BLOCK = 8  # tokens per block, processed in turn; the last tokens of all blocks form a shorter scan


def vector_row_sums(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    segment: Tensor | None,
    settings: Settings,
    include_diagonal: bool = True,
) -> Tensor:
    """Compute the row sums (B, H, .., L) of the scores that `vector_scores` computes from the same arguments."""
    q, k, log_decay = q.to(log_decay.dtype), k.to(log_decay.dtype), bounded(log_decay)
    row_sum = torch.zeros_like(q[..., 0])
    if include_diagonal:
        row_sum = (q * k).sum(-1)
    sides = sides_of(q, k, lambdas(log_decay), settings.decay_convention, settings.direction)
    if "forward" in sides:
        side = sides["forward"]
        row_sum = row_sum + (side.late * states_before(side.early, log_decay, segment)).sum(-1)
    if "backward" in sides:
        side = sides["backward"]
        reversed_segment = None if segment is None else segment.flip(-1)
        states = states_before(side.late.flip(-2), log_decay.flip(-2), reversed_segment)
        row_sum = row_sum + (side.early * states.flip(-2)).sum(-1)
    return row_sum


def states_before(k: Tensor, log_decay: Tensor, segment: Tensor | None) -> Tensor:
    """Return the decayed sum of the keys (B, H, .., L, D) before each token, within its segment (B, .., L)."""
    if segment is None:
        return shift_later(_Scan.apply(k, log_decay), 1)
    first = segment_starts(segment)[:, None, ..., None]
    log_decay = log_decay.masked_fill(first, log_zero(log_decay.dtype))
    return shift_later(_Scan.apply(k, log_decay), 1).masked_fill(first, 0)


class _Scan(torch.autograd.Function):
    """Recurrence `h_i = lambda_i h_{i-1} + x_i`; its gradient is the same scan from the other end."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, log_decay: Tensor) -> Tensor:
        return scan(x, lambdas(log_decay))

    @staticmethod
    def setup_context(ctx, inputs: tuple, h: Tensor) -> None:
        ctx.save_for_backward(h, inputs[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, log_decay = ctx.saved_tensors
        lam = lambdas(log_decay)
        dx = scan(grad.flip(-2), shift_later(lam.flip(-2), 1)).flip(-2)
        return dx, (dx * lam * shift_later(h, 1)).sum_to_size(log_decay.shape)


def scan(x: Tensor, lam: Tensor) -> Tensor:
    """Compute `h_i = lam_i h_{i-1} + x_i` for x (.., L, D), lam (.., L, D) in 0 .. 1."""
    length = x.shape[-2]
    size = min(BLOCK, length)
    x = blocks(pad(x, -length % size), size)  # (.., M, S, D)
    lam = blocks(pad(lam, -length % size), size)
    h = [x[..., 0, :]]
    decays = [lam[..., 0, :]]
    for i in range(1, size):
        h.append(normal(h[-1] * lam[..., i, :] + x[..., i, :]))
        decays.append(flush_denormals(decays[-1] * lam[..., i, :]))
    inside = torch.stack(h, -2)
    if length > size:
        entering = shift_later(scan(h[-1], decays[-1]), 1)[..., None, :]  # (.., M, 1, D)
        inside = normal(inside + torch.stack(decays, -2) * entering)
    return inside.flatten(-3, -2)[..., :length, :]


def normal(x: Tensor) -> Tensor:
    """Return x, with 0 in place of values that are too small.

    A product with such a value could be denormal.
    """
    return x.masked_fill(x.abs() < math.exp(least_log_decay(x.dtype)), 0)
