import copy
import json
import os
import re
import signal
import time

import pytest
import torch

from lion.recipe import dump_recipe, load_recipe
from lion.runs import load
from lion.trainer.log import cut_metrics
from tests.helpers import state_of, tiny_recipe
from tests.processes import Command, in_ranks
from tests.trainer.helpers import lines, same, train, trainer
from tools.compose import resolve

pytest.importorskip("sklearn")


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_stopped_run_ends_bit_for_bit_like_a_straight_one(tmp_path, ema):
    path = tiny_recipe(tmp_path, trainer={"steps": 24, "eval_every": 10, "ema": ema})  # 16 steps per epoch
    straight = train(path, tmp_path / "a")
    for stop in (5, 11, 19):  # twice within the first epoch, once within the second
        stopped = train(path, tmp_path / "b", stop_at=stop)
        assert stopped.state.step == stop
    resumed = train(path, tmp_path / "b")
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    a, b = (state_of(tmp_path / run) for run in "ab")
    assert straight.state.best == resumed.state.best and torch.equal(a["random"][0]["torch"], b["random"][0]["torch"])
    if ema:
        assert same(a["ema"], b["ema"])
    losses = [[(x["step"], x["loss"]) for x in lines(tmp_path / run) if x["kind"] == "train"] for run in "ab"]
    assert losses[0] == losses[1]


def test_settings_of_compilation_reach_the_compiler(tmp_path, monkeypatch):
    given = []
    for name in ("load_compiled", "save_compiled"):
        monkeypatch.setattr(f"lion.trainer.loop.{name}", lambda file, name=name: given.append((name, file)))
    compiler = "lion.trainer.loop.compile_blocks"
    monkeypatch.setattr(compiler, lambda _, **how: given.append(("compile_blocks", how)) or True)
    path = tiny_recipe(tmp_path, trainer={"compile": True, "steps": 1})
    settings = "trainer.memory_budget=0.5", "trainer.autotune=true", "trainer.compiled_code=code"
    train(path, tmp_path / "run", *settings)
    how = {"memory_budget": 0.5, "autotune": True}
    assert given == [("load_compiled", "code"), ("compile_blocks", how), ("save_compiled", "code")]


def test_the_average_follows_the_weights(tmp_path):
    t = trainer(resolve(tiny_recipe(tmp_path, trainer={"steps": 2, "ema": 0.9})), tmp_path / "run")
    weights, step = [[p.detach().clone() for p in t.model.parameters()]], t.train_step

    def train_step(*args):
        out = step(*args)
        weights.append([p.detach().clone() for p in t.model.parameters()])
        return out

    t.train_step = train_step
    t.fit()
    for start, one, two, average in zip(*weights, t.ema.parameters()):
        torch.testing.assert_close(average, 0.81 * start + 0.09 * one + 0.1 * two)


@pytest.mark.parametrize("micro", [8, 16, 64])
def test_accumulation_equals_the_big_batch(tmp_path, micro):
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer={"clip_grad": 1.0})
    expected = train(path, tmp_path / "big").model.state_dict()
    got = train(path, tmp_path / "small", f"trainer.micro_batch={micro}").model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-5)


def test_best_is_chosen_on_val_and_metrics_are_complete(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 12, "ema": 0.5})
    t = train(path, tmp_path / "run")
    found = lines(tmp_path / "run")
    val = {x["step"]: x["top1"] for x in found if x["kind"] == "val"}
    assert list(val) == [3, 6, 9, 12] and t.state.best["value"] == max(val.values()) == val[t.state.best["step"]]
    assert [x["step"] for x in found if x["kind"] == "val_ema"] == [3, 6, 9, 12]
    first = next(x for x in found if x["kind"] == "train")
    names = {"loss", "lr", "gradient_norm", "images_per_second", "data_wait_share", "memory_mib", "compiled_graphs"}
    assert names <= first.keys()
    assert state_of(tmp_path / "run", "best")["step"] == t.state.best["step"]


def test_tensorboard_holds_curves_images_and_decays(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_recipe(tmp_path), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = events.Tags()
    assert tags["images"] == ["inputs"]
    assert tags["histograms"] == [f"λ/blocks.{i}" for i in range(2)]
    assert max(tags["scalars"]) < min(tags["histograms"]), "metrics are shown first"
    assert {"train/loss", "train/lr", "val/top1"} <= set(tags["scalars"])
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6]


