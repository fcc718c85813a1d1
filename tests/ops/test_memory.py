"""Memory of the forms: the size of the largest tensor, recorded and not estimated."""

import pytest
import torch

from lion.ops import linear_attention

from .helpers import DECAYS, Allocations, backward, make, pairwise

B, H, D, E = 2, 2, 4, 6


def recorded(decay: str, length: int, **arguments) -> Allocations:
    leaves = make(decay, length, batch=B, heads=H, dim=D, value_dim=E, dtype=torch.float32).leaves()
    with Allocations() as allocations:
        backward(linear_attention(*leaves, **arguments, feature_map=None), leaves)
    return allocations


def test_the_recorder_sees_a_square():
    """Check that the recorder sees the L x L weights of full attention with decay, also in the backward pass."""
    shapes = recorded("S", 512, form="full").shapes
    assert sum(shape == (B, H, 512, 512) for shape in shapes) > 2


@pytest.mark.parametrize("direction", ("both", "forward", "backward"))
@pytest.mark.parametrize("masks", ("none", "valid", "segments"))
def test_lit_never_builds_a_square(masks, direction):
    """Check that lit builds no L x L tensor, with or without a direction or segments that need a mask."""
    length, chunk = 512, 64
    arguments = {
        "none": {},
        "valid": dict(valid=torch.arange(length).expand(B, -1) < length - 100),
        "segments": dict(segments=(torch.arange(length) // 200).expand(B, -1)),
    }[masks]
    product = direction == "both" and masks != "segments"
    for decay_convention in ("source", "between"):
        allocations = recorded(
            "lit", length, form="full", direction=direction, decay_convention=decay_convention, **arguments
        )
        assert allocations.largest() <= B * H * length * (max(D, E) if product else chunk)  # length² is 8 times larger


@pytest.mark.parametrize("direction", ("both", "forward"))
@pytest.mark.parametrize("decay", DECAYS)
def test_chunk_memory_is_linear(decay, direction):
    """Check that no tensor is larger than the weights inside chunks, C per token, also with two levels of chunks."""
    for chunk in (8, 64):
        for length in (512, 2048, 4096):
            allocations = recorded(decay, length, form="chunk", chunk_size=chunk, direction=direction)
            room = length + 32 * chunk  # tokens, including padding to whole groups of chunks
            states = D * E / chunk  # one state per chunk
            groups = 64 / chunk  # at most 64 weights between each chunk and the others
            # vector decays: elementwise blocks of 16, and a separate carry for every key dimension
            lanes = max(min(chunk, 16), groups) * D if "vector" in decay else 0
            allowed = max(chunk, D, E, states, groups, lanes)
            assert allocations.largest() <= B * H * room * allowed, f"{chunk} {length}"


@pytest.mark.parametrize(
    "decay, chunk, normalize, dtype", pairwise(DECAYS, (1, 16), ("sum", "none"), (torch.float32, torch.bfloat16))
)
def test_rnn_memory_does_not_grow(decay, chunk, normalize, dtype):
    """Check that only outputs and row sums, before and after the division, are as long as the sequence."""

    def allocated(length: int, dtype: torch.dtype):
        inputs = make(decay, length, batch=B, heads=H, dim=D, value_dim=E, dtype=dtype)
        if inputs.log_decay is not None:  # gates are passed in float32, because a cast would copy them
            inputs = inputs._replace(log_decay=inputs.log_decay.float())
        valid = torch.arange(length).expand(B, -1) < length - 20
        with torch.inference_mode(), Allocations() as allocations:
            linear_attention(*inputs, form="rnn", chunk_size=chunk, valid=valid, normalize=normalize, feature_map=None)
        long = [shape for shape in allocations.shapes if length in shape]
        allocations.shapes = [shape for shape in allocations.shapes if length not in shape]
        return long, allocations.largest()

    (short, at_short), (long, at_long) = allocated(61, dtype), allocated(149, dtype)
    assert at_short == at_long
    for shapes, length in ((short, 61), (long, 149)):
        assert set(shapes) <= {(B, H, length, E), (B, H, length), (B, H, length, 1)}
    assert len(short) == len(long) <= 6
