"""Prefill and step in every combination: outputs, states, padding, segments, and states on disk."""

import pytest
import torch

from lion.ops import State, linear_attention, prefill, step

from .helpers import (
    ALL_NORMALIZE,
    DECAY_CONVENTIONS,
    DECAYS,
    Case,
    assert_close,
    backward,
    case,
    make,
    oracle_attention,
    signed,
)
from .helpers import unit_keys as unit
from .test_streaming import PIECES, cut, stream

LENGTH = 14
SPLIT = 9
EVERY_DECAY = (*DECAYS, "fixed vector")
EXTRAS = ("", "bonus H", "bonus HD, angles HL", "angles BHL")
REST = [1, 3, 1]  # lengths of the pieces after the prompt


def some(decay: str, normalize: str, what: str, **shape) -> Case:
    inputs = make(decay, LENGTH, **shape)
    return case(signed(inputs) if normalize in ("max", "none") else inputs, what)


def check(inputs: Case, **arguments) -> None:
    """Check steps, pieces, a prompt, and a prompt with steps: all give the forward outputs and one state."""
    read = "S" if arguments.get("normalize") == "none" else "Sz"  # parts of the state; see test_the_sum_nobody_reads
    expected = oracle_attention(inputs, direction="forward", **arguments)
    _, whole = stream(inputs, [1] * LENGTH, **arguments)
    for pieces in PIECES.values():
        y, state = stream(inputs, pieces, **arguments)
        assert_close(y, expected, 1e-12, f"step {pieces}")
        check_state(state, whole, read, f"step {pieces}")
    for size in (4, 64):
        y, state = inputs.on(prefill, chunk_size=size, **arguments, feature_map=None)
        assert_close(y, expected, 1e-12, f"prefill {size}")
        check_state(state, whole, read, f"prefill {size}")
    y, state = cut(inputs, 0, SPLIT).on(prefill, chunk_size=4, **arguments, feature_map=None)
    assert_close(y, expected[:, :, :SPLIT], 1e-12, "prompt")
    y, state = stream(inputs, REST, state, SPLIT, **arguments)
    assert_close(y, expected[:, :, SPLIT:], 1e-12, "after the prompt")
    check_state(state, whole, read, "after the prompt")


def check_state(state: State, expected: State, read: str, what: str) -> None:
    for name, got, right in zip(State._fields, state, expected):
        if name in read:
            assert_close(got, right, 1e-12, f"{name} {what}")


@pytest.mark.parametrize("normalize", ALL_NORMALIZE)
@pytest.mark.parametrize("decay", EVERY_DECAY)
@pytest.mark.parametrize("decay_convention", DECAY_CONVENTIONS)
def test_every_combination(decay_convention, decay, normalize):
    for what in EXTRAS:
        check(some(decay, normalize, what, batch=1, heads=2), decay_convention=decay_convention, normalize=normalize)


@pytest.mark.parametrize("what", ("", "angles L"))
def test_the_sum_nobody_reads(what):
    """Check `z` under `normalize="none"`: it is equal after a prompt and after steps, so row sums can be used later."""
    inputs = some("S", "none", what)
    _, stepped = stream(inputs, [1] * LENGTH, normalize="none")
    _, prompted = inputs.on(prefill, normalize="none")
    check_state(prompted, stepped, "Sz", what)


@pytest.mark.parametrize("what", ("beta", "beta, angles L", "beta, angles BHL"))
def test_the_delta_rule(what):
    check(case(unit(make("lit", LENGTH)), what), normalize="none")
    check(case(unit(make("lit", LENGTH)), what), normalize="none", scale=0.3)


def test_scale_and_eps():
    for arguments in (dict(normalize="max", scale=0.3), dict(normalize="none", scale=0.3), dict(eps=20.0)):
        check(some("S", arguments.get("normalize", "sum"), "angles L"), decay_convention="target", **arguments)


