"""Blocks of every kind of model: their training graphs lower to GPU code without graph breaks, and compile.

By default one block of text is lowered (that of DeiT in test_budgets.py) and one of images is compiled. With `--every`,
all blocks are compiled for both targets.
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
DEIT = "deit_tiny_lion_s", ["data.image_size=[64, 64]"]
DIT = "dit_tiny_lightnet", []
BOTH = ("a100", "h100")
GPT = "gpt2_tiny_lion_s", []
OTHERS = [
    ("mlm_tiny_lion_d", []),
    ("lra_image_lion_lit", ["data.side=8"]),
    ("lightnet_tiny", ["data.image_size=[64, 64]"]),
    ("lra_image_lion_s", ["data.side=8"]),  # vector decays take 30 s
    ("lra_image_lion_s", ["data.side=16", "model.attention.normalize=none"]),  # sums over tokens are split
    ("hydra_small", ["data.image_size=[64, 64]"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes, targets",
    [
        (*DIT, BOTH[1:]),
        (*GPT, ()),
        *(pytest.param(*item, BOTH, marks=pytest.mark.every) for item in (DEIT, DIT, GPT, *OTHERS)),
    ],
)
def test_training_graphs_of_a_block_lower_and_compile(name, changes, targets):
    recipe = resolve(name, [*SMALL, *changes])
    step = trace_step(recipe, make_task(recipe, describe_data(recipe, look=False)[0]), batch=2)
    assert {graph.stage for graph in step.graphs} == {"forward", "backward"}
    for graph in step.graphs:
        for target in targets or BOTH[1:]:
            program = lower(graph, TARGETS[target])
            assert program.kernels and not program.fallbacks, program.fallbacks
            if targets:
                compile_kernels(program.kernels, TARGETS[target])
