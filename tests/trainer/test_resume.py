"""Tests of resuming: the state that a stopped run keeps, and its messages."""

import logging
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from lion.config import ConfigError, rounding, to_dict
from lion.layers.optim_factors import OptimFactors
from lion.recipe import differences
from lion.trainer.checkpoint_files import (
    FOLDER,
    MANIFEST,
    STATE,
    UnusableCheckpoint,
    load_state,
    newest,
    prune,
    scratch_folder,
    seal,
    steps_of,
    verified,
    write_manifest,
)
from lion.trainer.faults import FaultsConfig, RunError
from lion.trainer.plan import make_plan
from lion.trainer.state import KEPT, RunState, reproducibility_text
from tests.helpers import refused, state_of, tiny_recipe
from tests.trainer import toys
from tests.trainer.helpers import are_same, differing, events_of, lines, logged, stopped_at, train, trainer
from tools.compose import resolve

pytest.importorskip("sklearn")


def checkpoint(run, step, kind="last"):
    return run / FOLDER / f"{kind}-{step}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a recipe of six steps to its end, and in another folder to step 4, between two evaluations."""
    root = tmp_path_factory.mktemp("trained")
    path = tiny_recipe(root)
    train(path, root / "stopped", stop_at=4)
    return path, train(path, root / "whole")


@pytest.fixture
def whole(trained):
    """Return the trainer of a run without a stop."""
    return trained[1]


@pytest.fixture
def path(trained):
    return trained[0]


@pytest.fixture
def run(path, tmp_path):
    """Make a copy of the run that was stopped at step 4, with the checkpoints of steps 3 and 4."""
    return shutil.copytree(path.parent / "stopped", tmp_path / "run")


def test_a_resumed_run_has_the_exact_state(tmp_path, caplog):
    path = tiny_recipe(tmp_path, trainer={"steps": 8, "eval_every": 4, "ema": 0.9})
    stopped = train(path, tmp_path / "run", stop_at=5)
    before, upcoming, random = stopped.checkpoints.learner.state(), stopped.state.upcoming(), torch.get_rng_state()
    torch.manual_seed(99)
    resumed = trainer(resolve(path), tmp_path / "run")
    with caplog.at_level(logging.INFO, "lion"):
        resumed.prepare()
    assert not differing(before, resumed.checkpoints.learner.state()) and resumed.state.upcoming() == upcoming
    assert torch.equal(torch.get_rng_state(), random)
    assert (resumed.state.step, resumed.state.best, resumed.state.evaluated) == (5, stopped.state.best, 4)
    for part in ("resuming at step 5 of 8: exact state", "bit for bit what the run would have"):
        assert part in caplog.text
    first = resumed.data.sampler(resumed.state.samples)
    assert [index for _, _, index in next(iter(first))][:8] == upcoming["samples"]


@pytest.mark.slow
def test_a_run_resumes_where_other_parameters_have_weight_decay(tmp_path, path, monkeypatch):
    """Check a checkpoint of a version that grouped the parameters otherwise: the moments are kept."""

    def alike(model, rule):
        return {name: OptimFactors(1, 1) for name, _ in model.named_parameters()}

    with monkeypatch.context() as patch:
        patch.setattr("lion.trainer.optim.factors", alike)
        before = train(path, tmp_path / "run", stop_at=3).checkpoints.learner.state()["optimizer"]
    resumed = trainer(resolve(path), tmp_path / "run")
    resumed.prepare()
    after = resumed.checkpoints.learner.state()["optimizer"]
    assert len(before["param_groups"]) == 1 and len(after["param_groups"]) == 2
    assert not differing(before["state"], after["state"])
    resumed.fit()
    assert resumed.state.step == 6


@pytest.mark.slow
def test_workers_may_change_at_every_stop(tmp_path, path, whole):
    for stop, workers in ((2, 2), (4, 3)):
        train(path, tmp_path / "run", stop_at=stop, workers=workers)
    assert are_same(whole.model, train(path, tmp_path / "run").model)


def test_settings_that_change_the_rounding_are_conditions(tmp_path):
    recipe = resolve("quickstart", ["model.attention.form=chunk", "trainer.memory_budget=0.5"])
    expected = {"model.attention.form": "chunk", "model.attention.chunk_size": 64, "trainer.memory_budget": 0.5}
    expected.update({"model.attention.kernels": "auto", "trainer.autotune": False})
    assert make_plan(recipe, samples=64, world=1).rounding == expected
    assert rounding(resolve("lra_text_softmax", []).data) == {"pad": "length"}
    made = toys.trainer(tmp_path, memory_budget=0.5).state.conditions()
    assert made["trainer.memory_budget"] == 0.5


