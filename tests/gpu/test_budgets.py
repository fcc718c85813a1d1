"""Upper bounds on the calls and bytes of the code that Inductor generates for a GPU.

These tests fail if a change breaks fusion, falls back to eager operators, or computes in float64 over pairs of tokens.
The counts hold for the versions of torch below; with other versions, the tests are skipped.
"""

import math
import re

import pytest
import torch

from tools.compose import describe_data, make_task, resolve
from tools.gpu.cubins import compile_kernels
from tools.gpu.lower import lower
from tools.gpu.operator import operator_graphs
from tools.gpu.step import trace_step
from tools.gpu.targets import TARGETS

from .test_mixers import OPERATORS

VERSION = ".".join(torch.__version__.split(".")[:2])
SHAPE = (4, 6, 64)  # batch, heads, dim; bfloat16
VERSIONS = ("2.14", "2.15")  # of torch, with equal counts but for the delta rule, which has fewer with 2.15
# mixer, form, tokens: calls (launches and products) forward and backward, and bytes of both in units of q
BUDGETS = {
    ("lion_lit", "full", 197): (6, 8, 26.5),
    ("lion_lit", "full", 1024): (6, 8, 25.0),
    ("lion_d", "full", 197): (9, 15, 72.0),
    ("lion_s", "full", 197): (9, 14, 74.5),
    ("lion_lit", "chunk", 1024): (22, 25, 100.5),
    ("lion_s", "chunk", 1024): (24, 38, 113.0),
    ("gated_deltanet", "chunk", 1024): (21, 23, 231.0),
    ("lion_s_vector", "full", 64): (16, 21, 131.5),
    ("gla", "chunk", 1024): (30, 45, 258.0),
    ("gla_forward", "chunk", 1024): (21, 29, 186.0),
}

EVERY = [("lion_lit", "full", 1024), ("lion_lit", "chunk", 1024), ("gated_deltanet", "chunk", 1024)]
EVERY += [("lion_d", "full", 197), ("lion_s_vector", "full", 64)]
EVERY += [("gla", "chunk", 1024), ("gla_forward", "chunk", 1024)]
# calls forward and backward, and MB of both, of a block of DeiT-S with Lion-S, 4 samples
BLOCK = (29, 49, 168.0)


def programs_of(mixer: str, form: str, length: int, target: str = "h100"):
    """Return the programs of both stages."""
    batch, heads, dim = SHAPE
    graphs = operator_graphs(mixer, form, (batch, heads, length, dim), torch.bfloat16)
    return [lower(graph, TARGETS[target]) for graph in graphs]


known = pytest.mark.skipif(VERSION not in VERSIONS, reason=f"no budgets for torch {VERSION}")


def case(key: tuple[str, str, int]):
    return pytest.param(*key, marks=[pytest.mark.every] if key in EVERY else [])


@known
@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "form", "length"), [*map(case, BUDGETS)])
def test_calls_and_bytes_stay_within_their_budget(mixer, form, length):
    forward, backward = programs_of(mixer, form, length)
    calls_forward, calls_backward, moved = BUDGETS[mixer, form, length]
    batch, heads, dim = SHAPE
    units = (forward.cost.moved + backward.cost.moved) / (2 * batch * heads * length * dim)
    assert forward.cost.calls <= calls_forward
    assert backward.cost.calls <= calls_backward
    assert units <= moved
    for program in (forward, backward):
        assert all(any(own in name for own in OPERATORS) for name in program.fallbacks)
        for name, source in program.kernels.items():
            assert "tl.atomic_add" not in source, f"{name}: gradients would differ from run to run"
            if "float64" in source:
                assert elements(source) <= 4 * batch * heads * (length + 64), f"{name}: float64 over more than tokens"


@known
@pytest.mark.slow
def test_a_block_of_a_training_step_stays_within_its_budget():
    recipe = resolve("deit_small_lion_s", ["model.depth=2"])
    step = trace_step(recipe, make_task(recipe, describe_data(recipe, look=False)[0]), batch=4)
    ((_, depth),) = step.blocks
    assert depth == 2
    costs = step.costs(TARGETS["h100"])
    forward, backward = costs["forward"], costs["backward"]
    assert forward.fallbacks == backward.fallbacks == costs["around"].fallbacks == 0
    assert forward.calls <= depth * BLOCK[0]
    assert backward.calls <= depth * BLOCK[1]
    assert forward.moved + backward.moved <= depth * BLOCK[2] * 1e6
    tokens, pairs, dim, heads = 4 * 197, 4 * 197 * 200, 384, 6  # keys are padded
    weights = 12 * dim**2 + dim * heads  # of the block's products, among them the gates'
    assert forward.flops == depth * (2 * tokens * weights + 2 * 2 * pairs * dim)


def elements(source: str) -> int:
    """Return the number of elements that a kernel computes, each dimension rounded up to a power of two."""
    return math.prod(map(int, re.findall(r"'\w+': (\d+)", re.search(r"size_hints=\{(.*?)\}", source)[1])))


@pytest.mark.slow
def test_every_kernel_compiles_to_a_cubin():
    """Check the kernels for an A100; those for an H100 are compiled with the results of test_mixers.py."""
    for program in programs_of("lion_s", "chunk", 128, "a100"):
        assert program.cost.kernels == len(program.kernels) > 5
        compile_kernels(program.kernels, TARGETS["a100"])
