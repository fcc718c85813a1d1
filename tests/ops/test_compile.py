"""Compilation: full and chunk are single graphs for torch.compile, compiled once per shape or once for all lengths."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lion.ops.chunk
from lion.layers.layout import Layout
from lion.layers.mixers import MIXERS, LionAttention, make_mixer

from .checks import assert_gradients, attend, saved_sizes, values_and_gradients
from .helpers import Inputs, assert_close, case, make, signed, unit_keys

pytestmark = pytest.mark.compiled

FULL = dict(form="full")
CHUNK = dict(form="chunk", chunk_size=8)
LENGTH = 19
SEGMENTS = dict(segments=torch.tensor([[0] * 7 + [1] * 12, [-1] * 5 + [7] * 14]))
MASKS = dict(SEGMENTS, valid=torch.arange(LENGTH).expand(2, -1) % 5 != 3)
DELTA = dict(normalize="none", decay_convention="target")
LENGTHS = (100, 65, 127, 128, 197, 300)  # including a multiple of a chunk, and one less


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def some(decay: str, what: str = "", length: int = LENGTH, seed: int = 0) -> Inputs:
    inputs = make(decay, length, heads=2, dtype=torch.float32, seed=seed)
    inputs = unit_keys(inputs) if "beta" in what or "read" in what else inputs
    return case(inputs, what, seed)


def check(backend: str, tolerance: float, decay: str, what: str, *settings: dict, length: int = LENGTH) -> None:
    """Check compiled against eager results on two sets of values; the second set must not compile again.

    The tolerance is that of float32: compiled, the gradient of a mask is computed from the masked scores.
    """
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=backend)
    for call in range(2):
        inputs = some(decay, what, length, seed=call)
        if settings[-1].get("normalize") == "max":
            inputs = signed(inputs)
        expected, grads = values_and_gradients(inputs, *settings)
        with torch._dynamo.config.patch(error_on_recompile=call > 0):
            got, got_grads = values_and_gradients(inputs, *settings, call=compiled)
        assert_close(got, expected, tolerance, f"call {call}")
        for name, grad in got_grads.items():
            assert_close(grad, grads[name], tolerance, f"d{name} call {call}")


@pytest.mark.parametrize(
    "decay, what, settings",
    [
        ("lit", "", [FULL, dict(direction="forward")]),
        ("vector", "", [FULL, MASKS]),  # masks are data: the check that segments are contiguous is in the graph
        ("S", "bonus HD", [FULL, dict(decay_convention="between")]),
        ("S", "", [FULL, SEGMENTS, dict(normalize="pre")]),
        ("S", "", [CHUNK, MASKS]),
        ("D", "", [CHUNK, dict(direction="backward", normalize="max")]),
        ("vector", "angles HL", [CHUNK, dict(direction="forward")]),
        ("lit", "beta, angles L", [FULL, SEGMENTS, dict(normalize="none")]),
        ("S", "beta, read", [CHUNK, DELTA]),
        ("vector", "erase, read", [FULL, DELTA, dict(undecayed_erase=True, direction="forward")]),
    ],
)
def test_one_graph(decay, what, settings):
    check("aot_eager", 2e-6, decay, what, *settings)


def test_one_graph_with_two_levels_of_chunks():
    length = 2 * lion.ops.chunk.GROUP + 1
    check("aot_eager", 2e-6, "S", "", dict(form="chunk", chunk_size=1), length=length)


@pytest.mark.every
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor():
    check("inductor", 1e-5, "S", "", CHUNK)


def test_one_matrix_of_pairs_is_saved_for_the_backward_pass():
    inputs = some("S")
    batch, heads, length, _ = inputs.q.shape
    compiled = torch.compile(attend, backend="aot_eager_decomp_partition", dynamic=False)
    with saved_sizes() as saved:
        compiled(inputs.leaves(), FULL)
    pairs = batch * heads * length**2
    assert saved.count(pairs) == 1 and max(saved) == pairs


def test_autocast_outside():
    inputs = some("S")

    def both_forms(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(inputs, FULL), attend(inputs, CHUNK)

    expected = both_forms(inputs)
    compiled = torch.compile(both_forms, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(inputs)
    for form in range(2):
        assert got[form].dtype == torch.float32
        assert_close(got[form], expected[form], 1e-6)


# Graphs of all lengths


def check_lengths(cases: list, function=attend, backend: str = "eager", graphs: int = 1) -> None:
    """Check values and gradients against eager for cases of all lengths, with `graphs` compiled graphs in total."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for inputs, settings in cases:
        expected, expected_grads = values_and_gradients(inputs, settings, call=function)
        got, grads = values_and_gradients(inputs, settings, call=compiled)
        counts.add(counter.frame_count)
        what = f"{inputs.q.shape[2]} tokens"
        assert_close(got, expected, 1e-12, what)
        assert_gradients(grads, expected_grads, 1e-12, what)
    assert len(counts) == graphs, counts  # AOT may count the first graph twice


