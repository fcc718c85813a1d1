"""Tests of resuming: the state that a stopped run keeps, and its messages."""

import logging
import shutil
import time

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from lion.config import ConfigError, rounding, to_dict
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
from lion.trainer.faults import RunError
from lion.trainer.optim import Factors
from lion.trainer.plan import make_plan
from lion.trainer.state import KEPT, RunState, reproducibility_text
from tests.helpers import state_of, tiny_recipe
from tests.trainer import toys
from tests.trainer.helpers import lines, same, train, trainer
from tools.compose import resolve
from tools.soak import differing

pytest.importorskip("sklearn")


def checkpoint(run, step, kind="last"):
    return run / FOLDER / f"{kind}-{step}"


def test_a_resumed_run_has_the_exact_state(tmp_path, caplog):
    path = tiny_recipe(tmp_path, trainer={"steps": 24, "eval_every": 10, "ema": 0.9})
    stopped = train(path, tmp_path / "run", stop_at=11)
    before, upcoming, random = stopped.checkpoints.learner.state(), stopped.state.upcoming(), torch.get_rng_state()
    torch.manual_seed(99)
    resumed = trainer(resolve(path), tmp_path / "run")
    with caplog.at_level(logging.INFO, "lion"):
        resumed.prepare()
    after = resumed.checkpoints.learner.state()
    assert not differing(before, after) and resumed.state.upcoming() == upcoming
    assert torch.equal(torch.get_rng_state(), random)
    assert (resumed.state.step, resumed.state.best, resumed.state.evaluated) == (11, stopped.state.best, 10)
    ids = ", ".join(map(str, upcoming["samples"]))
    for part in (
        "resuming at step 11 of 24: exact state",
        f"samples {ids}",
        "bit for bit what the run would have been",
    ):
        assert part in caplog.text
    first = resumed.data.sampler(resumed.state.samples)
    assert [index for _, _, index in next(iter(first))][:8] == upcoming["samples"]


@pytest.mark.slow
def test_a_run_resumes_where_other_parameters_have_weight_decay(tmp_path, monkeypatch):
    """Check a checkpoint of a version that grouped the parameters otherwise: the moments are kept."""
    path = tiny_recipe(tmp_path, trainer={"steps": 24, "eval_every": 10})
    with monkeypatch.context() as patch:
        patch.setattr(
            "lion.trainer.optim.factors", lambda model, _: {n: Factors(1, 1) for n, _ in model.named_parameters()}
        )
        before = train(path, tmp_path / "run", stop_at=11).checkpoints.learner.state()["optimizer"]
    resumed = trainer(resolve(path), tmp_path / "run")
    resumed.prepare()
    after = resumed.checkpoints.learner.state()["optimizer"]
    assert len(before["param_groups"]) == 1 and len(after["param_groups"]) == 2
    assert not differing(before["state"], after["state"])
    resumed.fit()
    assert resumed.state.step == 24


def test_workers_may_change_at_every_stop(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 14})
    straight = train(path, tmp_path / "a")
    for stop, workers in ((3, 0), (6, 2), (10, 3)):  # resume three times within one epoch
        train(path, tmp_path / "b", stop_at=stop, workers=workers)
    assert same(straight.model.state_dict(), train(path, tmp_path / "b").model.state_dict())


