"""GPU code of every mixer's layer: generation, compilation for sm_90, and correct results.

The generated kernels run in Triton's interpreter on CPU tensors, forward and backward. Their results are compared with
the same graph on the CPU. Sizes are small: 16 features, 2 heads, 24 tokens in the full form, and 40 tokens in chunks of
16. By default one mixer runs for each kind of operator, and some of the kernels compile. With `--every`, all mixers run
and all kernels compile, also for sm_80 and in every form and direction.
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

TOLERANCE = 1e-4  # relative to the largest value, float32; gradients of decays are sums over all pairs
BF16_TOLERANCE = 0.05  # the graph on the CPU rounds every intermediate result to bfloat16, fused kernels do not
FULL, CHUNK, ONE_WAY = ("full", "both", 24), ("chunk", "both", 40), ("full", "forward", 24)
FULL_BF16, CHUNK_BF16 = (*FULL, "bfloat16"), (*CHUNK, "bfloat16")
FULL_AUTOTUNED, CHUNK_AUTOTUNED = (*FULL, "autotune"), (*CHUNK, "autotune")
KINDS = {  # a mixer for each kind of operator
    "lion_lit": [FULL],  # no decay
    "lion_s": [FULL, CHUNK, FULL_BF16],  # scalar decays, row sums
    "gla": [("chunk", "forward", 40)],  # vector decays
    "rwkv6": [FULL],  # decays between tokens, a bonus
    "xlstm": [FULL],  # division by the largest of |row sum| and 1
    "lightnet": [FULL],  # normalised keys, one scan
    "deltanet": [FULL, CHUNK],  # delta rule
    "selective_scan": [("chunk", "both", 4)],  # a step of Vim's loop, and its gradients
}
OTHERS = {mixer: [FULL] for mixer in LINEAR if mixer not in KINDS}  # differ from these in gates only
OTHERS |= {"lightnet": [ONE_WAY], "lion_lit": [CHUNK], "gla": [FULL, CHUNK, FULL_BF16, CHUNK_AUTOTUNED]}
OTHERS |= {"lion_s": [ONE_WAY, CHUNK_BF16, FULL_AUTOTUNED, CHUNK_AUTOTUNED]}
OTHERS |= {"hydra": [FULL, CHUNK], "lion_d": [FULL], "gated_deltanet": [FULL, CHUNK], "kda": [FULL, CHUNK]}
OTHERS |= {"vim": [CHUNK]}  # around its loop, which is one operator
OPERATORS = ("linalg_solve_triangular", "lion.delta_states", "lion.selective_scan")  # no kernels of the graph
COMPILED = "gla,chunk", "lion_s,full,both,24,bfloat16"  # by default
GROUPS = [  # importing PyTorch takes longer than a case
    *(dict([*KINDS.items()][i::2]) for i in range(2)),
    *(pytest.param(dict([*OTHERS.items()][i::2]), marks=pytest.mark.every) for i in range(2)),
]


def tolerance_of(case: str) -> float:
    return BF16_TOLERANCE if "bfloat16" in case else TOLERANCE


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{next(iter(group))} and others")
def test_generated_kernels_are_right_and_compile(group, tmp_path, pytestconfig):
    cases = [",".join((mixer, *map(str, case))) for mixer, cases in group.items() for case in cases]
    command = [sys.executable, "-m", "tools.gpu.interpret", str(tmp_path), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["stage"] for row in rows] == ["forward", "backward"] * len(cases)
    for case, row in zip([case for case in cases for _ in range(2)], rows):
        assert "unsupported" not in row, (case, row)
        assert row["error"] <= tolerance_of(case), (case, row)
        assert "autotune" not in case or not row["library"], (case, row)
        assert all(any(own in name for own in OPERATORS) for name in row["fallbacks"]), (case, row)
    kernels = sorted(tmp_path.glob("*.json"))
    assert len(kernels) == len(rows)
    compiled = "" if pytestconfig.getoption("--every") else COMPILED
    for path in (path for path in kernels if path.name.startswith(compiled)):
        compile_kernels(json.loads(path.read_text()), TARGETS["h100"])


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("form", ["full", "chunk"])
@pytest.mark.parametrize("mixer", LINEAR)
def test_every_mixer_form_and_direction_compiles_for_sm_80(mixer, form, direction):
    torch._dynamo.reset()
    layer = MIXERS[mixer].layer(32, 2, mixer, form=form, direction=direction, chunk_size=16)
    graphs = trace(layer, torch.randn(1, 72, 32, requires_grad=True))
    assert [graph.stage for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        program = lower(graph, TARGETS["a100"])
        assert program.kernels and all(any(own in name for own in OPERATORS) for name in program.fallbacks)
        compile_kernels(program.kernels, TARGETS["a100"])


@pytest.mark.slow
def test_fox_lowers_without_gradients():
    """Check the graph of an evaluation, in which the scan of the gates could fuse with their bias."""
    torch._dynamo.reset()
    with torch.no_grad():
        (graph,) = trace(MIXERS["fox"].layer(32, 2, "fox"), torch.randn(2, 300, 32))
    assert lower(graph, TARGETS["h100"]).kernels
