"""The slow definition and every form, against the mathematics computed entry by entry."""

import math

import pytest
import torch

from lion.ops import linear_attention, reference_attention

from .checks import attend
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    DIRECTIONS,
    SMALL_FORMS,
    Inputs,
    assert_close,
    case,
    grid,
    make,
    oracle_attention,
    oracle_mask,
    signed_for,
)

# The examples in the docstring of lion.ops.decay: row i attends to column j, letters are factors.
EXAMPLES = {
    "source": ("1 b bc bcd", "a 1 c cd", "ab b 1 d", "abc bc c 1"),
    "target": ("1 a ab abc", "b 1 b bc", "bc c 1 c", "bcd cd d 1"),
    "symmetric": ("1 b bc bcd", "b 1 c cd", "bc c 1 d", "bcd cd d 1"),
    "between": ("1 1 b bc", "1 1 1 c", "b 1 1 1", "bc c 1 1"),
}
LETTERS = {"1": 1.0, "a": 0.5, "b": 0.3, "c": 0.7, "d": 0.2}


def example(decay_convention: str, direction: str) -> torch.Tensor:
    rows = []
    for row in EXAMPLES[decay_convention]:
        rows.append([math.prod(LETTERS[letter] for letter in entry) for entry in row.split()])
    mask = torch.tensor(rows, dtype=torch.float64)
    return {"both": mask, "forward": mask.tril(), "backward": mask.triu()}[direction]


def mask_of(attention, lam: list[float], **arguments) -> torch.Tensor:
    """Return the mask that an implementation applies: its output for scores of one and one-hot values."""
    ones = torch.ones(1, 1, len(lam), 1, dtype=torch.float64)
    values = torch.eye(len(lam), dtype=torch.float64)[None, None]
    log_decay = torch.tensor(lam, dtype=torch.float64).log()[None, None]
    return attention(ones, ones, values, log_decay, normalize="none", scale=1.0, **arguments)[0, 0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_printed_examples(decay_convention, direction):
    lam = [0.5, 0.3, 0.7, 0.2]
    expected = example(decay_convention, direction)
    how = dict(decay_convention=decay_convention, direction=direction)
    assert_close(oracle_mask(lam, **how), expected, 1e-15, "oracle")
    assert_close(mask_of(reference_attention, lam, **how), expected, 1e-14, "reference")
    assert_close(mask_of(linear_attention, lam, **how), expected, 1e-14, "full")


def check(inputs: Inputs, **arguments) -> None:
    got = inputs.on(reference_attention, **arguments)
    assert got.dtype == torch.float64
    assert_close(got, oracle_attention(inputs, **arguments), 1e-12, f"{inputs.q.shape} {arguments}")


EXTRAS = ("", "bonus H", "bonus HD", "angles L", "angles HL", "angles B1L", "bonus HD, angles BHL")


MASK = dict(direction=DIRECTIONS, decay_convention=DECAY_CONVENTIONS, normalize=ALL_NORMALIZE)


@pytest.mark.parametrize("decay, what, how", grid((*DECAYS, "fixed vector"), EXTRAS, **MASK))
def test_reference_is_the_mathematics(decay, what, how):
    for length in (1, 2, 7, 12):
        inputs = make(decay, length, heads=2)
        inputs = case(signed_for(inputs, how["normalize"]), what)
        check(inputs, **how)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(normalize="none", scale=0.3),
        dict(normalize="sum", eps=20.0),
        dict(normalize="pre", eps=20.0),
        dict(normalize="max", scale=0.3),
        dict(normalize="max", scale=0.01),
        dict(scale=7.0),
        dict(normalize="pre", scale=7.0),
    ],
)
def test_scale_and_eps(arguments):
    inputs = make("S", 6, heads=2)
    check(inputs, **arguments)
    expected = oracle_attention(inputs, **arguments)
    for form, how in SMALL_FORMS.items():
        assert_close(attend(inputs, how, arguments), expected, 1e-12, form)


@pytest.mark.parametrize("tokens", ([0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [0, 1, 4, 5, 6, 8]))
def test_reference_deletes_padding_and_cuts_segments(tokens):
    inputs = make("S", 9, batch=1)
    tokens = torch.tensor(tokens)
    valid = torch.zeros(1, 9, dtype=torch.bool)
    valid[0, tokens] = True
    segments = torch.full((1, 9), 5)
    segments[0, tokens[:2]] = 3

    whole = torch.zeros_like(inputs.v)
    whole[:, :, tokens] = oracle_attention(inputs.at(tokens))
    assert_close(inputs.on(reference_attention, valid=valid), whole, 1e-12)

    cut = torch.zeros_like(inputs.v)
    for part in (tokens[:2], tokens[2:]):
        cut[:, :, part] = oracle_attention(inputs.at(part))
    assert_close(inputs.on(reference_attention, valid=valid, segments=segments), cut, 1e-12)
    assert_close(inputs.on(reference_attention, segments=segments.masked_fill(~valid, -1)), cut, 1e-12)
