"""Tests of the estimates for meshes of GPUs, against formulas."""

import pytest

from lion.runs import build_on_meta, count_parameters
from lion.trainer.plan import make_plan
from tests.helpers import assert_in, printed, refuse
from tools.compose import describe_data, make_task, resolve
from tools.mesh import Mesh, largest, memory_of, meshes, on_mesh, time_of
from tools.meta import Pass, count_pass

SMALL = "model.dim=32 model.depth=2 model.num_heads=2 trainer.batch_size=8 trainer.micro_batch=2"
DROPOUT = ("model.dropout", "model.attention.score_dropout")


def described(name, *overrides):
    """Return recipe, task and number of samples of a small BERT."""
    recipe = resolve(name, [*SMALL.split(), *overrides])
    info, samples, _ = describe_data(recipe, look=False)
    return recipe, make_task(recipe, info), samples


@pytest.fixture(scope="module")
def bert():
    return described("mlm_tiny_lion_s", "trainer.precision=bf16")


@pytest.mark.slow
def test_the_exchange_of_states_is_that_of_the_formula(bert):
    recipe, task, _ = bert
    whole = count_pass(task, recipe, 2)
    assert whole == Pass(count_pass(task, recipe, 1).flops * 2, 0, 0)
    layers, rows, heads, width = 2, 2, 2, 16
    numbers = heads * (2 * width**2 + 2 * width + 1)  # S, z and a decay, in both directions
    for sharing in (2, 4):
        shared = count_pass(task, recipe, 2, sharing)
        assert shared.received == 2 * layers * rows * 4 * numbers * (sharing - 1)  # forward and backward
        assert shared.calls == 2 * layers
        assert shared.flops < whole.flops


def test_the_exchange_of_heads_is_that_of_the_formula():
    """Check an all-to-all of q, k and v and one of outputs in each layer, and the same backward."""
    recipe, task, _ = described("mlm_tiny_softmax", *(f"{name}=0" for name in DROPOUT))
    rows, layers, width, sharing = 2, 2, 32, 2
    shared = count_pass(task, recipe, rows, sharing)
    assert shared.calls == 2 * layers * 4
    of_others = (sharing - 1) / sharing
    assert shared.received == 2 * layers * 4 * rows * 4 * recipe.data.length / sharing * width * of_others


def test_memory_and_time_of_a_gpu(bert):
    recipe, task, samples = bert
    model, mesh, one = build_on_meta(task, recipe.model), Mesh(2, 2), Pass(8e9, 4, 1000.0)
    every = 4 * count_parameters(model)
    blocks = [4 * count_parameters(unit) for unit in model.units()]
    whole = memory_of(model, recipe, mesh, "ddp", 1e6)
    share = memory_of(model, recipe, mesh, "fsdp", 1e6)
    assert whole == (every, every, 2 * every, every, 1e6)
    assert share == (every / 4, every / 4, every / 2, 2 * (every - sum(blocks)) + 3 * blocks[0], 1e6)
    plan = make_plan(on_mesh(recipe, mesh), samples=samples, world=4)
    assert (plan.micro, plan.accumulation) == (2, 2)
    spent = time_of(recipe, plan, mesh, "ddp", one, whole)
    states = 2 * (1000 / 450e9 + 4 * 10e-6)
    assert spent.products == pytest.approx(2 * 8e9 / (0.4 * 989e12))
    assert spent.memory == pytest.approx(2 * 10 * 1e6 / 3.35e12)
    assert spent.exchange == pytest.approx(2 * every * 3 / 4 / 450e9 + 4 * 10e-6 + states)
    assert spent.update == pytest.approx(7 * every / 3.35e12)
    assert spent.step == spent.exchange + spent.update
    assert spent._replace(memory=1.0).step == spent.products + 1 + spent.update
    sharded = time_of(recipe, plan, mesh, "fsdp", one, share)
    assert sharded.exchange == pytest.approx(5 * every * 3 / 4 / 450e9 + 10 * 10e-6 + states)
    assert largest(whole, plan, 4) == 4
    for activations, most in ((60, 2), (200, 0)):
        assert largest(whole._replace(activations=activations * 2**30), plan, 4) == most


@pytest.mark.slow
def test_show_on_a_mesh(capsys):
    assert meshes(Mesh(4, 3)) == [(4, 3), (12, 1), (6, 2), (3, 4), (2, 6)]
    more = [*(f"{name}=0.1" for name in DROPOUT), "model.depth=1", "--mesh", "2x2"]
    out = printed(capsys, "show", "mlm_tiny_lion_s", *SMALL.split(), *more)
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith(("2x2", "4x1", "1x4"))]
    assert rows == [[mesh, parallel] for mesh in ("2x2", "4x1", "1x4") for parallel in ("ddp", "fsdp")]
    assert_in(
        out,
        "in each of 4 GPUs (NVIDIA H100 SXM, 80 GiB)",
        "ms  hours",
        "an estimate",
        "sequence: 2",
        "score_dropout: 0.0",
        "estimated with model.attention.score_dropout=0, which",
    )
    assert "measured now" not in out


def test_meshes_that_are_none(capsys):
    for words, message in {
        "quickstart --mesh 8": "--mesh: expected DATAxSEQUENCE such as 8x4, got '8'",
        "dit_tiny_lightnet --mesh 2x2": "model.name: DiT does not split",
        f"mlm_tiny_lion_s {SMALL} --mesh 16x1": "cannot be divided evenly among 16",
        "quickstart --mesh 4x2 --processes 2": "--processes: a mesh has 8, leave it out",
    }.items():
        assert message in refuse(capsys, "show", *words.split())
