"""The slow definition and every form, against the mathematics computed entry by entry."""

import math

import pytest
import torch

from lion.ops import linear_attention, reference_attention

from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    NORMALIZE,
    SMALL_FORMS,
    assert_close,
    case,
    make,
    oracle_attention,
    oracle_mask,
    signed,
    unit_keys,
)

# The examples in the docstring of lion.ops.decay: row i attends to column j, letters are factors.
EXAMPLES = {
    "source": ("1 b bc bcd", "a 1 c cd", "ab b 1 d", "abc bc c 1"),
    "target": ("1 a ab abc", "b 1 b bc", "bc c 1 c", "bcd cd d 1"),
    "symmetric": ("1 b bc bcd", "b 1 c cd", "bc c 1 d", "bcd cd d 1"),
    "between": ("1 1 b bc", "1 1 1 c", "b 1 1 1", "bc c 1 1"),
}
LETTERS = {"1": 1.0, "a": 0.5, "b": 0.3, "c": 0.7, "d": 0.2}


def example(decay_convention, direction):
    rows = [
        [math.prod(LETTERS[letter] for letter in entry) for entry in row.split()] for row in EXAMPLES[decay_convention]
    ]
    mask = torch.tensor(rows, dtype=torch.float64)
    return {"both": mask, "forward": mask.tril(), "backward": mask.triu()}[direction]


def mask_of(attention, lam, **arguments):
    """Return the mask that an implementation applies: its output for scores of one and one-hot values."""
    ones = torch.ones(1, 1, len(lam), 1, dtype=torch.float64)
    values = torch.eye(len(lam), dtype=torch.float64)[None, None]
    log_decay = torch.tensor(lam, dtype=torch.float64).log()[None, None]
    return attention(ones, ones, values, log_decay, normalize="none", scale=1.0, **arguments)[0, 0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_printed_examples(decay_convention, direction):
    lam = [LETTERS[letter] for letter in "abcd"]
    expected = example(decay_convention, direction)
    assert_close(oracle_mask(lam, decay_convention, direction), expected, 1e-15, "oracle")
    assert_close(
        mask_of(reference_attention, lam, decay_convention=decay_convention, direction=direction),
        expected,
        1e-14,
        "reference",
    )
    for form in ("full", "chunk", "rnn"):
        for size in (1, 3, 64):
            got = mask_of(
                linear_attention,
                lam,
                decay_convention=decay_convention,
                direction=direction,
                form=form,
                chunk_size=size,
            )
            assert_close(got, expected, 1e-14, f"{form} {size}")


def test_source_example_in_numbers():
    expected = [[1, 0.3, 0.21, 0.042], [0.5, 1, 0.7, 0.14], [0.15, 0.3, 1, 0.2], [0.105, 0.21, 0.7, 1]]
    got = mask_of(reference_attention, [0.5, 0.3, 0.7, 0.2])
    assert_close(got, torch.tensor(expected, dtype=torch.float64), 1e-14)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", DECAYS)
def test_reference_is_the_mathematics(decay, direction, decay_convention, normalize):
    for length in (1, 2, 7, 12):
        inputs = make(decay, length, heads=2)
        arguments = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
        got = reference_attention(*inputs, **arguments)
        assert got.dtype == torch.float64
        assert_close(got, oracle_attention(inputs, **arguments), 1e-12, f"L={length}")


EXTRAS = ("", "bonus H", "bonus HD", "angles L", "angles HL", "angles B1L", "bonus HD, angles BHL")


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_reference_is_the_mathematics_of_all_else(decay_convention, normalize):
    for decay in ("lit", "S", "fixed vector", "vector"):
        for direction in DIRECTIONS:
            for what in EXTRAS:
                inputs = make(decay, 5, heads=2)
                inputs = case(signed(inputs) if normalize in ("max", "none") else inputs, what)
                arguments = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
                got = inputs.on(reference_attention, **arguments)
                assert_close(got, oracle_attention(inputs, **arguments), 1e-12, f"{decay} {direction} {what}")


@pytest.mark.parametrize("what", ("beta", "beta, angles BHL"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_is_the_delta_rule(direction, what):
    for length in (1, 2, 9):
        inputs = case(unit_keys(make("lit", length)), what)
        arguments = dict(direction=direction, normalize="none")
        got = inputs.on(reference_attention, **arguments)
        assert_close(got, oracle_attention(inputs, **arguments), 1e-12, f"L={length}")


def test_scale_and_eps():
    inputs = make("S", 6, heads=2)
    for arguments in (
        dict(normalize="none", scale=0.3),
        dict(normalize="sum", eps=20.0),
        dict(normalize="pre", eps=20.0),
        dict(normalize="max", scale=0.3),
        dict(normalize="max", scale=0.01),
        dict(scale=7.0),
        dict(normalize="pre", scale=7.0),
    ):
        expected = oracle_attention(inputs, **arguments)
        assert_close(reference_attention(*inputs, **arguments), expected, 1e-12, f"reference {arguments}")
        for form, how in SMALL_FORMS.items():
            assert_close(
                linear_attention(*inputs, **how, **arguments, feature_map=None), expected, 1e-12, f"{form} {arguments}"
            )


@pytest.mark.parametrize("padding", ("right", "left", "hole"))
def test_reference_deletes_padding_and_cuts_segments(padding):
    inputs = make("S", 9, batch=1)
    tokens = {"right": range(6), "left": range(3, 9), "hole": (0, 1, 4, 5, 6, 8)}[padding]
    tokens = torch.tensor(list(tokens))
    valid = torch.zeros(1, 9, dtype=torch.bool)
    valid[0, tokens] = True
    segments = torch.full((1, 9), 5)
    segments[0, tokens[:2]] = 3

    whole = torch.zeros_like(inputs.v)
    whole[:, :, tokens] = oracle_attention(inputs.tokens(0, tokens))
    assert_close(reference_attention(*inputs, valid=valid), whole, 1e-12)

    cut = torch.zeros_like(inputs.v)
    for part in (tokens[:2], tokens[2:]):
        cut[:, :, part] = oracle_attention(inputs.tokens(0, part))
    assert_close(reference_attention(*inputs, valid=valid, segments=segments), cut, 1e-12)
    assert_close(reference_attention(*inputs, segments=segments.masked_fill(~valid, -1)), cut, 1e-12)
