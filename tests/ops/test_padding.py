"""`valid` and `segments`: every sequence gets what it gets alone, whatever its padding holds."""

import pytest
import torch
from torch import Tensor

from lion.ops import linear_attention, reference_attention

from .helpers import DECAYS, DIRECTIONS, GATES, NORMALIZE, SMALL_FORMS, Inputs, assert_close, backward, make

LENGTH = 23
HOLES = {0, 3, 4, 9, 15, 16, 17, 18, 19, 22}  # at both ends too, and one as long as a chunk
VALID = torch.tensor(
    [
        [t < 13 for t in range(LENGTH)],  # padding right
        [t >= 9 for t in range(LENGTH)],  # padding left
        [t not in HOLES for t in range(LENGTH)],
        [False] * LENGTH,  # an empty sequence
        [True] * LENGTH,
    ]
)
SEGMENTS = torch.tensor(
    [
        [4] * 7 + [2] + [9] * 15,  # ids in any order, a segment of one token
        [-1] * 3 + [0] * 6 + [-1] * 2 + [1] * 8 + [-1] * 4,  # padding at both ends and between segments
        [7, 7, -1, 7, -1, -1, -1, -1, -1, 7, 7] + [3, -1, 3, 3, -1, 3] + [5] * 6,  # holes inside segments
        [-1] * LENGTH,
        list(range(LENGTH)),  # every token alone
    ]
)
BATCH = len(VALID)


def poisoned(inputs: Inputs, valid: Tensor) -> Inputs:
    """NaN and infinities at all padding."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=inputs.q.dtype)
    out = []
    for x in inputs:
        if x is not None and x.dim() >= 3:
            mask = (~valid[:, None]).reshape(BATCH, 1, LENGTH, *[1] * (x.dim() - 3)).expand_as(x)
            x = torch.where(mask, bad[torch.arange(x.numel()) % 3].reshape(x.shape), x)
        out.append(x)
    return Inputs(*out)


def alone(inputs: Inputs, sequences: list[list[Tensor]], **arguments) -> Tensor:
    """Every sequence (a list of token places for each batch row) run by itself, the rest 0."""
    rows = []
    for row, places in enumerate(sequences):
        y = torch.zeros_like(inputs.v[:1])
        for index in places:
            y = y.index_add(2, index, linear_attention(*inputs.tokens(row, index), **arguments))
        rows.append(y)
    return torch.cat(rows)


def by_valid(valid: Tensor) -> list[list[Tensor]]:
    return [[row.nonzero()[:, 0]] if row.any() else [] for row in valid]


def by_segments(segments: Tensor, valid: Tensor) -> list[list[Tensor]]:
    return [[((row == i) & ok).nonzero()[:, 0] for i in row[ok].unique() if i >= 0] for row, ok in zip(segments, valid)]


def check(inputs: Inputs, sequences, present: Tensor, how: dict, **masks) -> None:
    """Poisoned and masked against clean and alone: values, gradients, exact zeros."""
    leaves = inputs.leaves()
    expected = alone(leaves, sequences, **how)
    expected_grads = backward(expected, leaves) if expected.requires_grad else leaves.grads()

    leaves = poisoned(inputs, present).leaves()
    got = linear_attention(*leaves, **how, **masks)
    absent = (~present)[:, None].expand(got.shape[:3])
    assert_close(got, expected, 1e-12, f"{how}")
    assert (got[absent] == 0).all()

    for name, grad in backward(got, leaves).items():
        assert grad.isfinite().all(), f"d{name} {how}"
        assert_close(grad, expected_grads[name], 1e-10, f"d{name} {how}", floor=0.1)
        if grad.dim() >= 3:
            assert (grad[absent] == 0).all(), f"d{name} {how}"


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_valid(decay, direction, form):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    for normalize in NORMALIZE:
        how = SMALL_FORMS[form] | dict(direction=direction, normalize=normalize)
        check(inputs, by_valid(VALID), VALID, how, valid=VALID)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_segments(decay, direction, form):
    inputs = make(decay, LENGTH, batch=BATCH, heads=2)
    how = SMALL_FORMS[form] | dict(direction=direction)
    everything = torch.ones_like(VALID)
    check(inputs, by_segments(SEGMENTS, everything), SEGMENTS >= 0, how, segments=SEGMENTS)
    present = VALID & (SEGMENTS >= 0)
    check(inputs, by_segments(SEGMENTS, VALID), present, how, segments=SEGMENTS, valid=VALID)


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, form):
    """A border or a hole must not lend its decay to the next token under any gate."""
    inputs = make("extreme", LENGTH, batch=BATCH, heads=2)
    for direction in DIRECTIONS:
        how = SMALL_FORMS[form] | dict(direction=direction, gate=gate)
        check(inputs, by_valid(VALID), VALID, how, valid=VALID)
        present = VALID & (SEGMENTS >= 0)
        check(inputs, by_segments(SEGMENTS, VALID), present, how, segments=SEGMENTS, valid=VALID)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_against_the_definition(decay, direction):
    """Long rows with many chunks, padding and segments together."""
    inputs = make(decay, 150, batch=2, heads=1)
    segments = torch.tensor([[1] * 40 + [-1] * 25 + [2] * 3 + [3] * 82, [0] * 150])
    valid = torch.rand(2, 150, generator=torch.Generator().manual_seed(5)) < 0.8
    expected = reference_attention(*inputs, direction=direction, valid=valid, segments=segments)
    for form in (dict(form="full"), dict(form="chunk"), dict(form="chunk", chunk_size=2), dict(form="rnn")):
        got = linear_attention(*inputs, **form, direction=direction, valid=valid, segments=segments)
        assert_close(got, expected, 1e-12, f"{form}")


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_masks_that_hide_nothing_change_nothing(form):
    for decay in DECAYS:
        inputs = make(decay, LENGTH)
        how = SMALL_FORMS[form]
        expected = linear_attention(*inputs, **how)
        ones = torch.ones(2, LENGTH, dtype=torch.bool)
        assert_close(linear_attention(*inputs, **how, valid=ones), expected, 1e-14, f"{decay} valid")
        got = linear_attention(*inputs, **how, segments=torch.full((2, LENGTH), 3))
        assert_close(got, expected, 1e-12, f"{decay} segments")


@pytest.mark.parametrize("form", SMALL_FORMS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_padding_is_zero_in_every_dtype(dtype, form):
    """Also in float16, where 1 / eps is infinite."""
    for decay in DECAYS:
        leaves = poisoned(make(decay, LENGTH, batch=BATCH, heads=2, dtype=dtype), VALID).leaves()
        got = linear_attention(*leaves, **SMALL_FORMS[form], valid=VALID)
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
            expected = linear_attention(*inputs, **how, segments=segments, **masks)
            got = linear_attention(*inputs, **how, segments=segments.to(dtype), **masks)
            assert torch.equal(got, expected), form


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_segments_that_come_back(form):
    inputs = make("S", 3)
    good, bad = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match="segments"):
        linear_attention(*inputs, **SMALL_FORMS[form], segments=torch.stack([good, bad]))
    # what lies between is deleted: then the two pieces stand together
    for masks in (
        dict(segments=torch.tensor([[0, -1, 0]] * 2)),
        dict(segments=torch.stack([bad, bad]), valid=torch.tensor([[True, False, True]] * 2)),
    ):
        expected = reference_attention(*inputs, valid=torch.tensor([[True, False, True]] * 2))
        assert_close(linear_attention(*inputs, **SMALL_FORMS[form], **masks), expected, 1e-12)
