"""Tests of the estimates for meshes of GPUs, against formulas."""

import pytest

from lion.runs import build_on_meta, count_parameters
from lion.trainer.plan import make_plan
from tests.helpers import here, refuse
from tools.bench.sequence import Layer
from tools.compose import describe_data, make_task, resolve
from tools.mesh import Mesh, largest, memory_of, meshes, on_mesh, time_of
from tools.meta import Pass, count_pass

SMALL = ["model.dim=32", "model.depth=2", "model.num_heads=2", "trainer.batch_size=8", "trainer.micro_batch=2"]


@pytest.fixture(scope="module")
def bert():
    """Return recipe, task and number of samples of a small BERT."""
    recipe = resolve("mlm_tiny_lion_s", [*SMALL, "trainer.precision=bf16"])
    info, samples, _ = describe_data(recipe, look=False)
    return recipe, make_task(recipe, info), samples


def test_the_exchange_of_states_is_that_of_the_formula(bert):
    recipe, task, _ = bert
    whole = count_pass(task, recipe, 2)
    assert whole == Pass(count_pass(task, recipe, 1).flops * 2, 0, 0)
    for sharing in (2, 4):
        shared = count_pass(task, recipe, 2, sharing)
        layers, rows, numbers = 2, 2, Layer(2, 16).exchanged()
        assert shared.received == 2 * layers * rows * 4 * numbers * (sharing - 1)  # forward and backward
        assert shared.calls == 2 * layers and shared.flops < whole.flops


def test_the_exchange_of_heads_is_that_of_the_formula():
    """Check an all-to-all of q, k and v and one of outputs in each layer, and the same backward."""
    recipe = resolve("mlm_tiny_softmax", [*SMALL, "model.dropout=0", "model.attention.score_dropout=0"])
    task, rows, layers = make_task(recipe, describe_data(recipe, look=False)[0]), 2, 2
    tokens, width, sharing = recipe.data.length, 32, 2
    shared = count_pass(task, recipe, rows, sharing)
    assert shared.calls == 2 * layers * 4
    assert shared.received == 2 * layers * 4 * rows * 4 * tokens / sharing * width * (sharing - 1) / sharing


def test_memory_and_time_of_a_gpu(bert):
    recipe, task, samples = bert
    model, mesh, one = build_on_meta(task, recipe.model), Mesh(2, 2), Pass(8e9, 4, 1000.0)
    every, blocks = 4 * count_parameters(model), [4 * count_parameters(unit) for unit in model.units()]
    whole, share = (memory_of(model, recipe, mesh, parallel, 1e6) for parallel in ("ddp", "fsdp"))
    assert whole == (every, every, 2 * every, every, 1e6)
    assert share == (every / 4, every / 4, every / 2, 2 * (every - sum(blocks)) + 3 * blocks[0], 1e6)
    plan = make_plan(on_mesh(recipe, mesh), samples=samples, world=4)
    assert (plan.micro, plan.accumulation) == (2, 2)
    spent = time_of(recipe, plan, mesh, "ddp", one, whole)
    states = 2 * (1000 / 450e9 + 4 * 10e-6)
    assert spent.products == pytest.approx(2 * 8e9 / (0.4 * 989e12))
    assert spent.exchange == pytest.approx(2 * every * 3 / 4 / 450e9 + 4 * 10e-6 + states)
    assert spent.update == pytest.approx(7 * every / 3.35e12)
    assert spent.step == spent.exchange + spent.update
    sharded = time_of(recipe, plan, mesh, "fsdp", one, share)
    assert sharded.exchange == pytest.approx(5 * every * 3 / 4 / 450e9 + 10 * 10e-6 + states)
    assert largest(whole, plan, 4) == 4 and largest(whole._replace(activations=60 * 2**30), plan, 4) == 2
    assert largest(whole._replace(activations=200 * 2**30), plan, 4) == 0


def test_show_on_a_mesh(capsys):
    assert meshes(Mesh(4, 3)) == [(4, 3), (12, 1), (6, 2), (3, 4), (2, 6)]
    dropout = ["model.dropout=0.1", "model.attention.score_dropout=0.1"]
    assert here("show", "mlm_tiny_lion_s", *SMALL, *dropout, "model.depth=1", "--mesh", "2x2") == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("2x2", "4x1", "1x4"))]
    assert [" ".join(row[:2]) for row in rows] == ["2x2 ddp", "2x2 fsdp", "4x1 ddp", "4x1 fsdp", "1x4 ddp", "1x4 fsdp"]
    assert "in each of 4 GPUs (NVIDIA H100 SXM, 80 GiB)" in out and "an estimate" in out and "sequence: 2" in out
    assert "measured now" not in out and "score_dropout: 0.0" in out
    assert "estimated with model.attention.score_dropout=0, which" in out
    assert "--mesh: expected DATAxSEQUENCE such as 8x4, got '8'" in refuse(capsys, "show", "quickstart", "--mesh", "8")
    assert "model.name: DiT does not split" in refuse(capsys, "show", "dit_tiny_lightnet", "--mesh", "2x2")
    assert "cannot be divided evenly among 16" in refuse(capsys, "show", "mlm_tiny_lion_s", *SMALL, "--mesh", "16x1")


def test_a_mesh_has_its_own_number_of_processes(capsys):
    said = refuse(capsys, "show", "quickstart", "--mesh", "4x2", "--processes", 2)
    assert "--processes: a mesh has 8, leave it out" in said