def test_a_setting_that_an_earlier_version_did_not_store_had_its_default():
    new = resolve("quickstart", [])
    stored = to_dict(new)
    del stored["task"]["temperature"]
    assert differences(stored, new) == []
    del stored["task"]["label_smoothing"]  # not the default in this recipe
    assert differences(stored, new) == ["task.label_smoothing: None -> 0.1"]


def test_what_is_promised_depends_on_what_is_the_same():
    now = {"torch": "2.15", "device": "AVX512", "processes": 1, "threads": 2, "deterministic": True}
    assert "bit for bit" in reproducibility_text(now, now)
    line = reproducibility_text({**now, "threads": 1}, now)
    assert "same data order, not the same bits (threads 1 -> 2)" in line
    older = {k: v for k, v in now.items() if k != "threads"}  # of a version that did not record it
    assert "bit for bit" in reproducibility_text(older, now)
    gpu = {**now, "deterministic": False}
    assert "trainer.deterministic=true" in reproducibility_text(gpu, gpu)


def halve(state):
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])


def flip(state):
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


def break_manifest(state):
    (state.parent / MANIFEST).write_text("{")


@pytest.mark.parametrize("harm", [halve, flip, Path.unlink, break_manifest])
def test_a_damaged_last_is_reported_and_the_one_before_it_used(path, whole, run, caplog, harm):
    assert [step for step, _ in steps_of(run, "last")] == [4, 3]
    broken = checkpoint(run, 4)
    harm(broken / STATE)
    resumed = train(path, run)
    assert f"{broken} is damaged" in caplog.text and "going back to last-3" in caplog.text
    assert are_same(whole.model, resumed.model)
    assert broken.with_name("damaged-last-4").is_dir()  # kept under another name
    assert logged(run, "train", "step") == [2, 4, 6]


FORGED = {  # wrong values in a state whose manifest is correct
    "next": None,  # missing, as in a checkpoint of another version
    "step": 3,
    "evaluated": "yes",
    "random": [{"torch": torch.zeros(3, dtype=torch.uint8), "cuda": None}],
    "skipped": torch.zeros(7),
    "info": 3,
    "made": 3,
    "model": {"cls": torch.zeros(1)},
    "optimizer": {"state": 3, "param_groups": []},
}


@pytest.mark.slow
def test_a_whole_checkpoint_that_does_not_fit_is_passed_over(path, whole, run, tmp_path, caplog):
    state = state_of(run)
    for step, (name, value) in enumerate(FORGED.items(), 100):
        forged = {**state, "step": step, name: value}
        if value is None:
            del forged[name]
        scratch = scratch_folder(run, "last", step)
        torch.save(forged, scratch / STATE)
        seal(scratch)
    copy = shutil.copytree(run, tmp_path / "copy")
    assert are_same(whole.model, train(path, run).model)
    assert "last-100 is damaged: state.pt: a run cannot resume from it, 'next' is missing; going back" in caplog.text
    for step in range(100, 100 + len(FORGED)):
        assert f"last-{step} is damaged: state.pt: a run cannot resume from it" in caplog.text
        assert checkpoint(run, f"{step}", "damaged-last").is_dir()
    for step in (3, 4):
        shutil.rmtree(checkpoint(copy, step))
    before = steps_of(copy, "last")
    message = r"no 'last' checkpoint can be used \(.*last-100: state.pt: .* 'next' is missing\); training with --f"
    refused(message, train, path, copy)
    assert steps_of(copy, "last") == before


def test_a_checkpoint_replaced_while_it_is_read_is_looked_for_again(tmp_path):
    """Check reading while a run trains on: the run may save another checkpoint and delete this one at any moment."""
    run = tmp_path / "run"

    def save(step):
        scratch = scratch_folder(run, "best", step)
        torch.save({"step": step}, scratch / STATE)
        prune(seal(scratch), 1)

    def read(found):
        seen.append(found.step)
        if len(seen) < 4:
            save(found.step + 1)
        return load_state(found.state)["step"]

    seen = []
    save(1)
    assert newest(run, "best", read=read) == 4 and seen == [1, 2, 3, 4]
    listing = steps_of(run, "best")
    save(5)
    assert [step for step, _ in listing] == [4]  # a listed checkpoint may be deleted before it is opened
    with pytest.raises(UnusableCheckpoint):
        verified(*listing[0])


