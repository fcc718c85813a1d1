"""Normalisation with `max` and `pre`: divisors other than the row sum of the masked scores."""

import pytest
import torch

from lion.ops import blockwise_attention, linear_attention_parts, prefill, reference_attention

from .checks import attend, every_form
from .helpers import (
    DIRECTIONS,
    SMALL_FORMS,
    assert_close,
    case,
    make,
    oracle_masks,
    oracle_parts,
    signed,
    signed_for,
)
from .test_streaming import one_step


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_floor(direction):
    """Check rows with divisors of their own at least, above and below 1, in every form and in a stream."""
    inputs = signed(make("S", 11, batch=2, heads=2))
    rng = torch.Generator().manual_seed(3)
    floor = torch.rand(2, 2, 11, generator=rng, dtype=torch.float64) * 3 + 1e-3
    how = dict(normalize="max", direction=direction, decay_convention="target")
    want = inputs.on(reference_attention, floor=floor, **how)
    assert not torch.allclose(want, inputs.on(reference_attention, **how))
    how["floor"] = floor
    for form in SMALL_FORMS.values():
        assert_close(attend(inputs, form, how), want, 1e-12)
    assert_close(attend(inputs, dict(chunk_size=4), how, function=blockwise_attention), want, 1e-12)
    if direction == "forward":
        del how["direction"]
        y, state = attend(inputs.at(slice(7)), how, dict(floor=floor[..., :7]), function=prefill)
        rest, _ = one_step(inputs.at(slice(7, 11)), state, **how | dict(floor=floor[..., 7:]))
        assert_close(torch.cat([y, rest], 2), want, 1e-12)


def test_floor_is_for_the_divisor():
    inputs = make("S", 11, batch=1, heads=2)
    floor = torch.ones(1, 2, 11)
    with pytest.raises(ValueError, match="floor: only normalize='max' has a smallest divisor, got 'none'"):
        attend(inputs, dict(floor=floor, normalize="none"))
    with pytest.raises(ValueError, match="floor: linear_attention_parts does not divide"):
        attend(inputs, dict(floor=floor, normalize="max"), function=linear_attention_parts)
    with pytest.raises(ValueError, match=r"^floor: expected floating point"):
        attend(inputs, dict(floor=floor[..., :3], normalize="max"))


def test_max_has_both_sides():
    """Check that the inputs have row sums in -1 .. 1 and on both sides of it, so that all branches are tested."""
    inputs = signed(make("S", 11, batch=1, heads=2))
    scaled = oracle_parts(inputs, oracle_masks(inputs, "source", "both"))[1] / 2
    assert (scaled > 1).any() and (scaled < -1).any() and (scaled.abs() < 1).any()


@every_form
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pre_is_the_row_sum_of_the_plain_product(form, direction):
    """Check that `pre` divides the decayed numerator by the plain row sum, and equals `sum` without decay."""
    how = form | dict(direction=direction)
    pre = how | dict(normalize="pre")
    inputs = make("S", 11)
    free = inputs._replace(log_decay=None)
    numerator, rowsum = attend(inputs, pre, function=linear_attention_parts)
    assert_close(rowsum, attend(free, how, function=linear_attention_parts)[1], 1e-14)
    assert_close(numerator, attend(inputs, how, function=linear_attention_parts)[0], 1e-14)
    assert_close(attend(free, pre), attend(free, how), 1e-14)


@every_form
@pytest.mark.parametrize("normalize", ("max", "pre"))
def test_dtypes_and_inference(normalize, form):
    how = form | dict(normalize=normalize, decay_convention="between")
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs = case(signed_for(make("S", 11, dtype=dtype), normalize), "bonus HD")
        expected = attend(inputs, how)
        assert expected.dtype == dtype
        for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            with mode:
                assert torch.equal(attend(inputs, how), expected)
