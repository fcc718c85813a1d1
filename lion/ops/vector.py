"""Decay of each key dimension in the full and chunk forms: the pairs of tokens, and the scan over chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lion.ops.decay import exp_where
from lion.ops.full import weighted_sum, with_own_keys
from lion.ops.settings import Settings
from lion.ops.tokens import Sums, Tokens
from lion.ops.vector_pairs import FACTORS, lambdas, sides_of
from lion.ops.vector_scores import halving_padding, vector_scores
from lion.ops.vector_sums import vector_row_sums


def full_vector_sums(tokens: Tokens, settings: Settings) -> Sums:
    """Compute `(Q K^T * M) V` and the row sums, dense in L, under a decay (b, H, L, D)."""
    length = tokens.q.shape[2]
    sums = vector_sums(tokens.padded(halving_padding(length)), settings)
    row_sum = sums.row_sum
    if row_sum is not None:
        row_sum = row_sum[..., :length]
    sums = Sums(sums.numerator[:, :, :length], row_sum)
    return with_own_keys(sums, tokens, settings)


def vector_sums(tokens: Tokens, settings: Settings) -> Sums:
    """Compute the sums over all keys of rows or chunks (B, H, .., L, D); without its own key, if that has a bonus."""
    q, k, v, log_decay, segment = tokens.q, tokens.k, tokens.v, tokens.decays(), tokens.segment
    include_diagonal = tokens.bonus is None
    if settings.row_sums and not v.shape[-1]:
        return Sums(v, vector_row_sums(q, k, log_decay, segment, settings, include_diagonal))
    return weighted_sum(vector_scores(q, k, log_decay, segment, settings, include_diagonal), v, settings)


class ChunkScan(NamedTuple):
    """One direction of a scan over chunks of tokens.

    Attributes:
        q, k: Queries and keys (B, H, N, C, D).
        from_start: Decays from the start of its chunk, along the scan, to each query (b, H, N, C, D or 1).
        to_end: Decays from each key to the end of its chunk (b, H, N, C, D or 1).
        reverse: Whether the scan goes from right to left.
    """

    q: Tensor
    k: Tensor
    from_start: Tensor
    to_end: Tensor
    reverse: bool


def vector_scans(chunks: Tokens, settings: Settings) -> list[ChunkScan]:
    """Return the scans of all directions over chunks (B, H, N, C, D); q and k are multiplied by their own decays."""
    log_decay = chunks.decays()
    from_left = exp_where(exclusive_sum(log_decay), factors=FACTORS)
    to_right = exp_where(exclusive_sum(log_decay.flip(-2)).flip(-2), factors=FACTORS)
    sides = sides_of(chunks.q, chunks.k, lambdas(log_decay), settings.decay_convention, settings.direction)
    scans = []
    if "forward" in sides:
        side = sides["forward"]
        scans.append(ChunkScan(q=side.late, k=side.early, from_start=from_left, to_end=to_right, reverse=False))
    if "backward" in sides:
        side = sides["backward"]
        scans.append(ChunkScan(q=side.early, k=side.late, from_start=to_right, to_end=from_left, reverse=True))
    return scans


def exclusive_sum(x: Tensor) -> Tensor:
    """Return the exclusive prefix sum over tokens (.., L, D)."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :].cumsum(-2)
