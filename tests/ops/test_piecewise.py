"""Long sequences without gradients: loops over pieces against the definition, eager and as one graph operator."""

import pytest
import torch

from lion.layers.mixers import make_mixer
from lion.ops import linear_attention, piecewise, reference_attention, segment_index
from lion.ops.features import FEATURE_MAPS, apply_feature_map

from .checks import definition
from .helpers import DECAY_CONVENTIONS, DIRECTIONS, Allocations, assert_close, case, make, pairwise, unit_keys

FORMS = {"chunk": dict(form="chunk", chunk_size=2), "rnn": dict(form="rnn", chunk_size=8)}
LENGTHS = (33, 64, 75)  # 17 chunks make a few pieces; the last piece is whole or padded
SEGMENTS = torch.tensor([[0] * 20 + [-1] * 13 + [4] * 42, [-1] * 3 + [2] * 29 + [1] * 30 + [7] * 13])
VALID = torch.arange(75) % 5 != torch.tensor([[1], [3]])


@pytest.fixture(params=("eager", pytest.param("compiled", marks=pytest.mark.compiled)))
def attention(request, monkeypatch):
    """Return the operator without gradients, eager or compiled."""
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()

    def run(*inputs, **arguments):
        with torch.no_grad():
            if request.param == "eager":
                return linear_attention(*inputs, **{"feature_map": None} | arguments)
            compiled = torch.compile(linear_attention, backend="eager", fullgraph=True, dynamic=False)
            return compiled(*inputs, **{"feature_map": None} | arguments)

    with torch._dynamo.config.patch(recompile_limit=100):  # many variants of one function
        yield run
    piecewise.compiled.cache_clear()


