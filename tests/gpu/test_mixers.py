"""GPU code of every mixer's layer: generation, compilation for sm_90, and correct results.

The generated kernels run in Triton's interpreter on CPU tensors, forward and backward. Their results are compared with
the same graph on the CPU. Sizes are small: 16 features, 2 heads, 24 tokens in the full form, and 40 tokens in chunks of
16. The fused form takes 32 features, and Lion-D has two blocks of it. By default one mixer runs for each kind of
operator, with `--every` all mixers; then all mixers, forms and directions also compile for sm_80.
"""

import json
import subprocess
import sys

import pytest
import torch

from lion.config import ConfigError
from lion.layers.mixers import LINEAR, MIXERS
from tests.helpers import ROOT
from tools.gpu.cubins import compile_kernels
from tools.gpu.fused import FUSED, FUSED_CHUNKS, taken
from tools.gpu.graphs import trace
from tools.gpu.lower import lower
from tools.gpu.targets import TARGETS

TOLERANCE = 1e-4  # relative to the largest value, float32; gradients of decays are sums over all pairs
FUSED_TOLERANCE = 3e-4
BF16_TOLERANCE = 0.1  # the graph on the CPU rounds every intermediate result to bfloat16, fused kernels do not
# the gradient of the gate's bias, a sum over tokens that cancels: against float64 (relative to the largest value), the
# graph on the CPU is off by 0.154 and the GPU code by 0.041; other gradients differ by 0.016
FUSED_CHUNKS_BF16_TOLERANCE = 0.2
FULL, CHUNK, ONE_WAY = ("full", "both", 24), ("chunk", "both", 40), ("full", "forward", 24)
FULL_BF16, CHUNK_BF16 = (*FULL, "bfloat16"), (*CHUNK, "bfloat16")
FUSED_BOTH, FUSED_IN_CHUNKS, FUSED_CAUSAL = (FUSED, "both", 24), (FUSED_CHUNKS, "both", 72), (FUSED, "forward", 24)
FUSED_BF16, FUSED_IN_CHUNKS_BF16 = (*FUSED_BOTH, "bfloat16"), (*FUSED_IN_CHUNKS, "bfloat16")
FUSED_CAUSAL_BF16 = (*FUSED_CAUSAL, "bfloat16")
KINDS = {  # a mixer for each kind of operator
    "lion_lit": [FULL],  # no decay
    # scalar decays, row sums
    "lion_s": [FULL, CHUNK, FULL_BF16, FUSED_BOTH, FUSED_CAUSAL_BF16, FUSED_IN_CHUNKS],
    "gla": [("chunk", "forward", 40)],  # vector decays
    # Lion-D for two blocks: the interpreter cannot run a cumulative sum over more than 128 tokens (programs wait)
    "lion_d": [(FUSED, "both", 150)],
    "rwkv6": [FULL],  # decays between tokens, a bonus
    "xlstm": [FULL],  # division by the largest of |row sum| and 1
    "lightnet": [FULL],  # normalised keys, one scan
    "deltanet": [FULL, CHUNK],  # delta rule
    "selective_scan": [("chunk", "both", 4)],  # a step of Vim's loop, and its gradients
}
OTHERS = {mixer: [FULL] for mixer in LINEAR if mixer not in KINDS}  # differ from these in gates only
OTHERS |= {"lightnet": [ONE_WAY], "lion_lit": [CHUNK, FUSED_BOTH], "gla": [FULL, CHUNK, FULL_BF16]}
OTHERS |= {"lion_s": [ONE_WAY, CHUNK_BF16, FUSED_CAUSAL, (FUSED, "backward", 24), FUSED_BF16, FUSED_IN_CHUNKS_BF16]}
OTHERS["lion_s"] += [(FUSED_CHUNKS, "forward", 72)]
OTHERS |= {"hydra": [FULL, CHUNK], "lion_d": [FULL], "gated_deltanet": [FULL, CHUNK], "kda": [FULL, CHUNK]}
OTHERS |= {"vim": [CHUNK]}  # around its loop, which is one operator
OPERATORS = ("linalg_solve_triangular", "lion.delta_states", "lion.selective_scan")  # no kernels of the graph
GROUPS = [  # importing PyTorch takes longer than a case
    *(dict([*KINDS.items()][i::2]) for i in range(2)),
    *(pytest.param(dict([*OTHERS.items()][i::2]), marks=pytest.mark.every) for i in range(2)),
]


def tolerance_of(case: str) -> float:
    if case.endswith("bfloat16"):
        return FUSED_CHUNKS_BF16_TOLERANCE if FUSED_CHUNKS in case else BF16_TOLERANCE
    return FUSED_TOLERANCE if FUSED in case else TOLERANCE


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{next(iter(group))} and others")
def test_generated_kernels_are_right_and_compile(group, tmp_path):
    cases = [",".join((mixer, *map(str, case))) for mixer, cases in group.items() for case in cases]
    command = [sys.executable, "-m", "tools.gpu.interpret", str(tmp_path), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["stage"] for row in rows] == ["forward", "backward"] * len(cases)
    for case, row in zip([case for case in cases for _ in range(2)], rows):
        assert "unsupported" not in row, (case, row)
        assert row["error"] <= tolerance_of(case), (case, row)
        assert all(any(own in name for own in OPERATORS) for name in row["fallbacks"]), (case, row)
        assert FUSED not in case or not row["fallbacks"], (case, row)
    kernels = sorted(tmp_path.glob("*.json"))
    assert len(kernels) == len(rows)
    for path in kernels:
        compile_kernels(json.loads(path.read_text()), TARGETS["h100"])


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("form", ["full", "chunk", FUSED, FUSED_CHUNKS])
@pytest.mark.parametrize("mixer", LINEAR)
def test_every_mixer_form_and_direction_compiles_for_sm_80(mixer, form, direction):
    torch._dynamo.reset()
    try:
        with taken(form) as name:
            layer = MIXERS[mixer].layer(32, 2, mixer, form=name, direction=direction, chunk_size=16)
            graphs = trace(layer, torch.randn(1, 72, 32, requires_grad=True))
    except ConfigError:
        assert form in (FUSED, FUSED_CHUNKS)
        pytest.skip("no fused form")
    assert [graph.stage for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        program = lower(graph, TARGETS["a100"])
        assert program.kernels and all(any(own in name for own in OPERATORS) for name in program.fallbacks)
        compile_kernels(program.kernels, TARGETS["a100"])
