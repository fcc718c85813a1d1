import copy
import json
import os
import signal

import pytest
import torch

from lion.recipe import dump_recipe, load_recipe
from lion.runs import load
from lion.trainer.log import cut_metrics
from tests.helpers import ended, state_of, tiny_recipe
from tests.layers.helpers import close
from tests.processes import Command, in_ranks
from tests.trainer import toys
from tests.trainer.helpers import (
    are_same,
    assert_close,
    before_steps,
    differing,
    events_of,
    lines,
    logged,
    stopped_at,
    train,
    trainer,
    wait_for,
)
from tools.compose import resolve

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_a_stopped_run_ends_bit_for_bit_like_a_straight_one(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 12, "eval_every": 5, "ema": 0.9, "batch_size": 128})
    straight = train(path, tmp_path / "a")  # of 8 steps per epoch
    for stop in (2, 6, 10):  # twice within the first epoch, once within the second
        stopped = train(path, tmp_path / "b", stop_at=stop)
        assert stopped.state.step == stop
    resumed = train(path, tmp_path / "b")
    assert are_same(straight.model, resumed.model)
    a, b = (state_of(tmp_path / run) for run in "ab")
    assert straight.state.best == resumed.state.best and torch.equal(a["random"][0]["torch"], b["random"][0]["torch"])
    assert not differing(a["ema"], b["ema"])
    assert logged(tmp_path / "a", "train", "step", "loss") == logged(tmp_path / "b", "train", "step", "loss")


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
    t = toys.trainer(tmp_path / "run", steps=2)
    weights = []

    def keep():
        weights.append([p.detach().clone() for p in t.model.parameters()])

    assert before_steps(t, keep).fit()
    keep()
    for start, one, two, average in zip(*weights, t.ema.parameters(), strict=True):
        close(average, 0.81 * start + 0.09 * one + 0.1 * two)
        assert average.grad_fn is None and not average.requires_grad


@pytest.mark.slow
def test_accumulation_equals_the_big_batch(tmp_path):
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer={"clip_grad": 1.0, "steps": 4})
    expected = train(path, tmp_path / "big").model.state_dict()
    for micro in (8, 16):
        got = train(path, tmp_path / f"{micro}", f"trainer.micro_batch={micro}")
        assert_close(got.model.state_dict(), expected)


@pytest.mark.slow
def test_best_is_chosen_on_val_and_everything_is_logged(tmp_path):
    """Check the lines of the log, and the curves, images and decays for TensorBoard."""
    path = tiny_recipe(tmp_path, trainer={"steps": 8, "eval_every": 2, "ema": 0.5})
    t = train(path, tmp_path / "run")
    val = dict(logged(tmp_path / "run", "val", "step", "top1"))
    assert list(val) == [2, 4, 6, 8] and t.state.best["value"] == max(val.values()) == val[t.state.best["step"]]
    assert logged(tmp_path / "run", "val_ema", "step") == [2, 4, 6, 8]
    first = lines(tmp_path / "run")[0]
    names = {"loss", "lr", "gradient_norm", "images_per_second", "data_wait_share", "memory_mib", "compiled_graphs"}
    assert first["kind"] == "train" and names <= first.keys()
    assert state_of(tmp_path / "run", "best")["step"] == t.state.best["step"]
    events = events_of(tmp_path / "run")
    tags = events.Tags()
    assert tags["images"] == ["inputs"]
    assert tags["histograms"] == ["λ/blocks.0", "λ/blocks.1"]
    assert max(tags["scalars"]) < min(tags["histograms"]), "metrics are shown first"
    shown = sorted(tags["scalars"])
    first = ["best/val_ema_top1", "best/val_top1", "loss/train", "loss/val", "loss/val_ema", "rate/lr"]
    assert shown[: len(first)] == first and "val/top1" not in shown
    assert [e.step for e in events.Scalars("loss/train")] == [2, 4, 6, 8]


def test_a_signal_during_evaluation_costs_no_evaluation(tmp_path):
    """Send a signal in the step before an evaluation; steps 2, 4 and 6, the last, are evaluated."""
    straight = toys.trainer(tmp_path / "straight")
    assert straight.fit()
    for stop in (2, 6):
        run = tmp_path / str(stop)
        stopped = stopped_at(toys.trainer(run), stop)
        assert not stopped.fit() and stopped.state.step == stop and stopped.state.evaluated < stop
        resumed = toys.trainer(run)
        assert resumed.fit() and resumed.state.best == straight.state.best and resumed.state.evaluated == 6
        assert logged(run, "val", "step", "loss") == logged(tmp_path / "straight", "val", "step", "loss")


def test_cut_metrics_drops_what_came_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(path, lambda line: line["step"] <= 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.slow
def test_load_gives_the_best_weights(tmp_path):
    recipe = resolve(tiny_recipe(tmp_path))
    t = trainer(recipe, tmp_path / "run")
    t.fit()
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    model = load(tmp_path / "run", checkpoint="last")
    assert not model.training and are_same(model, t.model)
    assert load_recipe(tmp_path / "run" / "recipe.yaml").model == recipe.model


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, number):
    path = tiny_recipe(tmp_path, trainer={"steps": 40_000, "save_every": 1000, "eval_every": 1000})
    run = tmp_path / "runs" / "tiny"
    process = Command("train", path)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) > 3, process)
    os.kill(process.pid, number)
    done = process.wait(60)
    assert done.returncode == 130 and "the same command resumes from there" in done.stdout + done.stderr, done
    assert 0 < state_of(run)["step"] < 40_000 and not list(run.glob(".*tmp"))


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_equal_one(tmp_path):
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer={"micro_batch": 16})
    alone = train(path, tmp_path / "one")
    ended(in_ranks(2, "train", path))
    folder = tmp_path / "runs" / "tiny"
    assert_close(state_of(folder)["model"], alone.model.state_dict())
    one, two = (logged(run, "val", "top1") for run in (tmp_path / "one", folder))
    assert one == pytest.approx(two, abs=0.01)
    assert json.loads((folder / "summary.json").read_text())["forms"].keys() == {"full", "chunk", "rnn", "rnn_64"}
    first, second = (each["torch"] for each in state_of(folder)["random"])
    assert not torch.equal(first, second), "both processes draw the same noise"


def test_the_gradient_norm_is_that_of_the_mean_loss(tmp_path):
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer={"steps": 1, "log_every": 1})
    whole = trainer(resolve(path), tmp_path / "run")
    run = trainer(resolve(path, ["trainer.micro_batch=16"]), tmp_path / "run")
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
    assert " 1/3 [00:00<?, ?step/s]" in capsys.readouterr().err
