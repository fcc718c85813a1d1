"""LightNet attention (arXiv 2405.21022, Eq. 6 and 7): keys normalised over the sequence, in one scan.

    Y = phi(Q) (softmax_L(K)^T V)

The softmax runs over the valid tokens of a sequence, separately for each key dimension, so one scan sees all tokens. No
token has a position in it: without rotation, tokens in another order give the same outputs in that order.

"full" and "chunk" compute the product from right to left. "rnn" is one scan, after which the outputs are computed
(`lion.ops.key_softmax`). So is "chunk" for a long sequence without gradients. In one direction, LightNet is a vector
decay (`lion.layers.mixers.lightnet`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.api import linear_attention
from lion.ops.arguments import Gates, check_gates, check_tokens, no_autocast, sum_dtype
from lion.ops.decay import exp_where
from lion.ops.inductor import outer_sum
from lion.ops.key_softmax import divisor, finite, masked, masked_keys, queries
from lion.ops.modes import exporting
from lion.ops.piecewise import PIECE, PIECES, WHOLE, in_pieces
from lion.ops.rotary import rotate
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import Settings, resolve_form
from lion.ops.tokens import ScoreSettings, TokenBlock


def one_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Tensor | None = None,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    form: str = "full",
    chunk_size: int = 64,
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
    check_gates(q, Gates(None, angles=angles), settings)
    form, length = resolve_form(form, q.shape[2], decays=False), q.shape[2]
    with no_autocast(q):
        index, valid = prepared(q, valid, segments)
        tokens = TokenBlock(q, k, v, turning(q, angles), valid, index, feature_map)
        at_once = torch.is_grad_enabled() or exporting()
        size = chunk_size if form == "rnn" else chunk_size * PIECES.get(q.device.type, PIECE)
        if form == "rnn":
            scans = index is None or not (
                at_once and torch.compiler.is_compiling()
            )  # a graph does not know where segments end
        else:
            scans = form == "chunk" and index is None and not at_once and length > WHOLE * chunk_size
        if scans:
            how = ScoreSettings("one_scan", "target", "both", True, False, size)
            return in_pieces(tokens, None, how)[0].to(v.dtype)
        return product(tokens, chunk_size).to(v.dtype)


def turning(q: Tensor, angles: Tensor | None) -> Tensor:
    """Return angles as a gate of tokens q (B, H, L, D), (b, h, L, D/2); (1, 1, L, 0) without angles."""
    return q.new_zeros(1, 1, q.shape[2], 0) if angles is None else angles[(None,) * (4 - angles.dim())]


def product(tokens: TokenBlock, chunk_size: int) -> Tensor:
    """Compute the product from right to left, (B, H, L, E).

    With segments the product is computed in chunks, never as an L x L matrix.
    """
    index = tokens.segment_index
    k = masked_keys(tokens, torch.promote_types(tokens.k.dtype, torch.float32))
    if index is not None:
        return weighted(tokens, segment_softmax(k, index), chunk_size)
    weights = exp_where(k - finite(k.detach().amax(-2, keepdim=True)))  # (B, H, L, D)
    s = divisor(weights.sum(-2, keepdim=True))
    if tokens.gate.shape[-1]:
        return weighted(tokens, weights / s, chunk_size)
    q, v = (x.to(sum_dtype(x)) for x in (queries(tokens), masked(tokens.v, tokens.valid)))
    return q @ (outer_sum(weights.to(v.dtype), v) / s.mT).to(v.dtype)  # the smallest tensor is divided, (B, H, D, E)


def weighted(tokens: TokenBlock, weights: Tensor, chunk_size: int) -> Tensor:
    """Return the outputs (B, H, L, E) for normalised keys `weights` (B, H, L, D), which are rotated here."""
    angles, valid, index = tokens.gate, tokens.valid, tokens.segment_index
    q, v = (x.to(sum_dtype(x)) for x in (queries(tokens), masked(tokens.v, valid)))
    if angles.shape[-1]:
        angles = masked(angles, valid)
        weights, q = rotate(weights, angles), rotate(q, angles)
    weights = weights.to(v.dtype)
    if index is None:
        return q @ outer_sum(weights, v)
    segments = SegmentIndex(index, valid)
    return linear_attention(q, weights, v, segments=segments, normalize="none", scale=1.0, chunk_size=chunk_size)


def segment_softmax(k: Tensor, segment_index: Tensor) -> Tensor:
    """Compute the softmax of k (B, H, L, D) over the tokens of each segment; a row has at most L segments."""
    batch, heads, length, dim = k.shape
    index = segment_index[:, None, :, None].expand_as(k)
    none = k.new_zeros(batch, heads, length + 1, dim)
    m = (none - torch.inf).scatter_reduce(2, index, k.detach(), "amax")
    weights = exp_where(k - finite(m.gather(2, index)))
    return weights / divisor(none.scatter_add(2, index, weights).gather(2, index))
