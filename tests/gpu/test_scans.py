"""Steps of selective scans: found in a graph, and counted."""

import pytest
import torch

from lion.layers.mixers import VimMixer
from lion.ops.selective_scan import TOKENS_ELSEWHERE
from tools.gpu.graphs import trace
from tools.gpu.lower import lower
from tools.gpu.scans import steps_of
from tools.gpu.targets import TARGETS


@pytest.mark.slow
def test_the_steps_of_a_loop_are_counted_in_the_cost_of_its_graph():
    length = 2 * TOKENS_ELSEWHERE + 8  # three steps
    forward, backward = trace(VimMixer(32, 2), torch.randn(2, length, 32, requires_grad=True))
    for graph, stage in ((forward, "forward"), (backward, "backward")):
        ((step, count),) = steps_of(graph.module)
        assert (step.stage, count) == (stage, 3)
        whole, each = (lower(part, TARGETS["h100"]) for part in (graph, step))
        assert len(whole.fallbacks) == 1 and not each.fallbacks  # the loop is one operator of the graph
        assert whole.cost.launches > 3 * each.cost.launches >= 3 and whole.cost.moved > 3 * each.cost.moved
        assert each.cost.launches < 10  # and not a kernel for every token