def masks_of(length: int) -> dict[str, torch.Tensor]:
    place = torch.arange(length).expand(2, -1)
    return dict(valid=place % 7 != 3, segments=place // 30)


def full_and_delta(inputs: Inputs, masks: dict) -> torch.Tensor:
    """Return the full form with masks, and the delta rule."""
    plain = attend(inputs._replace(beta=None), FULL, masks)
    return plain + attend(inputs._replace(log_decay=None), FULL, dict(normalize="none"))


def test_one_graph_of_all_lengths_in_full():
    cases = [(case(unit_keys(make("S", length)), "beta"), masks_of(length)) for length in LENGTHS]
    check_lengths(
        [(inputs._replace(q=inputs.q + 0.7, k=inputs.k.abs()), masks) for inputs, masks in cases], full_and_delta
    )


@pytest.mark.every
def test_graphs_of_vectors_in_full():
    """Check that vector decays, whose blocks are halved, need one graph for each doubling of the length."""
    cases = [(make("vector", length, batch=1, heads=1), FULL) for length in (25, 17, 32, 40)]
    check_lengths(cases, graphs=2)


def test_one_graph_of_all_lengths_in_chunks_of_rotated_vectors():
    forward = dict(CHUNK, direction="forward")
    cases = [(case(make("vector", length, heads=1), "angles HL"), forward) for length in LENGTHS[::2]]
    check_lengths(cases)


def test_one_graph_of_all_lengths_in_chunks_with_masks():
    cases = [(make("S", length, heads=1), dict(masks_of(length), form="chunk")) for length in LENGTHS]
    check_lengths(cases)


@pytest.mark.slow
def test_one_graph_of_all_lengths_backward():
    cases = [(make("S", length, heads=1), dict(form="chunk")) for length in (100, 127, 192)]
    with torch._dynamo.config.patch(specialize_float=True):  # as in `compile_blocks`, traced once
        check_lengths(cases, backend="aot_eager")


def test_graphs_of_lengths_by_default():
    """Check the default: a graph for the first length, one for all others, and one if "auto" selects another form."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    counts = []
    for length in (100, 65, 128, 300, 40):
        inputs = make("S", length)
        assert_close(compiled(inputs, dict(form="auto")), attend(inputs, dict(form="chunk")), 1e-12, f"{length}")
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 3, 3]


def test_layers_are_one_graph_of_all_lengths():
    """Check layers with token-dependent gates, rotary positions and padding."""
    lion_s = LionAttention(16, 2, mixer="lion_s", form="chunk")
    retnet = LionAttention(16, 2, mixer="retnet", form="chunk")

    def both_layers(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return lion_s(x, layout), retnet(x, layout)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(both_layers, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS[:5]:
        x = torch.randn(3, length, 16)
        layout = Layout.of(x, torch.arange(length).expand(3, -1) % 5 != 3)
        for got, expected in zip(compiled(x, layout), both_layers(x, layout), strict=True):
            assert_close(got, expected, 5e-6, f"{length} tokens")
    assert counter.frame_count == 1


@pytest.mark.every
@pytest.mark.parametrize("form, graphs", [("full", 2), ("chunk", 1)])
def test_graphs_of_lightnet_in_one_direction(form, graphs):
    """Check that blocks of blocks need one graph for each power of eight; in full, one for each power of two."""
    layer = make_mixer("lightnet", 16, 2, MIXERS["lightnet"].layer.Config(direction="forward")).double()
    layer.set_form(form)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS[:5]:
        x = torch.randn(2, length, 16, dtype=torch.float64)
        assert_close(compiled(x), layer(x), 1e-12, f"{length} tokens")
    assert counter.frame_count == graphs


def test_steps_are_one_graph_of_all_batches():
    layers = [
        LionAttention(16, 2, mixer=mixer, direction="forward") for mixer in ("lion_s", "retnet", "rwkv6", "deltanet")
    ]

    def step_of_each(x: torch.Tensor, states: list) -> list:
        return [layer.step(x, state) for layer, state in zip(layers, states)]

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step_of_each, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch in (3, 5, 2):
            x = torch.randn(batch, 2, 16)
            first = compiled(x[:, :1], [layer.initial_state(batch) for layer in layers])
            second = compiled(x[:, 1:], [state for _, state in first])
            for layer, before, after in zip(layers, first, second):
                y = torch.cat([before[0], after[0]], 1)
                assert_close(y, layer(x), 1e-6, f"{layer} batch {batch}")
    assert counter.frame_count == 1
