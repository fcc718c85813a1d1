"""The report of `bench gpu`, and upper bounds on the calls and bytes of the code that Inductor generates for a GPU.

The bounds fail if a change breaks fusion, falls back to eager operators, or computes in float64 over pairs of tokens.
They hold for the versions of torch below; with other versions, the tests of bounds are skipped.
"""

import contextlib
import io
import json
import math
import re
from collections import defaultdict

import pytest
import torch

from tests.helpers import ROOT
from tools.bench import gpu
from tools.gpu.cost import Cost, total
from tools.gpu.lower import lower
from tools.gpu.operator import operator_graphs
from tools.gpu.targets import TARGETS

from .test_mixers import no_operator_is_eager_but_these

pytestmark = pytest.mark.slow

VERSION = ".".join(torch.__version__.split(".")[:2])
VERSIONS = ("2.14", "2.15")  # of torch, with equal counts but for the delta rule, which has fewer with 2.15
known = pytest.mark.skipif(VERSION not in VERSIONS, reason=f"no budgets for torch {VERSION}")
SHAPE = (4, 6, 64)  # batch, heads, dim; bfloat16
# mixer, form, tokens: calls (launches and products) forward and backward, and bytes of both in units of q
BUDGETS = {
    ("lion_lit", "full", 197): (6, 8, 26.5),
    ("lion_lit", "full", 1024): (6, 8, 25.0),
    ("lion_d", "full", 197): (9, 15, 72.0),
    ("lion_s", "full", 197): (9, 14, 74.5),
    ("lion_lit", "chunk", 1024): (22, 25, 100.5),
    ("lion_s", "chunk", 1024): (22, 38, 112.0),
    ("gated_deltanet", "chunk", 1024): (21, 23, 231.0),
    ("lion_s_vector", "full", 64): (16, 21, 131.5),
    ("gla", "chunk", 1024): (30, 45, 258.0),
    ("gla_forward", "chunk", 1024): (21, 29, 186.0),
}
DEFAULT = [("lion_lit", "full", 197), ("lion_s", "full", 197), ("lion_s", "chunk", 1024)]
# calls forward and backward, and MB of both, of a block of DeiT-S with Lion-S, 4 samples
BLOCK, DEPTH = (29, 49, 168.0), 3


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Report an operator and a step; return rows by name, what is written and printed, and programs by stage."""
    folder = tmp_path_factory.mktemp("gpu")
    programs = defaultdict(list)

    def kept(*args):
        program = lower(*args)
        programs[program.stage].append(program)
        return program

    shallow = folder / "deit_small_lion_s.yaml"  # all blocks are alike
    shallow.write_text(f"extends: {ROOT / 'recipes' / shallow.name}\nmodel: {{depth: {DEPTH}}}\n")
    command = f"lion_s {shallow} --length 197 --form full --batch 4 --out".split()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("tools.gpu.lower.lower", kept)
        patch.setattr("tools.gpu.step.lower", kept)
        assert gpu.main([*command, str(folder)]) == 0
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    texts = (folder / "gpu.md").read_text(), out.getvalue()
    return {row["name"]: row for row in rows}, texts, programs


def costs_of(row):
    return {part: Cost(**cost) for part, cost in row["parts"].items()}


def test_an_operator_and_a_step_are_reported(report):
    rows, (text, printed), _ = report
    assert set(rows) == {"lion_s", "deit_small_lion_s"}
    operator, step = costs_of(rows["lion_s"]), costs_of(rows["deit_small_lion_s"])
    assert set(operator) == {"forward", "backward"}
    assert set(step) == {"forward", "backward", "around"}
    for cost in (*operator.values(), *step.values()):
        assert cost.moved > 0
    weights = step["around"].moved / 4  # the optimizer reads and writes 7 float32 numbers per parameter
    assert weights > 7 * 6_000_000
    for words in ("estimates", "| lion_s | full | 197 |", "| deit_small_lion_s | 788 |"):
        assert words in text, words
    assert "x softmax" in printed


def check_budget(key, programs):
    """Compare the programs of an operator, forward and backward, with their budget."""
    _, _, length = key
    batch, heads, dim = SHAPE
    calls_forward, calls_backward, moved = BUDGETS[key]
    forward, backward = programs
    assert (forward.stage, backward.stage) == ("forward", "backward")
    assert forward.cost.calls <= calls_forward
    assert backward.cost.calls <= calls_backward
    units = total(program.cost for program in programs).moved / (2 * batch * heads * length * dim)
    assert units <= moved
    for program in programs:
        assert program.cost.kernels == len(program.kernels) > 0
        assert no_operator_is_eager_but_these(program.fallbacks)
        for name, source in program.kernels.items():
            assert "tl.atomic_add" not in source, f"{name}: gradients would differ from run to run"
            if "float64" in source:
                assert elements(source) <= 4 * batch * heads * (length + 64), f"{name}: float64 over more than tokens"


def elements(source: str) -> int:
    """Return the number of elements that a kernel computes, each dimension rounded up to a power of two."""
    hints = re.search(r"size_hints=\{(.*?)\}", source)[1]
    return math.prod(map(int, re.findall(r"'\w+': (\d+)", hints)))


def programs_of(mixer, form, length):
    batch, heads, dim = SHAPE
    graphs = operator_graphs(mixer, form, (batch, heads, length, dim), torch.bfloat16)
    return [lower(graph, TARGETS["h100"]) for graph in graphs]


@known
@pytest.mark.parametrize("key", DEFAULT)
def test_calls_and_bytes_of_lion_stay_within_their_budget(key, report):
    programs = report[2]
    reported = key == ("lion_s", "full", 197)
    check_budget(key, [programs["forward"][0], programs["backward"][0]] if reported else programs_of(*key))


@known
@pytest.mark.every
@pytest.mark.parametrize("key", [key for key in BUDGETS if key not in DEFAULT])
def test_calls_and_bytes_of_all_operators_stay_within_their_budget(key):
    check_budget(key, programs_of(*key))


@known
def test_the_blocks_of_a_training_step_stay_within_their_budget(report):
    costs = costs_of(report[0]["deit_small_lion_s"])
    forward, backward = costs["forward"], costs["backward"]
    assert forward.fallbacks == backward.fallbacks == costs["around"].fallbacks == 0
    assert forward.calls <= DEPTH * BLOCK[0]
    assert backward.calls <= DEPTH * BLOCK[1]
    assert forward.moved + backward.moved <= DEPTH * BLOCK[2] * 1e6
    tokens, pairs, dim, heads = 4 * 197, 4 * 197 * 200, 384, 6  # keys are padded
    weights = 12 * dim**2 + dim * heads  # of the block's products, among them the gates'
    assert forward.flops == DEPTH * (2 * tokens * weights + 2 * 2 * pairs * dim)
