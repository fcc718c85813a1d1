"""Blocks of every kind of model: their training graphs lower to GPU code without graph breaks, and compile.

By default only the block of DeiT is lowered, in test_budgets.py.
"""

import pytest

from tools.compose import describe_data, make_task, resolve
from tools.gpu.cubins import compile_kernels
from tools.gpu.lower import lower
from tools.gpu.step import trace_step
from tools.gpu.targets import TARGETS

SMALL = [
    "model.depth=1",
    "model.dim=64",
    "model.num_heads=2",
    "trainer.batch_size=2",
    "trainer.micro_batch=2",
    "optim.lr_batch=null",
]
SIZE = "data.image_size=[64, 64]"
BLOCKS = [
    ("dit_tiny_lightnet", []),
    ("gpt2_tiny_lion_s", []),
    ("deit_tiny_lion_s", [SIZE]),
    ("mlm_tiny_lion_d", []),
    ("lra_image_lion_lit", ["data.side=8"]),
    ("lightnet_tiny", [SIZE]),
    ("lra_image_lion_s", ["data.side=8"]),  # vector decays take 30 s
    ("lra_image_lion_s", ["data.side=16", "model.attention.normalize=none"]),  # sums over tokens are split
    ("hydra_small", [SIZE]),
]


@pytest.mark.every
@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize(("name", "changes"), BLOCKS)
def test_training_graphs_of_all_blocks_compile(name, changes, target):
    recipe = resolve(name, [*SMALL, *changes])
    info = describe_data(recipe, look=False)[0]
    step = trace_step(recipe, make_task(recipe, info), batch=2)
    assert {graph.stage for graph in step.graphs} == {"forward", "backward"}
    for graph in step.graphs:
        program = lower(graph, TARGETS[target])
        assert program.kernels and not program.fallbacks, program.fallbacks
        compile_kernels(program.kernels, TARGETS[target])
