"""Entry point of all forms: `Y = scale(Q K^T * M) V`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lion.ops.arguments import Gates, check_call, no_autocast
from lion.ops.forms import call_sums, prepare, sums_of
from lion.ops.full import product, product_row_sum
from lion.ops.fused import fits, fused_attention
from lion.ops.scale import normalized, row_factor
from lion.ops.segments import SegmentIndex
from lion.ops.settings import DEFAULTS, Settings
from lion.ops.tokens import Sums, Tokens


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
    gates, settings = check_call(q, k, v, gates, settings, fields)
    with no_autocast(q):
        scores, of_rows = prepare(q, k, v, gates, valid, segments, settings)
        if of_rows is None and fits(scores.tokens, settings, scores.form):
            return fused_attention(scores.tokens, settings).to(v.dtype)
        if scores.form == "product":
            row_sum = None
            if of_rows is not None:
                row_sum = sums_of(of_rows).row_sum
            return divided_product(scores.tokens, settings, row_sum, gates.floor).to(v.dtype)
        return normalized(call_sums(scores, of_rows), settings, q.shape[-1], gates.floor).to(v.dtype)


def divided_product(tokens: Tokens, settings: Settings, row_sum: Tensor | None, floor: Tensor | None) -> Tensor:
    """Compute Lion-lit in both directions, `scale(Q) (K^T V)`: rows are divided in the kernel that maps q.

    `row_sum` (B, H, L) is None if it uses the same scores as the numerator.
    """
    tokens = tokens.masked()
    q, k = tokens.q, tokens.k
    if row_sum is None and settings.row_sums:
        row_sum = product_row_sum(q, k)
    q = (q * row_factor(row_sum, settings, q.shape[-1], floor)).to(q.dtype)
    return product(q, k, tokens.v)


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
) -> Sums:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L), without dividing them.

    The numerator has the dtype of v (float32 for float16), the row sum float32 or a wider one. Several scans can
    therefore be added up before the division. The arguments are those of `linear_attention` except the gates `prefix`
    and `floor`, and `scale` and `eps`. With `normalize="none"` the row sum is None.
    """
    gates, settings = check_call(q, k, v, gates, settings, fields, unused=("scale", "eps"), prefix=False)
    if gates.floor is not None:
        raise ValueError("floor: linear_attention_parts does not divide")
    with no_autocast(q):
        return call_sums(*prepare(q, k, v, gates, valid, segments, settings))
