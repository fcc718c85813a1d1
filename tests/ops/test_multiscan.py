"""Several scans of the same tokens, against masks computed pair by pair along each order."""

import pytest
import torch
from torch import Tensor

from lion.ops import SCAN_MERGES, multi_scan_attention

from .checks import attend, every_form
from .helpers import (
    DIRECTIONS,
    SMALL_FORMS,
    Inputs,
    assert_close,
    make,
    oracle_attention,
    oracle_masks,
    oracle_normalized,
    oracle_parts,
    pairwise,
)

every_merge = pytest.mark.parametrize("scan_merge", SCAN_MERGES)


def random_orders(scans: int, length: int) -> Tensor:
    rng = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(length, generator=rng) for _ in range(scans)])


def decays_of(decay: str, length: int, scans: int = 2) -> list[Tensor]:
    return [make(decay, length, seed=seed).log_decay for seed in range(scans)]


def scan(inputs: Inputs, decays: list[Tensor], orders: Tensor, *settings: dict) -> Tensor:
    return attend(inputs, dict(log_decays=decays, orders=orders), *settings, function=multi_scan_attention)


def oracle(inputs: Inputs, decays: list[Tensor], orders: Tensor, *, scan_merge: str, normalize="sum", **how) -> Tensor:
    """Compute each scan separately: gather its tokens, mask, and scatter the result."""
    outputs = []
    masks = []
    for log_decay, order in zip(decays, orders):
        back = order.argsort()
        moved = inputs._replace(log_decay=log_decay).at(order)
        outputs.append(oracle_attention(moved, normalize=normalize, **how)[:, :, back])
        masks.append(oracle_masks(moved, **how)[..., back, :][..., back])
    if scan_merge == "outputs":
        return sum(outputs) / len(outputs)
    numerator, rowsum = oracle_parts(inputs, sum(masks) / len(masks))
    return oracle_normalized(numerator, rowsum[..., None], normalize, inputs.q.shape[-1] ** -0.5)


@pytest.mark.parametrize(
    "form, scan_merge, decay, length, decay_convention",
    pairwise(
        tuple(SMALL_FORMS), SCAN_MERGES, ("D", "S", "extreme", "vector"), (1, 10, 13), ("source", "target", "symmetric")
    ),
)
def test_is_the_definition(form, scan_merge, decay, length, decay_convention):
    inputs = make(decay, length)._replace(log_decay=None)
    decays = decays_of(decay, length)
    orders = random_orders(2, length)
    for direction in DIRECTIONS:
        how = dict(decay_convention=decay_convention, direction=direction, scan_merge=scan_merge)
        got = scan(inputs, decays, orders, how, SMALL_FORMS[form])
        assert_close(got, oracle(inputs, decays, orders, **how), 1e-12, f"{decay_convention} {direction}")


@pytest.mark.parametrize("form, scan_merge, normalize", pairwise(tuple(SMALL_FORMS), SCAN_MERGES, ("none", "max")))
def test_other_normalisations_and_three_scans(form, scan_merge, normalize):
    inputs = make("lit", 11)
    decays = decays_of("S", 11, 3)
    orders = random_orders(3, 11)
    how = dict(decay_convention="source", direction="both", scan_merge=scan_merge, normalize=normalize)
    assert_close(scan(inputs, decays, orders, how, SMALL_FORMS[form]), oracle(inputs, decays, orders, **how), 1e-12)


@every_form
@every_merge
@pytest.mark.parametrize("decay", ["D", "S"])
def test_gradients(form, scan_merge, decay):
    orders = random_orders(2, 9)
    how = dict(scan_merge=scan_merge, decay_convention="source", direction="both")

    def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
        return torch.autograd.grad((y * weight).sum(), leaves)

    inputs = make("lit", 9).leaves()
    decays = [x.requires_grad_() for x in decays_of(decay, 9)]
    leaves = [inputs.q, inputs.k, inputs.v, *decays]
    got = gradients(scan(inputs, decays, orders, how, form), leaves)
    plain = [x.detach() for x in decays]  # masks of the oracle are plain numbers
    want = gradients(oracle(inputs, plain, orders, **how), leaves[:3])
    want += gradients(scan(inputs, decays, orders, how, dict(form="rnn", chunk_size=1)), decays)
    for found, expected in zip(got, want, strict=True):
        assert found.abs().max() > 0
        assert_close(found, expected, 1e-11)


