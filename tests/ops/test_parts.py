"""Numerator and row sum before the division, as used by several scans."""

import pytest
import torch

from lion.ops import linear_attention_parts

from .checks import attend
from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    SMALL_FORMS,
    assert_close,
    grid,
    make,
    oracle_masks,
    oracle_parts,
)


def parts(inputs, *settings):
    return attend(inputs, *settings, function=linear_attention_parts)


@pytest.mark.parametrize(
    "decay, form, how",
    grid(DECAYS, tuple(SMALL_FORMS), decay_convention=DECAY_CONVENTIONS, direction=DIRECTIONS),
)
def test_numerator_and_row_sum(decay, form, how):
    inputs = make(decay, 19, batch=1, heads=2)
    found = parts(inputs, SMALL_FORMS[form], how)
    expected = oracle_parts(inputs, oracle_masks(inputs, **how))
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_dtypes_shapes_and_no_row_sum(decay, form):
    """Check that the row sum keeps a wide dtype, because it divides all values, and that none is computed for none."""
    how = SMALL_FORMS[form]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs = make(decay, 9, dtype=dtype)
        numerator, rowsum = parts(inputs, how)
        assert numerator.dtype == dtype and numerator.shape == inputs.v.shape
        assert rowsum.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert rowsum.shape == inputs.v.shape[:3]
    for direction in DIRECTIONS:
        one = dict(direction=direction)
        alone, nothing = parts(inputs, how, one, dict(normalize="none"))
        assert nothing is None
        assert torch.equal(alone, parts(inputs, how, one)[0])
        assert torch.equal(attend(inputs, how, one, dict(normalize="none", scale=0.5)), alone * 0.5)