@pytest.mark.parametrize("decay", EVERY_DECAY)
def test_defaults_are_those_of_the_whole(decay):
    inputs = some(decay, "sum", "bonus H, angles L")
    expected = inputs.on(linear_attention, direction="forward", feature_map=None)
    prompt, state = cut(inputs, 0, SPLIT).on(prefill, feature_map=None)
    rest, _ = stream(inputs, REST, state, SPLIT)
    assert_close(torch.cat([prompt, rest], 2), expected, 1e-12)
    assert_close(stream(inputs, PIECES["pieces"])[0], expected, 1e-12)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_dtypes(dtype):
    """Check that outputs are narrow and states wide; autocast and inference mode must not change the result."""
    delta = dict(normalize="none")
    for inputs, arguments in (
        (some("S", "pre", "bonus HD", dtype=dtype), dict(decay_convention="between", normalize="pre")),
        (some("vector", "sum", "angles L", dtype=dtype), {}),
        (case(unit(make("lit", LENGTH, dtype=dtype)), "beta"), delta),
    ):
        y, state = inputs.on(prefill, **arguments, feature_map=None)
        assert y.dtype == dtype and state.S.dtype == state.z.dtype == torch.float32
        exact = oracle_attention(inputs, direction="forward", **arguments)
        tolerance = 0.02 if dtype == torch.bfloat16 else 2e-5
        assert_close(y, exact, tolerance)
        assert_close(stream(inputs, PIECES["pieces"], **arguments)[0], exact, tolerance)
        for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            with mode:
                again, other = inputs.on(prefill, **arguments, feature_map=None)
            assert torch.equal(again, y) and torch.equal(other.S, state.S) and torch.equal(other.z, state.z)


def test_gradients_flow_through_the_prompt():
    for decay, what, arguments in (
        ("S", "bonus HD, angles HL", dict(decay_convention="between")),
        ("S", "", dict(decay_convention="source", normalize="pre")),
        ("vector", "", dict(decay_convention="target", normalize="max")),
        ("lit", "beta", dict(normalize="none")),
    ):
        inputs = some(decay, arguments.get("normalize", "sum"), what)
        leaves = inputs.leaves()
        expected = backward(leaves.on(linear_attention, direction="forward", **arguments, feature_map=None), leaves)
        leaves = inputs.leaves()
        prompt, state = cut(leaves, 0, SPLIT).on(prefill, chunk_size=4, **arguments, feature_map=None)
        rest, _ = stream(leaves, REST, state, SPLIT, **arguments)
        for name, grad in backward(torch.cat([prompt, rest], 2), leaves).items():
            assert_close(grad, expected[name], 1e-10, f"d{name} {decay}", floor=0.1)


# Prompts of several lengths in one batch, and of several segments

PADDED = torch.tensor(
    [[t < 6 for t in range(SPLIT)], [t >= 4 for t in range(SPLIT)], [t not in (2, 5) for t in range(SPLIT)]]
)
CASES = {  # arguments that enter the state in different ways
    "S": ("S", "bonus H", dict(decay_convention="source")),
    "between": ("S", "bonus HD, angles L", dict(decay_convention="between")),
    "vector": ("extreme vector", "angles HL", dict(decay_convention="symmetric")),
    "pre": ("S", "", dict(decay_convention="source", normalize="pre")),
    "max": ("D", "angles L", dict(decay_convention="target", normalize="max")),
    "delta": ("lit", "beta", dict(normalize="none")),
}


def of(name: str) -> tuple[Case, dict]:
    decay, what, arguments = CASES[name]
    inputs = make(decay, LENGTH, batch=3, heads=2)
    return case(unit(inputs) if name == "delta" else signed(inputs) if name == "max" else inputs, what), arguments