@every_merge
def test_gradcheck(scan_merge):
    inputs = make("lit", 5, batch=1, heads=2, dim=2, value_dim=2).leaves()
    decays = [make("S", 5, batch=1, heads=2, seed=seed).log_decay.requires_grad_() for seed in (1, 2)]
    orders = random_orders(2, 5)

    def attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return scan(Inputs(q, k, v), [first, second], orders, dict(scan_merge=scan_merge))

    assert torch.autograd.gradcheck(attention, [inputs.q, inputs.k, inputs.v, *decays])


@every_form
@every_merge
def test_padding_is_as_if_deleted(form, scan_merge):
    length = 12
    keep = torch.tensor([0, 1, 3, 4, 5, 8, 9])
    valid = torch.zeros(2, length, dtype=torch.bool)
    valid[:, keep] = True
    inputs = make("lit", length)
    decays = decays_of("S", length)
    orders = random_orders(2, length)
    poisoned = inputs.map(lambda x: x.masked_fill(~valid[:, None, :, None], torch.nan))
    bad = [x.masked_fill(~valid[:, None], torch.nan) for x in decays]
    how = form | dict(scan_merge=scan_merge)
    got = scan(poisoned, bad, orders, how, dict(valid=valid))
    rank = torch.full((length,), -1).scatter(0, keep, torch.arange(len(keep)))
    shorter = [rank[order][rank[order] >= 0] for order in orders]
    want = scan(inputs.at(keep), [x[:, :, keep] for x in decays], torch.stack(shorter), how)
    assert_close(got[:, :, keep], want, 1e-12)
    assert not got[:, :, ~valid[0]].any()


def test_merges_differ_only_through_the_row_sum():
    inputs = make("lit", 12)
    decays = decays_of("S", 12)
    orders = random_orders(2, 12)
    masks = dict(scan_merge="masks")
    outputs = dict(scan_merge="outputs")
    none = dict(normalize="none")
    assert (scan(inputs, decays, orders, masks) - scan(inputs, decays, orders, outputs)).abs().max() > 1e-3
    assert_close(scan(inputs, decays, orders, masks, none), scan(inputs, decays, orders, outputs, none), 1e-13)


@every_form
def test_half_precision_keeps_its_dtype(form):
    inputs = make("lit", 70)
    decays = decays_of("S", 70)
    orders = random_orders(2, 70)
    got = scan(inputs.to(torch.bfloat16), decays, orders, form)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), scan(inputs, decays, orders), 2e-2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(scan_merge="mean"), "scan_merge: expected one of masks, outputs, got 'mean'"),
        (dict(orders=random_orders(2, 8)), r"orders: expected integer \(scans, 9\), got int64 \(2, 8\)"),
        (dict(orders=torch.zeros(2, 9)), "orders: expected integer"),
        (dict(orders=None), "orders: expected integer .*got NoneType"),
        (dict(orders=random_orders(3, 9)), "log_decays: expected one for each of 3 scans, got 2"),
        (dict(log_decays=[torch.zeros(3), torch.zeros(4)]), "log_decay: expected"),
        (dict(log_decays=[torch.zeros(3), torch.ones(3)]), "log_decay: expected logarithms, at most 0"),
        (dict(log_decays=None), "log_decays: expected one for each scan, got NoneType"),
        (dict(log_decays=[torch.zeros(3), None]), "log_decays: without decay, all orders have the same scores"),
        (dict(valid=torch.ones(9)), "valid: expected bool"),
        (dict(orders=torch.tensor([[*range(9)], [0, *range(8)]])), "orders: expected permutations of 0 .. 8"),
    ],
)
def test_bad_arguments(change, message):
    q, k, v = make("lit", 9)[:3]
    arguments = dict(log_decays=decays_of("S", 9), orders=random_orders(2, 9), feature_map=None) | change
    with pytest.raises(ValueError, match=message):
        multi_scan_attention(q, k, v, **arguments)
