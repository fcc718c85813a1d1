"""Numerator and row sum before the division, as used by several scans."""

import pytest
import torch

from lion.ops import linear_attention, linear_attention_parts

from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    SMALL_FORMS,
    Inputs,
    assert_close,
    make,
    oracle_masks,
    oracle_parts,
)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_both_is_forward_plus_backward_less_the_diagonal(decay, decay_convention, form):
    inputs = make(decay, 19)
    how = SMALL_FORMS[form] | dict(decay_convention=decay_convention)
    parts = {d: linear_attention_parts(*inputs, direction=d, **how, feature_map=None) for d in DIRECTIONS}
    own = (inputs.q * inputs.k).sum(-1)
    diagonal = (own.unsqueeze(-1) * inputs.v, own)
    for both, forward, backward, once in zip(parts["both"], parts["forward"], parts["backward"], diagonal):
        assert_close(both, forward + backward - once, 1e-12)
    for direction in DIRECTIONS:
        for got, expected in zip(
            parts[direction], oracle_parts(inputs, oracle_masks(inputs, decay_convention, direction))
        ):
            assert_close(got, expected, 1e-12, direction)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_two_scans_share_one_division(decay, form):
    """Check that two scans added before the division equal one attention with the average of both masks."""
    inputs, other = make(decay, 12, heads=2), make(decay, 12, heads=2, seed=9)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))  # the order of the second scan
    back = order.argsort()
    q, k, v = inputs[:3]

    first = linear_attention_parts(*inputs, **SMALL_FORMS[form], feature_map=None)
    second = linear_attention_parts(
        *(x[:, :, order] for x in (q, k, v)), other.log_decay, **SMALL_FORMS[form], feature_map=None
    )
    numerator, rowsum = (a + b[:, :, back] for a, b in zip(first, second))

    path = oracle_masks(Inputs(q, k, v, other.log_decay), "source", "both")
    path = path[..., back, :][..., back]
    average = (oracle_masks(inputs, "source", "both") + path) / 2
    expected, total = oracle_parts(inputs, average)
    assert_close(numerator / rowsum.unsqueeze(-1), expected / total.unsqueeze(-1), 1e-12)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_dtypes_and_shapes(decay, form):
    """Check that the row sum keeps a wide dtype, because it divides all values."""
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        inputs = make(decay, 9, dtype=dtype)
        numerator, rowsum = linear_attention_parts(*inputs, **SMALL_FORMS[form], feature_map=None)
        assert numerator.dtype == dtype and numerator.shape == inputs.v.shape
        assert rowsum.dtype == wide and rowsum.shape == inputs.v.shape[:3]


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_without_row_sum(decay, form):
    inputs = make(decay, 9)
    for direction in DIRECTIONS:
        how = SMALL_FORMS[form] | dict(direction=direction)
        numerator, _ = linear_attention_parts(*inputs, **how, feature_map=None)
        alone, nothing = linear_attention_parts(*inputs, **how, normalize="none")
        assert nothing is None
        assert torch.equal(alone, numerator)
        assert torch.equal(linear_attention(*inputs, **how, normalize="none", scale=0.5), alone * 0.5)
