"""The Lion-chunk form of the paper: queries against one block of keys at a time, and the formula for a fixed decay."""

import pytest
import torch

from lion.ops import linear_attention

from .checks import BATCH, LENGTH, check_gradients, check_masks, check_outputs, gradcheck
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DIRECTIONS,
    SCALARS,
    Allocations,
    assert_close,
    backward,
    case,
    make,
    signed,
)

FORMS = {f"blockwise{size}": dict(form="blockwise", chunk_size=size) for size in (1, 4, 64)}


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", SCALARS)
def test_forms(decay, direction, decay_convention):
    arguments = dict(direction=direction, decay_convention=decay_convention)
    for length in (1, 2, 23):
        for what in ("", "bonus H", "bonus HD"):
            check_outputs(case(make(decay, length, batch=1, heads=2), what), FORMS, **arguments)
    check_gradients(case(make(decay, 9, batch=1, heads=2), "bonus HD"), FORMS, **arguments)
    check_gradients(make(decay, 9, batch=1, heads=2), FORMS, **arguments)


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
def test_long(normalize):
    """Check three blocks of 64, the last of which is short."""
    inputs = make("S", 150, batch=1, heads=1)
    inputs = signed(inputs) if normalize == "max" else inputs
    check_outputs(inputs, {"blockwise": dict(form="blockwise")}, normalize=normalize)
    check_gradients(inputs, {"blockwise": dict(form="blockwise")}, normalize=normalize)


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masks(direction, decay_convention):
    for decay in ("lit", "S", "extreme"):
        inputs = case(make(decay, LENGTH, batch=BATCH, heads=2), "bonus H")
        check_masks(
            inputs, dict(form="blockwise", chunk_size=4, direction=direction, decay_convention=decay_convention)
        )


def test_gradcheck():
    gradcheck(make("S", 5, batch=1, heads=1, dim=2, value_dim=2).leaves(), **FORMS["blockwise4"])


def test_dtypes():
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 2e-5)):
        inputs = make("S", 23, dtype=dtype)
        got = linear_attention(*inputs, **FORMS["blockwise4"], feature_map=None)
        assert got.dtype == dtype
        assert_close(got, linear_attention(*inputs.to(torch.float64), feature_map=None), tolerance)
        with torch.inference_mode():
            assert torch.equal(linear_attention(*inputs, **FORMS["blockwise4"], feature_map=None), got)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", SCALARS)
def test_memory(decay, direction):
    """Check that memory is at most L x C, also in the backward pass, which recomputes the blocks."""
    batch, heads, length, size = 2, 2, 512, 16
    leaves = make(decay, length, batch=batch, heads=heads, dtype=torch.float32).leaves()
    with Allocations() as allocations:
        y = linear_attention(*leaves, form="blockwise", chunk_size=size, direction=direction, feature_map=None)
        forward = len(allocations.shapes)
        backward(y, leaves)
    assert allocations.largest() <= batch * heads * length * size
    block = (batch, heads, length, size)
    for part in (allocations.shapes[:forward], allocations.shapes[forward:]):
        assert part.count(block) >= length // size  # the recorder must see the blocks, in both passes


def test_what_is_kept_for_the_backward_pass():
    """Check that no block is saved for the backward pass, because all blocks together are the L x L matrix."""
    leaves, sizes = make("S", 512, batch=1, heads=1).leaves(), []

    def note(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        linear_attention(*leaves, form="blockwise", chunk_size=16, feature_map=None)
    assert sum(sizes) < 512 * 512 / 4


# The mask of a fixed decay in blocks, for lambda = 0.9 and blocks of 3: exact, and as printed in the paper


def blocks(power: int, below: torch.Tensor, above: torch.Tensor, count: int) -> torch.Tensor:
    """Build a mask of blocks: `lambda^(power |i-j|)` times a (C, C) matrix; on the diagonal `Gamma = lambda^|a-b|`."""
    rows = [
        [GAMMA if i == j else 0.9 ** (power * abs(i - j)) * (below if i > j else above) for j in range(count)]
        for i in range(count)
    ]
    return torch.cat([torch.cat(row, 1) for row in rows])


PLACE = torch.arange(1, 4).double()
POWERS = (0.9**PLACE)[:, None] @ (0.9**-PLACE)[None]  # L (1/L)^T, L_c = lambda^c
GAMMA = 0.9 ** (PLACE[:, None] - PLACE).abs()


def worst(mask: torch.Tensor) -> float:
    """Compute the largest error against the mask that the operator applies."""
    length = len(mask)
    ones = torch.ones(1, 1, length, 1, dtype=torch.float64)
    values = torch.eye(length, dtype=torch.float64)[None, None]
    log_decay = torch.tensor([0.9], dtype=torch.float64).log()
    applied = linear_attention(
        ones, ones, values, log_decay, form="blockwise", chunk_size=3, normalize="none", scale=1.0
    )
    return (mask - applied[0, 0]).abs().max().item()


@pytest.mark.parametrize("count", (1, 2, 5))
def test_the_exact_block(count):
    assert worst(blocks(3, POWERS, POWERS.T, count)) < 1e-14


@pytest.mark.parametrize(
    "printed, power, below, expected",
    [
        ("transposed, and lambda^|i-j| for lambda^(C|i-j|) (Eq. 82)", 1, POWERS.T, 0.5206),
        ("Gamma lambda^|i-j|, the diagonal's block everywhere", 1, GAMMA, 0.1710),
        ("lambda^|i-j| L (1/L)^T, without the C", 1, POWERS, 0.2111),
        ("transposed alone", 3, POWERS.T, 0.3095),
    ],
)
def test_printed_blocks(printed, power, below, expected):
    """Check two blocks; errors are larger for more blocks."""
    assert worst(blocks(power, below, below.T, 2)) == pytest.approx(expected, abs=1e-4), printed
