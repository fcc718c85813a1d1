"""Memory of the forms: the size of the largest tensor, recorded and not estimated."""

import pytest
import torch

from .checks import attend
from .helpers import DECAYS, DIRECTIONS, Allocations, backward, make, pairwise

B, H, D, E = 2, 2, 4, 6


def recorded(decay: str, length: int, **arguments) -> Allocations:
    leaves = make(decay, length, batch=B, heads=H, dim=D, value_dim=E, dtype=torch.float32).leaves()
    with Allocations() as allocations:
        backward(attend(leaves, arguments), leaves)
    return allocations


def test_the_recorder_sees_a_square():
    """Check that the recorder sees the L x L weights of full attention with decay, also in the backward pass."""
    assert recorded("S", 512, form="full").shapes.count((B, H, 512, 512)) > 2


@pytest.mark.parametrize(
    "masks, direction, decay_convention", pairwise(("none", "valid", "segments"), DIRECTIONS, ("source", "between"))
)
def test_lit_never_builds_a_square(masks, direction, decay_convention):
    """Check that lit builds no L x L tensor, with or without a direction or segments that need a mask."""
    length = 512
    arguments = {
        "none": {},
        "valid": dict(valid=torch.arange(length).expand(B, -1) < length - 100),
        "segments": dict(segments=(torch.arange(length) // 200).expand(B, -1)),
    }[masks]
    product = direction == "both" and masks != "segments"
    allocations = recorded(
        "lit", length, form="full", direction=direction, decay_convention=decay_convention, **arguments
    )
    assert allocations.largest() <= B * H * length * (max(D, E) if product else 64)  # length² is 8 times larger


@pytest.mark.parametrize(
    "decay, direction, chunk, length", pairwise(DECAYS, ("both", "forward"), (8, 64), (512, 2048, 4096))
)
def test_chunk_memory_is_linear(decay, direction, chunk, length):
    """Check that no tensor is larger than the weights inside chunks, C per token, also with two levels of chunks."""
    allocations = recorded(decay, length, form="chunk", chunk_size=chunk, direction=direction)
    room = length + 32 * chunk  # tokens, including padding to whole groups of chunks
    states = D * E / chunk  # one state per chunk
    groups = 64 / chunk  # at most 64 weights between each chunk and the others
    # vector decays: elementwise blocks of 16, and a separate carry for every key dimension
    lanes = max(min(chunk, 16), groups) * D if "vector" in decay else 0
    assert allocations.largest() <= B * H * room * max(chunk, D, E, states, groups, lanes)


@pytest.mark.parametrize(
    "decay, chunk, normalize, dtype", pairwise(DECAYS, (1, 16), ("sum", "none"), (torch.float32, torch.bfloat16))
)
def test_rnn_memory_does_not_grow(decay, chunk, normalize, dtype):
    """Check that only outputs and row sums, before and after the division, are as long as the sequence."""
    counts = []
    largest = []
    for length in (61, 149):
        inputs = make(decay, length, batch=B, heads=H, dim=D, value_dim=E, dtype=dtype)
        if decay != "lit":  # gates are passed in float32, because a cast would copy them
            inputs = inputs._replace(log_decay=inputs.log_decay.float())
        valid = torch.arange(length).expand(B, -1) < length - 20
        with torch.inference_mode(), Allocations() as allocations:
            attend(inputs, dict(form="rnn", chunk_size=chunk, valid=valid, normalize=normalize))
        long = [shape for shape in allocations.shapes if length in shape]
        assert set(long) <= {(B, H, length, E), (B, H, length), (B, H, length, 1)}
        counts.append(len(long))
        allocations.shapes = [shape for shape in allocations.shapes if length not in shape]
        largest.append(allocations.largest())
    assert largest[0] == largest[1]
    assert counts[0] == counts[1] <= 6
