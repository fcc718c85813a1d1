"""Several scans of the same tokens, against masks computed pair by pair along each order."""

import pytest
import torch

from lion.ops import SCAN_MERGES, multi_scan_attention
from tests.ops.helpers import (
    DIRECTIONS,
    SMALL_FORMS,
    Inputs,
    assert_close,
    make,
    oracle_attention,
    oracle_masks,
    oracle_parts,
)


def random_orders(scans: int, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(length, generator=rng) for _ in range(scans)])


def scanned(inputs: Inputs, log_decay: torch.Tensor, order: torch.Tensor) -> Inputs:
    q, k, v = (x[:, :, order] for x in inputs[:3])
    return Inputs(q, k, v, log_decay if log_decay.dim() < 3 else log_decay[:, :, order])


def oracle(inputs, log_decays, orders, *, scan_merge, normalize="sum", **how) -> torch.Tensor:
    """Compute each scan separately: gather its tokens, mask, and scatter the result."""
    outputs, masks = [], []
    for log_decay, order in zip(log_decays, orders):
        moved = scanned(inputs, log_decay, order)
        y, mask = oracle_attention(moved, normalize=normalize, **how), oracle_masks(moved, **how)
        put, put_mask = torch.empty_like(y), torch.empty_like(mask)
        for a, i in enumerate(order.tolist()):
            put[:, :, i] = y[:, :, a]
            for b, j in enumerate(order.tolist()):
                put_mask[..., i, j] = mask[..., a, b]
        outputs.append(put)
        masks.append(put_mask)
    if scan_merge == "outputs":
        return sum(outputs) / len(outputs)
    numerator, rowsum = oracle_parts(inputs, sum(masks) / len(masks))
    scale = inputs.q.shape[-1] ** -0.5
    if normalize == "sum":
        return numerator / rowsum[..., None].clamp_min(1e-6)
    return scale * numerator / ((scale * rowsum).abs().clamp_min(1)[..., None] if normalize == "max" else 1)


def decays_of(decay: str, length: int, scans: int) -> list[torch.Tensor]:
    return [make(decay, length, seed=s).log_decay for s in range(scans)]


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("scan_merge", SCAN_MERGES)
@pytest.mark.parametrize("decay", ["D", "S", "extreme", "vector"])
@pytest.mark.parametrize("length", [1, 10, 13])
def test_is_the_definition(form, scan_merge, decay, length):
    inputs, decays, orders = make(decay, length), decays_of(decay, length, 2), random_orders(2, length)
    for direction in DIRECTIONS:
        for decay_convention in ("source", "target", "symmetric"):
            how = dict(decay_convention=decay_convention, direction=direction, scan_merge=scan_merge)
            got = multi_scan_attention(*inputs[:3], decays, orders, **SMALL_FORMS[form], **how, feature_map=None)
            assert_close(got, oracle(inputs, decays, orders, **how), 1e-12, f"{decay_convention} {direction}")


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("normalize", ["none", "max"])
def test_other_normalisations_and_three_scans(form, normalize):
    inputs, decays, orders = make("S", 11), decays_of("S", 11, 3), random_orders(3, 11)
    for scan_merge in SCAN_MERGES:
        how = dict(decay_convention="source", direction="both", scan_merge=scan_merge, normalize=normalize)
        got = multi_scan_attention(*inputs[:3], decays, orders, **SMALL_FORMS[form], **how, feature_map=None)
        assert_close(got, oracle(inputs, decays, orders, **how), 1e-12)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("scan_merge", SCAN_MERGES)
@pytest.mark.parametrize("decay", ["D", "S"])
def test_gradients(form, scan_merge, decay):
    inputs, orders = make(decay, 9), random_orders(2, 9)
    how = dict(scan_merge=scan_merge, decay_convention="source", direction="both")

    def gradients(function, **arguments):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs[:3], *decays_of(decay, 9, 2))]
        if function is oracle:  # masks of the oracle are plain numbers
            y = oracle(Inputs(*leaves[:3], None), [x.detach() for x in leaves[3:]], orders, **how)
        else:
            y = function(*leaves[:3], leaves[3:], orders, feature_map=None, **how, **arguments)
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
        (y * weight).sum().backward()
        return [x.grad for x in leaves]

    got = gradients(multi_scan_attention, **SMALL_FORMS[form])
    for name, a, b in zip("qkv", got, gradients(oracle)):
        assert_close(a, b, 1e-11, name)
    for a, b in zip(got[3:], gradients(multi_scan_attention, form="rnn", chunk_size=1)[3:]):
        assert a.abs().max() > 0
        assert_close(a, b, 1e-11, "decay")


