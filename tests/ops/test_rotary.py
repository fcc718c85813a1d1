"""Rotation of q and k, which together with a real decay is a complex decay."""

import pytest
import torch

from lion.ops import linear_attention, rope_frequencies, rotary_angles, rotate

from .checks import BATCH, LENGTH, check_gradients, check_masks, check_outputs, gradcheck
from .helpers import (
    ALL_NORMALIZE,
    DECAYS,
    DIRECTIONS,
    FORMS,
    SMALL_FORMS,
    assert_close,
    backward,
    case,
    make,
    oracle_rotate,
    signed,
)

SHAPES = ("angles L", "angles HL", "angles B1L", "angles BHL")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Angles in the operator


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.slow
def test_every_shape(direction, what, normalize):
    """Check that row sums use unrotated scores, because sums of rotated scores may vanish or be negative."""
    for decay, decay_convention in (("lit", "source"), ("S", "source"), ("S", "between"), ("vector", "target")):
        inputs = make(decay, 11, heads=2)
        inputs = case(signed(inputs) if normalize == "max" else inputs, what)
        arguments = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
        check_outputs(inputs, SMALL_FORMS, **arguments)
    check_gradients(inputs, SMALL_FORMS, **arguments)


@pytest.mark.parametrize("decay", DECAYS)
def test_with_every_decay_and_a_bonus(decay):
    for direction in DIRECTIONS:
        inputs = case(make(decay, 11, heads=2), "angles HL, bonus HD")
        check_outputs(inputs, SMALL_FORMS, direction=direction, decay_convention="between")
        check_gradients(inputs, SMALL_FORMS, direction=direction, decay_convention="between")


@pytest.mark.parametrize("length", (1, 2, 65, 197))
def test_lengths(length):
    for normalize in ("sum", "none"):
        check_outputs(case(make("S", length, batch=1, heads=2), "angles HL"), FORMS, normalize=normalize)


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
@pytest.mark.parametrize("form", SMALL_FORMS)
def test_masks(form, normalize):
    for direction, what in (("both", "angles BHL"), ("backward", "angles HL")):
        inputs = case(make("S", LENGTH, batch=BATCH, heads=2), what)
        check_masks(inputs, SMALL_FORMS[form] | dict(direction=direction, normalize=normalize))


