"""The Lion-chunk of the paper: queries against one block of keys at a time, and the formula for a fixed decay."""

import pytest
import torch

from lion.ops import Gates, blockwise_attention, linear_attention

from . import checks
from .checks import BATCH, LENGTH
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DIRECTIONS,
    Allocations,
    Denormals,
    assert_close,
    backward,
    case,
    make,
    signed,
)

SCALARS = ("lit", "D", "S", "extreme")
SIZES = {f"blocks of {size}": dict(chunk_size=size) for size in (1, 4, 64)}


def check(inputs, sizes=SIZES, **arguments):
    checks.check_outputs(inputs, sizes, blockwise_attention, **arguments)


def check_gradients(inputs, sizes=SIZES, **arguments):
    checks.check_gradients(inputs, sizes, blockwise_attention, **arguments)


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", SCALARS)
def test_the_definition(decay, direction, decay_convention):
    arguments = dict(direction=direction, decay_convention=decay_convention)
    for length in (1, 2, 23):
        for what in ("", "bonus H", "bonus HD"):
            check(case(make(decay, length, batch=1, heads=2), what), **arguments)
    check_gradients(case(make(decay, 9, batch=1, heads=2), "bonus HD"), **arguments)
    check_gradients(make(decay, 9, batch=1, heads=2), **arguments)


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
def test_long(normalize):
    """Check three blocks of 64, the last of which is short."""
    inputs = make("S", 150, batch=1, heads=1)
    inputs = signed(inputs) if normalize == "max" else inputs
    check(inputs, {"blocks of 64": {}}, normalize=normalize)
    check_gradients(inputs, {"blocks of 64": {}}, normalize=normalize)


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
@pytest.mark.parametrize("decay", ("lit", "S"))
def test_normalisation_with_rotation_and_bonus(decay, normalize):
    inputs = make(decay, 11, batch=2, heads=2)
    inputs = signed(inputs) if normalize == "max" else inputs
    for what in ("bonus HD", "angles BHL"):
        for direction, decay_convention in (("both", "source"), ("forward", "between")):
            arguments = dict(direction=direction, decay_convention=decay_convention, normalize=normalize)
            check(case(inputs, what), **arguments)
            check_gradients(case(inputs, what), **arguments)


@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_masks(direction, decay_convention):
    for decay in ("lit", "S", "extreme"):
        inputs = case(make(decay, LENGTH, batch=BATCH, heads=2), "bonus H")
        arguments = dict(chunk_size=4, direction=direction, decay_convention=decay_convention)
        checks.check_masks(inputs, arguments, blockwise_attention)
    checks.check_masks(case(make("S", LENGTH, batch=BATCH), "angles BHL"), dict(chunk_size=4), blockwise_attention)


def test_gradcheck():
    leaves = make("S", 5, batch=1, heads=1, dim=2, value_dim=2).leaves()
    checks.gradcheck(leaves, blockwise_attention, chunk_size=4)


def test_dtypes():
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 2e-3), (torch.float32, 2e-5)):
        inputs = make("S", 23, dtype=dtype)
        got = blockwise_attention(*inputs, chunk_size=4, feature_map=None)
        assert got.dtype == dtype
        assert_close(got, linear_attention(*inputs.to(torch.float64), feature_map=None), tolerance)
        with torch.inference_mode():
            assert torch.equal(blockwise_attention(*inputs, chunk_size=4, feature_map=None), got)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gates_of_zero_and_small_products(direction):
    inputs = make("S", 67, batch=1)
    closed = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    inputs = inputs._replace(log_decay=inputs.log_decay.masked_fill(closed, -torch.inf))
    check_gradients(inputs, direction=direction, decay_convention="between")
    leaves = make("S", 197, batch=1, dtype=torch.float32).leaves()
    with Denormals() as denormals:
        backward(blockwise_attention(*leaves, direction=direction, feature_map=None), leaves)
    assert not denormals.counts


def test_what_it_refuses():
    q, k, v, log_decay = make("vector", 5)
    for gates in (log_decay, log_decay[0, :, 0], Gates(beta=log_decay[..., 0].exp())):
        with pytest.raises(
            ValueError, match="blockwise_attention: takes neither the delta rule nor decays per key dimension"
        ):
            blockwise_attention(q, k, v, gates, normalize="none")
    with pytest.raises(ValueError, match="log_decay: expected logarithms, at most 0"):
        blockwise_attention(q, k, v, -log_decay[..., 0], normalize="none", feature_map=None)
    for name in ("form", "dropout_p", "scan_merge"):
        with pytest.raises(ValueError, match=f"{name}: not a setting here"):
            blockwise_attention(q, k, v, normalize="none", **{name: "full"})


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("decay", SCALARS)
def test_memory(decay, direction):
    """Check that memory is at most L x C, also in the backward pass, which recomputes the blocks."""
    batch, heads, length, size = 2, 2, 512, 16
    leaves = make(decay, length, batch=batch, heads=heads, dtype=torch.float32).leaves()
    with Allocations() as allocations:
        y = blockwise_attention(*leaves, chunk_size=size, direction=direction, feature_map=None)
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
        blockwise_attention(*leaves, chunk_size=16, feature_map=None)
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
    applied = blockwise_attention(ones, ones, values, log_decay, chunk_size=3, normalize="none", scale=1.0)
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