def test_gradcheck_of_merged_masks():
    inputs, orders = make("S", 5, batch=1, heads=2, dim=2, value_dim=2), random_orders(2, 5)
    decays = [make("S", 5, batch=1, heads=2, seed=s).log_decay for s in (1, 2)]
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], *decays)]
    for scan_merge in SCAN_MERGES:
        torch.autograd.gradcheck(
            lambda q, k, v, *a, m=scan_merge: multi_scan_attention(q, k, v, a, orders, scan_merge=m, feature_map=None),
            leaves,
        )


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("scan_merge", SCAN_MERGES)
def test_padding_is_as_if_deleted(form, scan_merge):
    length, keep = 12, torch.tensor([0, 1, 3, 4, 5, 8, 9])
    inputs, decays, orders = make("S", length), decays_of("S", length, 2), random_orders(2, length)
    valid = torch.zeros(2, length, dtype=torch.bool)
    valid[:, keep] = True
    poisoned = [x.masked_fill(~valid[:, None, :, None], torch.nan) for x in inputs[:3]]
    bad = [a.masked_fill(~valid[:, None], torch.nan) for a in decays]
    how = dict(scan_merge=scan_merge, **SMALL_FORMS[form])
    got = multi_scan_attention(*poisoned, bad, orders, valid=valid, **how, feature_map=None)
    rank = torch.full((length,), -1).scatter(0, keep, torch.arange(len(keep)))
    shorter = torch.stack([rank[order][rank[order] >= 0] for order in orders])
    want = multi_scan_attention(
        *(x[:, :, keep] for x in inputs[:3]), [a[:, :, keep] for a in decays], shorter, **how, feature_map=None
    )
    assert_close(got[:, :, keep], want, 1e-12)
    assert not got[:, :, ~valid[0]].any()


def test_merges_differ_only_through_the_row_sum():
    inputs, decays, orders = make("S", 12), decays_of("S", 12, 2), random_orders(2, 12)

    def merged(**how):
        return [
            multi_scan_attention(*inputs[:3], decays, orders, scan_merge=m, **how, feature_map=None)
            for m in SCAN_MERGES
        ]

    assert (merged()[0] - merged()[1]).abs().max() > 1e-3
    assert_close(*merged(normalize="none"), 1e-13)


def test_half_precision_keeps_its_dtype():
    inputs, decays, orders = make("S", 70), decays_of("S", 70, 2), random_orders(2, 70)
    want = multi_scan_attention(*inputs[:3], decays, orders, feature_map=None)
    for form in SMALL_FORMS.values():
        got = multi_scan_attention(*(x.bfloat16() for x in inputs[:3]), decays, orders, **form, feature_map=None)
        assert got.dtype == torch.bfloat16
        assert_close(got.double(), want, 2e-2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(scan_merge="mean"), "scan_merge: expected one of masks, outputs, got 'mean'"),
        (
            dict(orders=torch.zeros(2, 8, dtype=torch.long)),
            r"orders: expected integer \(scans, 9\), got int64 \(2, 8\)",
        ),
        (dict(orders=torch.zeros(2, 9)), "orders: expected integer"),
        (dict(orders=None), "orders: expected integer .*got NoneType"),
        (dict(orders=torch.zeros(3, 9, dtype=torch.long)), "log_decays: expected one for each of 3 scans, got 2"),
        (dict(log_decays=[torch.zeros(3), torch.zeros(4)]), "log_decay: expected"),
        (dict(log_decays=[torch.zeros(3), torch.ones(3)]), "log_decay: expected logarithms, at most 0"),
        (dict(log_decays=None), "log_decays: expected one for each scan, got NoneType"),
        (dict(log_decays=[torch.zeros(3), None]), "log_decays: without decay, all orders have the same scores"),
        (dict(valid=torch.ones(9)), "valid: expected bool"),
        (dict(form="fast"), "form: expected one of"),
        (dict(decay_convention="both"), "decay_convention: expected one of"),
        (dict(direction="up"), "direction: expected one of"),
        (dict(normalize="softmax"), "normalize: expected one of"),
        (dict(orders=torch.tensor([[*range(9)], [0, *range(8)]])), "orders: expected permutations of 0 .. 8"),
    ],
)
def test_bad_arguments(change, message):
    inputs = make("S", 9)
    arguments = dict(log_decays=decays_of("S", 9, 2), orders=random_orders(2, 9)) | change
    with pytest.raises(ValueError, match=message):
        multi_scan_attention(*inputs[:3], **arguments, feature_map=None)