def test_settings_that_change_the_rounding_are_conditions(tmp_path):
    recipe = resolve("quickstart", ["model.attention.form=chunk", "trainer.memory_budget=0.5"])
    expected = {"model.attention.form": "chunk", "model.attention.chunk_size": 64, "trainer.memory_budget": 0.5}
    expected["trainer.autotune"] = False
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


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "manifest"])
@pytest.mark.slow
def test_a_damaged_last_is_reported_and_the_one_before_it_used(tmp_path, caplog, harm):
    path = tiny_recipe(tmp_path, trainer={"steps": 12})
    straight = train(path, tmp_path / "a")
    train(path, tmp_path / "b", stop_at=8)
    assert [step for step, _ in steps_of(tmp_path / "b", "last")] == [8, 6]
    broken = checkpoint(tmp_path / "b", 8)
    content = bytearray((broken / STATE).read_bytes())
    if harm == "truncate":
        (broken / STATE).write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        (broken / STATE).write_bytes(content)
    elif harm == "delete":
        (broken / STATE).unlink()
    else:
        (broken / MANIFEST).write_text("{")
    resumed = train(path, tmp_path / "b")
    assert f"{broken} is damaged" in caplog.text and "going back to last-6" in caplog.text
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert checkpoint(tmp_path / "b", "8").with_name("damaged-last-8").is_dir()  # kept under another name
    assert [x["step"] for x in lines(tmp_path / "b") if x["kind"] == "train"] == [2, 4, 6, 8, 10, 12]


def test_nothing_whole_is_refused_and_left_as_it_is(tmp_path):
    path = tiny_recipe(tmp_path)
    train(path, tmp_path / "run")
    for _, folder in steps_of(tmp_path / "run", "last"):
        (folder / STATE).write_bytes(b"")
    with pytest.raises(ConfigError, match="no 'last' checkpoint can be used"):
        train(path, tmp_path / "run")
    assert len(steps_of(tmp_path / "run", "last")) == 2


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


def test_a_whole_checkpoint_that_does_not_fit_is_passed_over(tmp_path, caplog):
    path = tiny_recipe(tmp_path)
    straight = train(path, tmp_path / "a")
    train(path, tmp_path / "b", stop_at=4)
    state = state_of(tmp_path / "b")
    for step, (name, value) in enumerate(FORGED.items(), 100):
        forged = {**state, "step": step, name: value}
        scratch = scratch_folder(tmp_path / "b", "last", step)
        torch.save({k: v for k, v in forged.items() if k != name or v is not None}, scratch / STATE)
        seal(scratch)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    resumed = train(path, tmp_path / "b")
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert "last-100 is damaged: state.pt: a run cannot resume from it, 'next' is missing; going back" in caplog.text
    for step in range(100, 100 + len(FORGED)):
        assert f"last-{step} is damaged: state.pt: a run cannot resume from it" in caplog.text
        assert checkpoint(tmp_path / "b", step).with_name(f"damaged-last-{step}").is_dir()
    for step in (3, 4):
        shutil.rmtree(checkpoint(tmp_path / "c", step))
    before = steps_of(tmp_path / "c", "last")
    with pytest.raises(
        ConfigError,
        match=r"no 'last' checkpoint can be used \(.*last-100: state.pt: .* 'next' is missing\); training with --f",
    ):
        train(path, tmp_path / "c")
    assert steps_of(tmp_path / "c", "last") == before


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


def test_a_file_in_the_place_of_a_checkpoint_is_set_aside(tmp_path):
    path = tiny_recipe(tmp_path)
    straight = train(path, tmp_path / "a")
    train(path, tmp_path / "b", stop_at=4)
    places = [checkpoint(tmp_path / "b", 6, kind) for kind in ("best", "last")]
    for place in places:
        place.write_text("mine")
    resumed = train(path, tmp_path / "b")
    assert same(straight.model.state_dict(), resumed.model.state_dict()) and resumed.state.best == straight.state.best
    assert newest(tmp_path / "b", "last").step == 6
    assert all(place.with_name(f"damaged-{place.name}").read_text() == "mine" for place in places)


def test_damaged_best_weights_stop_no_run(tmp_path, caplog):
    path = tiny_recipe(tmp_path)
    train(path, tmp_path / "run", stop_at=4)
    (checkpoint(tmp_path / "run", 3, "best") / STATE).write_bytes(b"")
    t = train(path, tmp_path / "run")
    assert "the search for the best checkpoint starts over" in caplog.text
    assert t.state.best["step"] == 6 and newest(tmp_path / "run", "best").step == 6
    assert (tmp_path / "run" / FOLDER / "damaged-best-3").is_dir()