def test_all_that_a_run_saves_reaches_it_again(tmp_path, monkeypatch):
    """Check that a new part of the saved state reaches the resumed run."""
    to_dict, seen = RunState.to_dict, []
    monkeypatch.setattr(RunState, "to_dict", lambda self: {**to_dict(self), "new": [self.step]})
    assert toys.trainer(tmp_path / "run").fit()
    resumed = toys.trainer(tmp_path / "run")
    assert resumed.checkpoints.resume(seen.append)["new"] == [6] and seen[0].keys() == {*KEPT, "data", "new"}


def test_a_file_in_the_place_of_a_checkpoint_is_set_aside(path, whole, run):
    places = [checkpoint(run, 6, kind) for kind in ("best", "last")]
    for place in places:
        place.write_text("mine")
    resumed = train(path, run)
    assert are_same(whole.model, resumed.model) and resumed.state.best == whole.state.best
    assert newest(run, "last").step == 6
    for place in places:
        assert place.with_name(f"damaged-{place.name}").read_text() == "mine"


def test_damaged_best_weights_stop_no_run(path, run, caplog):
    (checkpoint(run, 3, "best") / STATE).write_bytes(b"")
    t = train(path, run)
    assert "the search for the best checkpoint starts over" in caplog.text
    assert t.state.best["step"] == 6 and newest(run, "best").step == 6
    assert checkpoint(run, 3, "damaged-best").is_dir()


def test_the_best_of_an_attempt_without_a_checkpoint_is_set_aside(path, whole, run, caplog):
    """A kill before the first checkpoint leaves the best one alone, of data that may change before the next attempt."""
    for _, last in steps_of(run, "last"):
        shutil.rmtree(last)
    best = checkpoint(run, 3, "best")
    state = torch.load(best / STATE)
    assert whole.task.metric.higher_is_better
    state["best"]["value"] = 1e9
    torch.save(state, best / STATE)
    write_manifest(best, [best / STATE], sharded=False)
    again = train(path, run)
    assert again.state.best == whole.state.best and "of an attempt without a checkpoint" in caplog.text
    assert checkpoint(run, 3, "earlier-best").is_dir()


def test_the_newest_few_are_kept_and_interrupted_saves_swept(tmp_path):
    litter = tmp_path / "run" / FOLDER / ".last-1.tmp"
    litter.mkdir(parents=True)
    assert toys.trainer(tmp_path / "run", steps=5, save_every=1, keep_last=3).fit()
    kept = steps_of(tmp_path / "run", "last")
    assert [step for step, _ in kept] == [5, 4, 3]
    assert len(steps_of(tmp_path / "run", "best")) == 1 and not litter.exists()
    for step, path in kept:
        verified(step, path)


@pytest.mark.parametrize(("every", "steps"), [("0.00001min", [5, 4, 3, 2, 1]), ("10min", [5])])
def test_saving_by_the_clock(tmp_path, every, steps):
    assert toys.trainer(tmp_path / "run", steps=5, save_every=every, keep_last=9).fit()
    assert [step for step, _ in steps_of(tmp_path / "run", "last")] == steps


def test_a_step_is_undone_if_a_signal_stops_the_compiler(tmp_path):
    """Stop while a new shape compiles, as Ctrl-C does; the resumed run ends like one without a stop."""

    class Noisy(toys.Sides):
        def loss(self, model, batch):
            return super().loss(model, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})

    whole = toys.trainer(tmp_path / "whole", kind=Noisy)
    assert whole.fit()
    stopped = toys.trainer(tmp_path / "stopped", kind=Noisy)
    loss, stopped.state.compiled = stopped.task.loss, True

    def interrupted(model, batch):
        out = loss(model, batch)
        if stopped.state.step == 3:  # neither an evaluation nor a checkpoint is due
            stopped.stopping = True
            raise TorchDynamoException
        return out

    stopped.task.loss = interrupted
    assert not stopped.fit() and stopped.checkpoints.saved == 3
    resumed = toys.trainer(tmp_path / "stopped", kind=Noisy)
    assert resumed.fit() and are_same(whole.model, resumed.model) and whole.model.steps[0] == 6


def test_changed_data_is_noticed(path, run):
    with pytest.raises(ConfigError, match=r"the training samples have changed since step 4: the next were samples \d+"):
        train(path, run, "data.val_split=0.1")


