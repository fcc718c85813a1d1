"""The Lion-chunk of the paper: queries against one block of keys at a time, and the formula for a fixed decay."""

import pytest
import torch

from lion.ops import Gates, blockwise_attention

from . import checks
from .checks import BATCH, LENGTH, attend, saved_sizes
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DIRECTIONS,
    Allocations,
    Denormals,
    Inputs,
    assert_close,
    backward,
    case,
    grid,
    make,
    pairwise,
    signed_for,
)
from .test_reference import mask_of

SCALARS = ("lit", "D", "S", "extreme")
SIZES = {f"blocks of {size}": dict(chunk_size=size) for size in (1, 4, 64)}


def blockwise(inputs: Inputs, *settings: dict) -> torch.Tensor:
    return attend(inputs, *settings, function=blockwise_attention)


def check(inputs: Inputs, sizes: dict = SIZES, **arguments) -> None:
    checks.check_gradients(inputs, sizes, blockwise_attention, **arguments)


MASK = dict(direction=DIRECTIONS, decay_convention=DECAY_CONVENTIONS)


@pytest.mark.parametrize(
    "decay, what, how",
    grid(SCALARS, ("", "bonus H", "bonus HD", "angles BHL"), **MASK, normalize=ALL_NORMALIZE),
)
def test_the_definition(decay, what, how):
    for length in (1, 2, 23):
        inputs = signed_for(make(decay, length, batch=1, heads=2), how["normalize"])
        check(case(inputs, what), **how)


@pytest.mark.parametrize("decay, what, how", grid(("lit", "S", "extreme"), ("bonus H", "angles BHL"), **MASK))
def test_masks(decay, what, how):
    inputs = case(make(decay, LENGTH, batch=BATCH, heads=2), what)
    checks.check_masks(inputs, how | dict(chunk_size=4), blockwise_attention)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 2e-3), (torch.float32, 2e-5)])
def test_dtypes(dtype, tolerance):
    inputs = make("S", 23, dtype=dtype)
    got = blockwise(inputs, dict(chunk_size=4))
    assert got.dtype == dtype
    assert_close(got, attend(inputs.to(torch.float64)), tolerance)
    with torch.inference_mode():
        assert torch.equal(blockwise(inputs, dict(chunk_size=4)), got)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gates_of_zero_and_small_products(direction):
    inputs = make("S", 67, batch=1)
    closed = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    inputs = inputs._replace(log_decay=inputs.log_decay.masked_fill(closed, -torch.inf))
    check(inputs, direction=direction, decay_convention="between")
    leaves = make("S", 197, batch=1, dtype=torch.float32).leaves()
    with Denormals() as denormals:
        backward(blockwise(leaves, dict(direction=direction)), leaves)
    assert not denormals.counts


def test_what_it_refuses():
    inputs = make("vector", 5)
    q, k, v, log_decay = inputs[:4]
    for gates in (log_decay, log_decay[0, :, 0], Gates(beta=log_decay[..., 0].exp())):
        line = "blockwise_attention: takes neither the delta rule nor decays per key dimension"
        with pytest.raises(ValueError, match=line):
            blockwise_attention(q, k, v, gates, normalize="none")
    with pytest.raises(ValueError, match="log_decay: expected logarithms, at most 0"):
        blockwise_attention(q, k, v, -log_decay[..., 0], normalize="none", feature_map=None)
    for name in ("form", "dropout_p", "scan_merge"):
        with pytest.raises(ValueError, match=f"{name}: not a setting here"):
            blockwise_attention(q, k, v, normalize="none", **{name: "full"})


@pytest.mark.parametrize("decay, direction", pairwise(SCALARS, DIRECTIONS))
def test_memory(decay, direction):
    """Check that memory is at most L x C, also in the backward pass, which recomputes the blocks."""
    batch, heads, length, size = 1, 2, 256, 16
    leaves = make(decay, length, batch=batch, heads=heads, dtype=torch.float32).leaves()
    with Allocations() as allocations:
        y = blockwise(leaves, dict(chunk_size=size, direction=direction))
        forward = len(allocations.shapes)
        backward(y, leaves)
    assert allocations.largest() <= batch * heads * length * size
    for part in (allocations.shapes[:forward], allocations.shapes[forward:]):
        assert part.count((batch, heads, length, size)) >= length // size  # the recorder must see blocks in both passes


def test_what_is_kept_for_the_backward_pass():
    """Check that no block is saved for the backward pass, because all blocks together are the L x L matrix."""
    leaves = make("S", 512, batch=1, heads=1).leaves()
    with saved_sizes() as sizes:
        blockwise(leaves, dict(chunk_size=16))
    assert sum(sizes) < 512 * 512 / 4


# The mask of a fixed decay in blocks, for lambda = 0.9 and blocks of 3: exact, and as printed in the paper

PLACE = torch.arange(1, 4).double()
POWERS = (0.9**PLACE)[:, None] @ (0.9**-PLACE)[None]  # L (1/L)^T, L_c = lambda^c
GAMMA = 0.9 ** (PLACE[:, None] - PLACE).abs()


def worst(power: int, below: torch.Tensor, above: torch.Tensor, count: int) -> float:
    """Compute the largest error of a mask of blocks against the mask that the operator applies.

    A block is `lambda^(power |i-j|)` times a (C, C) matrix; on the diagonal it is `Gamma = lambda^|a-b|`.
    """
    mask = torch.zeros(count, 3, count, 3, dtype=torch.float64)
    for i in range(count):
        for j in range(count):
            mask[i, :, j] = 0.9 ** (power * abs(i - j)) * (below if i > j else above)
        mask[i, :, i] = GAMMA
    applied = mask_of(blockwise_attention, [0.9] * (3 * count), chunk_size=3)
    return (mask.view(applied.shape) - applied).abs().max().item()


@pytest.mark.parametrize("count", (1, 2, 5))
def test_the_exact_block(count):
    assert worst(3, POWERS, POWERS.T, count) < 1e-14


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
    assert worst(power, below, below.T, 2) == pytest.approx(expected, abs=1e-4), printed
