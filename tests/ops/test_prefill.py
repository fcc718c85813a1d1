"""Prefill and step in every combination: outputs, states, padding and segments."""

import pytest
import torch

from lion.ops import State, prefill

from .checks import assert_gradients, attend, values_and_gradients
from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    Inputs,
    assert_close,
    backward,
    case,
    grid,
    make,
    oracle_attention,
    signed_for,
    unit_keys,
)
from .test_streaming import FORWARD, PIECES, one_step, stream

LENGTH = 14
SPLIT = 9
PROMPT = slice(SPLIT)
EVERY_DECAY = (*DECAYS, "fixed vector")
EXTRAS = ("", "bonus H", "bonus HD, angles HL", "angles BHL")
REST = [1, 3, 1]  # lengths of the pieces after the prompt


def some(decay: str, normalize: str, what: str, **shape) -> Inputs:
    inputs = make(decay, LENGTH, **shape)
    inputs = unit_keys(inputs) if "beta" in what else signed_for(inputs, normalize)
    return case(inputs, what)


def check(inputs: Inputs, **arguments) -> None:
    """Check steps, pieces, a prompt, and a prompt with steps: all give the forward outputs and one state."""
    read = "S" if arguments["normalize"] == "none" else "Sz"  # parts of the state; see test_the_sum_nobody_reads
    expected = oracle_attention(inputs, direction="forward", **arguments)
    _, whole = stream(inputs, [1] * LENGTH, **arguments)
    for pieces in PIECES.values():
        y, state = stream(inputs, pieces, **arguments)
        assert_close(y, expected, 1e-12, f"step {pieces}")
        check_state(state, whole, read, f"step {pieces}")
    for size in (4, 64):
        y, state = attend(inputs, arguments, dict(chunk_size=size), function=prefill)
        assert_close(y, expected, 1e-12, f"prefill {size}")
        check_state(state, whole, read, f"prefill {size}")
    y, state = attend(inputs.at(PROMPT), arguments, dict(chunk_size=4), function=prefill)
    assert_close(y, expected[:, :, PROMPT], 1e-12, "prompt")
    y, state = stream(inputs, REST, state, SPLIT, **arguments)
    assert_close(y, expected[:, :, SPLIT:], 1e-12, "after the prompt")
    check_state(state, whole, read, "after the prompt")


def check_state(state: State, expected: State, read: str, what: str) -> None:
    for name in read:
        assert_close(getattr(state, name), getattr(expected, name), 1e-12, f"{name} {what}")


@pytest.mark.parametrize(
    "decay, what, how", grid(EVERY_DECAY, EXTRAS, decay_convention=DECAY_CONVENTIONS, normalize=ALL_NORMALIZE)
)
def test_every_pair_of_arguments(decay, what, how):
    check(some(decay, how["normalize"], what, batch=1, heads=2), **how)


@pytest.mark.parametrize("what", ("", "angles L"))
def test_the_sum_nobody_reads(what):
    """Check `z` under `normalize="none"`: it is equal after a prompt and after steps, so row sums can be used later."""
    inputs = some("S", "none", what)
    _, stepped = stream(inputs, [1] * LENGTH, normalize="none")
    _, prompted = attend(inputs, dict(normalize="none"), function=prefill)
    check_state(prompted, stepped, "Sz", what)


@pytest.mark.parametrize(
    "decay, what, arguments",
    [
        ("lit", "beta", dict(normalize="none")),
        ("lit", "beta, angles L", dict(normalize="none", scale=0.3)),
        ("lit", "beta, angles BHL", dict(normalize="none")),
        ("S", "angles L", dict(normalize="max", scale=0.3, decay_convention="target")),
        ("S", "angles L", dict(normalize="none", scale=0.3, decay_convention="target")),
        ("S", "angles L", dict(normalize="sum", eps=20.0, decay_convention="target")),
    ],
)
def test_the_delta_rule_scale_and_eps(decay, what, arguments):
    check(some(decay, arguments["normalize"], what), **arguments)


@pytest.mark.parametrize("decay", EVERY_DECAY)
def test_defaults_are_those_of_the_whole(decay):
    inputs = some(decay, "sum", "bonus H, angles L")
    expected = attend(inputs, FORWARD)
    prompt, state = attend(inputs.at(PROMPT), function=prefill)
    rest, _ = stream(inputs, REST, state, SPLIT)
    assert_close(torch.cat([prompt, rest], 2), expected, 1e-12)
    assert_close(stream(inputs, PIECES["pieces"])[0], expected, 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "decay, what, arguments",
    [
        ("S", "bonus HD", dict(decay_convention="between", normalize="pre")),
        ("vector", "angles L", dict(normalize="sum")),
        ("lit", "beta", dict(normalize="none")),
    ],
)
def test_dtypes(decay, what, arguments, dtype, tolerance):
    """Check that outputs are narrow and states wide; autocast and inference mode must not change the result."""
    inputs = some(decay, arguments["normalize"], what, dtype=dtype)
    y, state = attend(inputs, arguments, function=prefill)
    assert y.dtype == dtype and state.S.dtype == state.z.dtype == torch.float32
    exact = oracle_attention(inputs, direction="forward", **arguments)
    assert_close(y, exact, tolerance)
    assert_close(stream(inputs, PIECES["pieces"], **arguments)[0], exact, tolerance)
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            again, other = attend(inputs, arguments, function=prefill)
        assert torch.equal(again, y) and torch.equal(other.S, state.S) and torch.equal(other.z, state.z)


