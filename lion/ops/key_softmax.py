"""Softmax of the keys over the sequence, each key dimension separately, in one scan: a running maximum, sum and state.

    m' = max(m, k_i)      s' = e^(m - m') s + e^(k_i - m')      S' = e^(m - m') S + e^(k_i - m') v_i^T
    softmax_L(K)^T V = S / s        after the last token

Every token reads the last state, so outputs are computed after the scan, in any order. Nothing decays and nothing is
stored on the way: memory beyond the outputs is one state and `chunk_size` tokens.

A rotation acts on pairs of normalised key dimensions, and each dimension of a pair has its own sum. The scan therefore
keeps two states: one of the keys times the cosine, and one of the keys times the sine. `normalised` combines them at
the end.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops.decay import exp_where
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.rotary import rotate
from lion.ops.settings import Settings
from lion.ops.tokens import Sums, Tokens, featurize, mask_tokens, optional


class RunningSoftmax(NamedTuple):
    """Running softmax of the keys so far.

    Attributes:
        m: Largest key (B, H, 1, D).
        s: Sum of the weights `exp(k - m)` (B, H, 1, D).
        S: State (B, H, D, E); with rotation (B, H, 2 D, E).
    """

    m: Tensor
    s: Tensor
    S: Tensor


def one_scan_sums(tokens: Tokens, settings: Settings, compiler: Callable) -> Sums:
    """Compute the outputs (B, H, L, E) by one scan of each sequence, `chunk_size` tokens per step."""
    out = torch.empty_like(tokens.v, dtype=sum_dtype(tokens.v), memory_format=torch.contiguous_format)
    if tokens.segment is None:
        one_sequence(tokens, out, 0, tokens.q.shape[2], settings.chunk_size, compiler)
        return Sums(out, None)
    for row, starts in enumerate(sequence_starts(tokens.segment)):
        own = row_of(tokens, row)
        for start, end in pairwise(starts):
            one_sequence(own, out[row : row + 1], start, end, settings.chunk_size, compiler)
    return Sums(out, None)


def one_sequence(tokens: Tokens, out: Tensor, start: int, end: int, size: int, compiler: Callable) -> None:
    """Write the outputs of the tokens from `start` to `end`, one sequence in each row, into `out` (B, H, L, E)."""
    state = initial_state(tokens)
    for place in range(start, end, size):
        count = min(size, end - place)
        piece = tokens.slice(place, count)
        one = compiler(advance) if count == size else advance
        state = one(state, piece)
        del piece  # free this memory before the next piece
    S = normalised(state)
    for place in range(start, end, size):
        count = min(size, end - place)
        piece = tokens.slice(place, count)
        one = compiler(read) if count == size else read
        out[:, :, place : place + count] = one(S, piece).to(out.dtype)
        del piece


def sequence_starts(segment: Tensor) -> list[list[int]]:
    """Return for each row the first tokens of its segments (B, L), and the length."""
    rows = []
    for row in segment.tolist():
        starts = [0]
        for place in range(1, len(row)):
            if row[place] != row[place - 1]:
                starts.append(place)
        rows.append([*starts, len(row)])
    return rows


def row_of(tokens: Tokens, row: int) -> Tokens:
    """Return one row without its segments; angles that all rows share stay shared."""
    here = slice(row, row + 1)
    one = tokens.map(lambda x: x if len(x) == 1 else x[here])
    return one._replace(valid=optional(lambda mask: mask[here], tokens.valid), segment=None)


def initial_state(tokens: Tokens) -> RunningSoftmax:
    """Return the running softmax of no tokens."""
    k, v = tokens.k, tokens.v
    wide = wide_dtype(k)
    s = k.new_zeros(*k.shape[:2], 1, k.shape[-1], dtype=wide)
    states = 1 if tokens.angles is None else 2
    S = k.new_zeros(*k.shape[:2], states * k.shape[-1], v.shape[-1], dtype=wide)
    return RunningSoftmax(torch.full_like(s, -torch.inf), s, S)


def advance(state: RunningSoftmax, tokens: Tokens) -> RunningSoftmax:
    """Return the state after C more tokens."""
    wide = state.s.dtype
    k = masked_keys(tokens, wide)
    v = mask_tokens(tokens.v, tokens.valid).to(wide)
    m = torch.maximum(state.m, k.detach().amax(-2, keepdim=True))
    top = finite(m)
    kept = exp_where(state.m - top)  # (B, H, 1, D)
    weights = exp_where(k - top)  # (B, H, C, D)
    s = kept * state.s + weights.sum(-2, keepdim=True)
    if tokens.angles is not None:
        angles = mask_tokens(tokens.angles, tokens.valid)
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        of_cos = weights * torch.cat([cos, cos], -1)
        of_sin = weights * torch.cat([sin, sin], -1)
        weights = torch.cat([of_cos, of_sin], -1)
        kept = torch.cat([kept, kept], -1)
    return RunningSoftmax(m, s, kept.mT * state.S + weights.mT @ v)


def normalised(state: RunningSoftmax) -> Tensor:
    """Return `softmax_L(K)^T V` (B, H, D, E) after the last token; keys are rotated if there are angles."""
    s = divisor(state.s).mT  # (B, H, D, 1)
    if state.S.shape[-2] == s.shape[-2]:
        return state.S / s
    of_cos, of_sin = state.S.chunk(2, -2)
    cos_real, cos_imaginary = (of_cos / s).chunk(2, -2)
    sin_real, sin_imaginary = (of_sin / s).chunk(2, -2)
    return torch.cat([cos_real - sin_imaginary, sin_real + cos_imaginary], -2)


def read(S: Tensor, tokens: Tokens) -> Tensor:
    """Return the outputs (B, H, C, E) of C tokens, which read the normalised state S (B, H, D, E)."""
    q = queries(tokens).to(S.dtype)
    if tokens.angles is not None:
        q = rotate(q, mask_tokens(tokens.angles, tokens.valid))
    return q @ S


def queries(tokens: Tokens) -> Tensor:
    """Return q after the feature map, with 0 for invalid tokens."""
    return mask_tokens(featurize(tokens.q, tokens.feature_map, tokens.valid), tokens.valid)


def masked_keys(tokens: Tokens, wide: torch.dtype) -> Tensor:
    """Return k as logits, with minus infinity for invalid tokens."""
    return mask_tokens(tokens.k.to(wide), tokens.valid, -torch.inf)


def finite(m: Tensor) -> Tensor:
    """Return a maximum over tokens with 0 in place of minus infinity, the maximum of no tokens.

    Invalid keys, which are minus infinity, then stay minus infinity after the maximum is subtracted.
    """
    return m.masked_fill(m == -torch.inf, 0)


def divisor(s: Tensor) -> Tensor:
    """Return a sum of weights with 1 in place of 0, the sum of no tokens.

    All other sums are at least 1, the weight of the largest key.
    """
    return s.masked_fill(s == 0, 1)
