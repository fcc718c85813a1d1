"""LightNet attention (arXiv 2405.21022, Eq. 6 and 7): keys normalised over the sequence, in one scan.

    Y = phi(Q) (softmax_L(K)^T V)

The softmax runs over the valid tokens of a sequence, separately for each key dimension, so one scan sees all tokens. No
token has a position in it: without rotation, tokens in another order give the same outputs in that order.

"full" and "chunk" compute the product from right to left. "rnn" is one scan, after which the outputs are computed
(`lion.ops.key_softmax`). So is "chunk" for a long sequence without gradients. In one direction, LightNet is a vector
decay (`lion.layers.mixers.lightnet`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lion.ops.api import linear_attention
from lion.ops.arguments import Gates, check_gates, check_tokens, no_autocast
from lion.ops.decay import exp_where
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.inductor import outer_sum
from lion.ops.key_softmax import divisor, finite, masked_keys, queries
from lion.ops.modes import exporting
from lion.ops.piecewise import PIECE, PIECES, WHOLE, in_pieces
from lion.ops.rotary import rotate
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import CHUNK_SIZE, Settings, resolve_form
from lion.ops.tokens import Tokens, mask_tokens


def one_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Tensor | None = None,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    form: str = "full",
    chunk_size: int = CHUNK_SIZE,
    feature_map: str | None = None,
) -> Tensor:
    """Compute linear attention with keys normalised over the tokens of their sequence, `Y = phi(Q) (softmax_L(K)^T V)`.

    Args:
        q: Queries (B, H, L, D). The feature map must be applied before the call, unless `feature_map` names one.
        k: Logits of the keys (B, H, L, D); the softmax is computed in float32 or wider.
        v: Values (B, H, L, E).
        angles: Rotation of q and the normalised k, as in `linear_attention`.
        valid, segments: Masks, as in `linear_attention`.
        form: "full", "chunk", "rnn" or "auto"; all compute the same function.
        chunk_size: Tokens that "rnn" processes at once, at least 1. "chunk" processes several times as many at once,
            and all of them if there are gradients. With segments, "full" and "chunk" have chunks of this size.

    Returns:
        Outputs (B, H, L, E) in the dtype of `v`.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name.
        RuntimeError: A call under `torch.jit.trace`.
    """
    settings = Settings(form=form, chunk_size=chunk_size, feature_map=feature_map, normalize="none")
    check_tokens(q, k, v)
    check_gates(q, Gates(angles=angles), settings)
    form = resolve_form(form, q.shape[2], decays=False)
    with no_autocast(q):
        masks = prepared(q, valid, segments)
        tokens = Tokens(q, k, v, valid=masks.valid, segment=masks.index, feature_map=feature_map, angles=by_row(angles))
        if scans(tokens, settings, form):
            if form == "chunk":
                settings = replace(settings, chunk_size=chunk_size * PIECES.get(q.device.type, PIECE))
            return in_pieces(tokens, settings, "one_scan").numerator.to(v.dtype)
        return product(tokens, chunk_size).to(v.dtype)


def scans(tokens: Tokens, settings: Settings, form: str) -> bool:
    """Return whether the tokens are scanned; otherwise the product is computed from right to left."""
    at_once = torch.is_grad_enabled() or exporting()
    if form == "rnn":  # a graph does not know where segments end
        return tokens.segment is None or not (at_once and torch.compiler.is_compiling())
    long = tokens.q.shape[2] > WHOLE * settings.chunk_size
    return form == "chunk" and tokens.segment is None and not at_once and long


def by_row(angles: Tensor | None) -> Tensor | None:
    """Return angles (.., L, D/2) as (b, h, L, D/2)."""
    if angles is None:
        return None
    return angles[(None,) * (4 - angles.dim())]


def product(tokens: Tokens, chunk_size: int) -> Tensor:
    """Compute the product from right to left, (B, H, L, E).

    With segments the product is computed in chunks, never as an L x L matrix.
    """
    k = masked_keys(tokens, wide_dtype(tokens.k))
    if tokens.segment is not None:
        return weighted(tokens, segment_softmax(k, tokens.segment), chunk_size)
    weights = exp_where(k - finite(k.detach().amax(-2, keepdim=True)))  # (B, H, L, D)
    s = divisor(weights.sum(-2, keepdim=True))
    if tokens.angles is not None:
        return weighted(tokens, weights / s, chunk_size)
    q, v = queries_and_values(tokens)
    return q @ (outer_sum(weights.to(v.dtype), v) / s.mT).to(v.dtype)  # the smallest tensor is divided, (B, H, D, E)


def queries_and_values(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the mapped queries and the values, with 0 for invalid tokens, in the dtype of sums."""
    q = queries(tokens)
    v = mask_tokens(tokens.v, tokens.valid)
    return q.to(sum_dtype(q)), v.to(sum_dtype(v))


def weighted(tokens: Tokens, weights: Tensor, chunk_size: int) -> Tensor:
    """Return the outputs (B, H, L, E) for normalised keys `weights` (B, H, L, D), which are rotated here."""
    q, v = queries_and_values(tokens)
    if tokens.angles is not None:
        angles = mask_tokens(tokens.angles, tokens.valid)
        weights = rotate(weights, angles)
        q = rotate(q, angles)
    weights = weights.to(v.dtype)
    if tokens.segment is None:
        return q @ outer_sum(weights, v)
    segments = SegmentIndex(tokens.segment, tokens.valid)
    return linear_attention(q, weights, v, segments=segments, normalize="none", scale=1.0, chunk_size=chunk_size)


def segment_softmax(k: Tensor, segment: Tensor) -> Tensor:
    """Compute the softmax of k (B, H, L, D) over the tokens of each segment; a row has at most L segments."""
    batch, heads, length, dim = k.shape
    index = segment[:, None, :, None].expand_as(k)
    none = k.new_zeros(batch, heads, length + 1, dim)
    m = (none - torch.inf).scatter_reduce(2, index, k.detach(), "amax")
    weights = exp_where(k - finite(m.gather(2, index)))
    return weights / divisor(none.scatter_add(2, index, weights).gather(2, index))