def test_the_best_of_an_attempt_without_a_checkpoint_is_set_aside(tmp_path, caplog):
    """A kill before the first checkpoint leaves the best one alone, of data that may change before the next attempt."""
    path = tiny_recipe(tmp_path)
    straight = train(path, tmp_path / "a")
    train(path, tmp_path / "b", stop_at=4)
    for _, last in steps_of(tmp_path / "b", "last"):
        shutil.rmtree(last)
    best = checkpoint(tmp_path / "b", 3, "best")
    state = torch.load(best / STATE)
    state["best"]["value"] = 1e9 if straight.task.metric.higher_is_better else -1e9
    torch.save(state, best / STATE)
    write_manifest(best, [best / STATE], sharded=False)
    again = train(path, tmp_path / "b")
    assert again.state.best == straight.state.best and "of an attempt without a checkpoint" in caplog.text
    assert best.with_name("earlier-best-3").is_dir()


def test_the_newest_few_are_kept_and_interrupted_saves_swept(tmp_path):
    litter = tmp_path / "run" / FOLDER / ".last-1.tmp"
    litter.mkdir(parents=True)
    train(tiny_recipe(tmp_path, trainer={"steps": 12, "keep_last": 3}), tmp_path / "run")
    assert [step for step, _ in steps_of(tmp_path / "run", "last")] == [12, 9, 6]
    assert len(steps_of(tmp_path / "run", "best")) == 1 and not litter.exists()
    for step, path in steps_of(tmp_path / "run", "last"):
        verified(step, path)


def test_saving_by_the_clock(tmp_path):
    changes = {"steps": 5, "save_every": "0.00001min", "keep_last": 9}
    train(tiny_recipe(tmp_path, trainer=changes), tmp_path / "run")
    assert [step for step, _ in steps_of(tmp_path / "run", "last")] == [5, 4, 3, 2, 1]
    train(tiny_recipe(tmp_path, trainer={**changes, "save_every": "10min"}), tmp_path / "slow")
    assert [step for step, _ in steps_of(tmp_path / "slow", "last")] == [5]


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
    assert resumed.fit() and same(whole.model.state_dict(), resumed.model.state_dict()) and whole.model.steps[0] == 6


def test_changed_data_is_noticed(tmp_path):
    path = tiny_recipe(tmp_path)
    train(path, tmp_path / "run", stop_at=3)
    with pytest.raises(ConfigError, match=r"the training samples have changed since step 3: the next were samples \d+"):
        train(path, tmp_path / "run", "data.val_split=0.1")


