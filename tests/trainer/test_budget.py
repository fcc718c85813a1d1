"""Tests of time-limited runs, growing batches, and their schedules."""

import logging
import signal
import subprocess
import sys
import time

import pytest
import torch

from lion.config import ConfigError
from lion.recipe import load_recipe
from lion.samples.order import Shuffled
from lion.trainer import state
from lion.trainer.diagnostics import Monitor
from lion.trainer.loader import StepSampler
from lion.trainer.optim import to_seconds, to_share
from lion.trainer.plan import make_plan
from lion.trainer.state import TrainingClock
from tests.helpers import ROOT, ended, refuse, state_of, tiny_recipe
from tests.layers.helpers import invalid
from tests.processes import in_ranks
from tests.trainer import toys
from tests.trainer.helpers import are_same, assert_close, lines, logged, stopped_at, train
from tools.compose import process_count, resolve

RAMP = {"batch_ramp": "60%", "batch_start": 4, "steps": 10}
GROWING = [4, 4, 8, 12, 12, 16, 16, 16, 16, 16]  # 4 (1 + int(4 step / 6)), cut at 16
SECOND = {"time": "0.1min", "steps": None}  # six steps of a clock with one tick per step


class Ticking(TrainingClock):
    """A clock on which every step takes a second."""

    def lap(self):
        return 1.0


def seen(trainer):
    """Train and return the batches as lists of the sums of points."""
    found, loss = [], trainer.task.loss

    def watched(model, batch):
        found.append((trainer.state.step, batch["x"].sum(1).tolist()))
        return loss(model, batch)

    trainer.task.loss = watched
    assert trainer.fit()
    return found


def test_times():
    assert [to_seconds(t) for t in ("24h", "1.5 h", "30min", "0.5min")] == [86_400, 5400, 1800, 30]
    assert [to_seconds(t) for t in ("24", 24, "24 hours", "5ep", "h", "-1h")] == [None] * 6
    assert [to_share(t, 200) for t in ("60%", "1min", 0, "0")] == [120, 60, 0, 0]
    for bad in (5, "2ep", "soon"):
        invalid(r"expected percent .* in a time-limited run", to_share, bad, 200)


