"""The GPU's code of every mixer's layer: it is made, compiles for sm_90, and is right.

The generated kernels run in Triton's interpreter, on CPU tensors, forward and backward, and are held against the same
graph on the CPU. Small sizes: 16 features, 2 heads, 24 tokens in full, 40 in chunks of 16. All forms are compiled, for
sm_80 and sm_90, by `./run.sh bench gpu --compile`.
"""

import json
import subprocess
import sys

import pytest

from lion.layers import MIXERS
from tests.helpers import ROOT
from tools.gpu.kernels import compile_kernels
from tools.gpu.targets import TARGETS

TOLERANCE = 1e-4  # of the largest value, float32; gradients of decays are sums over all pairs
FULL, CHUNK = ("full", 24), ("chunk", 40)
CASES = {mixer: [(*FULL, "both")] for mixer in MIXERS}
for mixer in ("lion_lit", "lion_s", "gla", "deltanet"):  # a mixer of each kind of operator: gates alone differ
    CASES[mixer].append((*CHUNK, "both"))
for mixer in ("lion_s", "lightnet"):
    CASES[mixer].append((*FULL, "forward"))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("mixer", MIXERS)
def test_generated_kernels_are_right_and_compile(mixer, tmp_path):
    cases = [f"{mixer},{form},{direction},{tokens}" for form, tokens, direction in CASES[mixer]]
    command = [sys.executable, "-m", "tools.gpu.interpret", str(tmp_path), *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["stage"] for row in rows] == ["forward", "backward"] * len(cases)
    for row in rows:
        assert "unsupported" not in row, row
        assert row["error"] <= TOLERANCE, row
        assert all("linalg_solve_triangular" in name for name in row["fallbacks"]), row  # of the delta rule; no kernel
    for path in sorted(tmp_path.glob("*.json")):
        compile_kernels(json.loads(path.read_text()), TARGETS["h100"])
