"""Entry point of all forms: masks, the choice of a form, and normalisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lion.ops.arguments import Gates, check_gates, check_tokens, expand_decay, no_autocast, sum_dtype, take_gates
from lion.ops.delta import delta_parts, with_delta
from lion.ops.flex import fused_applies, fused_attention
from lion.ops.full import Scale, add_diagonal, masked_parts, product_parts, undecayed_parts
from lion.ops.piecewise import in_pieces
from lion.ops.prefix import gradients_to
from lion.ops.rotary import rotate_each
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import DEFAULTS, Settings, resolve_form, with_fields
from lion.ops.tokens import ScoreSettings, TokenBlock
from lion.ops.vector import full_vector_parts


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> Tensor:
    """Compute linear attention `Y = scale(Q K^T * M) V` with the decay mask M (LION, Eq. 13 and 14).

    `settings`, or its fields passed by name, determine how Y is computed, for example
    `linear_attention(q, k, v, log_decay, form="chunk", direction="forward")`. Every form computes the same function.
    The forms "full" and "chunk" are static graphs for `torch.compile`.

    Args:
        q, k: Queries and keys (B, H, L, D). The feature map must be applied before the call, unless `feature_map` names
            one. Gates on the keys must be multiplied into k before the call.
        v: Values (B, H, L, E). Float16 is computed in float32, because its sums would overflow; bfloat16 is not.
        gates: `Gates` with decays, the vectors of a delta rule, a bonus, a rotation; or `log_decay` alone, a tensor.
            Its fields may also be passed by name.
        valid: Boolean mask (B, L), False for padding. Invalid tokens behave as if deleted, whatever values they hold.
            Their output is 0.
        segments: Integer segment ids (B, L). Tokens interact only within their segment; -1 marks padding. The tokens of
            a segment must be contiguous, except for padding between them. Alternatively, the result of
            `segment_index(valid, segments)`, prepared once per batch for many calls; it already contains `valid`.
        settings, fields: See `Settings`. A field passed by name overrides the object.

    Returns:
        Outputs (B, H, L, E) in the dtype of `v`.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name, or two arguments that cannot be combined.
        RuntimeError: A call under `torch.jit.trace`.
    """
    gates = take_gates(gates, fields)
    settings = with_fields(settings, fields, unused=("scan_merge",))
    check_tokens(q, k, v)
    check_gates(q, gates, settings)
    if fused_applies(q, v, gates, settings):
        return fused_attention(q, k, v, gates.log_decay, valid, segments, settings)
    scale = functools.partial(row_scale, settings=settings, dim=q.shape[-1])
    return _attention_parts(q, k, v, gates, valid, segments, settings, scale)[0].to(v.dtype)


def linear_attention_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None = None,
    *,
    valid: Tensor | None = None,
    segments: Tensor | SegmentIndex | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), float32 or wider, without dividing them.

    Several scans can therefore be added up before the division. The arguments are those of `linear_attention` except
    the gate `prefix`, and `scale` and `eps`. With `normalize="none"` the row sum is None. For float16 tokens the
    numerator is float32.
    """
    gates = take_gates(gates, fields, prefix=False)
    settings = with_fields(settings, fields, unused=("scale", "eps", "scan_merge"))
    check_tokens(q, k, v)
    check_gates(q, gates, settings)
    return _attention_parts(q, k, v, gates, valid, segments, settings)


def normalized(numerator: Tensor, rowsum: Tensor | None, settings: Settings, dim: int) -> Tensor:
    """Divide the numerator (B, H, L, E) by the row sum (B, H, L) as `normalize` specifies, or scale it.

    Without gradients the result reuses the memory of the numerator.
    """
    return scaled(numerator, row_scale(rowsum, settings, dim))


def row_scale(rowsum: Tensor | None, settings: Settings, dim: int) -> Tensor | float:
    """Return the factor of each row (B, H, L, 1) that `normalize` specifies, or of all rows; the forms share it."""
    scale = settings.scale_of(dim)
    if rowsum is None:
        return scale
    if settings.normalize == "max":
        return (scale / (scale * rowsum).abs().clamp_min(1))[..., None]
    # an empty row and its gradient are 0, even where 1 / eps overflows
    return rowsum.clamp_min(settings.eps).reciprocal().masked_fill(rowsum == 0, 0)[..., None]