def test_batches_grow_by_whole_starts_up_to_the_full_one():
    plan = make_plan(toys.settings(**RAMP), samples=64, world=2)
    assert [plan.batch(step) for step in range(10)] == GROWING and plan.samples == sum(GROWING)
    assert (plan.micro, plan.accumulation) == (2, 4)
    assert [plan.passes(step) for step in range(10)] == [n // 4 for n in GROWING]
    timed = make_plan(toys.settings(**{**RAMP, **SECOND}), samples=64, world=1)
    assert [timed.batch(at) for at in (0, 0.89, 0.91, 1.81, 2.71, 3.6, 5)] == [4, 4, 8, 12, 16, 16, 16]
    assert (timed.total, timed.samples, timed.length) == (None, None, 6)


def test_cramming_reaches_its_batch_after_60_percent():
    """Compare with recipes.md 7.4: the batch, in micro-batches of 128, as the authors' code computes it."""
    settings = toys.settings(batch_size=8192, batch_start=128, batch_ramp="60%", steps=1000)
    plan = make_plan(settings, samples=8192, world=1)
    for step in range(1000):
        assert plan.batch(step) == min(int(step * 8192 / 600 // 128 + 1) * 128, 8192)


@pytest.mark.slow
def test_growing_batches_read_the_samples_of_a_run_without_and_have_the_loss_of_the_whole_batch(tmp_path):
    straight = [x for _, xs in seen(toys.trainer(tmp_path / "straight", steps=8)) for x in xs]
    models = []
    for micro in (None, 1, 2):
        growing = toys.trainer(tmp_path / str(micro), micro_batch=micro, clip_grad=0.5, **RAMP)
        found = seen(growing)
        sizes = [sum(len(x) for step, x in found if step == s) for s in range(10)]
        assert sizes == GROWING
        # one step may contain samples of two epochs
        assert [x for _, xs in found for x in xs] == straight[: sum(GROWING)]
        models.append(dict(growing.model.named_parameters()))
    for other in models[1:]:
        assert_close(other, models[0], rtol=1e-4, atol=1e-6)


def test_processes_share_a_growing_batch():
    how = {"order": Shuffled(), "batch": 16, "micro": 2, "seed": 3, "start": 20, "end": 20 + 44}
    one = StepSampler(64, **{**how, "micro": 4}, rank=0, world=1)
    two = [StepSampler(64, **how, rank=rank, world=2) for rank in range(2)]
    assert [a + b for a, b in zip(*two)] == list(one) and len(one) == 11
    assert StepSampler(64, **{**how, "end": None}, rank=0, world=1)[10**6]  # a run of unknown length


@pytest.mark.slow
def test_a_stopped_run_of_growing_batches_ends_bit_for_bit_like_a_straight_one(tmp_path, caplog):
    """Stop within the ramp, at its end, and after it."""
    changes = {"steps": 10, "batch_start": 16, "batch_ramp": 6, "eval_every": 5, "ema": 0.9, "log_every": 1}
    path = tiny_recipe(tmp_path, schedule={"kind": "budget_triangle", "warmup": 0}, trainer=changes)
    straight = train(path, tmp_path / "a")
    for stop, workers in ((3, 0), (6, 2), (8, 0)):
        assert train(path, tmp_path / "b", stop_at=stop, workers=workers).state.step == stop
    with caplog.at_level(logging.INFO, "lion"):
        resumed = train(path, tmp_path / "b")
    assert "bit for bit what the run would have been" in caplog.text
    assert are_same(straight.model, resumed.model) and are_same(straight.ema, resumed.ema)
    sizes = [16, 16, 32, 48, 48, 64, 64, 64, 64, 64]
    for run in (tmp_path / "a", tmp_path / "b"):
        assert logged(run, "train", "batch_size") == sizes
        assert logged(run, "train", "samples") == [sum(sizes[: n + 1]) for n in range(10)]
        assert logged(run, "train", "epoch")[-1] == pytest.approx(sum(sizes) / 1024)
        assert logged(run, "train", "lr")[:2] == pytest.approx([2e-3 * 0.25, 2e-3 * (0.25 + 1 / 10)])
    assert logged(tmp_path / "a", "train", "step", "loss") == logged(tmp_path / "b", "train", "step", "loss")


def test_the_speed_counts_the_samples_that_were_taken(tmp_path, monkeypatch):
    t = toys.trainer(tmp_path / "run", **{**RAMP, "log_every": 5, "eval_every": 5})
    counted, report = [], Monitor.report

    def keep(monitor, *args):
        counted.append(monitor.samples)
        report(monitor, *args)

    monkeypatch.setattr(Monitor, "report", keep)
    assert t.fit() and counted == [sum(GROWING[:5]), sum(GROWING[5:])]


def test_a_run_of_a_time_takes_the_learning_rates_of_its_place_in_it(tmp_path, monkeypatch):
    """Check that a clock of one tick per step gives the run of as many steps, bit for bit."""
    steps = toys.trainer(tmp_path / "steps", **RAMP, eval_every=3)
    monkeypatch.setattr("lion.trainer.loop.TrainingClock", Ticking)
    timed = toys.trainer(tmp_path / "time", **{**RAMP, "time": f"{10 / 60!r}min", "steps": None}, eval_every=3)
    assert steps.fit() and timed.fit() and timed.state.step == 10 and timed.state.seconds == pytest.approx(10)
    assert are_same(steps.model, timed.model)
    for kind in ("train", "val", "val_ema"):
        a, b = (logged(tmp_path / run, kind, "step", "lr", "loss", "samples") for run in ("steps", "time"))
        assert a == b
    assert logged(tmp_path / "time", "train", "seconds") == [float(n) for n in range(1, 11)]


def test_the_time_that_is_used_up_stays_used_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lion.trainer.loop.TrainingClock", Ticking)
    straight = toys.trainer(tmp_path / "a", **SECOND)
    assert straight.fit() and straight.state.step == 6
    stopped = stopped_at(toys.trainer(tmp_path / "b", **SECOND), 4)
    assert not stopped.fit() and stopped.state.seconds == 4
    assert stopped.state.progress_text() == "step 4, 4 s of 0.1min"
    resumed = toys.trainer(tmp_path / "b", **SECOND)
    with caplog.at_level(logging.INFO, "lion"):
        assert resumed.fit()
    assert (resumed.state.step, resumed.state.seconds) == (6, 6) and resumed.state.upcoming() is None
    assert "resuming at step 4, 4 s of 0.1min: exact state" in caplog.text
    assert "same data order, not the same bits (time-limited runs are not" in caplog.text
    assert are_same(straight.model, resumed.model)  # this clock does go as far


def test_evaluation_saving_and_compilation_take_none_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(state.time, "perf_counter", lambda: now[0])

    def passing(call, seconds):
        def timed(*args, **kwargs):
            now[0] += seconds
            return call(*args, **kwargs)

        return timed

    t = toys.trainer(tmp_path / "run", **{**SECOND, "eval_every": 1, "save_every": 1})
    t.train_step, t.save = passing(t.train_step, 1), passing(t.save, 100)
    t.evaluate_if_due = passing(t.evaluate_if_due, 1000)
    assert t.fit() and (t.state.step, t.state.seconds) == (6, 6)
    clock = TrainingClock(compiles=True)
    for expected in (0, 5, 5):
        now[0] += 5
        assert clock.lap() == expected


def test_the_first_process_says_what_time_it_is(tmp_path, monkeypatch):
    t = toys.trainer(tmp_path / "run", **SECOND)
    monkeypatch.setattr(type(t.state.runtime), "agree", lambda self, value: value / 2)
    t.state.advance(3.0)
    assert (t.state.step, t.state.seconds, t.state.samples) == (1, 1.5, 16)


STOPPED = """
import time
from lion.trainer.state import StoppedTime, TrainingClock

with StoppedTime() as stopped:
    clock = TrainingClock(compiles=False, stopped=stopped)
    end = time.monotonic() + 3.5
    print("ready", flush=True)
    while time.monotonic() < end:
        time.sleep(0.01)
    print(clock.lap(), flush=True)
"""


@pytest.mark.process
def test_time_in_which_the_process_is_stopped_is_no_training():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert 0.5 < float(out) < 2.2


@pytest.mark.slow
def test_the_last_step_is_the_one_that_uses_the_time_up_and_is_evaluated(tmp_path):
    """Check the end of a time-limited run with the real clock."""
    t = toys.trainer(tmp_path / "run", **{**SECOND, "time": "0.003min", "eval_every": 10**6, "ema": None})
    assert t.fit() and t.state.seconds >= 0.18
    last = lines(tmp_path / "run")[-1]
    assert (last["kind"], last["step"]) == ("val", t.state.step) and last["seconds"] >= 0.18
    earlier = logged(tmp_path / "run", "train", "seconds")
    assert earlier == sorted(earlier) and all(x < 0.18 for x in earlier[:-1])


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_end_at_one_step(tmp_path):
    path = tiny_recipe(tmp_path, schedule={"warmup": 0}, trainer={"batch_start": 16, "batch_ramp": "50%"})
    done = ended(in_ranks(2, "train", path, "trainer.time=0.01min", "trainer.eval_every=500", "--no-eval"))
    assert "0.01min of training, batches of 16 to 64, reached after 50% = 2 x 4 x 8" in done.stdout
    kept = state_of(tmp_path / "runs" / "tiny")
    assert kept["seconds"] >= 0.6 and kept["next"] is None
    assert kept["samples"] == lines(tmp_path / "runs" / "tiny")[-1]["samples"]


def test_a_layer_that_gives_a_time_takes_steps_away(tmp_path):
    recipe = load_recipe(tiny_recipe(tmp_path), ["trainer.time=24h"])
    assert (recipe.trainer.time, recipe.trainer.steps) == ("24h", None)
    assert load_recipe(tiny_recipe(tmp_path), ["trainer.time=24h", "trainer.time=1h"]).trainer.time == "1h"


HOUR = ["trainer.time=1h", "schedule.warmup=0"]
START = "trainer.batch_start=16"
CLASHES = [
    (["trainer.time=24h", "trainer.steps=3"], "give exactly one of trainer.steps and trainer.time"),
    (["trainer.time=soon"], "trainer.time: expected hours ('24h') or minutes ('30min'), got 'soon'"),
    (["trainer.time=0h"], "trainer.time: expected hours"),
    (
        ["trainer.time=1h", "schedule.warmup=5ep"],
        "schedule.warmup: expected percent ('6%') or a time ('30min') in a time-limited run, got '5ep'",
    ),
    (
        [*HOUR, "trainer.eval_every=5%"],
        "trainer.eval_every: '5%' is undefined in a time-limited run: give steps (1000) or epochs",
    ),
    (["schedule.warmup=5min"], "schedule.warmup: expected steps (2000)"),
    (["trainer.batch_ramp=60%"], "trainer.batch_start: batch_ramp and batch_start go together"),
    ([START], "trainer.batch_ramp: batch_ramp and batch_start go together"),
    (["trainer.batch_ramp=60%", "trainer.batch_start=20"], "20 does not divide batch_size 64, nearest: 16"),
    (["trainer.batch_ramp=0", START], "trainer.batch_ramp: expected more than 0"),
    (["trainer.batch_ramp=120%", START], "trainer.batch_ramp: '120%' is longer than the run"),
    ([*HOUR, "trainer.batch_ramp=90min", START], "batch_ramp: '90min' is longer than the run, nearest: '100%'"),
    (["trainer.batch_ramp=5min", START], "trainer.batch_ramp: expected steps"),
    (["trainer.batch_ramp=2ep", START, "trainer.epochs=5"], "trainer.batch_ramp: not possible"),
    (
        ["trainer.batch_ramp=50%", START, "trainer.micro_batch=5"],
        "micro_batch: 5 does not divide the 16 samples of a process, nearest: 4, 8",
    ),
]


@pytest.mark.slow
def test_what_does_not_go_together_is_said_in_a_line(tmp_path, capsys):
    for overrides, message in CLASHES:
        assert message in refuse(capsys, "show", tiny_recipe(tmp_path), *overrides)


def test_growing_batches_divide_among_processes():
    with pytest.raises(ConfigError, match=r"trainer.batch_start: 4 cannot be divided evenly among 3 .*nearest: 3"):
        make_plan(toys.settings(**RAMP), samples=64, world=3)


def test_as_many_gpus_are_used_as_divide_the_first_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    path = tiny_recipe(tmp_path, trainer={"batch_size": 60})
    for more, expected in (([], 6), (["trainer.batch_ramp=60%", "trainer.batch_start=20"], 5)):
        assert process_count(resolve(path, more)) == expected
