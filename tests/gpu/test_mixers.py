"""GPU code of every mixer's layer: generation, compilation for sm_90, and correct results.

The generated kernels run in Triton's interpreter on CPU tensors, forward and backward. Their results are compared with
the same graph on the CPU. Sizes are small: 16 features, 2 heads, 24 tokens in the full form, and 40 tokens in chunks of
16. `./run.sh bench gpu --compile` compiles all forms for sm_80 and sm_90.
"""

import json
import subprocess
import sys

import pytest

from lion.layers.mixers import LINEAR
from tests.helpers import ROOT
from tools.gpu.kernels import compile_kernels
from tools.gpu.targets import TARGETS

TOLERANCE = 1e-4  # relative to the largest value, float32; gradients of decays are sums over all pairs
FULL, CHUNK = ("full", 24), ("chunk", 40)
CASES = {mixer: [(*FULL, "both")] for mixer in LINEAR}
for mixer in ("lion_lit", "lion_s", "gla", "deltanet"):  # one per operator: other mixers differ in gates only
    CASES[mixer].append((*CHUNK, "both"))
for mixer in ("lion_s", "lightnet"):
    CASES[mixer].append((*FULL, "forward"))


GROUPS = [tuple(LINEAR)[i::3] for i in range(3)]  # importing PyTorch takes longer than a case


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("mixers", GROUPS, ids=lambda group: f"{group[0]} and others")
def test_generated_kernels_are_right_and_compile(mixers, tmp_path):
    cases = [f"{m},{form},{direction},{tokens}" for m in mixers for form, tokens, direction in CASES[m]]
    command = [sys.executable, "-m", "tools.gpu.interpret", str(tmp_path), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["stage"] for row in rows] == ["forward", "backward"] * len(cases)
    for case, row in zip([case for case in cases for _ in range(2)], rows):
        assert "unsupported" not in row, (case, row)
        assert row["error"] <= TOLERANCE, (case, row)
        assert all("linalg_solve_triangular" in name for name in row["fallbacks"]), (case, row)  # the delta rule's
    kernels = sorted(tmp_path.glob("*.json"))
    assert len(kernels) == len(rows)
    for path in kernels:
        compile_kernels(json.loads(path.read_text()), TARGETS["h100"])
