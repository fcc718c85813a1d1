"""Steps of selective scans: found in a graph, and counted."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lion.ops.selective_scan import selective_scan
from tools.gpu import scans
from tools.gpu.graphs import trace
from tools.gpu.lower import lower
from tools.gpu.targets import TARGETS


def scanned(x, dt, A, B, C):
    return selective_scan(x, dt, -A.exp(), B, C)[0].square()


@pytest.mark.slow
def test_the_steps_of_a_loop_are_counted_in_the_cost_of_its_graph(monkeypatch):
    monkeypatch.setattr(scans, "TOKENS_ELSEWHERE", 4)
    tokens = (2, 2, 11)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [(*tokens, 32), (*tokens, 32), (2, 32, 16), (*tokens, 16), (*tokens, 16)]
        graphs = trace(scanned, *[torch.rand(shape, requires_grad=True) for shape in shapes])
    assert [graph.stage for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        ((step, count),) = scans.steps_of(graph.module)
        assert (step.stage, count) == (graph.stage, 3)
        whole = lower(graph, TARGETS["h100"])
        each = lower(step, TARGETS["h100"])
        assert len(whole.fallbacks) == 1  # the loop is one operator of the graph
        assert not each.fallbacks
        assert whole.cost.launches > 3 * each.cost.launches >= 3
        assert whole.cost.moved > 3 * each.cost.moved
        assert each.cost.launches < 8  # and not one for each token
