"""The Triton kernels of scalar decays, without a GPU: values in the interpreter, cubins, bytes, and who takes them."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lion.ops import fused, kernels, linear_attention
from lion.ops.settings import Settings
from lion.ops.tokens import Tokens
from tests.helpers import ROOT
from tools.gpu.graphs import trace
from tools.gpu.lower import lower
from tools.gpu.targets import TARGETS, pretend

pytestmark = pytest.mark.slow

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32"}
NAMES = ("sums_kernel", "states_kernel", "outputs_kernel", "queries_kernel", "keys_kernel")
FEW = {"sums_kernel": 0, "states_kernel": 16, "outputs_kernel": 32, "queries_kernel": 8, "keys_kernel": 112}


@pytest.mark.process
def test_values_and_gradients_are_those_of_the_definition(request):
    """Run every case in the interpreter.

    Float32 is exact to a few roundings, 2e-6. Under extreme decays one float32 number holds sums as far as -200 log2(e)
    a token, so that the decays themselves are exact to 1e-5. Products of bfloat16 are exact to 2e-2.
    Float16 is computed in float32, and its outputs and gradients are rounded.
    """
    allowed = {"extreme decays": 2e-5, "bfloat16": 2e-2, "float16": 1e-3}
    every = ["--every"] if request.config.getoption("--every") else []
    command = [sys.executable, "-m", "tests.gpu.kernel_cases", *every]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *cases, (_, behaviour) = map(json.loads, done.stdout.splitlines())
    assert len(cases) >= 36
    for name, errors in cases:
        assert max(errors) < allowed.get(name.partition(",")[0], 2e-6), (name, errors)
    assert all(behaviour.values()), behaviour


class Recorder:
    """Stands for a kernel, and records its launches."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        def launch(*arguments, num_warps=4, num_stages=3, **constants):
            self.launches.append((self.name, arguments, constants, num_warps, num_stages))

        return launch


