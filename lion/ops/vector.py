"""Vector decay in full and in chunks: as `full.py` and `chunk.py`, every key dimension decaying on its own."""

from __future__ import annotations

from itertools import zip_longest

import torch.nn.functional as F
from torch import Tensor

from lion.ops import chunk
from lion.ops.chunk import Entering
from lion.ops.decay import FORGOTTEN, Clock, exp_where, prefix_sums
from lion.ops.full import pad_run, weighted_parts
from lion.ops.rnn import State
from lion.ops.vector_scores import FACTORS, fold_both, lambdas, missing_of, pad, vector_scores


def full_vector_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    run: Tensor | None,
    *,
    decay_convention: str,
    direction: str,
    own: bool,
    rowsum: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L), dense in L; log_decay (b, H, L, D), run (B, L) or None."""
    length = q.shape[2]
    missing = missing_of(length)
    q, k, v, log_decay = pad(missing, q, k, v, log_decay)
    run = pad_run(run, missing)
    weights = vector_scores(q, k, log_decay, run, decay_convention=decay_convention, direction=direction, own=own)
    return weighted_parts(weights, v, length, rowsum=rowsum, dropout_p=dropout_p)


def chunk_vector_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    run: Tensor | None,
    *,
    decay_convention: str,
    direction: str,
    own: bool,
    rowsum: bool,
    chunk_size: int,
    enter: tuple[Entering, ...] = (),
) -> tuple[Tensor, Tensor | None, list[State]]:
    """The same, linear in L: what `lion.ops.chunk` does, every key dimension decaying on its own."""
    length, wide = q.shape[2], log_decay.dtype
    size, count = chunk.chunk_grid(length, chunk_size)
    size += missing_of(size)
    missing = size * count - length
    q, k, v, log_decay = (
        x.unflatten(2, (count, size)) for x in pad(missing, q, k, v, log_decay.clamp_min(FORGOTTEN))
    )  # (B, H, N, C, D)
    if run is not None:
        run = pad_run(run, missing).unflatten(1, (count, size))

    weights = vector_scores(
        q, k, log_decay, run, decay_convention=decay_convention, direction=direction, own=own
    )  # (B, H, N, C, C)
    numerator = weights.to(v.dtype) @ v
    total = weights.sum(-1) if rowsum else None

    leave = []
    if count > 1 or enter:
        (q_early, q_late), (k_early, k_late) = fold_both(q, k, lambdas(log_decay), decay_convention)
        to_start, to_end = before(log_decay), before(log_decay.flip(-2)).flip(-2)
        since, until = (exp_where(x, factors=FACTORS) for x in (to_start, to_end))  # decays to the chunk's ends
        upto, start = prefix_sums(log_decay.sum(-2))  # (b, H, N, D), of whole chunks
        ways = []
        if direction != "backward":
            ways.append((q_late * since, k_early * until, upto, start, False))
        if direction != "forward":
            negated = (tuple(-t for t in terms) for terms in (start, upto))
            ways.append((q_early * until, k_late * since, *negated, True))  # edge, and the one behind it
        for (reads, write, edge, behind, back), entering in zip_longest(ways, enter):
            edge_run = None
            if run is not None:
                edge_run = (run[..., 0] if back else run[..., -1])[:, None, :, None]  # (B, 1, N, 1)
                write = write.masked_fill(run[:, None, ..., None] != edge_run[..., None], 0)
            edge, begin, end = Clock(edge, edge_run), None, None
            if entering is not None:
                ends = (slice(-1, None), slice(0, 1)) if back else (slice(0, 1), slice(-1, None))
                begin = Clock(tuple(t[..., ends[0], :] for t in behind), None).entered(entering.run)
                end = edge.map(lambda t, last=ends[1]: t[..., last, :])
            behind = Clock(behind, chunk.earlier(edge, back, begin).run)
            if run is not None:
                reads = reads.masked_fill(run[:, None, ..., None] != behind.run[..., None], 0)
            border = chunk.Border(edge, behind, back, begin, end)
            S, S_on = chunk.carry((write.to(v.dtype).mT @ v).to(wide), border, entering and entering.S)
            numerator = numerator + reads.to(v.dtype) @ S.to(v.dtype)  # S (B, H, N, D, E)
            if rowsum or entering:
                z, z_on = chunk.carry(write.sum(3)[..., None], border, entering and entering.z[..., None])
                total = total + (reads * z.mT).sum(-1) if rowsum else None  # z (B, H, N, D, 1)
                leave.append(entering and State(S_on, z_on.squeeze(-1)))
    numerator = numerator.to(v.dtype).flatten(2, 3)[:, :, :length]
    return numerator, total.flatten(2, 3)[..., :length] if rowsum else None, leave


def before(x: Tensor) -> Tensor:
    """The exclusive prefix sum over tokens."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)
