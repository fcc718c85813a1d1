"""Padding and segments: every sequence has the result of a separate run, whatever the padding contains."""

import pytest
import torch

from lion.ops import linear_attention, reference_attention

from .checks import (
    BATCH,
    LENGTH,
    SEGMENTS,
    VALID,
    by_segments,
    by_valid,
    check_masked,
    check_masks,
    poisoned,
)
from .helpers import DECAY_CONVENTIONS, DECAYS, DIRECTIONS, NORMALIZE, SMALL_FORMS, assert_close, backward, case, make


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_valid(decay, direction, form):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    for normalize in NORMALIZE:
        how = SMALL_FORMS[form] | dict(direction=direction, normalize=normalize)
        check_masked(inputs, by_valid(VALID), VALID, how, valid=VALID)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_segments(decay, direction, form):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    how = SMALL_FORMS[form] | dict(direction=direction)
    everything = torch.ones_like(VALID)
    check_masked(inputs, by_segments(SEGMENTS, everything), SEGMENTS >= 0, how, segments=SEGMENTS)
    present = VALID & (SEGMENTS >= 0)
    check_masked(inputs, by_segments(SEGMENTS, VALID), present, how, segments=SEGMENTS, valid=VALID)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_gates(decay_convention, form):
    """Check that the decay of a border or hole does not affect the next token, under any convention."""
    inputs = make("extreme", LENGTH, batch=BATCH, heads=2)
    for direction in DIRECTIONS:
        how = SMALL_FORMS[form] | dict(direction=direction, decay_convention=decay_convention)
        check_masks(inputs, how)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("decay", ("lit", "S", "vector"))
def test_bonus(decay, form):
    """Check that padding of one row does not reach the gradient of the bonus, which all rows share."""
    inputs = case(make(decay, LENGTH, batch=BATCH, heads=2), "bonus HD")
    for direction, decay_convention in (("both", "between"), ("backward", "between"), ("both", "source")):
        check_masks(inputs, SMALL_FORMS[form] | dict(direction=direction, decay_convention=decay_convention))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_against_the_definition(decay, direction):
    """Check long rows with many chunks, padding and segments against the definition."""
    inputs = make(decay, 150, batch=2, heads=1)
    segments = torch.tensor([[1] * 40 + [-1] * 25 + [2] * 3 + [3] * 82, [0] * 150])
    valid = torch.rand(2, 150, generator=torch.Generator().manual_seed(5)) < 0.8
    expected = reference_attention(*inputs, direction=direction, valid=valid, segments=segments)
    for form in (dict(form="full"), dict(form="chunk"), dict(form="chunk", chunk_size=2), dict(form="rnn")):
        got = linear_attention(*inputs, **form, direction=direction, valid=valid, segments=segments, feature_map=None)
        assert_close(got, expected, 1e-12, f"{form}")


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_masks_that_hide_nothing_change_nothing(form):
    for decay in DECAYS:
        inputs = make(decay, LENGTH)
        how = SMALL_FORMS[form]
        expected = linear_attention(*inputs, **how, feature_map=None)
        ones = torch.ones(2, LENGTH, dtype=torch.bool)
        assert_close(linear_attention(*inputs, **how, valid=ones, feature_map=None), expected, 1e-14, f"{decay} valid")
        got = linear_attention(*inputs, **how, segments=torch.full((2, LENGTH), 3), feature_map=None)
        assert_close(got, expected, 1e-12, f"{decay} segments")


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_padding_is_zero_in_every_dtype(dtype, form):
    """Check that outputs at padding are 0, also in float16, where 1 / eps is infinite."""
    for decay in DECAYS:
        leaves = poisoned(make(decay, LENGTH, batch=BATCH, heads=2, dtype=dtype), VALID).leaves()
        got = linear_attention(*leaves, **SMALL_FORMS[form], valid=VALID, feature_map=None)
        assert (got[(~VALID)[:, None].expand(got.shape[:3])] == 0).all()
        assert got.isfinite().all()
        for name, grad in backward(got, leaves).items():
            assert grad.isfinite().all(), f"d{name}"


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
def test_any_integer_dtype(dtype):
    inputs = make("S", 6, batch=1)
    segments = torch.tensor([[0, 0, 3, 3, 3, 1]])
    valid = torch.tensor([[True, True, True, False, True, True]])
    for form, how in SMALL_FORMS.items():
        for masks in (dict(), dict(valid=valid)):
            expected = linear_attention(*inputs, **how, segments=segments, **masks, feature_map=None)
            got = linear_attention(*inputs, **how, segments=segments.to(dtype), **masks, feature_map=None)
            assert torch.equal(got, expected), form


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_segments_that_come_back(form):
    inputs = make("S", 3)
    good, bad = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="segments"):
        linear_attention(*inputs, **SMALL_FORMS[form], segments=torch.stack([good, bad]), feature_map=None)
    # with the tokens between deleted, the two pieces are adjacent
    for masks in (
        dict(segments=torch.tensor([[0, -1, 0]] * 2)),
        dict(segments=torch.stack([bad, bad]), valid=torch.tensor([[True, False, True]] * 2)),
    ):
        expected = reference_attention(*inputs, valid=torch.tensor([[True, False, True]] * 2))
        assert_close(linear_attention(*inputs, **SMALL_FORMS[form], **masks, feature_map=None), expected, 1e-12)
