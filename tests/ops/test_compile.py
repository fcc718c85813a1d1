"""Full and chunk are single static graphs for torch.compile, and are compiled once per shape."""

import shutil

import pytest
import torch

import lion.ops.chunk
from lion.ops import linear_attention

from .helpers import assert_close, backward, case, make, signed, unit_keys

FORMS = {"full": dict(form="full"), "chunk": dict(form="chunk", chunk_size=8)}
LENGTH = 43


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(inputs, backend: str, tolerance: float = 1e-6, **arguments) -> None:
    """Compiled against eager on three sets of values, the later ones without compiling again."""

    kind = type(inputs[0])

    def attention(*x):
        return kind(*x).on(linear_attention, **arguments)

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
    return [make(decay, length, heads=2, dtype=torch.float32, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("direction", ("both", "forward"))
@pytest.mark.parametrize("decay", ("lit", "D", "S", "vector"))
@pytest.mark.parametrize("form", FORMS)
def test_one_graph(form, decay, direction, backend):
    check(some(decay), backend, **FORMS[form], direction=direction)


@pytest.mark.parametrize("decay", ("lit", "S", "vector"))
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_with_masks(form, decay):
    """Masks are data: the check that segments stand together must not break the graph."""
    segments = torch.tensor([[0] * 20 + [1] * (LENGTH - 20), [-1] * 5 + [7] * (LENGTH - 5)])
    valid = torch.arange(LENGTH).expand(2, -1) % 5 != 3
    check(some(decay), "aot_eager", **FORMS[form], segments=segments, valid=valid)


EXTRAS = {
    "between": ("S", "bonus HD", dict(gate="between")),
    "max": ("S", "", dict(normalize="max")),
    "pre": ("S", "", dict(normalize="pre")),
    "angles": ("vector", "angles HL", dict(direction="forward")),
    "delta": ("lit", "beta, angles L", dict(normalize="none")),
}
LITTLE = 19


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("form", FORMS)
def test_one_graph_with_all_else(form, name):
    decay, what, arguments = EXTRAS[name]
    inputs = some(decay, LITTLE)
    if name in ("max", "delta"):
        inputs = [unit_keys(x) if name == "delta" else signed(x) for x in inputs]
    cases = [case(x, what, seed) for seed, x in enumerate(inputs)]
    segments = torch.tensor([[0] * 7 + [1] * (LITTLE - 7), [-1] * 5 + [7] * (LITTLE - 5)])
    masks = dict(segments=segments) if name in ("delta", "pre") else {}
    check(cases, "aot_eager", **FORMS[form], **arguments, **masks)


@pytest.mark.parametrize("gate", ("source", "between"))
def test_one_graph_in_blocks(gate):
    check(some("S", LITTLE), "aot_eager", form="blockwise", chunk_size=8, gate=gate)


def test_one_graph_with_two_levels_of_chunks():
    length = 2 * lion.ops.chunk.GROUP + 1
    check(some("S", length), "aot_eager", form="chunk", chunk_size=1)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_outside(form):
    inputs = some("S")[0]
    expected = linear_attention(*inputs, **FORMS[form])
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(*inputs, **FORMS[form])
    assert got.dtype == torch.float32
    assert_close(got, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor():
    check(some("S"), "inductor", 1e-5, **FORMS["chunk"])
