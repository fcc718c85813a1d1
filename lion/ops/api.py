"""Entry point of all forms: arguments and normalisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lion.ops.arguments import Gates, check_gates, check_tokens, no_autocast, take_gates
from lion.ops.scores import all_parts, scaled, score_sets
from lion.ops.segments import SegmentIndex
from lion.ops.settings import DEFAULTS, Settings, with_fields


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
            one. Gates on the keys are multiplied into the mapped keys before the call, which then has
            `feature_map=None`.
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
    check_tokens(q, k, v)
    gates = take_gates(gates, fields)
    settings = with_fields(settings, fields, unused=("scan_merge",))
    check_gates(q, gates, settings)
    scale = functools.partial(row_scale, settings=settings, dim=q.shape[-1], floor=gates.floor)
    with no_autocast(q):
        scores, sums = score_sets(q, k, v, gates, valid, segments, settings)
        return all_parts(scores, sums, scale)[0].to(v.dtype)


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
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), without dividing them.

    The numerator has the dtype of v (float32 for float16), the row sum float32 or a wider one. Several scans can
    therefore be added up before the division. The arguments are those of `linear_attention` except the gates `prefix`
    and `floor`, and `scale` and `eps`. With `normalize="none"` the row sum is None.
    """
    check_tokens(q, k, v)
    gates = take_gates(gates, fields, prefix=False)
    settings = with_fields(settings, fields, unused=("scale", "eps", "scan_merge"))
    check_gates(q, gates, settings)
    if gates.floor is not None:
        raise ValueError("floor: linear_attention_parts does not divide")
    with no_autocast(q):
        return all_parts(*score_sets(q, k, v, gates, valid, segments, settings))


def normalized(
    numerator: Tensor, rowsum: Tensor | None, settings: Settings, dim: int, floor: Tensor | None = None
) -> Tensor:
    """Divide the numerator (B, H, L, E) by the row sum (B, H, L) as `normalize` specifies, or scale it.

    Without gradients the result reuses the memory of the numerator.
    """
    return scaled(numerator, row_scale(rowsum, settings, dim, floor))


def row_scale(rowsum: Tensor | None, settings: Settings, dim: int, floor: Tensor | None = None) -> Tensor | float:
    """Return the factor of each row (B, H, L, 1) that `normalize` specifies, or one number if there are no row sums.

    `floor` (B, H, L) is the smallest divisor of each row under "max".
    """
    scale = settings.scale_of(dim)
    if rowsum is None:
        return scale
    if settings.normalize == "max":
        size = (scale * rowsum).abs()
        divisor = size.clamp_min(1) if floor is None else torch.maximum(size, floor.to(size.dtype))
        return (scale / divisor)[..., None]
    # an empty row and its gradient are 0, even where 1 / eps overflows
    return rowsum.clamp_min(settings.eps).reciprocal().masked_fill(rowsum == 0, 0)[..., None]