def scaled(numerator: Tensor, factor: Tensor | float) -> Tensor:
    if not torch.is_grad_enabled():
        return numerator.mul_(factor)  # in place: inference in the rnn form keeps a single copy of its outputs
    return (numerator * factor).to(numerator.dtype)


def separate_rowsum(normalize: str, angles: Tensor | None) -> bool:
    """Return whether the row sum uses other scores than the numerator: without decay, or without rotation."""
    return normalize == "pre" or (normalize != "none" and angles is not None)


def _attention_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    valid: Tensor | None,
    segments: Tensor | SegmentIndex | None,
    settings: Settings,
    scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator, multiplied by `scale` of the row sum if that is given, and the row sum."""
    log_decay, beta, bonus, angles, prefix, erase, read = gates
    no_decay = log_decay is None
    form = resolve_form(settings.form, q.shape[2], gates.delta or not no_decay, settings.dropout_p)
    rowsum, undecayed = settings.normalize != "none", settings.undecayed_erase
    how = ScoreSettings(
        form, settings.decay_convention, settings.direction, True, rowsum, settings.chunk_size, undecayed
    )
    feature_map = settings.feature_map
    with no_autocast(q):
        index, valid = prepared(q, valid, segments)
        if form != "rnn":  # the rnn form widens one piece at a time
            q, k, v = (x.to(sum_dtype(x)) for x in (q, k, v))
        if feature_map is not None and (angles is not None or prefix is not None):  # both apply to mapped q and k
            q, k, feature_map = *TokenBlock(q, k, v, v, valid, feature_map=feature_map).featurized()[:2], None
        *rotated, erase, read = rotate_each(angles, valid, q, k, erase, read)
        if prefix is not None and prefix.requires_grad:
            rotated, log_decay = gradients_to(prefix, *rotated, valid), log_decay.detach()
        decays = expand_decay(log_decay, q, clamp=form != "rnn" and not gates.delta)
        tokens = TokenBlock(*rotated, v, decays, valid, index, feature_map)
        if gates.delta:
            tokens = with_delta(tokens, beta, erase, read)
            if form == "rnn":
                return finished(in_pieces(tokens, None, how._replace(form="delta_rnn")), scale)
            return finished(delta_parts(tokens, how), scale)
        if not separate_rowsum(settings.normalize, angles):
            return _score_parts(tokens, bonus, no_decay, how, settings.dropout_p, scale)
        others, plain = tokens._replace(q=q, k=k, v=v[..., :0]), settings.normalize == "pre"
        if plain:
            others = others._replace(gate=expand_decay(None, q))
        total = _score_parts(others, None if plain else bonus, plain or no_decay, how, 0.0)[1]
        own = scale and (lambda _: scale(total))
        return _score_parts(tokens, bonus, no_decay, how._replace(rowsum=False), settings.dropout_p, own)[0], total


def _score_parts(
    tokens: TokenBlock,
    bonus: Tensor | None,
    no_decay: bool,
    how: ScoreSettings,
    dropout_p: float,
    scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator and the row sum of one set of scores; see `_attention_parts`."""
    if bonus is not None:
        bonus = bonus.to(tokens.gate.dtype).reshape(bonus.shape[0], 1, -1)  # (H, 1, D or 1)
    how = how._replace(include_diagonal=bonus is None and (no_decay or how.decay_convention != "between"))
    undecayed = no_decay and how.include_diagonal and how.form == "full"
    product = undecayed and not dropout_p
    if product and not (how.direction == "both" and tokens.segment_index is None):
        how = how._replace(form="chunk")  # one direction or segments: chunks, never an L x L matrix
    if how.form in ("chunk", "rnn"):
        return finished(in_pieces(tokens, bonus, how), scale)
    tokens = tokens.masked()
    q, k, v, log_decay = tokens[:4]
    if product:
        return product_parts(q, k, v, rowsum=how.rowsum, scale=scale)
    decayed = full_vector_parts if log_decay.shape[-1] > 1 else masked_parts
    numerator, total = (undecayed_parts if undecayed else decayed)(tokens, how, dropout_p)
    if not how.include_diagonal:
        numerator, total = add_diagonal(numerator, total, q, k, v, bonus, log_decay.dtype)
    return finished((numerator, total), scale)


def finished(parts: tuple[Tensor, Tensor | None], scale: Scale | None) -> tuple[Tensor, Tensor | None]:
    return parts if scale is None else (scaled(parts[0], scale(parts[1])), parts[1])
