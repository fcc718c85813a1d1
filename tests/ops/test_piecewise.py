"""Long sequences without gradients: loops over pieces against the definition, eager and as one graph operator."""

import itertools

import pytest
import torch

from lion.layers.mixers import make_mixer
from lion.ops import piecewise, reference_attention, segment_index
from lion.ops.features import FEATURE_MAPS, apply_feature_map

from .checks import attend, definition
from .helpers import (
    DECAY_CONVENTIONS,
    DIRECTIONS,
    Allocations,
    Inputs,
    assert_close,
    case,
    grid,
    make,
    pairwise,
    unit_keys,
)

FORMS = {"chunk": dict(form="chunk", chunk_size=2), "rnn": dict(form="rnn", chunk_size=8)}
LENGTH = 75
LENGTHS = (33, 64, LENGTH)  # 17 chunks make a few pieces; the last piece is whole or padded
SEGMENTS = torch.tensor([[0] * 20 + [-1] * 13 + [4] * 42, [-1] * 3 + [2] * 29 + [1] * 30 + [7] * 13])
VALID = torch.arange(LENGTH) % 5 != torch.tensor([[1], [3]])
UNDECAYED = dict(normalize="none", decay_convention="target", undecayed_erase=True)
MASKS = {
    "segments": dict(segments=SEGMENTS),
    "valid": dict(valid=VALID),
    "both": dict(segments=SEGMENTS, valid=VALID),
}


@pytest.fixture
def eager_backend(monkeypatch):
    """Compile pieces without Inductor, and forget those that were compiled before."""
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()
    yield
    piecewise.compiled.cache_clear()


def looped(inputs: Inputs, *settings: dict) -> torch.Tensor:
    with torch.no_grad():
        return attend(inputs, *settings)


def some(decay: str, what: str = "") -> Inputs:
    inputs = make(decay, LENGTH, heads=2)
    return case(unit_keys(inputs) if "beta" in what else inputs, what)


@pytest.mark.parametrize(
    "length, form, decay, how",
    grid(
        LENGTHS,
        tuple(FORMS),
        ("lit", "S", "extreme", "vector", "extreme vector"),
        decay_convention=DECAY_CONVENTIONS,
        direction=DIRECTIONS,
    ),
)
def test_decays_and_directions(length, form, decay, how):
    inputs = make(decay, length, batch=1, heads=2)
    expected, _ = definition(inputs, **how)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        got = looped(inputs.to(dtype), FORMS[form], how)
        assert got.dtype == dtype
        assert_close(got, expected, tolerance)


@pytest.mark.parametrize(
    "form, decay, direction, masks", pairwise(tuple(FORMS), ("lit", "S", "vector"), DIRECTIONS, tuple(MASKS))
)
def test_masks(form, decay, direction, masks):
    inputs = some(decay)
    how = FORMS[form] | dict(direction=direction)
    expected = inputs.on(reference_attention, direction=direction, **MASKS[masks])
    assert_close(looped(inputs, how, MASKS[masks]), expected, 1e-12)
    prepared = segment_index(MASKS[masks].get("valid"), MASKS[masks].get("segments"))
    assert_close(looped(inputs, how, dict(segments=prepared)), expected, 1e-12, "prepared")


COMPILED = 4  # of the calls below
CALLS = [  # arguments that enter the loops in different ways
    ("S", "bonus HD", "chunk", dict(decay_convention="between", segments=SEGMENTS, valid=VALID)),
    ("vector", "bonus HD", "rnn", dict(decay_convention="between", direction="backward", valid=VALID)),
    ("lit", "beta", "rnn", dict(normalize="none", segments=SEGMENTS)),
    ("vector", "beta, erase, read", "rnn", UNDECAYED | dict(valid=VALID)),
    ("vector", "angles HL", "chunk", dict(direction="forward", normalize="max", scale=0.3)),
    ("vector", "beta, erase, read", "chunk", UNDECAYED | dict(chunk_size=8, valid=VALID)),
    ("S", "angles HL", "rnn", dict(direction="forward", normalize="max")),
    ("vector", "", "chunk", dict(normalize="pre", segments=SEGMENTS)),
    ("S", "", "rnn", dict(normalize="pre", segments=SEGMENTS)),
    ("lit", "", "chunk", dict(decay_convention="target", direction="backward")),
]


@pytest.fixture(scope="module")
def calls() -> list[tuple[Inputs, dict, torch.Tensor]]:
    """Return inputs, settings and outputs of all calls."""
    made = []
    for decay, what, form, how in CALLS:
        inputs = some(decay, what)
        plain = {name: value for name, value in how.items() if name != "chunk_size"}
        made.append((inputs, FORMS[form] | how, inputs.on(reference_attention, **plain)))
    return made


def test_everything_else(calls):
    for inputs, how, expected in calls:
        assert_close(looped(inputs, how), expected, 1e-12, f"{how}")


