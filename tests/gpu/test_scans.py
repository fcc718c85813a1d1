"""Steps of selective scans: found in a graph, and counted."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lion.layers.mixers import VimMixer
from tools.gpu import scans
from tools.gpu.graphs import fake_module, trace
from tools.gpu.lower import lower
from tools.gpu.targets import TARGETS


@pytest.mark.slow
def test_the_steps_of_a_loop_are_counted_in_the_cost_of_its_graph(monkeypatch):
    monkeypatch.setattr(scans, "TOKENS_ELSEWHERE", 4)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    layer = fake_module(VimMixer(32, 2), mode)
    with mode:
        graphs = trace(layer, torch.randn(2, 11, 32, requires_grad=True))
    assert [graph.stage for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        ((step, count),) = scans.steps_of(graph.module)
        assert (step.stage, count) == (graph.stage, 3)
        whole, each = (lower(part, TARGETS["h100"]) for part in (graph, step))
        assert len(whole.fallbacks) == 1 and not each.fallbacks  # the loop is one operator of the graph
        assert whole.cost.launches > 3 * each.cost.launches >= 3 and whole.cost.moved > 3 * each.cost.moved
        assert each.cost.launches < 8  # and not one for each token
