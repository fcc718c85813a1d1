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

from lion.ops.api import linear_attention_parts
from lion.ops.arguments import (
    Gates,
    check_gates,
    check_tokens,
    check_values,
    expand_decay,
    is_integer_tensor,
    mismatch,
    no_autocast,
)
from lion.ops.decay import decay_mask, make_directions, pad_with_last
from lion.ops.dtypes import sum_dtype
from lion.ops.full import pad, padding_of, weighted_sum
from lion.ops.inductor import inner_products
from lion.ops.modes import may_wait
from lion.ops.scale import normalized
from lion.ops.segments import check_masks
from lion.ops.settings import DEFAULTS, Settings, resolve_form, with_fields
from lion.ops.tokens import Sums, Tokens, featurize, mask_tokens


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
    length, dim = q.shape[2:]
    check_masks((q.shape[0], length), valid, None)
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

    q = featurize(q, settings.feature_map, valid)
    k = featurize(k, settings.feature_map, valid)
    settings = replace(settings, feature_map=None)
    merged = settings.scan_merge == "masks"
    scalar = all(log_decay.dim() in (1, 3) for log_decay in log_decays)
    one_product = scalar and merged and settings.decay_convention != "between" and settings.normalize != "pre"
    if one_product and resolve_form(settings.form, length, True, settings.dropout_p) == "full":
        sums = mean_mask_sums(q, k, v, log_decays, orders, valid, settings)
        return normalized(sums, settings, dim).to(v.dtype)
    scans = []
    for log_decay, order in zip(log_decays, orders):
        scans.append(scan_sums(q, k, v, log_decay, order, valid, settings))
    if not merged:
        return mean([normalized(sums, settings, dim) for sums in scans]).to(v.dtype)
    row_sum = None
    if settings.row_sums:
        row_sum = mean([sums.row_sum for sums in scans if sums.row_sum is not None])
    numerator = mean([sums.numerator for sums in scans])
    return normalized(Sums(numerator, row_sum), settings, dim).to(v.dtype)


def scan_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, order: Tensor, valid: Tensor | None, settings: Settings
) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of one scan, in the original order of the tokens."""
    q, k, v = q.index_select(2, order), k.index_select(2, order), v.index_select(2, order)
    if valid is not None:
        valid = valid.index_select(1, order)
    sums = linear_attention_parts(q, k, v, in_scan_order(log_decay, order), valid=valid, settings=settings)
    back = positions_in(order)
    row_sum = sums.row_sum
    if row_sum is not None:
        row_sum = row_sum.index_select(2, back)
    return Sums(sums.numerator.index_select(2, back), row_sum)


def mean_mask_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Sequence[Tensor],
    orders: Tensor,
    valid: Tensor | None,
    settings: Settings,
) -> Sums:
    """Compute the sums over keys (B, H, L, ..) under the mean of the masks of all scans.

    The tokens stay in their original order. Only their cumulative decays are reordered.
    """
    length = q.shape[2]
    padding = padding_of(length)
    with no_autocast(q):
        tokens = Tokens(q, k, v, valid=valid).masked()
        tokens = tokens.to(sum_dtype(q))
        k = pad(tokens.k, padding)  # (B, H, L', D)
        v = pad(tokens.v, padding)
        masks = []
        for log_decay, order in zip(log_decays, orders):
            decays = mask_tokens(tokens._replace(log_decay=expand_decay(log_decay, tokens.q)).decays(), valid)
            masks.append(scan_mask(decays, order, padding, settings))
        scores = inner_products(tokens.q, k).to(masks[0].dtype)
        return weighted_sum(scores * mean(masks), v, settings)


def scan_mask(log_decay: Tensor, order: Tensor, padding: int, settings: Settings) -> Tensor:
    """Return the mask (b, H, L, L') of one scan, in the original order of the tokens, with `padding` more keys."""
    length = len(order)
    positions = positions_in(order)
    log_decay = log_decay.index_select(2, order)
    back = torch.cat([positions, torch.arange(length, length + padding, device=order.device)])
    directions = []
    for direction in make_directions(log_decay, settings.decay_convention, settings.direction):
        query = pad_with_last(direction.query.index_select(-2, positions), padding)
        key = pad_with_last(direction.key.index_select(-2, positions), padding)
        directions.append(direction._replace(query=query, key=key))
    return decay_mask(tuple(directions), queries=length, positions=back).squeeze(-1)


def in_scan_order(log_decay: Tensor, order: Tensor) -> Tensor:
    """Return decays in the order of a scan; decays of a whole head do not depend on the order."""
    if log_decay.dim() < 3:
        return log_decay
    return log_decay.index_select(2, order)


def positions_in(order: Tensor) -> Tensor:
    """Return the inverse permutation of `order`: the position of each token in the scan."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device, dtype=order.dtype))


def mean(xs: Sequence[Tensor]) -> Tensor:
    return sum(xs[1:], xs[0]) / len(xs)