@pytest.mark.slow
def test_an_evaluation_made_again_is_logged_once(tmp_path):
    """Check a process that dies after logging an evaluation and before the next checkpoint."""
    run = tmp_path / "run"

    def made():
        return toys.trainer(run, log_every=3, eval_every=3, save_every=3, ema=None)

    assert not stopped_at(made(), 3).fit()  # saved before the evaluation of step 3
    shutil.copytree(run / FOLDER, tmp_path / "copy")
    time.sleep(1)  # TensorBoard reads files by their names, in which the second comes first, and then 10 before 9
    assert made().fit()
    time.sleep(1)
    shutil.rmtree(run / FOLDER)
    shutil.copytree(tmp_path / "copy", run / FOLDER)
    assert made().fit()
    found = [(x["step"], x["kind"]) for x in lines(run)]
    assert found == [(3, "train"), (3, "val"), (6, "train"), (6, "val")]
    for tag in ("loss/train", "loss/val"):
        assert [e.step for e in events_of(run).Scalars(tag)] == [3, 6]


def test_the_best_of_a_lost_future_stays_the_best(path, whole, tmp_path):
    """Check that `best` stays valid if a kill leaves it ahead: it is written before `last`."""
    run = shutil.copytree(path.parent / "whole", tmp_path / "run")
    shutil.rmtree(checkpoint(run, 6))
    resumed = trainer(resolve(path), run)
    resumed.prepare()
    assert resumed.state.step == 3 and resumed.state.best == whole.state.best
    assert state_of(run, "best")["best"] == whole.state.best
    again = train(path, run)
    held, best = again.state.best, newest(run, "best")
    assert held == whole.state.best and best.step == held["step"]
    assert not best.path.with_name(f"earlier-{best.path.name}").exists()
    again.state.step = held["step"]  # a resumed run may differ, in rounding
    better = {"value": held["value"] + 1, "step": held["step"]}
    again.keep_if_best(better["value"])
    assert again.state.best == state_of(run, "best")["best"] == better
    assert best.path.with_name(f"earlier-{best.path.name}").is_dir()


def poisoned(t, steps):
    """Make the loss of some steps NaN, as a bad batch would."""
    loss = t.task.loss

    def poison(model, batch):
        sums = loss(model, batch)
        return sums._replace(loss=sums.loss * float("nan")) if t.state.step in steps else sums

    t.task.loss = poison
    return t


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_without_a_finite_loss_changes_nothing_and_is_counted(tmp_path, caplog, clip):
    how = {"steps": 4, "clip_grad": clip, "eval_every": 4}
    before = stopped_at(toys.trainer(tmp_path / "a", **how), 2)
    assert not before.fit()
    t = poisoned(toys.trainer(tmp_path / "b", **how), {2, 3})
    assert t.fit()
    assert are_same(before.model, t.model)
    moments = [s for s in t.optimizer.state.values() if s]
    assert moments and all(s["step"] == 2 and torch.isfinite(s["exp_avg"]).all() for s in moments)
    assert logged(tmp_path / "b", "train", "skipped_steps") == [None, None, 1, 2]
    assert "step 3: 1 steps skipped so far" in caplog.text
    assert state_of(tmp_path / "b")["skipped"].tolist() == [2, 2]


def test_too_many_such_steps_stop_the_run(tmp_path):
    run = tmp_path / "run"
    how = {"steps": 40, "save_every": 3, "eval_every": 3, "faults": FaultsConfig(nonfinite=4)}
    t = poisoned(toys.trainer(run, **how), range(5, 40))
    with pytest.raises(RunError) as error:
        t.fit()
    for part in (
        "steps from 5 on",
        "the checkpoint of step 3 is kept",
        "trainer.clip_grad=1",
        "optim.lr",
        f"(run.name=NAME, init_from={run} keeps the best weights)",
    ):
        assert part in str(error.value), error.value
    assert t.state.step <= 12 and newest(run, "last").step == 3
    assert lines(run)[-1]["loss"] is None  # JSON has no NaN


def test_a_run_that_takes_no_step_at_all_stops_though_it_is_short(tmp_path):
    with pytest.raises(RunError, match=r"in the 5 steps from 0 on .*, all skipped; there is no checkpoint"):
        poisoned(toys.trainer(tmp_path / "run", steps=5), range(5)).fit()


def test_a_run_that_diverges_within_its_last_steps_stops_and_has_no_best(tmp_path, caplog):
    """Take one step with a huge learning rate: the weights stay finite, their outputs do not."""
    path = tiny_recipe(tmp_path, optim={"lr": 1e30}, schedule={"warmup": 0}, trainer={"steps": 5, "ema": 0.9})
    with pytest.raises(RunError) as error:
        train(path, tmp_path / "run")
    for part in ("step 5: weights, or outputs on val, are not finite; there is no checkpoint", "(run.name=NAME) try"):
        assert part in str(error.value), error.value
    assert "step 3: weights, or outputs on val, are not finite: no best checkpoint" in caplog.text
    assert not steps_of(tmp_path / "run", "*")