def launches_of(monkeypatch, length, packed=False, decays=True):
    """Return the launches of both passes of an operator of the size of DeiT small."""
    found = []
    with monkeypatch.context() as patch:
        for name in NAMES:
            patch.setattr(kernels, name, Recorder(name, found))
        q, k, v = torch.empty(4, length, 3, 6, 64, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
        log_decay = torch.empty(24, length) if decays else None
        masks = (None, None)
        if packed:
            masks = torch.ones(4, length, dtype=torch.uint8), torch.zeros(4, length, dtype=torch.int32)
        options = ("silu_shifted", "source", "both", True, 0.125, 1e-6)
        results = fused.attention_op._init_fn(q, k, v, log_decay, *masks, *options)
        fused.gradients_op._init_fn(torch.empty_like(results[0]), q, k, v, *masks, *results, *options)
    return found


def resources(launch, architecture):
    """Return the registers of a thread and the bytes of its stack, as the compiler reports them."""
    name, arguments, constants, warps, stages = launch
    kernel = getattr(kernels, name)
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    for place, (argument, value) in enumerate(zip(kernel.arg_names, arguments)):
        kind = TYPES[value.dtype] if torch.is_tensor(value) else "i32" if isinstance(value, int) else "fp32"
        signature[argument] = kind
        if torch.is_tensor(value) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    fixed = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return int(found[1]), int(found[2])


def rest(*values):
    return pytest.param(*values, marks=pytest.mark.every)


@pytest.mark.parametrize(
    ("target", "architecture", "length", "packed"),
    [
        *(("h100", 90, 197, False), ("h100", 90, 1024, False), ("a100", 80, 197, False), ("a100", 80, 1024, True)),
        *(rest("h100", 90, 1024, True), rest("a100", 80, 1024, False)),
    ],
)
def test_kernels_compile_and_keep_their_numbers_in_registers(target, architecture, length, packed, monkeypatch):
    """Compile the kernels of Lion-S for one chunk and for several, and of packed rows with padding.

    On an H100 nothing but the masks of packed rows is kept in memory; on an A100 up to `FEW` bytes of a thread are.
    """
    with pretend(TARGETS[target]):
        found = launches_of(monkeypatch, length, packed)
        assert {launch[0] for launch in found} == set(NAMES) - ({"states_kernel"} if length == 197 else set())
        for launch in found:
            registers, stack = resources(launch, architecture)
            assert registers <= 255
            assert stack <= (FEW[launch[0]] if packed or architecture == 80 else 0), launch[0]


def traced(length, kind, how="triton", dtype=torch.bfloat16, **changes):
    """Return the graphs of both passes of the operator, as for a GPU."""
    shape = (4, 6, length)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(*shape, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        log_decay = torch.empty(shape if kind == "lion_s" else 6, requires_grad=True)
        given = (q, k, v) if kind == "lion_lit" else (q, k, v, log_decay)
        settings = {"feature_map": "silu_shifted", "form": "auto", "kernels": how, **changes}
        return trace(lambda *tokens: linear_attention(*tokens, **settings), *given)


@pytest.mark.parametrize(
    ("kind", "length", "calls", "bytes_of_q"),
    [("lion_lit", 197, 2, 12.1), ("lion_d", 197, 5, 12.8), ("lion_s", 197, 5, 12.9), ("lion_s", 1024, 5, 15.0)],
)
def test_few_bytes_are_moved(kind, length, calls, bytes_of_q):
    """Bound the launches of both passes, and the arguments and results of all kernels in sizes of q."""
    moved = launches = 0
    for graph in traced(length, kind):
        cost = lower(graph, TARGETS["h100"]).cost
        moved += cost.moved
        launches += cost.launches + cost.library + cost.fallbacks
    assert launches <= calls
    assert moved / (4 * 6 * length * 64 * 2) <= bytes_of_q


def test_every_call_that_fits_takes_the_kernels():
    """Check calls as for a GPU: a call that could take the kernels and takes the graph fails here."""

    def takes(*args, **changes):
        return any(
            "scalar_attention" in str(node.target) for graph in traced(*args, **changes) for node in nodes(graph)
        )

    def nodes(graph):
        return graph.module.graph.nodes

    for kind, length, changes in (
        ("lion_lit", 197, {}),
        ("lion_d", 1024, {"direction": "forward"}),
        ("lion_s", 300, {"decay_convention": "target", "direction": "backward"}),
        ("lion_d", 64, {"normalize": "none", "feature_map": None}),
        ("lion_lit", 64, {"feature_map": "relu", "direction": "forward"}),
        ("lion_s", 197, {"form": "chunk"}),
        ("lion_s", 197, {"dtype": torch.float16}),
    ):
        assert takes(length, kind, **changes), (kind, length, changes)
    for how in ("auto", "graph"):
        assert not takes(197, "lion_s", how)


def test_calls_that_do_not_fit_take_the_graphs():
    q = torch.zeros(1, 1, 4, 16)
    tokens = Tokens(q, q, q, torch.zeros(1, 1, 4, 1))
    settings = Settings(feature_map=None, kernels="triton")
    assert not fused.fits(tokens, settings, "full"), "there is no GPU"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lion.ops.modes.for_gpu", lambda device: True)
        assert fused.fits(tokens, settings, "full")
        assert not fused.fits(tokens, settings, "rnn")
        for changes in (
            {"q": q.double()},
            {"q": torch.zeros(1, 1, 4, 24)},
            {"v": torch.zeros(1, 1, 4, 256)},
            {"log_decay": torch.zeros(1, 1, 4, 16)},
            {"bonus": torch.ones(1, 1, 1)},
            {"beta": torch.ones(1, 1, 4, 1)},
        ):
            assert not fused.fits(tokens._replace(**changes), settings, "full"), list(changes)
        for other in (
            Settings(feature_map=None, kernels="triton", normalize="max"),
            Settings(feature_map=None, kernels="triton", dropout_p=0.1),
            Settings(feature_map=None, kernels="triton", decay_convention="between"),
            Settings(feature_map=None),
        ):
            assert not fused.fits(tokens, other, "full")
    x = torch.randn(1, 1, 4, 16)
    expected = linear_attention(x, x, x, feature_map="elu1")
    assert torch.equal(linear_attention(x, x, x, feature_map="elu1", kernels="triton"), expected)
