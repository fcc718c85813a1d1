"""GPU code of every mixer's layer: generation, compilation for sm_80 and sm_90, and correct results.

The generated kernels run in Triton's interpreter on CPU tensors, forward and backward. Their results are compared with
the same graph on the CPU. Sizes are small: 16 features, 2 heads, 24 tokens in the full form, and 40 tokens in chunks of
16. By default a few mixers run, each with another kind of operator, and the kernels of two cases compile. With
`--every`, all mixers run and all kernels compile, in every form and direction.
"""

import json
import subprocess
import sys

import pytest
import torch

from lion.layers.mixers import LINEAR, MIXERS
from tests.helpers import ROOT
from tools.gpu.cubins import compile_kernels
from tools.gpu.graphs import trace
from tools.gpu.lower import lower
from tools.gpu.targets import TARGETS

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # relative to the largest value, float32; gradients of decays are sums over all pairs
BF16_TOLERANCE = 0.05  # the graph on the CPU rounds every intermediate result to bfloat16, fused kernels do not
FULL, CHUNK = "full,both,24", "chunk,both,40"
COMPILED = "lion_s,full,both,24,bfloat16"  # scalar decays, row sums
DEFAULT = [
    COMPILED,
    f"lightnet,{FULL}",  # normalised keys, one scan
    "selective_scan,chunk,both,4",  # a step of Vim's loop, and its gradients
]
OTHERS = [f"{mixer},{FULL}" for mixer in LINEAR if mixer not in ("lightnet", "vim")]
OTHERS += [f"{mixer},{CHUNK}" for mixer in ("lion_lit", "lion_s", "gla", "hydra", "deltanet", "gated_deltanet", "kda")]
OTHERS += [f"vim,{CHUNK}"]  # around its loop, which is one operator
OTHERS += ["lion_s,full,forward,24", "lightnet,full,forward,24", "gla,chunk,forward,40"]
OTHERS += [f"gla,{FULL},bfloat16", f"gla,{CHUNK},autotune"]
OTHERS += [f"lion_s,{CHUNK},bfloat16", f"lion_s,{FULL},autotune", f"lion_s,{CHUNK},autotune"]
OPERATORS = ("linalg_solve_triangular", "lion.delta_states", "lion.selective_scan")  # no kernels of the graph


def no_operator_is_eager_but_these(fallbacks):
    """Return whether all eager operators of a program are those of `OPERATORS`."""
    return all(any(own in name for own in OPERATORS) for name in fallbacks)


def graphs_of(mixer, tokens, **settings):
    """Trace a layer of 32 features on one sequence."""
    torch._dynamo.reset()
    layer = MIXERS[mixer].layer(32, 2, mixer, **settings)
    return trace(layer, torch.randn(1, tokens, 32, requires_grad=True))


def interpret(cases, folder):
    """Run the kernels of cases, check their results, and return the kernels by name of the file."""
    command = [sys.executable, "-m", "tools.gpu.interpret", str(folder), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = [(row["case"], row["stage"]) for row in rows]
    assert found == [(case, stage) for case in cases for stage in ("forward", "backward")]
    for row in rows:
        case = row["case"]
        assert "unsupported" not in row, row
        assert row["error"] <= (BF16_TOLERANCE if "bfloat16" in case else TOLERANCE), row
        assert "autotune" not in case or not row["library"], row
        assert no_operator_is_eager_but_these(row["fallbacks"]), row
    kernels = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert len(kernels) == len(rows)
    return kernels


@pytest.mark.process
def test_generated_kernels_of_each_kind_are_right_and_some_compile(tmp_path):
    kernels = interpret(DEFAULT, tmp_path)
    for stage in ("forward", "backward"):
        compile_kernels(kernels[f"{COMPILED} {stage}.json"], TARGETS["h100"])


@pytest.mark.process
@pytest.mark.every
@pytest.mark.parametrize("cases", [DEFAULT, OTHERS[::2], OTHERS[1::2]], ids=["kinds", "half", "rest"])
def test_generated_kernels_of_all_mixers_are_right_and_compile(cases, tmp_path):
    for kernels in interpret(cases, tmp_path).values():
        compile_kernels(kernels, TARGETS["h100"])


@pytest.mark.every
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("form", ["full", "chunk"])
@pytest.mark.parametrize("mixer", LINEAR)
def test_every_mixer_form_and_direction_compiles_for_sm_80(mixer, form, direction):
    graphs = graphs_of(mixer, 72, form=form, direction=direction, chunk_size=16)
    assert [graph.stage for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        program = lower(graph, TARGETS["a100"])
        assert program.kernels
        assert no_operator_is_eager_but_these(program.fallbacks)
        compile_kernels(program.kernels, TARGETS["a100"])


def test_fox_lowers_and_compiles_for_sm_80_without_gradients():
    """Check the graph of an evaluation, in which the scan of the gates could fuse with their bias."""
    with torch.no_grad():
        (graph,) = graphs_of("fox", 300)
    program = lower(graph, TARGETS["a100"])
    assert program.cost.kernels == len(program.kernels) > 0
    compile_kernels(program.kernels, TARGETS["a100"])