def both_ways(names: str, rows: list[tuple]):
    """Parametrise with all rows eager and half of them compiled; that half contains most pairs of values."""
    compiled = [pytest.param("compiled", *row, marks=pytest.mark.compiled) for row in rows[: len(rows) // 2]]
    rows = [pytest.param("eager", *row) for row in rows] + compiled
    return pytest.mark.parametrize(f"attention, {names}", rows, indirect=["attention"])


@both_ways(
    "form, decay, decay_convention, direction, length, dtype",
    pairwise(
        tuple(FORMS),
        ("lit", "S", "extreme", "vector", "extreme vector"),
        DECAY_CONVENTIONS,
        DIRECTIONS,
        LENGTHS,
        (torch.float64, torch.float32),
    ),
)
def test_decays_and_directions(attention, form, decay, decay_convention, direction, length, dtype):
    inputs, how = make(decay, length), dict(decay_convention=decay_convention, direction=direction)
    expected, _ = definition(inputs, **how)
    got = attention(*inputs.to(dtype), **FORMS[form], **how)
    assert got.dtype == dtype
    assert_close(got, expected, 1e-12 if dtype == torch.float64 else 2e-5)


MASKS = {
    "segments": dict(segments=SEGMENTS),
    "valid": dict(valid=VALID),
    "both": dict(segments=SEGMENTS, valid=VALID),
    "prepared": dict(segments=segment_index(VALID, SEGMENTS)),
}


@both_ways("form, decay, direction, masks", pairwise(tuple(FORMS), ("lit", "S", "vector"), DIRECTIONS, tuple(MASKS)))
def test_masks(attention, form, decay, direction, masks):
    inputs = make(decay, 75)
    raw = MASKS["both" if masks == "prepared" else masks]
    expected = inputs.on(reference_attention, direction=direction, **raw)
    assert_close(attention(*inputs, **FORMS[form], direction=direction, **MASKS[masks]), expected, 1e-12)


@pytest.mark.slow
@both_ways("form, decay", [("rnn", "S"), ("chunk", "vector")])
def test_everything_else(attention, form, decay):
    inputs = make(decay, 75)
    for what, how in (
        ("bonus HD", dict(decay_convention="between")),
        ("angles HL", dict(direction="forward", normalize="max")),
        ("", dict(normalize="pre", segments=SEGMENTS)),
    ):
        given = case(inputs, what)
        expected = given.on(reference_attention, **how)
        extras = {name: x for name, x in given._asdict().items() if x is not None}
        assert_close(attention(**extras, **FORMS[form], **how), expected, 1e-12, f"{what} {how}")


@pytest.mark.slow
def test_delta_rule(attention):
    given = case(unit_keys(make("lit", 75)), "beta")
    expected = given.on(reference_attention, normalize="none", segments=SEGMENTS)
    got = attention(*given[:4], beta=given.beta, form="rnn", chunk_size=8, normalize="none", segments=SEGMENTS)
    assert_close(got, expected, 1e-12)


@pytest.mark.slow
def test_decays_of_the_delta_rule(attention):
    given = case(unit_keys(make("vector", 75)), "beta, erase, read")
    how = dict(normalize="none", decay_convention="target", undecayed_erase=True)
    expected = given.on(reference_attention, **how, valid=VALID)
    tensors = {name: x for name, x in given._asdict().items() if x is not None}
    for form in ("rnn", "chunk"):
        assert_close(attention(**tensors, form=form, chunk_size=8, valid=VALID, **how), expected, 1e-12, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ("full", "chunk", "rnn"))
def test_feature_maps(attention, form):
    """Check elementwise and vector feature maps, applied by the operator piece by piece, or before the call."""
    q, k, v, log_decay = make("S", 75)
    how = dict(form=form, chunk_size=2, valid=VALID)
    for name in ("elu1", "silu_unit"):
        how["normalize"] = "sum" if FEATURE_MAPS[name].positive else "none"
        expected = linear_attention(
            apply_feature_map(name, q), apply_feature_map(name, k), v, log_decay, **how, feature_map=None
        )
        assert_close(attention(q, k, v, log_decay, feature_map=name, **how), expected, 1e-12, name)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_autocast_outside(attention, form):
    inputs = make("S", 75)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(*inputs.to(torch.float32), **FORMS[form])
    assert got.dtype == torch.float32
    assert_close(got, inputs.on(reference_attention), 2e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_for_all_lengths(form, monkeypatch):
    """Check that the loop is one operator, and that the code for one piece is compiled once."""
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in range(96, 180, 12):  # lengths of whole pieces of 12
            inputs = make("S", length, dtype=torch.float32)
            with torch._dynamo.config.patch(error_on_recompile=length > 96):
                got = compiled(*inputs, feature_map=None, **FORMS[form])
            assert_close(got, inputs.on(reference_attention), 2e-5, str(length))
    piecewise.compiled.cache_clear()


@pytest.mark.compiled
@pytest.mark.parametrize(
    "mixer, form", [("lion_s", "chunk"), ("gla", "rnn"), ("gated_deltanet", "rnn"), ("vim", "chunk")]
)
def test_one_graph_for_all_batch_sizes(mixer, form, monkeypatch):
    """Check that a piece has a graph for one sample and one for all other batch sizes, in training, too (Vim)."""
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    piecewise.compiled.cache_clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = make_mixer(mixer, 16, 1, form=form, chunk_size=2)
    compiled = torch.compile(layer, backend="eager", dynamic=True)
    for batch in (1, 2, 3, 5, 8):
        x = torch.randn(batch, 40, 16, requires_grad=mixer == "vim")
        with torch._dynamo.config.patch(error_on_recompile=batch > 2), torch.set_grad_enabled(x.requires_grad):
            got = compiled(x)
            if x.requires_grad:
                (grad,) = torch.autograd.grad(got.square().sum(), x)
        same = x.detach().requires_grad_(x.requires_grad)
        expected = layer(same)
        assert_close(got, expected, 1e-5, str(batch))
        if x.requires_grad:
            assert_close(grad, torch.autograd.grad(expected.square().sum(), same)[0], 1e-5, str(batch))
    piecewise.compiled.cache_clear()


def test_shapes_beyond_the_limit_on_graphs_run_eagerly(monkeypatch, caplog):
    monkeypatch.setattr(piecewise, "BACKEND", "eager")
    torch._dynamo.reset()

    def piece(x):
        return x.sin()

    run = piecewise.compiled(piece)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (3, 4, 5, 6, 3):
            x = torch.rand(2, length)
            assert_close(run(x), x.sin(), 1e-6)
    messages = [record.getMessage() for record in caplog.records if record.name == "lion"]
    assert messages == ["piece: runs eagerly, since its shapes exceed torch._dynamo.config.recompile_limit"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ("S", "vector"))
@pytest.mark.slow
def test_memory_is_that_of_a_piece(decay, form):
    """Check that only output, row sums and cumulative gates grow with the sequence, without copies of q and k."""
    largest = {}
    for length in (256, 1024):
        q, k, v, log_decay = make(decay, length, heads=1, batch=1, dim=16, value_dim=16, dtype=torch.float32)
        with torch.no_grad(), Allocations() as allocations:
            linear_attention(q, k, v, log_decay, feature_map="silu_shifted", **FORMS[form])
        largest[length] = sum(shape == (1, 1, length, 16) for shape in allocations.shapes)
    assert largest[256] == largest[1024] <= (1 if decay == "S" else 2)
