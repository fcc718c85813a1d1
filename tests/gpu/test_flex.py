"""The fused form: its values and gradients, and its GPU code.

On a CPU, flex_attention's dense operator is compared with the full form. The code that Inductor generates for a GPU
must be correct in Triton's interpreter and compile (test_mixers.py), and move few bytes (test_budgets.py).
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from lion.config import ConfigError
from lion.ops import flex as fused
from lion.ops import flex_scan, linear_attention, reference_attention
from lion.ops.arguments import Gates
from lion.ops.settings import Settings
from tools.gpu.fused import FUSED
from tools.gpu.operator import operator_graphs

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
B, H, L, D, E = 2, 3, 150, 16, 20  # two blocks of pairs
CPU = torch.device("cpu")
FULL = Settings(form="full", feature_map="silu_shifted")
SEGMENTS = torch.tensor([[-1] * 5 + [0] * 60 + [1] * 50 + [2] * 20 + [-1] * 15, [1] * 100 + [2] * 50])
LEFT, RIGHT = torch.ones(B, L, dtype=torch.bool), torch.ones(B, L, dtype=torch.bool)
LEFT[0, :20], RIGHT[1, 100:] = False, False
DECAYS = {
    "lion_s": lambda rng: -torch.rand(B, H, L, generator=rng),
    "lion_d": lambda rng: -torch.rand(H, generator=rng),
    "steep": lambda rng: -1e4 * torch.rand(B, H, L, generator=rng) * (torch.rand(B, H, L, generator=rng) < 0.2) - 1e-3,
    "lion_lit": lambda rng: None,
}


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    """Enable gradients on a CPU: flex_attention refuses them, but its dense operator has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def inputs(decay: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor | None]:
    rng = torch.Generator().manual_seed(0)
    tokens = [torch.randn(B, H, L, n, generator=rng) for n in (D, D, E)]
    given = [*tokens, DECAYS[decay](rng)]
    return [x if x is None else x.to(dtype).requires_grad_() for x in given]


def results(fn, given: list, *args, **how) -> list[torch.Tensor]:
    """Return the output of `fn` and the gradients of all arguments in `given`."""
    y = fn(*given, *args, **how)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x for x in given if x is not None])]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30)


def against_full(given: list, settings: Settings, valid=None, segments=None, tolerance: float = 1e-12) -> list:
    got = results(fused.fused_attention, given, valid, segments, settings)
    want = results(linear_attention, given, valid=valid, segments=segments, settings=settings)
    assert_same(got, want, tolerance)
    return got


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
def test_values_and_gradients_are_those_of_the_full_form(decay, direction):
    for convention in ("source", "target", "symmetric"):
        settings = Settings(form="full", feature_map="silu_shifted", direction=direction, decay_convention=convention)
        against_full(inputs(decay), settings)
    against_full(inputs(decay, torch.float32), settings, tolerance=2e-4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("direction", ["both", "backward"])
def test_padding_and_segments_are_exact(decay, direction):
    settings = Settings(form="full", feature_map="relu", direction=direction)
    for valid, segments in ((LEFT, None), (RIGHT, None), (None, SEGMENTS), (RIGHT, SEGMENTS)):
        given, there = inputs(decay), torch.ones(B, L, dtype=torch.bool) if valid is None else valid
        there = there if segments is None else there & (segments >= 0)
        with torch.no_grad():
            for x in given[:3]:
                x.transpose(1, 2)[~there] = torch.nan
        got = against_full(given, settings, valid, segments)
        for x in got[:4]:  # the output and the gradients of q, k and v
            assert (x.transpose(1, 2)[~there] == 0).all()


@pytest.mark.parametrize("decay", ["lion_s", "lion_d", "steep"])
@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
def test_chunks_with_the_states_that_enter_them_are_exact(decay, direction, monkeypatch):
    for module, name, value in ((fused, "WHOLE_UP_TO", 64), (fused, "CHUNK", 48), (flex_scan, "BLOCK", 16)):
        monkeypatch.setattr(module, name, value)
    for convention in ("source", "target", "symmetric"):
        how = dict(feature_map="silu_shifted", direction=direction, decay_convention=convention)
        for valid, segments in ((None, None), (LEFT, None), (RIGHT, SEGMENTS)):
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5))[: 2 if segments is None else 1]:
                given = inputs(decay, dtype)
                got = results(fused.fused_attention, given, valid, segments, Settings(form="chunk", **how))
                full = Settings(form="full", **how)
                want = results(linear_attention, given, valid=valid, segments=segments, settings=full)
                assert_same(got, want, tolerance)


@pytest.mark.compiled
@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
def test_without_gradients_it_is_one_graph(direction, length, monkeypatch):
    """Check the graph of an evaluation, in one piece and in chunks: it traces other code than that of training."""
    monkeypatch.setattr(fused, "WHOLE_UP_TO", 64), monkeypatch.setattr(fused, "CHUNK", 48)
    given = [x.detach()[:, :, :length] for x in inputs("lion_s", torch.float32)]

    def attention(*given):
        settings = Settings(form="chunk", feature_map="silu_shifted", direction=direction)
        return fused.fused_attention(*given, None, None, settings)

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=False)
        assert_same([compiled(*given)], [attention(*given)], 1e-5)


def test_symbolic_lengths_are_not_fused(monkeypatch):
    monkeypatch.setattr("lion.ops.flex.is_static", lambda n: n != L)
    given = inputs("lion_s", torch.float32)
    assert not fused.suits(given[0], given[2], Gates(given[3]), FULL)