@pytest.mark.parametrize(
    "decay, what, arguments",
    [
        ("S", "bonus HD, angles HL", dict(normalize="sum", decay_convention="between")),
        ("S", "", dict(normalize="pre", decay_convention="source")),
        ("vector", "", dict(normalize="max", decay_convention="target")),
        ("D", "", dict(normalize="none", decay_convention="symmetric")),
        ("lit", "beta", dict(normalize="none")),
    ],
)
def test_gradients_flow_through_the_prompt(decay, what, arguments):
    inputs = some(decay, arguments["normalize"], what)
    _, expected = values_and_gradients(inputs, FORWARD, arguments)
    leaves = inputs.leaves()
    prompt, state = attend(leaves.at(PROMPT), arguments, dict(chunk_size=4), function=prefill)
    rest, _ = stream(leaves, REST, state, SPLIT, **arguments)
    assert_gradients(backward(torch.cat([prompt, rest], 2), leaves), expected, 1e-10)


# Prompts of several lengths in one batch, and of several segments

PADDED = torch.ones(3, SPLIT, dtype=torch.bool)
PADDED[0, 6:] = False
PADDED[1, :4] = False
PADDED[2, [2, 5]] = False
SEGMENTS = torch.tensor([[5, 5, 5, 2, 2, 2, 2, 2, 2], [0, 0, -1, 0, 0, 1, -1, 1, -1], [-1, 3, 3, 3, 3, 3, 3, 3, -1]])
MASKS = {  # arguments, and the segment of each token
    "padding": (dict(valid=PADDED), PADDED.long() - 1),
    "segments": (dict(segments=SEGMENTS), SEGMENTS),
}
CASES = {  # arguments that enter the state in different ways
    "S": ("S", "bonus H", dict(normalize="sum", decay_convention="source")),
    "between": ("S", "bonus HD, angles L", dict(normalize="sum", decay_convention="between")),
    "vector": ("extreme vector", "angles HL", dict(normalize="sum", decay_convention="symmetric")),
    "pre": ("S", "", dict(normalize="pre", decay_convention="source")),
    "max": ("D", "angles L", dict(normalize="max", decay_convention="target")),
    "delta": ("lit", "beta", dict(normalize="none")),
}
every_case = pytest.mark.parametrize("name", CASES)


def of(name: str) -> tuple[Inputs, dict]:
    decay, what, arguments = CASES[name]
    return some(decay, arguments["normalize"], what, batch=3, heads=2), arguments


def prompt_with_junk(inputs: Inputs, absent: torch.Tensor) -> Inputs:
    """Return the prompt with NaN at absent tokens."""
    prompt = inputs.at(PROMPT)
    for name in "qkv":
        x = getattr(prompt, name).masked_fill(absent[:, None, :, None], torch.nan)
        prompt = prompt._replace(**{name: x})
    return prompt


@pytest.mark.parametrize("name", ("S", "between", "vector", "max"))
def test_padding_of_a_prompt_leaves_gradients_alone(name):
    """Check that padding changes no gradients, including those of angles and bonus, which all rows share."""
    inputs, arguments = of(name)
    _, expected = values_and_gradients(inputs.at(PROMPT), FORWARD, arguments, dict(valid=PADDED))
    leaves = prompt_with_junk(inputs, ~PADDED).leaves()
    y, state = attend(leaves, arguments, dict(valid=PADDED), function=prefill)
    assert_gradients(backward(y + 0 * (state.S.sum() + state.z.sum()), leaves), expected, 1e-10)


@pytest.mark.parametrize("masks", MASKS)
@every_case
def test_the_state_is_that_of_the_last_segment(name, masks):
    """Check segments, and padding at the left, right or inside: each is a sequence by itself."""
    inputs, arguments = of(name)
    given, segments = MASKS[masks]
    prompt = prompt_with_junk(inputs, segments < 0)
    for size in (2, 4, 64):
        y, state = attend(prompt, arguments, dict(chunk_size=size), given, function=prefill)
        rest, _ = stream(inputs, REST, state, SPLIT, **arguments)
        for row, ids in enumerate(segments):
            assert not y[row, :, ids < 0].any()
            last = ids[ids >= 0][-1]
            for segment in ids[ids >= 0].unique():
                tokens = (ids == segment).nonzero()[:, 0]
                got = y[row, :, tokens]
                if segment == last:
                    tokens = torch.cat([tokens, torch.arange(SPLIT, LENGTH)])
                    got = torch.cat([got, rest[row]], 1)
                expected = oracle_attention(inputs.tokens(row, tokens), direction="forward", **arguments)[0]
                assert_close(got, expected, 1e-12, f"row {row} segment {segment}")


@every_case
def test_a_step_leaves_the_state_that_it_was_given(name):
    inputs, arguments = of(name)
    _, state = attend(inputs.at(PROMPT), arguments, function=prefill)
    S = state.S.clone()
    z = state.z.clone()
    with torch.no_grad():
        one_step(inputs.at(slice(SPLIT, SPLIT + 1)), state, **arguments)
    assert torch.equal(state.S, S) and torch.equal(state.z, z)
