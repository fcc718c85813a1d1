"""Rotation of q and k, which together with a real decay is a complex decay."""

import pytest
import torch

from lion.ops import rope_frequencies, rotary_angles, rotate

from .checks import BATCH, LENGTH, attend, check_gradients, check_masks, every_form
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
    oracle_rotate,
    pairwise,
    signed_for,
)

SHAPES = ("angles L", "angles HL", "angles B1L", "angles BHL")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Angles in the operator


@pytest.mark.parametrize(
    "decay, what, bonus, how",
    grid(
        DECAYS,
        SHAPES,
        ("", ", bonus HD"),
        direction=DIRECTIONS,
        decay_convention=DECAY_CONVENTIONS,
        normalize=ALL_NORMALIZE,
    ),
)
def test_every_shape(decay, what, bonus, how):
    """Check that row sums use unrotated scores, because sums of rotated scores may vanish or be negative."""
    inputs = signed_for(make(decay, 11, heads=2), how["normalize"])
    check_gradients(case(inputs, what + bonus), SMALL_FORMS, **how)


@pytest.mark.parametrize(
    "form, normalize, direction, what", pairwise(tuple(SMALL_FORMS), ALL_NORMALIZE, ("both", "backward"), SHAPES)
)
def test_masks(form, normalize, direction, what):
    """Check masks; NaN in the padding of one row must not reach angles that all rows share."""
    inputs = case(make("S", LENGTH, batch=BATCH, heads=2), what)
    check_masks(inputs, SMALL_FORMS[form] | dict(direction=direction, normalize=normalize))


@every_form
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.03), (torch.float32, 2e-5)])
def test_dtypes(form, dtype, tolerance):
    """Check wide angles with narrow tokens, in every floating-point dtype."""
    inputs = make("S", 11, dtype=dtype)
    for angles in (200 * uniform(11, 2).float(), 200 * uniform(11, 2)):
        got = attend(inputs._replace(angles=angles), form)
        assert got.dtype == dtype
        exact = inputs.to(torch.float64)._replace(angles=angles.double())
        assert_close(got, attend(exact, form), tolerance)


# Functions of the module


@pytest.mark.parametrize("shape", ((5, 3), (3, 5, 3), (2, 1, 5, 3), (2, 3, 5, 3)))
def test_rotate(shape):
    x = normal(2, 3, 5, 6)
    angles = 10 * normal(*shape, seed=1)
    assert_close(rotate(x, angles), oracle_rotate(x, angles), 1e-14)
    assert_close(rotate(rotate(x, angles), -angles), x, 1e-14)
    assert rotate(x.bfloat16(), angles).dtype == torch.bfloat16


def test_rotate_goes_from_the_first_axis_to_the_second():
    x = normal(2, 3, 5, 6)
    assert torch.equal(rotate(x, torch.zeros(5, 3)), x)
    one = rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[torch.pi / 2]]))
    assert_close(one, torch.tensor([[[[0.0, 1.0]]]]), 1e-6)
    for dim, pairs in ((3, 1), (6, 1), (6, 6)):
        with pytest.raises(ValueError, match=f"angles: expected one for each pair of {dim} dimensions, got {pairs}"):
            rotate(torch.rand(1, 1, 5, dim), torch.zeros(5, pairs))


@pytest.mark.parametrize("axes", (1, 2, 3))
@pytest.mark.parametrize("heads", ((), (2,)))
@pytest.mark.parametrize("batch", ((), (3,)))
def test_rotary_angles(batch, heads, axes):
    length, pairs = 7, 4
    coords = torch.randint(0, 9, (*batch, axes, length), generator=torch.Generator().manual_seed(0))
    coords[..., :, 2] = -1  # a token without a position
    coords[..., 0, 4] = -1  # a negative position on one of several axes
    frequencies = normal(*heads, axes, pairs, seed=1).requires_grad_()
    angles = rotary_angles(coords, frequencies)

    heads_out = heads or (1,) * len(batch)
    assert angles.shape == (*batch, *heads_out, length, pairs)
    places = coords.view(-1, axes, length).clone()
    places[:, :, 2] = 0
    if axes == 1:
        places[:, :, 4] = 0
    expected = torch.einsum("bal,hap->bhlp", places.double(), frequencies.detach().view(-1, axes, pairs))
    assert_close(angles.view(expected.shape), expected, 1e-14)
    assert not angles[..., 2, :].any()
    if axes > 1:
        assert angles[..., 4, :].all()

    angles.sum().backward()  # learned frequencies: the gradient is the sum of the positions
    total = frequencies.grad.view(-1, axes, pairs)
    assert_close(total, places.sum((0, 2)).double()[None, :, None].expand_as(total), 1e-14)


def test_float_places():
    coords = torch.tensor([[0.5, -1.0, 2.25]])
    assert torch.equal(rotary_angles(coords, torch.tensor([[2.0]])), torch.tensor([[1.0], [0.0], [4.5]]).double())


@every_form
def test_far_places(form):
    """Check that float32 tokens at position 10,000,000 rotate like float64 tokens at 0; frequencies get gradients."""
    inputs = make("S", 11, batch=1, heads=2)

    def attention(dtype, start):
        learned = torch.tensor([[1.0, 0.3]], dtype=torch.float32).to(dtype).requires_grad_()
        angles = rotary_angles(start + torch.arange(11)[None], learned)
        y = attend(inputs.to(dtype)._replace(angles=angles), form)
        y.square().sum().backward()
        assert y.dtype == learned.grad.dtype == dtype
        return y, learned.grad

    expected, expected_grad = attention(torch.float64, 0)
    assert_close(attention(torch.float32, 10_000_000)[0], expected, 2e-5)
    assert_close(attention(torch.float32, 0)[1], expected_grad, 5e-5)


def test_autocast_does_not_round_places():
    """Check positions under autocast, because position 1001 in bf16 would be 1000."""
    coords = torch.tensor([[1001.0, 7.0]])
    expected = rotary_angles(coords, rope_frequencies(8))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary_angles(coords, rope_frequencies(8)), expected)


def test_rope_frequencies():
    got = rope_frequencies(6)
    assert got.shape == (1, 3)
    assert_close(got, torch.tensor([[1.0, 10_000 ** (-2 / 6), 10_000 ** (-4 / 6)]]), 1e-6)
    exact = torch.tensor([[1.0, 0.1]], dtype=torch.float64)
    assert_close(rope_frequencies(4, base=100.0), exact, 1e-6)
    assert_close(rope_frequencies(4, base=100.0, dtype=torch.float64), exact, 1e-15)
    assert rope_frequencies(4, device="meta").is_meta
    with pytest.raises(ValueError, match=r"dim: .* got an odd 5"):
        rope_frequencies(5)