def junk_at(inputs: Case, absent: torch.Tensor) -> Case:
    """Return inputs with NaN at the absent tokens of a prompt."""
    hole = torch.zeros(3, LENGTH, dtype=torch.bool)
    hole[:, :SPLIT] = absent
    q, k, v = (x.masked_fill(hole[:, None, :, None], float("nan")) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


@pytest.mark.parametrize("name", CASES)
def test_padded_prompts(name):
    """Check padding at the left, right or inside: rows continue as if there were no padding."""
    inputs, arguments = of(name)
    prompt = cut(junk_at(inputs, ~PADDED), 0, SPLIT)
    for size in (4, 64):
        y, state = prompt.on(prefill, chunk_size=size, valid=PADDED, **arguments, feature_map=None)
        rest, _ = stream(inputs, REST, state, SPLIT, **arguments)
        for row, valid in enumerate(PADDED):
            tokens = torch.cat([valid.nonzero()[:, 0], torch.arange(SPLIT, LENGTH)])
            expected = oracle_attention(inputs.tokens(row, tokens), direction="forward", **arguments)[0]
            assert not y[row, :, ~valid].any()
            got = torch.cat([y[row, :, valid], rest[row]], 1)
            assert_close(got, expected, 1e-12, f"row {row}")


@pytest.mark.parametrize("name", ("S", "between", "vector", "max"))
def test_padding_of_a_prompt_leaves_gradients_alone(name):
    """Check that padding changes no gradients, including those of angles and bonus, which all rows share."""
    inputs, arguments = of(name)
    leaves = cut(inputs, 0, SPLIT).leaves()
    expected = backward(
        leaves.on(linear_attention, direction="forward", valid=PADDED, **arguments, feature_map=None), leaves
    )
    leaves = cut(junk_at(inputs, ~PADDED), 0, SPLIT).leaves()
    y, state = leaves.on(prefill, valid=PADDED, **arguments, feature_map=None)
    for key, grad in backward(y + 0 * (state.S.sum() + state.z.sum()), leaves).items():
        assert_close(grad, expected[key], 1e-10, f"d{key}")


SEGMENTS = torch.tensor([[5, 5, 5, 2, 2, 2, 2, 2, 2], [0, 0, -1, 0, 0, 1, -1, 1, -1], [-1, 3, 3, 3, 3, 3, 3, 3, -1]])


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_that_of_the_last_segment(name):
    inputs, arguments = of(name)
    prompt = cut(junk_at(inputs, SEGMENTS < 0), 0, SPLIT)
    for size in (2, 4, 64):
        y, state = prompt.on(prefill, chunk_size=size, segments=SEGMENTS, **arguments, feature_map=None)
        rest, _ = stream(inputs, REST, state, SPLIT, **arguments)
        for row, ids in enumerate(SEGMENTS):
            seen = ids[ids >= 0].unique()
            last = ids[ids >= 0][-1]
            for segment in seen:
                tokens = (ids == segment).nonzero()[:, 0]
                if segment != last:
                    expected = oracle_attention(inputs.tokens(row, tokens), direction="forward", **arguments)[0]
                    assert_close(y[row, :, tokens], expected, 1e-12, f"row {row} segment {segment}")
                    continue
                longer = torch.cat([tokens, torch.arange(SPLIT, LENGTH)])
                expected = oracle_attention(inputs.tokens(row, longer), direction="forward", **arguments)[0]
                got = torch.cat([y[row, :, tokens], rest[row]], 1)
                assert_close(got, expected, 1e-12, f"row {row} last segment")


# On disk


@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_goes_on_bit_for_bit(name, tmp_path):
    inputs, arguments = of(name)
    _, state = cut(inputs, 0, SPLIT).on(prefill, **arguments, feature_map=None)
    for _ in range(2):  # after a prompt, and after steps
        torch.save({**state._asdict()}, tmp_path / "state.pt")
        restored = State(**torch.load(tmp_path / "state.pt", weights_only=True))
        expected, last = stream(inputs, REST, state, SPLIT, **arguments)
        got, other = stream(inputs, REST, restored, SPLIT, **arguments)
        assert torch.equal(got, expected)
        assert all(torch.equal(x, y) for x, y in zip(other, last))
        state = last


def test_a_step_leaves_the_state_that_it_was_given():
    for name in CASES:
        inputs, arguments = of(name)
        _, state = cut(inputs, 0, SPLIT).on(prefill, **arguments, feature_map=None)
        before = [x.clone() for x in state]
        with torch.no_grad():
            cut(inputs, SPLIT, SPLIT + 1).on(
                lambda *x, state=state, **y: step(*x[:3], state, *x[3:], **y, feature_map=None), **arguments
            )
        assert all(torch.equal(x, y) for x, y in zip(state, before)), name