@pytest.mark.parametrize("stop_at", [3, 6])
def test_a_signal_during_evaluation_costs_no_evaluation(tmp_path, stop_at):
    """Send a signal in the step before an evaluation; steps 3 and 6, the last, are evaluated."""
    path = tiny_recipe(tmp_path)
    straight = train(path, tmp_path / "a")
    stopped = train(path, tmp_path / "b", stop_at=stop_at)
    assert stopped.state.step == stop_at and stopped.state.evaluated < stop_at
    resumed = train(path, tmp_path / "b")
    assert resumed.state.best == straight.state.best and resumed.state.evaluated == 6
    values = [[(x["step"], x["top1"]) for x in lines(tmp_path / run) if x["kind"] == "val"] for run in "ab"]
    assert values[0] == values[1]


def test_cut_metrics_drops_what_came_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(path, lambda line: line["step"] <= 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_load_gives_the_best_weights(tmp_path):
    recipe = resolve(tiny_recipe(tmp_path))
    t = trainer(recipe, tmp_path / "run")
    t.fit()
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    model = load(tmp_path / "run", checkpoint="last")
    assert not model.training and same(model.state_dict(), t.model.state_dict())
    assert load_recipe(tmp_path / "run" / "recipe.yaml").model == recipe.model


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, number):
    path = tiny_recipe(tmp_path, trainer={"steps": 40_000, "save_every": 1000, "eval_every": 1000})
    process = Command("train", path)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.time() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.time() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, number)
    done = process.wait(60)
    assert done.returncode == 130 and "the same command resumes from there" in done.stdout + done.stderr, done
    step = state_of(tmp_path / "runs" / "tiny")["step"]
    assert 0 < step < 40_000 and not list((tmp_path / "runs" / "tiny").glob(".*tmp"))


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_equal_one(tmp_path):
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer={"micro_batch": 16})
    expected = train(path, tmp_path / "one").model.state_dict()
    done = in_ranks(2, "train", path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    got = state_of(folder)["model"]
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-5)
    one, two = ([x for x in lines(f) if x["kind"] == "val"] for f in (tmp_path / "one", folder))
    assert [x["top1"] for x in one] == pytest.approx([x["top1"] for x in two], abs=0.01)
    assert json.loads((folder / "summary.json").read_text())["forms"].keys() == {"full", "chunk", "rnn", "rnn_64"}
    first, second = (each["torch"] for each in state_of(folder)["random"])
    assert not torch.equal(first, second), "both processes draw the same noise"


@pytest.mark.parametrize("micro", [64, 16])
def test_the_gradient_norm_is_that_of_the_mean_loss(tmp_path, micro):
    changes = {"trainer": {"steps": 1, "log_every": 1, "micro_batch": micro}}
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, **changes)
    run, whole = (trainer(resolve(path, given), tmp_path / "run") for given in ([], ["trainer.micro_batch=64"]))
    model = copy.deepcopy(run.model).train()
    loss, weight = run.task.loss(model, next(iter(whole.data.train(0))))
    (loss / weight).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    run.fit()
    assert lines(tmp_path / "run")[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_run_is_trained_and_evaluated_in_its_precision(tmp_path):
    changes = {"model": {"mixer": "softmax"}, "trainer": {"steps": 3, "precision": "bf16"}}
    run = trainer(resolve(tiny_recipe(tmp_path, **changes)), tmp_path / "run")
    seen = {True: set(), False: set()}
    run.model.head.register_forward_hook(lambda module, _, out: seen[module.training].add(out.dtype))
    run.fit()
    assert seen == {True: {torch.bfloat16}, False: {torch.bfloat16}}


def test_the_first_step_gives_no_rate(tmp_path, capsys):
    """Check that the bar estimates no remaining time from the first step, which may include compilation."""
    train(tiny_recipe(tmp_path, trainer={"steps": 3}), tmp_path / "run")
    first = re.search(r" 1/3 \[[^]]*\]", capsys.readouterr().err)
    assert first and "[00:00<?, ?step/s]" in first[0]
