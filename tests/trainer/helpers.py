"""Helpers that train in this process, without the command, and that read what a run has written."""

import json
import sys
import time

import pytest
import torch

from lion.trainer.loop import Trainer
from lion.trainer.plan import make_plan
from lion.trainer.runtime import seed_everything, start_runtime
from tests.processes import CONTEXT, run_in
from tools.compose import build_data, make_task, resolve

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or forks processes from a server")


def trainer(recipe, folder, workers=0):
    splits = build_data(recipe)
    task = make_task(recipe, splits.info)
    seed_everything(recipe.seed)
    model = task.build_model(recipe.model)
    folder.mkdir(exist_ok=True)
    plan = make_plan(recipe, samples=len(splits.train), world=1)
    return Trainer(plan, task, model, splits, folder, start_runtime("cpu"), workers=workers)


def train(path, folder, *overrides, stop_at=None, workers=0):
    """Train in this process; `stop_at` asks the run to stop after that step."""
    t = stopped_at(trainer(resolve(path, overrides), folder, workers), stop_at)
    t.fit()
    return t


def before_steps(t, act):
    """Call `act()` before every training step of a trainer; return the trainer."""
    step = t.train_step

    def train_step(*args):
        act()
        return step(*args)

    t.train_step = train_step
    return t


def stopped_at(t, last):
    """Ask a run to stop after step `last`, as a signal does; with None, never."""

    def ask():
        t.stopping = last is not None and t.state.step + 1 >= last

    return before_steps(t, ask)


def are_same(a, b):
    """Return whether two models have the same weights, bit for bit."""
    weights, others = a.state_dict(), b.state_dict()
    return all(torch.equal(weights[name], others[name]) for name in weights)


def assert_close(got, expected, rtol=1e-3, atol=2e-5):
    """Check that two models, or states of a model, have almost the same weights."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder, kind, *names):
    """Return the named values of all lines of a kind; of one name, the values alone."""
    rows = [[line.get(name) for name in names] for line in lines(folder) if line["kind"] == kind]
    return [row[0] for row in rows] if len(names) == 1 else rows


def events_of(folder):
    """Read what a run has written for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def command_after(prepare, folder, *args):
    """Call `prepare` and run a command in a process of its own; return its exit code and what it said on stderr."""
    folder.mkdir()
    process = CONTEXT.Process(target=_prepared, args=(prepare, str(folder), list(map(str, args))))
    process.start()
    process.join(120)
    return process.exitcode, (folder / "stderr").read_text()


def _prepared(prepare, folder, args):
    prepare()
    run_in(folder, args, {"OMP_NUM_THREADS": "1"})


def wait_for(condition, process=None, seconds=120):
    """Wait for a condition while a process runs."""
    deadline = time.time() + seconds
    while not condition():
        assert process is None or process.poll() is None, process
        assert time.time() < deadline
        time.sleep(0.02)


def run_all(function, *calls, seconds=60):
    """Call `function(*call)` for all calls at once, each in a process; return the processes, which have ended."""
    processes = [CONTEXT.Process(target=function, args=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    return processes


def differing(a, b, name=""):
    """Return the names of all leaves of two trees that are not equal, bit for bit."""
    found = []
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            found += differing(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for i in range(len(a)):
            found += differing(a[i], b[i], f"{name}[{i}]")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.numpy().tobytes() != b.numpy().tobytes():
            found.append(name)
    elif a != b:
        found.append(name)
    return found
