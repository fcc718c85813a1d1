"""Normalisation with `max` and `pre`: divisors other than the row sum of the masked scores."""

import pytest
import torch

from lion.ops import blockwise_attention, linear_attention, linear_attention_parts, prefill, reference_attention, step

from .checks import BATCH, LENGTH, check_gradients, check_masks, check_outputs, gradcheck
from .helpers import (
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    FORMS,
    SMALL_FORMS,
    Inputs,
    assert_close,
    case,
    make,
    oracle_attention,
    oracle_masks,
    oracle_parts,
    pairwise,
    signed,
)


def features(decay: str, length: int, normalize: str, **shape) -> Inputs:
    """Return signed features for `max` and positive features for `pre`."""
    inputs = make(decay, length, **shape)
    return signed(inputs) if normalize == "max" else inputs


@pytest.mark.parametrize("normalize", ("max", "pre"))
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_forms(decay, direction, decay_convention, normalize):
    inputs = features(decay, 11, normalize, batch=1, heads=2)
    arguments = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
    check_outputs(inputs, SMALL_FORMS, **arguments)
    if decay_convention in ("source", "between"):
        what = "bonus H" if direction == "both" else "bonus HD"
        check_gradients(case(inputs, what), SMALL_FORMS, **arguments)


@pytest.mark.parametrize("normalize", ("max", "pre"))
@pytest.mark.parametrize("length", (1, 2, 65, 197))
def test_lengths(length, normalize):
    for decay in ("S", "vector"):
        inputs = features(decay, length, normalize, batch=1, heads=2)
        check_outputs(inputs, FORMS, normalize=normalize)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_floor(direction):
    """Check rows with divisors of their own at least, above and below 1, in every form and in a stream."""
    inputs = signed(make("S", 11, batch=2, heads=2))
    floor = torch.rand(2, 2, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 1e-3
    arguments = dict(normalize="max", direction=direction, decay_convention="target")
    want = reference_attention(*inputs, floor=floor, **arguments)
    assert not torch.allclose(want, reference_attention(*inputs, **arguments))
    for how in SMALL_FORMS.values():
        assert_close(linear_attention(*inputs, floor=floor, feature_map=None, **how, **arguments), want, 1e-12)
    blocks = blockwise_attention(*inputs, floor=floor, feature_map=None, chunk_size=4, **arguments)
    assert_close(blocks, want, 1e-12)
    if direction == "forward":
        q, k, v, a = inputs
        del arguments["direction"]
        y, state = prefill(q[:, :, :7], k[:, :, :7], v[:, :, :7], a[..., :7], floor=floor[..., :7], **arguments)
        rest, _ = step(q[:, :, 7:], k[:, :, 7:], v[:, :, 7:], state, a[..., 7:], floor=floor[..., 7:], **arguments)
        assert_close(torch.cat([y, rest], 2), want, 1e-12)


def test_floor_is_for_the_divisor():
    inputs, floor = make("S", 11, batch=1, heads=2), torch.ones(1, 2, 11)
    with pytest.raises(ValueError, match="floor: only normalize='max' has a smallest divisor, got 'none'"):
        linear_attention(*inputs, floor=floor, normalize="none")
    with pytest.raises(ValueError, match="floor: linear_attention_parts does not divide"):
        linear_attention_parts(*inputs, floor=floor, normalize="max")
    with pytest.raises(ValueError, match=r"^floor: expected floating point"):
        linear_attention(*inputs, floor=floor[..., :3], normalize="max")


def test_max_has_both_sides():
    """Check that the inputs have row sums in -1 .. 1 and on both sides of it, so that all branches are tested."""
    inputs = signed(make("S", 11, batch=1, heads=2))
    scaled = oracle_parts(inputs, oracle_masks(inputs, "source", "both"))[1] / 2
    assert (scaled > 1).any() and (scaled < -1).any() and (scaled.abs() < 1).any()


@pytest.mark.parametrize(
    "form, normalize, given, mask",
    pairwise(
        tuple(SMALL_FORMS),
        ("max", "pre"),
        (("lit", "bonus HD"), ("extreme", "bonus H"), ("vector", "")),
        (("both", "source"), ("both", "between"), ("backward", "target")),
    ),
)
def test_masks(form, normalize, given, mask):
    (decay, what), (direction, decay_convention) = given, mask
    inputs = case(features(decay, LENGTH, normalize, batch=BATCH, heads=2), what)
    how = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
    check_masks(inputs, SMALL_FORMS[form] | how)


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_gradcheck(form):
    for normalize in ("max", "pre"):
        inputs = features("S", 3, normalize, batch=1, heads=1, dim=2, value_dim=2)
        gradcheck(
            case(inputs, "bonus H").leaves(), **SMALL_FORMS[form], decay_convention="between", normalize=normalize
        )


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_pre_is_the_row_sum_of_the_plain_product(form):
    """Check that `pre` divides the decayed numerator by the plain row sum, and equals `sum` without decay."""
    for direction in DIRECTIONS:
        how = SMALL_FORMS[form] | dict(direction=direction)
        inputs = make("S", 11)
        _, plain = linear_attention_parts(*inputs._replace(log_decay=None), **how, feature_map=None)
        numerator, rowsum = linear_attention_parts(*inputs, **how, normalize="pre", feature_map=None)
        assert_close(rowsum, plain, 1e-14)
        assert_close(numerator, linear_attention_parts(*inputs, **how, feature_map=None)[0], 1e-14)
        free = inputs._replace(log_decay=None)
        assert_close(
            linear_attention(*free, **how, normalize="pre", feature_map=None),
            linear_attention(*free, **how, feature_map=None),
            1e-14,
        )


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_max_bounds_the_divisor_after_both_directions_are_added(form):
    """Check the error of bounding the divisor of each direction before the sum, which is a different function."""
    inputs, how = signed(make("S", 11)), SMALL_FORMS[form] | dict(normalize="max")
    apart = sum(linear_attention(*inputs, **how, direction=d, feature_map=None) for d in ("forward", "backward"))
    assert (apart - linear_attention(*inputs, **how, feature_map=None)).abs().max() > 0.1


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_scale(form):
    """Check that `max` compares scaled row sums with 1, and that `pre` does not depend on the scale."""
    inputs = signed(make("S", 11))
    for scale in (0.05, 1.0, 20.0):
        expected = oracle_attention(inputs, normalize="max", scale=scale)
        assert_close(linear_attention(*inputs, **SMALL_FORMS[form], normalize="max", scale=scale), expected, 1e-12)
    inputs, how = make("S", 11), SMALL_FORMS[form] | dict(normalize="pre")
    assert torch.equal(
        linear_attention(*inputs, **how, scale=3.0, feature_map=None),
        linear_attention(*inputs, **how, feature_map=None),
    )


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("normalize", ("max", "pre"))
def test_dtypes_and_inference(normalize, form):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs = case(features("S", 11, normalize, dtype=dtype), "bonus HD")
        how = SMALL_FORMS[form] | dict(normalize=normalize, decay_convention="between")
        expected = inputs.on(linear_attention, **how, feature_map=None)
        assert expected.dtype == dtype
        with torch.inference_mode():
            assert torch.equal(inputs.on(linear_attention, **how, feature_map=None), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(inputs.on(linear_attention, **how, feature_map=None), expected)
