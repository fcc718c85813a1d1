"""Several scans of the same tokens, each with its order and its decays: Lion-D♮ and Lion-S♮ (C.14).

Let `M_s` be the mask of scan s, brought back to the original order of the tokens. There are two ways to merge scans:

    masks    Y = (S * M) V / rowsum(S * M), M = mean_s M_s      the released code
    outputs  Y = mean_s (S * M_s) V / rowsum(S * M_s)           our reading of C.14

where `S = Q K^T`. Without a row sum the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lion.ops.api import linear_attention_parts, normalized
from lion.ops.arguments import (
    Gates,
    check_gates,
    check_tokens,
    check_values,
    expand_decay,
    is_integer_tensor,
    mismatch,
    no_autocast,
    sum_dtype,
)
from lion.ops.decay import decay_mask, make_directions, pad_with_last
from lion.ops.full import aligned, weighted_sum
from lion.ops.inductor import inner_products
from lion.ops.modes import may_wait
from lion.ops.segments import check_masks
from lion.ops.settings import DEFAULTS, Settings, resolve_form, with_fields
from lion.ops.tokens import TokenBlock


def multi_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Sequence[Tensor],
    orders: Tensor,
    *,
    valid: Tensor | None = None,
    settings: Settings = DEFAULTS,
    **fields: Any,
) -> Tensor:
    """Compute masked, scaled linear attention over several scans of the same tokens.

    In the full form, merged masks cost one product of scores, however many scans there are. The other forms run once
    for each scan.

    Args:
        q, k, v: Tokens (B, H, L, D or E), as in `linear_attention`.
        log_decays: Decays of each scan, as in `linear_attention`, in the original order of the tokens.
        orders: Integer (S, L): the tokens in the order in which each scan visits them, permutations of 0 .. L - 1.
        valid: Boolean (B, L), as in `linear_attention`.
        settings, fields: See `Settings`; `scan_merge` is "masks" or "outputs" (see the top of this module).

    Returns:
        Outputs (B, H, L, E) in the dtype of `v`.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name; on a CPU outside of graphs also orders that are not
            permutations, and logarithms above 0.
    """
    check_tokens(q, k, v)
    settings = with_fields(settings, fields)
    check_masks(q, valid, None)
    length, dim = q.shape[2:]
    if not is_integer_tensor(orders) or orders.dim() != 2 or orders.shape[1] != length or not len(orders):
        raise mismatch("orders", f"integer (scans, {length})", orders)
    if not isinstance(log_decays, (Sequence, Tensor)):
        raise ValueError(f"log_decays: expected one for each scan, got {type(log_decays).__name__}")
    if len(log_decays) != len(orders):
        raise ValueError(f"log_decays: expected one for each of {len(orders)} scans, got {len(log_decays)}")
    if may_wait(orders.device) and (orders.sort(1).values != torch.arange(length)).any():
        raise ValueError(f"orders: expected permutations of 0 .. {length - 1}")
    orders = orders.long()
    for log_decay in log_decays:
        if log_decay is None:
            raise ValueError("log_decays: without decay, all orders have the same scores; use linear_attention")
        check_gates(q, Gates(log_decay), settings)
        check_values(Gates(log_decay), valid)

    q, k = TokenBlock(q, k, v, v, valid, feature_map=settings.feature_map).featurized()[:2]
    settings = replace(settings, feature_map=None)
    scalar = all(a.dim() in (1, 3) for a in log_decays)
    merged = settings.scan_merge == "masks"
    one_product = scalar and merged and settings.decay_convention != "between" and settings.normalize != "pre"
    if one_product and resolve_form(settings.form, length, True, settings.dropout_p) == "full":
        return normalized(*mean_mask_parts(q, k, v, log_decays, orders, valid, settings), settings, dim).to(v.dtype)
    scans = [scan_parts(q, k, v, *scan, valid, settings) for scan in zip(log_decays, orders)]
    if not merged:
        return mean([normalized(*parts, settings, dim) for parts in scans]).to(v.dtype)
    numerators, totals = zip(*scans)
    total = None if totals[0] is None else mean(totals)
    return normalized(mean(numerators), total, settings, dim).to(v.dtype)


def scan_parts(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, order: Tensor, valid: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) of one scan, in the original order of the tokens."""
    q, k, v = (x.index_select(2, order) for x in (q, k, v))
    valid = None if valid is None else valid.index_select(1, order)
    parts = linear_attention_parts(q, k, v, in_scan_order(log_decay, order), valid=valid, settings=settings)
    back = positions_in(order)
    return tuple(None if x is None else x.index_select(2, back) for x in parts)


def mean_mask_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Sequence[Tensor],
    orders: Tensor,
    valid: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator (B, H, L, E) and the row sum (B, H, L) under the mean of the masks of all scans.

    The tokens stay in their original order. Only their cumulative decays are reordered.
    """
    masks, length = [], q.shape[2]
    convention = settings.decay_convention
    with no_autocast(q):
        tokens = TokenBlock(q, k, v, expand_decay(None, q), valid).masked()
        q = tokens.q.to(sum_dtype(q))
        k, v, padding = aligned(*(x.to(sum_dtype(x)) for x in tokens[1:3]))
        for log_decay, order in zip(log_decays, orders):
            positions, decays = positions_in(order), expand_decay(log_decay, tokens.q)
            if valid is not None:
                decays = decays.masked_fill(~valid[:, None, :, None], 0)
            decays = decays.index_select(2, order)
            directions = make_directions(decays, None, decay_convention=convention, direction=settings.direction)
            directions = tuple(d.map(lambda t, back=positions: t.index_select(2, back)) for d in directions)
            if padding:
                directions = tuple(d.map(lambda t: pad_with_last(t, padding)).with_queries(length) for d in directions)
                positions = torch.cat([positions, torch.arange(length, length + padding, device=q.device)])
            masks.append(decay_mask(directions, positions=positions).squeeze(-1))  # (b, H, L, L')
        weights = inner_products(q, k).to(masks[0].dtype) * mean(masks)
        rowsum = settings.normalize != "none"
        return weighted_sum(weights, v, rowsum=rowsum, dropout_p=settings.dropout_p)


def in_scan_order(log_decay: Tensor, order: Tensor) -> Tensor:
    """Return decays in the order of a scan; decays of a whole head do not depend on the order."""
    return log_decay if log_decay.dim() < 3 else log_decay.index_select(2, order)


def positions_in(order: Tensor) -> Tensor:
    """Return the inverse permutation of `order`: the position of each token in the scan."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device, dtype=order.dtype))


def mean(xs: Sequence[Tensor]) -> Tensor:
    return sum(xs[1:], xs[0]) / len(xs)