def test_an_evaluation_made_again_is_logged_once(tmp_path):
    """Check a process that dies after logging an evaluation and before the next checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tiny_recipe(tmp_path, trainer={"log_every": 3})
    train(path, tmp_path / "run", stop_at=3)  # saved before the evaluation of step 3
    shutil.copytree(tmp_path / "run" / FOLDER, tmp_path / "copy")
    time.sleep(1)  # TensorBoard reads files by their names, in which the second comes first, and then 10 before 9
    train(path, tmp_path / "run")
    time.sleep(1)
    shutil.rmtree(tmp_path / "run" / FOLDER)
    shutil.copytree(tmp_path / "copy", tmp_path / "run" / FOLDER)
    train(path, tmp_path / "run")
    assert [(x["step"], x["kind"]) for x in lines(tmp_path / "run")] == [
        (3, "train"), (3, "val"), (6, "train"), (6, "val"),
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    for tag in ("train/loss", "val/loss"):
        assert [e.step for e in events.Scalars(tag)] == [3, 6]


def test_the_best_of_a_lost_future_stays_the_best(tmp_path):
    """Check that `best` stays valid if a kill leaves it ahead: it is written before `last`."""
    path = tiny_recipe(tmp_path, trainer={"steps": 6})
    full = train(path, tmp_path / "run")
    for step, folder in steps_of(tmp_path / "run", "last"):
        if step == 6:
            shutil.rmtree(folder)
    resumed = trainer(resolve(path), tmp_path / "run")
    resumed.prepare()
    assert resumed.state.step == 3 and resumed.state.best == full.state.best
    assert state_of(tmp_path / "run", "best")["best"] == full.state.best
    again = train(path, tmp_path / "run")
    assert again.state.best == full.state.best and newest(tmp_path / "run", "best").step == full.state.best["step"]
    held, path = again.state.best, newest(tmp_path / "run", "best").path
    assert not path.with_name(f"earlier-{path.name}").exists()
    again.state.step = held["step"]  # a resumed run may differ, in rounding
    better = {"value": held["value"] + (1 if again.task.metric.higher_is_better else -1), "step": held["step"]}
    again.keep_if_best(better["value"])
    assert again.state.best == state_of(tmp_path / "run", "best")["best"] == better
    assert path.with_name(f"earlier-{path.name}").is_dir()


def test_the_average_keeps_no_graph(tmp_path):
    t = train(tiny_recipe(tmp_path, trainer={"ema": 0.9}), tmp_path / "run")
    assert all(p.grad_fn is None and not p.requires_grad for p in t.ema.parameters())


def poison(t, steps):
    """Make the loss of some steps NaN, as a bad batch would."""
    loss = t.task.loss

    def poisoned(model, batch):
        sums = loss(model, batch)
        return sums._replace(loss=sums.loss * float("nan")) if t.state.step in steps else sums

    t.task.loss = poisoned
    return t


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_without_a_finite_loss_changes_nothing_and_is_counted(tmp_path, caplog, clip):
    path = tiny_recipe(tmp_path, trainer={"steps": 4, "log_every": 1, "clip_grad": clip})
    before = train(path, tmp_path / "a", stop_at=2).model.state_dict()
    t = poison(trainer(resolve(path), tmp_path / "b"), {2, 3})
    t.fit()
    assert same(before, t.model.state_dict())
    moments = [s for s in t.optimizer.state.values() if s]
    assert moments and all(s["step"] == 2 and torch.isfinite(s["exp_avg"]).all() for s in moments)
    assert [x.get("skipped_steps", 0) for x in lines(tmp_path / "b") if x["kind"] == "train"] == [0, 0, 1, 2]
    assert "step 3: 1 steps skipped so far" in caplog.text
    assert state_of(tmp_path / "b")["skipped"].tolist() == [2, 2]


def test_too_many_such_steps_stop_the_run(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 40, "faults": {"nonfinite": 4}})
    t = poison(trainer(resolve(path), tmp_path / "run"), range(5, 40))
    with pytest.raises(RunError) as error:
        t.fit()
    for part in ("steps from 5 on", "the checkpoint of step 3 is kept", "trainer.clip_grad=1", "optim.lr"):
        assert part in str(error.value), error.value
    assert f"(run.name=NAME, init_from={tmp_path / 'run'} keeps the best weights)" in str(error.value)
    assert t.state.step <= 12 and newest(tmp_path / "run", "last").step == 3
    assert lines(tmp_path / "run")[-1]["loss"] is None  # JSON has no NaN


def test_a_run_that_takes_no_step_at_all_stops_though_it_is_short(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 5})
    with pytest.raises(RunError, match=r"in the 5 steps from 0 on .*, all skipped; there is no checkpoint"):
        poison(trainer(resolve(path), tmp_path / "run"), range(5)).fit()


def test_a_run_that_diverges_within_its_last_steps_stops_and_has_no_best(tmp_path, caplog):
    """Take one step with a huge learning rate: the weights stay finite, their outputs do not."""
    path = tiny_recipe(tmp_path, optim={"lr": 1e30}, schedule={"warmup": 0}, trainer={"steps": 5, "ema": 0.9})
    with pytest.raises(RunError) as error:
        train(path, tmp_path / "run")
    for part in ("step 5: weights, or outputs on val, are not finite; there is no checkpoint", "(run.name=NAME) try"):
        assert part in str(error.value), error.value
    assert "step 3: weights, or outputs on val, are not finite: no best checkpoint" in caplog.text
    assert not steps_of(tmp_path / "run", "*")
