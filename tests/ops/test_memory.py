"""How large the largest tensor is: recorded, not estimated."""

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
    """Full attention with decay does build L x L weights, in its backward pass too."""
    shapes = recorded("S", 512, form="full").shapes
    assert sum(shape == (B, H, 512, 512) for shape in shapes) > 2


@pytest.mark.parametrize("direction", ("both", "forward", "backward"))
@pytest.mark.parametrize("masks", ("none", "valid", "segments"))
def test_lit_never_builds_a_square(masks, direction):
    """Not as the product, nor where a direction or borders between segments need a mask."""
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
        assert allocations.largest() <= B * H * length * (max(D, E) if product else chunk)  # length² is 8 times more


@pytest.mark.parametrize("direction", ("both", "forward"))
@pytest.mark.parametrize("decay", DECAYS)
def test_chunk_memory_is_linear(decay, direction):
    """No tensor larger than the weights inside the chunks, C for every token; two levels of chunks included."""
    for chunk in (8, 64):
        for length in (512, 2048, 4096):
            allocations = recorded(decay, length, form="chunk", chunk_size=chunk, direction=direction)
            room = length + 32 * chunk  # tokens with the padding to whole groups of chunks
            states = D * E / chunk  # a state per chunk
            groups = 64 / chunk  # at most 64 weights between each chunk and the others
            # of vectors: blocks of 16 element by element, and every key dimension carried on its own
            lanes = max(min(chunk, 16), groups) * D if "vector" in decay else 0
            allowed = max(chunk, D, E, states, groups, lanes)
            assert allocations.largest() <= B * H * room * allowed, f"{chunk} {length}"


@pytest.mark.parametrize(
    "decay, chunk, normalize, dtype", pairwise(DECAYS, (1, 16), ("sum", "none"), (torch.float32, torch.bfloat16))
)
def test_rnn_memory_does_not_grow(decay, chunk, normalize, dtype):
    """Only outputs and row sums (and what the one division makes of them) are as long as the sequence."""

    def allocated(length: int, dtype: torch.dtype):
        inputs = make(decay, length, batch=B, heads=H, dim=D, value_dim=E, dtype=dtype)
        if inputs.log_decay is not None:  # gates come in float32; cast ones would be copied
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
