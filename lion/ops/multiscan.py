"""Several scans of the same tokens, each in an order and with decays of its own: Lion-D♮ and Lion-S♮ (C.14).

With the mask `M_s` of scan s, brought back to the order in which the tokens stand, there are two ways to merge:

    masks    Y = (S * M) V / rowsum(S * M), M = mean_s M_s      the released code, which made the paper's tables
    outputs  Y = mean_s (S * M_s) V / rowsum(S * M_s)           the paper's text

where `S = Q K^T`. Without a row sum the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lion.ops.api import check_names, default_scale, finish, linear_attention_parts, resolve_form
from lion.ops.arguments import as_lanes, check_gates, check_masks, check_tokens, choice, no_autocast, sum_dtype
from lion.ops.decay import hold, make_directions, pair_mask
from lion.ops.full import aligned, weighted_parts
from lion.ops.rnn import Tokens

SCAN_MERGES = ("masks", "outputs")


def multi_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Sequence[Tensor],
    orders: Tensor,
    *,
    scan_merge: str = "masks",
    form: str = "full",
    direction: str = "both",
    normalize: str = "sum",
    decay_convention: str = "source",
    scale: float | None = None,
    chunk_size: int = 64,
    valid: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
) -> Tensor:
    """Masked, scaled linear attention over several scans of the same tokens.

    In the full form, merged masks cost one product of scores, however many scans there are; the other forms run
    once for each scan.

    Args:
        q, k, v: Tokens (B, H, L, D or E), as in `linear_attention`.
        log_decays: One of each scan, as in `linear_attention`, in the order in which the tokens stand.
        orders: Integer (S, L): the tokens in the order in which each scan visits them, permutations of 0 .. L - 1.
        scan_merge: "masks" or "outputs", above.

    The other arguments are those of `linear_attention`.

    Returns:
        (B, H, L, E) in the dtype of `v`.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name.
    """
    check_tokens(q, k, v)
    check_masks(q, valid, None)
    check_names(direction, decay_convention, normalize)
    choice("scan_merge", scan_merge, SCAN_MERGES)
    length = q.shape[2]
    whole = not (orders.is_floating_point() or orders.is_complex() or orders.dtype == torch.bool)
    if orders.dim() != 2 or orders.shape[1] != length or not len(orders) or not whole:
        raise ValueError(f"orders: expected integer (scans, {length}), got {tuple(orders.shape)} {orders.dtype}")
    if len(log_decays) != len(orders):
        raise ValueError(f"log_decays: expected one of each of {len(orders)} scans, got {len(log_decays)}")
    for log_decay in log_decays:
        check_gates(q, log_decay, None, None, None)

    how = dict(direction=direction, normalize=normalize, decay_convention=decay_convention)
    close = dict(scale=default_scale(scale, q), eps=eps)
    scalar = all(a.dim() in (1, 3) for a in log_decays)
    one_product = scalar and scan_merge == "masks" and decay_convention != "between" and normalize != "pre"
    if one_product and resolve_form(form, length, True, dropout_p) == "full":
        parts = mean_mask_parts(q, k, v, log_decays, orders, valid=valid, dropout_p=dropout_p, **how)
        return finish(*parts, normalize, **close).to(v.dtype)
    how |= dict(form=form, chunk_size=chunk_size, dropout_p=dropout_p)
    scans = [scan_parts(q, k, v, *scan, valid=valid, **how) for scan in zip(log_decays, orders)]
    if scan_merge == "outputs":
        return mean([finish(*parts, normalize, **close) for parts in scans]).to(v.dtype)
    numerators, totals = zip(*scans)
    total = None if totals[0] is None else mean(totals)
    return finish(mean(numerators), total, normalize, **close).to(v.dtype)


def scan_parts(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, order: Tensor, *, valid: Tensor | None, **how
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and row sum (B, H, L) of one scan, where the tokens stand."""
    q, k, v = (x.index_select(2, order) for x in (q, k, v))
    valid = None if valid is None else valid.index_select(1, order)
    parts = linear_attention_parts(q, k, v, along(log_decay, order), valid=valid, **how)
    back = places(order)
    return tuple(None if x is None else x.index_select(2, back) for x in parts)


def mean_mask_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decays: Sequence[Tensor],
    orders: Tensor,
    *,
    direction: str,
    normalize: str,
    decay_convention: str,
    valid: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """The same under the mean of all scans' masks: no token moves, only the times of its decays do."""
    masks, length = [], q.shape[2]
    with no_autocast(q):
        tokens = Tokens(q, k, v, as_lanes(None, q), valid).kept()
        q, k, v, missing = aligned(*(x.to(sum_dtype(x)) for x in tokens[:3]))
        for log_decay, order in zip(log_decays, orders):
            back, lanes = places(order), as_lanes(log_decay, tokens.q)
            if valid is not None:
                lanes = lanes.masked_fill(~valid[:, None, :, None], 0)
            ways = make_directions(
                lanes.index_select(2, order), None, decay_convention=decay_convention, direction=direction
            )
            ways = tuple(way.map(lambda t, back=back: t.index_select(2, back)) for way in ways)
            if missing:
                ways = tuple(way.map(lambda t: hold(t, missing)) for way in ways)
                back = torch.cat([back, torch.arange(length, length + missing, device=q.device)])
            masks.append(pair_mask(ways, places=back).squeeze(-1))  # (b, H, L, L)
        weights = (q @ k.mT).to(masks[0].dtype) * mean(masks)
        return weighted_parts(weights, v, length, rowsum=normalize != "none", dropout_p=dropout_p)


def along(log_decay: Tensor, order: Tensor) -> Tensor:
    """Decays in the order of a scan; those of a whole head are the same in any."""
    return log_decay if log_decay.dim() < 3 else log_decay.index_select(2, order)


def places(order: Tensor) -> Tensor:
    """The inverse permutation: as the how manieth each token is visited."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device, dtype=order.dtype))


def mean(xs: Sequence[Tensor]) -> Tensor:
    return sum(xs[1:], xs[0]) / len(xs)