@pytest.mark.slow
@pytest.mark.compiled
def test_loops_are_operators_of_one_graph(calls, eager_backend):
    calls = calls[:COMPILED]

    def all_calls(tensors: list[Inputs]) -> list[torch.Tensor]:
        return [attend(inputs, how) for inputs, (_, how, _) in zip(tensors, calls)]

    compiled = torch.compile(all_calls, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        outputs = compiled([inputs for inputs, _, _ in calls])
    for got, (_, how, expected) in zip(outputs, calls, strict=True):
        assert_close(got, expected, 1e-12, f"{how}")


@pytest.mark.slow
@pytest.mark.parametrize("form", ("full", "chunk", "rnn"))
@pytest.mark.parametrize("name", ("elu1", "silu_unit"))
def test_feature_maps(name, form):
    """Check elementwise and vector feature maps, applied by the operator piece by piece, or before the call."""
    inputs = some("S")
    normalize = "sum" if FEATURE_MAPS[name].positive else "none"
    how = dict(form=form, chunk_size=2, valid=VALID, normalize=normalize)
    mapped = inputs._replace(q=apply_feature_map(name, inputs.q), k=apply_feature_map(name, inputs.k))
    assert_close(looped(inputs, how, dict(feature_map=name)), attend(mapped, how), 1e-12, name)


@pytest.mark.slow
@pytest.mark.compiled
def test_a_graph_maps_features_in_the_loop_and_ignores_autocast(eager_backend):
    inputs = some("S")
    expected = inputs._replace(q=apply_feature_map("elu1", inputs.q), k=apply_feature_map("elu1", inputs.k))
    expected = expected.on(reference_attention)
    narrow = inputs.to(torch.float32)
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=False)
    for how in FORMS.values():
        for function in (attend, compiled):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                got = function(narrow, how, dict(feature_map="elu1"))
            assert got.dtype == torch.float32
            assert_close(got, expected, 2e-5)


@pytest.mark.compiled
def test_one_graph_for_all_lengths(eager_backend):
    """Check that the loop is one operator, and that the code for one piece is compiled once."""

    def both_forms(inputs: Inputs) -> list[torch.Tensor]:
        return [attend(inputs, how) for how in FORMS.values()]

    compiled = torch.compile(both_forms, backend="eager", fullgraph=True, dynamic=True)
    for length in (96, 108, 132, 168):  # lengths of whole pieces of 12
        inputs = make("S", length, batch=1, heads=2, dtype=torch.float32)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=length > 96):
            outputs = compiled(inputs)
        for got in outputs:
            assert_close(got, inputs.on(reference_attention), 2e-5, f"{length}")


@pytest.mark.compiled
def test_one_graph_for_all_batch_sizes(eager_backend):
    """Check that a piece has a graph for one sample and one for all other batch sizes."""
    delta = dict(normalize="none", decay_convention="target")

    def both_kinds(scalar: Inputs, vector: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(scalar, FORMS["chunk"]), attend(vector, FORMS["rnn"], delta)

    compiled = torch.compile(both_kinds, backend="eager", dynamic=True)
    for batch in (1, 2, 3, 5):
        scalar = make("S", 40, batch=batch, heads=1)
        vector = case(unit_keys(make("vector", 40, batch=batch, heads=1)), "beta")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=batch > 2):
            outputs = compiled(scalar, vector)
        for got, expected in zip(outputs, both_kinds(scalar, vector), strict=True):
            assert_close(got, expected, 1e-12, f"{batch}")


@pytest.mark.compiled
def test_one_graph_for_all_batch_sizes_in_training(eager_backend):
    """Check a layer whose pieces take parameters."""
    torch.manual_seed(0)
    layer = make_mixer("vim", 16, 1, form="chunk", chunk_size=2)
    compiled = torch.compile(layer, backend="eager", dynamic=True)
    for batch in (1, 2, 3, 5):
        x = torch.randn(batch, 40, 16, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=batch > 2):
            got = compiled(x)
            (grad,) = torch.autograd.grad(got.square().sum(), x)
        expected = layer(x)
        assert_close(got, expected, 1e-5, f"{batch}")
        assert_close(grad, torch.autograd.grad(expected.square().sum(), x)[0], 1e-5, f"{batch}")


def test_shapes_beyond_the_limit_on_graphs_run_eagerly(eager_backend, caplog):
    def piece(x):
        return x.sin()

    run = piecewise.compiled(piece)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (3, 4, 5, 6, 3):
            x = torch.rand(2, length)
            assert_close(run(x), x.sin(), 1e-6)
    messages = [record.getMessage() for record in caplog.records if record.name == "lion"]
    assert messages == ["piece: runs eagerly, since its shapes exceed torch._dynamo.config.recompile_limit"]


@pytest.mark.slow
@pytest.mark.parametrize("decay, form", list(itertools.product(("S", "vector"), FORMS)))
def test_memory_is_that_of_a_piece(decay, form):
    """Check that only output, row sums and cumulative gates grow with the sequence, without copies of q and k."""
    largest = []
    for length in (256, 512):
        inputs = make(decay, length, heads=1, batch=1, dim=16, value_dim=16, dtype=torch.float32)
        with Allocations() as allocations:
            looped(inputs, FORMS[form], dict(feature_map="silu_shifted"))
        largest.append(allocations.shapes.count((1, 1, length, 16)))
    assert largest[0] == largest[1] <= (1 if decay == "S" else 2)
