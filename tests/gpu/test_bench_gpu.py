"""`bench gpu`: estimates and refused arguments; its report is in test_budgets.py."""

import sys

import pytest
import torch

from tests.helpers import refuse
from tools.bench import engine
from tools.gpu import targets
from tools.gpu.cost import Cost, fused_softmax
from tools.gpu.step import Counter
from tools.gpu.targets import GAP, LAUNCH, TARGETS

H100 = TARGETS["h100"]


def test_the_least_time_is_that_of_bytes_or_of_products_and_of_launches():
    bytes_alone, products_alone = Cost(moved=int(H100.bandwidth)), Cost(flops=int(H100.bf16))
    assert bytes_alone.seconds(H100, torch.bfloat16) == pytest.approx(1)
    assert products_alone.seconds(H100, torch.bfloat16) == pytest.approx(1)
    assert (bytes_alone + products_alone).seconds(H100, torch.bfloat16) == pytest.approx(1)
    launches = Cost(launches=600, library=400)
    assert launches.seconds(H100, torch.bfloat16) == pytest.approx(1000 * GAP)
    assert launches.seconds(H100, torch.bfloat16, graphs=False) == pytest.approx(1000 * LAUNCH)
    assert (launches * 2).calls == 2000


def test_softmax_moves_four_tensors_forward_and_nine_backward():
    shape, tensor = (2, 3, 100, 64), 2 * 3 * 100 * 64 * 2
    forward, backward = fused_softmax(shape, torch.bfloat16).values()
    assert forward.moved == 4 * tensor + 4 * 2 * 3 * 100 and backward.moved == 9 * tensor + 3 * 4 * 2 * 3 * 100
    assert forward.flops == 4 * 2 * 3 * 100 * 100 * 64 and backward.flops == 2.5 * forward.flops


@pytest.mark.slow
def test_bytes_of_operators_that_write_in_place():
    x, y, z = torch.zeros(3, 1000).unbind()
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.zeros(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    for run, tensors in (
        (lambda: x + y, 3),
        (lambda: x.add_(y), 3),
        (lambda: x.addcmul_(y, z), 4),
        (lambda: x.copy_(y), 2),
        (optimizer.step, 7),  # reads weights, gradients and two moments, and writes all but the gradients
    ):
        with Counter() as counted:
            run()
        assert tensors * 4000 <= counted.cost.moved < tensors * 4000 + 100, tensors


def test_what_it_refuses(capsys, monkeypatch, tmp_path):
    assert "did you mean 'lion_s'" in refuse(capsys, "bench", "gpu", "lion_q")
    assert "--target: invalid choice: 'h300'" in refuse(capsys, "bench", "gpu", "lion_s", "--target", "h300")
    monkeypatch.setattr(targets, "TORCH", ((2, 1),))
    line = refuse(capsys, "bench", "gpu", "lion_s", "--out", tmp_path)
    assert f"under torch 2.1; this is {torch.__version__}" in line
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "no Triton in this environment" in refuse(capsys, "bench", "gpu", "lion_s", "--out", tmp_path)


@pytest.mark.slow
def test_what_cannot_be_traced_is_named_in_a_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "say", lambda _: None)

    def forward(self, x, *args, **kwargs):
        torch._dynamo.graph_break()
        return x

    monkeypatch.setattr("lion.layers.mixers.LionAttention.forward", forward)
    line = refuse(capsys, "bench", "gpu", "deit_tiny_lion_lit", "--batch", "1", "--out", tmp_path)
    assert "deit_tiny_lion_lit: cannot be traced" in line
