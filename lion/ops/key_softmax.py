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

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lion.ops.arguments import sum_dtype
from lion.ops.decay import exp_where
from lion.ops.features import apply_feature_map
from lion.ops.rotary import rotate
from lion.ops.tokens import ScoreSettings, TokenBlock


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


def one_scan_loop(tokens: TokenBlock, bonus: None, how: ScoreSettings, compiler: Callable) -> tuple[Tensor, None]:
    """Compute the outputs (B, H, L, E) by one scan of each sequence.

    `tokens.gate` holds the angles (b, h, L, D/2), or (b, h, L, 0) without rotation.
    """
    out = torch.empty_like(tokens.v, dtype=sum_dtype(tokens.v), memory_format=torch.contiguous_format)
    for rows, start, count in sequences(tokens):
        state, end = None, start + count
        pieces = [(place, min(how.chunk_size, end - place)) for place in range(start, end, how.chunk_size)]
        for place, size in pieces:
            piece = cut(tokens, rows, place, size)
            state = initial_state(piece) if state is None else state
            state = (compiler(advance) if size == how.chunk_size else advance)(state, piece)
            del piece  # free this memory before the next piece
        S = normalised(state)
        for place, size in pieces:
            piece = cut(tokens, rows, place, size)
            y = (compiler(read) if size == how.chunk_size else read)(S, piece)
            out[rows, :, place : place + size] = y.to(out.dtype)
            del piece, y
    return out, None


def sequences(tokens: TokenBlock) -> Iterator[tuple[slice, int, int]]:
    """Yield the rows, the first token and the number of tokens of each sequence.

    Rows without segments form one entry together. With segments, each segment is a separate entry.
    """
    length = tokens.q.shape[2]
    if tokens.segment_index is None:
        yield slice(None), 0, length
        return
    for row, index in enumerate(tokens.segment_index.tolist()):
        starts = [0, *(t for t in range(1, length) if index[t] != index[t - 1]), length]
        for start, end in pairwise(starts):
            yield slice(row, row + 1), start, end - start


def cut(tokens: TokenBlock, rows: slice, start: int, size: int) -> TokenBlock:
    """Return `size` tokens of some rows, from token `start`; a gate that all rows share stays shared."""
    parts = tokens._replace(segment_index=None).slice(start, size)
    if rows != slice(None):
        gate = parts.gate if len(parts.gate) == 1 else parts.gate[rows]
        valid = None if parts.valid is None else parts.valid[rows]
        parts = TokenBlock(*(x[rows] for x in parts[:3]), gate, valid, None, parts.feature_map)
    return parts.contiguous()


def initial_state(tokens: TokenBlock) -> RunningSoftmax:
    """Return the running softmax of no tokens."""
    k, v = tokens.k, tokens.v
    wide = torch.promote_types(k.dtype, torch.float32)
    s = k.new_zeros(*k.shape[:2], 1, k.shape[-1], dtype=wide)
    states = 2 if tokens.gate.shape[-1] else 1
    S = k.new_zeros(*k.shape[:2], states * k.shape[-1], v.shape[-1], dtype=wide)
    return RunningSoftmax(torch.full_like(s, -torch.inf), s, S)


def advance(state: RunningSoftmax, tokens: TokenBlock) -> RunningSoftmax:
    """Return the state after C more tokens."""
    wide = state.s.dtype
    k, v, angles = masked_keys(tokens, wide), masked(tokens.v, tokens.valid).to(wide), tokens.gate
    m = torch.maximum(state.m, k.detach().amax(-2, keepdim=True))
    top = finite(m)
    kept = exp_where(state.m - top)  # (B, H, 1, D)
    weights = exp_where(k - top)  # (B, H, C, D)
    s = kept * state.s + weights.sum(-2, keepdim=True)
    if angles.shape[-1]:
        angles = masked(angles, tokens.valid)
        cos, sin = (torch.cat([x, x], -1).to(wide) for x in (angles.cos(), angles.sin()))
        weights, kept = torch.cat([weights * cos, weights * sin], -1), torch.cat([kept, kept], -1)
    return RunningSoftmax(m, s, kept.mT * state.S + weights.mT @ v)


def normalised(state: RunningSoftmax) -> Tensor:
    """Return `softmax_L(K)^T V` (B, H, D, E) after the last token; keys are rotated if there are angles."""
    s = divisor(state.s).mT  # (B, H, D, 1)
    if state.S.shape[-2] == s.shape[-2]:
        return state.S / s
    (cos_real, cos_imaginary), (sin_real, sin_imaginary) = ((S / s).chunk(2, -2) for S in state.S.chunk(2, -2))
    return torch.cat([cos_real - sin_imaginary, sin_real + cos_imaginary], -2)


def read(S: Tensor, tokens: TokenBlock) -> Tensor:
    """Return the outputs (B, H, C, E) of C tokens, which read the normalised state S (B, H, D, E)."""
    q, angles = queries(tokens).to(S.dtype), tokens.gate
    return (rotate(q, masked(angles, tokens.valid)) if angles.shape[-1] else q) @ S


def queries(tokens: TokenBlock) -> Tensor:
    """Return q after the feature map, with 0 for invalid tokens."""
    return masked(apply_feature_map(tokens.feature_map, masked(tokens.q, tokens.valid)), tokens.valid)


def masked_keys(tokens: TokenBlock, wide: torch.dtype) -> Tensor:
    """Return k as logits, with minus infinity for invalid tokens."""
    return masked(tokens.k.to(wide), tokens.valid, -torch.inf)


def masked(x: Tensor, valid: Tensor | None, value: float = 0.0) -> Tensor:
    """Return x (b, h, L, D) with `value` in all invalid tokens.

    Values are selected, not multiplied, because padding may hold NaN.
    """
    return x if valid is None else x.masked_fill(~valid[:, None, :, None], value)


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
