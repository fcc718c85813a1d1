"""Compilation: full and chunk are single graphs for torch.compile, compiled once per shape or once for all lengths."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lion.ops.chunk
from lion.layers.layout import Layout
from lion.layers.mixers import MIXERS, LionAttention, make_mixer
from lion.ops import linear_attention

from .helpers import assert_close, backward, case, make, pairwise, signed, unit_keys

pytestmark = pytest.mark.compiled

FORMS = {"full": dict(form="full"), "chunk": dict(form="chunk", chunk_size=8)}
LENGTH = 43


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(inputs, backend: str, tolerance: float = 2e-6, **arguments) -> None:
    """Check compiled against eager results on two sets of values; the second set must not compile again.

    The tolerance is that of float32: compiled, the gradient of a mask is computed from the masked scores.
    """

    kind = type(inputs[0])

    def attention(*x):
        return kind(*x).on(linear_attention, **arguments, feature_map=None)

    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend=backend)
    for call, some in enumerate(inputs):
        leaves, same = some.leaves(), some.leaves()
        expected = attention(*same)
        with torch._dynamo.config.patch(error_on_recompile=call > 0):
            got = compiled(*leaves)
        assert_close(got, expected, tolerance, f"call {call}")
        expected_grads = backward(expected, same)
        for name, grad in backward(got, leaves).items():
            assert_close(grad, expected_grads[name], tolerance, f"d{name} call {call}")


def some(decay: str, length: int = LENGTH):
    return [make(decay, length, heads=2, dtype=torch.float32, seed=seed) for seed in range(2)]


@pytest.mark.parametrize(
    "form, decay, direction", pairwise(tuple(FORMS), ("lit", "D", "S", "vector"), ("both", "forward"))
)
def test_one_graph(form, decay, direction):
    check(some(decay), "aot_eager", **FORMS[form], direction=direction)


def test_one_matrix_of_pairs_is_saved_for_the_backward_pass():
    (x,) = some("S")[:1]
    batch, heads, length, _ = x.q.shape
    compiled, saved = torch.compile(linear_attention, backend="aot_eager_decomp_partition", dynamic=False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        x.leaves().on(compiled, form="full", feature_map=None)
    pairs = batch * heads * length**2
    assert saved.count(pairs) == 1 and max(saved) == pairs


@pytest.mark.parametrize("form, decay", [("full", "vector"), ("chunk", "S")])
def test_one_graph_with_masks(form, decay):
    """Check that masks are data: the check that segments are contiguous must not break the graph."""
    segments = torch.tensor([[0] * 20 + [1] * (LENGTH - 20), [-1] * 5 + [7] * (LENGTH - 5)])
    valid = torch.arange(LENGTH).expand(2, -1) % 5 != 3
    check(some(decay), "aot_eager", **FORMS[form], segments=segments, valid=valid)


EXTRAS = {
    "between": ("S", "bonus HD", dict(decay_convention="between")),
    "max": ("S", "", dict(normalize="max")),
    "pre": ("S", "", dict(normalize="pre")),
    "angles": ("S", "angles HL", dict(direction="forward")),
    "delta": ("lit", "beta, angles L", dict(normalize="none")),
    "gated delta": ("S", "beta, read", dict(normalize="none", decay_convention="target")),
    "undecayed delta": (
        "vector",
        "erase, read",
        dict(normalize="none", decay_convention="target", undecayed_erase=True, direction="forward"),
    ),
}
LITTLE = 19


@pytest.mark.parametrize("name, form", list(zip(EXTRAS, ("full", "chunk") * 4)))
def test_one_graph_with_all_else(name, form):
    decay, what, arguments = EXTRAS[name]
    inputs = some(decay, LITTLE)
    if name == "max" or "delta" in name:
        inputs = [signed(x) if name == "max" else unit_keys(x) for x in inputs]
    cases = [case(x, what, seed) for seed, x in enumerate(inputs)]
    segments = torch.tensor([[0] * 7 + [1] * (LITTLE - 7), [-1] * 5 + [7] * (LITTLE - 5)])
    masks = dict(segments=segments) if name in ("delta", "pre") else {}
    check(cases, "aot_eager", **FORMS[form], **arguments, **masks)


def test_one_graph_with_two_levels_of_chunks():
    length = 2 * lion.ops.chunk.GROUP + 1
    check(some("S", length), "aot_eager", form="chunk", chunk_size=1)


LENGTHS = (100, 65, 127, 128, 197, 300)  # including a multiple of a chunk, and one less


def check_lengths(function, cases, backend: str, graphs: int = 1, **arguments) -> None:
    """Check values and gradients against eager for cases of all lengths, with `graphs` compiled graphs in total."""

    def attention(*x):
        return kind(*x).on(function, feature_map=None, **arguments)

    kind, counter, counts = type(cases[0]), CompileCounterWithBackend(backend), []
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for some in cases:
        leaves, same = some.leaves(), some.leaves()
        what, expected, got = f"{some.q.shape[2]} tokens", attention(*same), compiled(*leaves)
        counts.append(counter.frame_count)
        assert_close(got, expected, 1e-12, what)
        expected_grads = backward(expected, same)
        for name, grad in backward(got, leaves).items():
            assert_close(grad, expected_grads[name], 1e-12, f"d{name} {what}")
    assert len(set(counts)) == graphs, counts  # AOT may count the first graph twice


EVERY = pytest.mark.every


@pytest.mark.parametrize(
    "form, decay",
    [
        pytest.param("full", "lit", marks=EVERY),
        ("full", "S"),
        pytest.param("chunk", "D", marks=EVERY),
        pytest.param("chunk", "vector", marks=EVERY),  # below, with rotation
    ],
)
def test_one_graph_of_all_lengths(form, decay):
    check_lengths(linear_attention, [make(decay, length) for length in LENGTHS], "eager", form=form)


def test_one_graph_of_rotated_vectors():
    cases = [case(make("vector", length, heads=1), "angles HL") for length in LENGTHS]
    check_lengths(linear_attention, cases, "eager", form="chunk", chunk_size=8, normalize="sum")


def test_graphs_of_vectors_in_full():
    """Check that vector decays, whose blocks are halved, need one graph for each doubling of the length."""
    cases = [make("vector", length, batch=1, heads=1) for length in (25, 17, 32, 40)]
    check_lengths(linear_attention, cases, "eager", graphs=2, form="full")


@pytest.mark.slow
def test_one_graph_of_all_lengths_backward():
    cases = [make("S", length, heads=1) for length in (100, 127, 192)]
    with torch._dynamo.config.patch(specialize_float=True):  # as in `compile_blocks`, traced once
        check_lengths(linear_attention, cases, "aot_eager", form="chunk")


def test_one_graph_of_all_lengths_of_the_delta_rule():
    cases = [case(unit_keys(make("lit", length)), "beta") for length in LENGTHS[:4]]
    check_lengths(linear_attention, cases, "eager", form="full", normalize="none")


def test_graphs_of_lengths_by_default():
    """Check the default: a graph for the first length, one for all others, and one if "auto" selects another form."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(linear_attention, fullgraph=True, backend=counter)
    counts = []
    for length in (*LENGTHS, 40, 5_000):  # one chunk, and two levels of chunks
        inputs = make("S", length)
        assert_close(
            compiled(*inputs, form="auto", feature_map=None),
            linear_attention(*inputs, form="chunk", feature_map=None),
            1e-12,
            str(length),
        )
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("form", ("full", "chunk"))
def test_one_graph_of_all_lengths_with_masks(form):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        place = torch.arange(length).expand(2, -1)
        inputs, masks = make("S", length), dict(valid=place % 7 != 3, segments=place // 30)
        expected = linear_attention(*inputs, form=form, **masks, feature_map=None)
        assert_close(compiled(*inputs, form=form, feature_map=None, **masks), expected, 1e-12, f"{length} tokens")
    assert counter.frame_count == 1


@pytest.mark.parametrize("mixer", ("lion_s", "retnet"))
def test_layer_is_one_graph_of_all_lengths(mixer):
    """Check a layer with token-dependent gates, rotary positions and padding."""
    layer, counter = LionAttention(16, 2, mixer=mixer, form="chunk"), CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        x, valid = torch.randn(3, length, 16), torch.arange(length).expand(3, -1) % 5 != 3
        layout = Layout.of(x, valid)
        assert_close(compiled(x, layout), layer(x, layout), 5e-6, f"{length} tokens")
    assert counter.frame_count == 1


@pytest.mark.every
@pytest.mark.parametrize("form, graphs", [("full", 2), ("chunk", 1)])
def test_graphs_of_lightnet_in_one_direction(form, graphs):
    """Check that blocks of blocks need one graph for each power of eight; in full, one for each power of two."""
    layer = make_mixer("lightnet", 16, 2, MIXERS["lightnet"].layer.Config(direction="forward")).double()
    layer.form, counter = form, CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS[:5]:
        x = torch.randn(2, length, 16, dtype=torch.float64)
        assert_close(compiled(x), layer(x), 1e-12, f"{length} tokens")
    assert counter.frame_count == graphs


@pytest.mark.parametrize("mixer", ("lion_s", "retnet", "rwkv6", "deltanet"))
def test_step_is_one_graph_of_all_batches(mixer):
    layer, counter = LionAttention(16, 2, mixer=mixer, direction="forward"), CompileCounterWithBackend("eager")
    compiled = torch.compile(layer.step, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch in (3, 5, 2):
            x = torch.randn(batch, 2, 16)
            y, state = compiled(x[:, :1], layer.initial_state(batch))
            y = torch.cat([y, compiled(x[:, 1:], state)[0]], 1)
            assert_close(y, layer(x), 1e-6, f"batch {batch}")
    assert counter.frame_count == 1


@pytest.mark.parametrize("form", FORMS)
def test_autocast_outside(form):
    inputs = some("S")[0]
    expected = linear_attention(*inputs, **FORMS[form], feature_map=None)
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(*inputs, feature_map=None, **FORMS[form])
    assert got.dtype == torch.float32
    assert_close(got, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor():
    check(some("S"), "inductor", 1e-5, **FORMS["chunk"])