def test_the_definition_and_rows_without_a_sum():
    given = inputs("lion_s")
    with torch.no_grad():
        given[0][:, :, 7] = -1  # all features are 0
        given[0][:, :, 9] = 1e-9  # the row sum is below eps
    settings = Settings(form="full", feature_map="relu")
    got = against_full(given, settings)
    assert (got[0][:, :, 7] == 0).all() and (got[1][:, :, 7] == 0).all() and got[0][:, :, 9].abs().max() < 0.1
    small = [x.detach()[:1, :1, :9] for x in given]
    q, k, v, log_decay = small
    want = reference_attention(q.relu(), k.relu(), v, log_decay)
    assert_same([fused.fused_attention(*small, None, None, settings)], [want], 1e-12)


def test_bf16_is_as_near_to_float64_as_the_full_form():
    given = [x.detach().bfloat16().requires_grad_() for x in inputs("lion_s")]
    exact = results(linear_attention, [x.detach().double().requires_grad_() for x in given], settings=FULL)
    got = results(fused.fused_attention, given, None, None, FULL)
    full = results(linear_attention, given, settings=FULL)
    for x, y, z in zip(got, full, exact):
        assert (x - z).norm() <= 2 * (y - z).norm() + 1e-3 * z.norm()


def test_where_it_is_taken(monkeypatch):
    q, a = torch.empty(B, H, L, D), torch.empty(B, H, L)
    assert not fused.fused_applies(q, q, Gates(a), FULL)  # on a CPU, outside a graph
    assert fused.expressible(Gates(a), FULL) and fused.expressible(Gates(None), FULL)
    for gates, changes in (
        (Gates(torch.empty(H, D)), {}),
        (Gates(a, bonus=torch.empty(H)), {}),
        (Gates(a, angles=torch.empty(L, D // 2)), {}),
        (Gates(None, beta=a), {}),
        (Gates(a), {"normalize": "max"}),
        (Gates(a), {"feature_map": "silu"}),
        (Gates(a), {"feature_map": None}),
        (Gates(a), {"decay_convention": "between"}),
        (Gates(a), {"dropout_p": 0.1}),
    ):
        settings = Settings(**{"form": "full", "feature_map": "relu", **changes})
        assert not fused.expressible(gates, settings)


def test_it_is_taken_on_a_gpu_once_it_is_checked(monkeypatch):
    gpu, a = torch.device("cuda"), torch.empty(B, H, L)
    monkeypatch.setattr(fused, "PASSED", set())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    decayed = Gates(a)

    def taken(form, length, gates=decayed, dim=64, dtype=torch.bfloat16):
        q = SimpleNamespace(shape=(B, H, length, dim), device=gpu, dtype=dtype)
        return fused.fused_applies(q, q, gates, Settings(form=form, feature_map="relu"))

    assert not taken("full", 197)
    fused.PASSED |= {(gpu, dtype, 64, 64) for dtype in (torch.bfloat16, torch.float32)}
    per_head = Gates(torch.empty(H))
    for form, length, gates, expected in (
        ("full", 197, decayed, True),
        ("full", 4096, decayed, True),
        ("auto", 1024, decayed, True),
        ("auto", 4096, decayed, True),  # chunks
        ("full", 197, per_head, False),  # in bfloat16
        ("chunk", 197, decayed, True),
        ("chunk", 197, Gates(None), False),
        ("rnn", 197, decayed, False),
        ("full", 256, Gates(None), True),
        ("full", 257, Gates(None), False),  # Q (K^T V) is linear in length
    ):
        assert taken(form, length, gates) is expected, (form, length)
    for form, expected in (("full", True), ("auto", False)):
        assert taken(form, 4096, per_head, dtype=torch.float32) is expected
    assert taken("auto", 1024, per_head, dtype=torch.float32)
    assert not taken("full", 197, dim=32) and not taken("full", 197, dtype=torch.float64)
    monkeypatch.setenv("LION_FUSED", "0")
    assert not taken("full", 197)


@pytest.mark.compiled
def test_the_check_falls_back_with_a_line(monkeypatch, caplog):
    monkeypatch.setattr(fused, "PASSED", set())
    whole, chunks = fused.CHECK_LENGTHS
    for dtype, length in ((torch.float32, whole), (torch.bfloat16, whole), (torch.float32, chunks)):
        assert fused.deviation(CPU, dtype, D, E, length, backend="aot_eager") < fused.TOLERANCES[dtype] / 2
    assert not fused.checked.__wrapped__(CPU, torch.float32, D, E)  # on a CPU, Inductor returns no row sums
    assert not fused.usable(CPU, torch.float32, D, E)
    monkeypatch.setattr(fused, "deviation", lambda *_: 1e-3)
    assert fused.checked.__wrapped__(CPU, torch.float32, D, E) and fused.usable(CPU, torch.float32, D, E)
    monkeypatch.setattr(fused, "deviation", lambda *_: float("nan"))
    assert not fused.checked.__wrapped__(CPU, torch.bfloat16, D, E)
    assert [len(r.getMessage().splitlines()) for r in caplog.records if r.name == "lion"] == [1, 1]

    def graph(x):
        return x * 2 if fused.usable(x.device, x.dtype, D, E) else x * 3

    assert torch.compile(graph, backend="eager", fullgraph=True)(torch.ones(1)) == 2


@pytest.mark.slow
def test_what_the_library_does_not_fuse_has_no_fused_form():
    """Check a decay per head in bfloat16; vector decays are in test_bench_gpu.py."""
    with pytest.raises(ConfigError, match="no fused form"):
        operator_graphs("lion_d", FUSED, (1, 2, 16, 16), torch.bfloat16)