@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("form", SMALL_FORMS)
def test_masks_over_nan(form, what):
    """Check that NaN in the padding of one row does not reach angles that all rows share."""
    inputs = case(make("S", LENGTH, batch=BATCH, heads=2), what)
    check_masks(inputs, SMALL_FORMS[form])


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_gradcheck(form):
    inputs = case(make("S", 3, batch=1, heads=1, dim=2, value_dim=2), "angles L")
    gradcheck(inputs.leaves(), **SMALL_FORMS[form])


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_only_differences_of_angles_count(form):
    inputs, how = case(make("S", 11), "angles BHL"), SMALL_FORMS[form]
    expected = inputs.on(linear_attention, **how, feature_map=None)
    assert_close(
        inputs._replace(angles=inputs.angles + 1.3).on(linear_attention, **how, feature_map=None), expected, 1e-12
    )
    still = inputs._replace(angles=torch.full_like(inputs.angles, 0.7)).on(linear_attention, **how, feature_map=None)
    assert_close(still, linear_attention(*inputs[:4], **how, feature_map=None), 1e-12)
    assert (expected - still).abs().max() > 0.1


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_dtypes(form):
    """Check wide angles with narrow tokens, in every floating-point dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        inputs = case(make("S", 11, dtype=dtype), "angles L")._replace(angles=200 * torch.rand(11, 2, generator=rng()))
        for angles in (inputs.angles, inputs.angles.double()):
            got = inputs._replace(angles=angles).on(linear_attention, **SMALL_FORMS[form], feature_map=None)
            assert got.dtype == dtype
            exact = inputs.to(torch.float64)._replace(angles=angles.double())
            tolerance = 0.03 if dtype == torch.bfloat16 else 2e-5
            assert_close(got, exact.on(linear_attention, **SMALL_FORMS[form], feature_map=None), tolerance)


# The complex recurrence


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_complex_diagonal_recurrence(direction):
    """Check `S_i = lambda_i S_{i-1} + conj(k_i) v_i`, `y_i = Re(q_i S_i)`, with a complex lambda for each pair.

    In the backward direction the angle of lambda has the opposite sign, and the tokens of a decay are those of the
    symmetric convention. With both directions, a token's own key is counted once.
    """
    batch, heads, length, pairs, width = 2, 3, 9, 2, 5
    q, k = (torch.randn(batch, heads, length, 2 * pairs, dtype=torch.float64, generator=rng(s)) for s in (1, 2))
    v = torch.randn(batch, heads, length, width, dtype=torch.float64, generator=rng(3))
    log_decay = -torch.rand(batch, heads, length, pairs, dtype=torch.float64, generator=rng(4))
    theta = 2 * torch.rand(batch, heads, length, pairs, dtype=torch.float64, generator=rng(5))

    lam = torch.exp(torch.complex(log_decay, theta))
    query, key = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    write = key.conj()[..., None] * v[..., None, :]  # (B, H, L, P, E)
    expected = torch.zeros_like(v)
    if direction in ("forward", "both"):
        S = torch.zeros_like(write[:, :, 0])
        for i in range(length):
            S = lam[:, :, i, :, None] * S + write[:, :, i]
            expected[:, :, i] += (query[:, :, i, :, None] * S).sum(-2).real
    if direction in ("backward", "both"):
        S = torch.zeros_like(write[:, :, 0])
        for i in reversed(range(length)):
            carried = lam[:, :, i + 1, :, None].conj() * S if i + 1 < length else S
            S = carried + write[:, :, i]
            expected[:, :, i] += (query[:, :, i, :, None] * S).sum(-2).real
    if direction == "both":
        expected -= (query[..., None] * write).sum(-2).real

    decays = torch.cat([log_decay, log_decay], -1)  # one decay for both dimensions of a pair
    arguments = dict(
        angles=theta.cumsum(2), direction=direction, decay_convention="symmetric", normalize="none", scale=1.0
    )
    for form, how in SMALL_FORMS.items():
        assert_close(linear_attention(q, k, v, decays, **arguments, **how, feature_map=None), expected, 1e-12, form)
        one = linear_attention(q, k, v, decays, **(arguments | dict(angles=-theta.cumsum(2))), **how, feature_map=None)
        assert (one - expected).abs().max() > 0.1, "the sign of the angle matters"


def test_a_fixed_complex_decay_is_rope():
    """Check `lambda = r exp(i w)` for every token: a decay (H, D) and angles proportional to the position."""
    length, pairs = 12, 3
    q, k, v = (torch.randn(1, 2, length, 2 * pairs, dtype=torch.float64, generator=rng(s)) for s in range(3))
    log_decay = -torch.rand(2, pairs, dtype=torch.float64, generator=rng(4))
    frequencies = torch.rand(2, 1, pairs, dtype=torch.float64, generator=rng(5))
    angles = rotary_angles(torch.arange(length)[None], frequencies)
    distance = torch.arange(length)[:, None] - torch.arange(
        length
    )  # i - j: forward and backward tokens rotate in opposite directions
    turn = torch.exp(torch.complex(log_decay[..., None, None] * distance.abs(), frequencies.mT[..., None] * distance))
    query, key = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    scores = torch.einsum("bhip,bhjp,hpij->bhij", query, key.conj(), turn).real
    for form, how in SMALL_FORMS.items():
        got = linear_attention(
            q, k, v, torch.cat([log_decay] * 2, -1), angles=angles, normalize="none", scale=1.0, **how
        )
        assert_close(got, scores @ v, 1e-12, form)


# Functions of the module


def test_rotate():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=rng())
    for shape in ((5, 3), (3, 5, 3), (2, 1, 5, 3), (2, 3, 5, 3)):
        angles = 10 * torch.randn(shape, dtype=torch.float64, generator=rng(1))
        assert_close(rotate(x, angles), oracle_rotate(x, angles), 1e-14)
        assert_close(rotate(rotate(x, angles), -angles), x, 1e-14)
        assert rotate(x.bfloat16(), angles).dtype == torch.bfloat16
    assert torch.equal(rotate(x, torch.zeros(5, 3)), x)
    one = rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[torch.pi / 2]]))  # from the first axis to the second
    assert_close(one, torch.tensor([[[[0.0, 1.0]]]]), 1e-6)
    for dim, pairs in ((3, 1), (6, 1), (6, 6)):
        with pytest.raises(ValueError, match=f"angles: expected one for each pair of {dim} dimensions, got {pairs}"):
            rotate(torch.rand(1, 1, 5, dim), torch.zeros(5, pairs))


@pytest.mark.parametrize("axes", (1, 2, 3))
@pytest.mark.parametrize("heads", (None, 2))
@pytest.mark.parametrize("batch", (None, 3))
def test_rotary_angles(batch, heads, axes):
    length, pairs = 7, 4
    lead = (axes, length) if batch is None else (batch, axes, length)
    coords = torch.randint(0, 9, lead, generator=rng())
    coords[..., :, 2] = -1  # a token without a position
    coords[..., 0, 4] = -1  # a negative position on one of several axes
    shape = (axes, pairs) if heads is None else (heads, axes, pairs)
    frequencies = torch.randn(shape, dtype=torch.float64, generator=rng(1)).requires_grad_()
    angles = rotary_angles(coords, frequencies)

    heads_out = () if heads is None and batch is None else (heads or 1,)
    assert angles.shape == (*(() if batch is None else (batch,)), *heads_out, length, pairs)
    places = coords.view(batch or 1, axes, length)
    expected = torch.zeros(batch or 1, heads or 1, length, pairs, dtype=torch.float64)
    for b in range(batch or 1):
        for i in range(length):
            for axis in range(axes):
                absent = i == 2 or (axes == 1 and i == 4)
                place = 0 if absent else places[b, axis, i].item()
                expected[b, :, i] += place * frequencies.detach().view(-1, axes, pairs)[:, axis]
    assert_close(angles.view(expected.shape), expected, 1e-14)
    assert not angles[..., 2, :].any()
    if axes > 1:
        assert angles[..., 4, :].all()

    angles.sum().backward()  # learned frequencies: the gradient is the sum of the positions
    seen = places.masked_fill((places < 0).all(1, keepdim=True), 0).sum((0, 2)).double()
    share = 1 if heads is None else heads
    total = frequencies.grad.view(share, axes, pairs)
    assert_close(total, seen[None, :, None].expand_as(total), 1e-14)


def test_float_places():
    coords = torch.tensor([[0.5, -1.0, 2.25]])
    assert torch.equal(rotary_angles(coords, torch.tensor([[2.0]])), torch.tensor([[1.0], [0.0], [4.5]]).double())


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_far_places(form):
    """Check that float32 tokens at position 10,000,000 rotate like float64 tokens at 0; frequencies get gradients."""
    inputs, frequencies = make("S", 11, batch=1, heads=2), torch.tensor([[1.0, 0.3]])

    def attention(dtype, start):
        learned = frequencies.to(dtype, copy=True).requires_grad_()
        angles = rotary_angles(start + torch.arange(11)[None], learned)
        y = linear_attention(*inputs.to(dtype), angles=angles, **SMALL_FORMS[form], feature_map=None)
        y.square().sum().backward()
        assert y.dtype == learned.grad.dtype == dtype
        return y, learned.grad

    expected, expected_grad = attention(torch.float64, 0)
    assert_close(attention(torch.float32, 10_000_000)[0], expected, 2e-5)
    assert_close(attention(torch.float32, 0)[1], expected_grad, 5e-5)


def test_autocast_does_not_round_places():
    """Check positions under autocast, because position 1001 in bf16 would be 1000."""
    coords, frequencies = torch.tensor([[1001.0, 7.0]]), rope_frequencies(8)
    expected = rotary_angles(coords, frequencies)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary_angles(coords, frequencies), expected)


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


def test_learned_frequencies_get_gradients_through_the_operator():
    inputs = make("S", 11, batch=1, heads=2)
    coords = torch.stack([torch.arange(11) // 4, torch.arange(11) % 4])
    grads = {}
    for form, how in SMALL_FORMS.items():
        frequencies = torch.rand(2, 2, 2, dtype=torch.float64, generator=rng()).requires_grad_()
        backward(
            linear_attention(*inputs, angles=rotary_angles(coords, frequencies), **how, feature_map=None),
            inputs.leaves(),
        )
        grads[form] = frequencies.grad
        assert grads[form].abs().min() > 1e-4
        assert_close(grads[form], grads["full"], 1e-10, form)
