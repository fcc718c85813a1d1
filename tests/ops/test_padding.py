"""Padding and segments: every sequence has the result of a separate run, whatever the padding contains."""

import pytest
import torch

from lion.ops import reference_attention

from .checks import (
    BATCH,
    LENGTH,
    SEGMENTS,
    VALID,
    assert_finite,
    attend,
    by_segments,
    check_masked,
    check_masks,
    every_form,
    poisoned,
    values_and_gradients,
)
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    SMALL_FORMS,
    assert_close,
    case,
    grid,
    make,
    pairwise,
    signed_for,
)


@pytest.mark.parametrize(
    "form, decay, how", grid(tuple(SMALL_FORMS), DECAYS, direction=DIRECTIONS, normalize=ALL_NORMALIZE)
)
def test_masks(form, decay, how):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    check_masks(signed_for(inputs, how["normalize"]), SMALL_FORMS[form] | how)


@pytest.mark.parametrize("form, decay, direction", list(zip(SMALL_FORMS, ("S", "vector", "lit", "D"), DIRECTIONS * 2)))
def test_segments_alone(form, decay, direction):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    sequences = by_segments(SEGMENTS, torch.ones_like(VALID))
    how = SMALL_FORMS[form] | dict(direction=direction)
    check_masked(inputs, sequences, SEGMENTS >= 0, how, segments=SEGMENTS)


@pytest.mark.parametrize(
    "form, how", grid(tuple(SMALL_FORMS), decay_convention=DECAY_CONVENTIONS, direction=DIRECTIONS)
)
def test_gates(form, how):
    """Check that the decay of a border or hole does not affect the next token, under any convention."""
    check_masks(make("extreme", LENGTH, batch=BATCH, heads=2), SMALL_FORMS[form] | how)


@pytest.mark.parametrize(
    "form, decay, how",
    grid(
        tuple(SMALL_FORMS),
        ("lit", "S", "vector"),
        direction=("both", "backward"),
        decay_convention=("between", "source"),
        normalize=ALL_NORMALIZE,
    ),
)
def test_bonus(form, decay, how):
    """Check that padding of one row does not reach the gradient of the bonus, which all rows share."""
    inputs = signed_for(make(decay, LENGTH, batch=BATCH, heads=2), how["normalize"])
    check_masks(case(inputs, "bonus HD"), SMALL_FORMS[form] | how)


@pytest.mark.parametrize("decay, direction", pairwise(DECAYS, DIRECTIONS))
def test_against_the_definition(decay, direction):
    """Check long rows with many chunks, padding and segments against the definition."""
    inputs = make(decay, 150, batch=2, heads=1)
    segments = torch.tensor([[1] * 40 + [-1] * 25 + [2] * 3 + [3] * 82, [0] * 150])
    valid = torch.rand(2, 150, generator=torch.Generator().manual_seed(5)) < 0.8
    how = dict(direction=direction, valid=valid, segments=segments)
    expected = inputs.on(reference_attention, **how)
    for form in (dict(form="full"), dict(form="chunk"), dict(form="chunk", chunk_size=2), dict(form="rnn")):
        assert_close(attend(inputs, form, how), expected, 1e-12, f"{form}")


@every_form
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_padding_is_zero_in_every_dtype(dtype, form):
    """Check that outputs at padding are 0, also in float16, where 1 / eps is infinite."""
    for decay in DECAYS:
        inputs = poisoned(make(decay, LENGTH, batch=BATCH, heads=2, dtype=dtype), VALID)
        got, grads = values_and_gradients(inputs, form, dict(valid=VALID))
        assert not got[(~VALID)[:, None].expand(got.shape[:3])].any()
        assert_finite(got, grads)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
def test_any_integer_dtype(dtype):
    inputs = make("S", 6, batch=1)
    segments = torch.tensor([[0, 0, 3, 3, 3, 1]])
    for masks in ({}, dict(valid=torch.tensor([[True, True, True, False, True, True]]))):
        for form, how in SMALL_FORMS.items():
            expected = attend(inputs, how, masks, dict(segments=segments))
            assert torch.equal(attend(inputs, how, masks, dict(segments=segments.to(dtype))), expected), form


@every_form
def test_segments_that_come_back(form):
    inputs = make("S", 3)
    bad = torch.tensor([[0, 0, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match="segments"):
        attend(inputs, form, dict(segments=bad))
    # with the tokens between deleted, the two pieces are adjacent
    valid = torch.tensor([[True, False, True]] * 2)
    expected = inputs.on(reference_attention, valid=valid)
    for masks in (dict(segments=torch.tensor([[0, -1, 0]] * 2)), dict(segments=bad[[1, 1]], valid=valid)):
        assert_close(attend(inputs, form, masks), expected, 1e-12)
