"""Tests of checkpoints that a thread writes while training continues."""

import datetime
import itertools
import os
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from lion.recipe_files import RECIPE
from lion.trainer import checkpointer
from lion.trainer.checkpoint_files import FOLDER, copied, load_state, newest, steps_of
from lion.trainer.parallel import join_shards
from lion.trainer.runtime import Runtime
from tests.helpers import state_of
from tests.processes import CONTEXT, in_processes
from tests.trainer import toys
from tests.trainer.helpers import before_steps, differing, linux, logged, run_all
from tools import consolidate

BESIDE = {"save_async": True, "save_every": 1, "eval_every": 20}


def test_the_file_holds_the_state_of_its_step(tmp_path, monkeypatch):
    """Check a checkpoint whose file is written two steps later."""
    assert toys.trainer(tmp_path / "whole", keep_last=9, save_every=2).fit()
    late = toys.trainer(tmp_path / "late", keep_last=9, save_every=2, save_async=True)
    save, trained, at = torch.save, threading.Event(), {}

    def wait_and_save(state, file):
        if "optimizer" in state:
            assert state["step"] != 2 or trained.wait(60)
            at[state["step"]] = late.state.step
        save(state, file)

    def join():
        if late.state.step == 3:  # about to take the fourth step, at whose end the next checkpoint is due
            trained.set()
            late.checkpoints.writing.thread.join()

    monkeypatch.setattr(checkpointer.torch, "save", wait_and_save)
    assert before_steps(late, join).fit()
    assert at[2] == 3 and at[6] == 6
    files = {kept: steps_of(tmp_path / kept, "last") for kept in ("whole", "late")}
    assert [step for step, _ in files["late"]] == [6, 4, 2]
    for (_, a), (_, b) in zip(files["whole"], files["late"], strict=True):
        assert not differing(load_state(a / "state.pt"), load_state(b / "state.pt"))
        assert (a / "state.pt").stat().st_size == (b / "state.pt").stat().st_size


def slowed(call, seconds):
    def later(*args, **kwargs):
        time.sleep(seconds)
        return call(*args, **kwargs)

    return later


@pytest.mark.slow
def test_the_time_of_a_save_is_that_for_which_training_stops(tmp_path, monkeypatch):
    """Check the seconds in the log, of saves that take at least 0.3 s to write."""
    monkeypatch.setattr(checkpointer, "seal", slowed(checkpointer.seal, 0.3))
    for name, beside in (("plain", False), ("beside", True)):
        assert toys.trainer(tmp_path / name, save_every=2, save_async=beside, eval_every=20).fit()
        stops = logged(tmp_path / name, "train", "save_seconds")
        assert [stop is not None for stop in stops] == [False, False, True, False, True, False]
        assert (stops[2] < 0.3) == beside
    assert toys.trainer(tmp_path / "seldom", save_every=2, eval_every=3, log_every=4).fit()
    assert logged(tmp_path / "seldom", "train", "save_seconds")[0] >= 0.3  # an evaluation came before the line


def test_copies_share_what_was_shared():
    table = torch.arange(6.0).view(2, 3)
    state = {"a": table, "b": [table.T, 1, None], "c": torch.zeros(0)}
    made = copied(state)
    assert not differing(state, made) and made["b"][0].stride() == table.T.stride()
    table.zero_()
    assert made["a"].sum() == 15 and made["a"].data_ptr() == made["b"][0].data_ptr()


def test_a_full_disk_is_reported_by_the_next_save(tmp_path, monkeypatch, caplog):
    t = toys.trainer(tmp_path / "run", **BESIDE)
    seal = checkpointer.seal

    def full(scratch, **kwargs):
        if scratch.name == ".last-3.tmp":
            raise OSError(28, "No space left on device")
        return seal(scratch, **kwargs)

    monkeypatch.setattr(checkpointer, "seal", full)
    assert t.fit() and t.checkpoints.saved == 6
    assert "last-3 is not saved: [Errno 28] No space left on device; the checkpoint of step 2 is kept" in caplog.text
    assert [step for step, _ in steps_of(tmp_path / "run", "last")] == [6, 5]
    assert not list((tmp_path / "run" / FOLDER).glob(".*"))


@pytest.mark.slow
def test_an_error_of_training_names_the_checkpoint_in_writing(tmp_path, monkeypatch):
    t = toys.trainer(tmp_path / "run", **BESIDE)
    monkeypatch.setattr(checkpointer, "seal", slowed(checkpointer.seal, 0.2))

    def fail():
        if t.state.step == 2:
            raise OSError(5, "Input/output error", "pictures/1.jpg")

    with pytest.raises(Exception, match=r"^pictures/1\.jpg: Input/output error; the checkpoint of step 2 is kept$"):
        before_steps(t, fail).fit()
    assert newest(tmp_path / "run", "last").step == 2


def life(folder, kill_at):
    """Train; die by SIGKILL before file operation `kill_at` of the threads that write checkpoints (None: live on).

    Operation 0 is the middle of a file.
    """
    count, save = 0, torch.save

    def half(state, file):
        save(state, file)
        file.flush()
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        nonlocal count
        if event in OPERATIONS and threading.current_thread().name == "checkpoint" and FOLDER in str(args[0]):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if kill_at == 0:
        torch.save = half
    sys.addaudithook(hook)
    assert toys.trainer(folder, steps=16, **BESIDE).fit()


OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree")
# A save opens a file (1), lists, flushes and hashes it (2 to 4), writes the manifest (5 to 7), flushes and renames the
# folder (8 to 10), and removes an old checkpoint (11 to 15).
KILLS = (20, 0, 1, 3, 5, 6, 9, 10, 12, 13, 15)


@linux
@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    run, before, leftovers = tmp_path / "killed", 0, 0
    for kill_at in KILLS:
        (process,) = run_all(life, (run, kill_at))
        assert process.exitcode == -signal.SIGKILL
        names = os.listdir(run / FOLDER)
        leftovers += any(name.startswith(".last") for name in names)
        whole = newest(run, "last", quiet=True)
        assert not before or whole.step >= before
        assert not any(name.startswith("damaged") for name in names)
        before = 0 if whole is None else whole.step
    assert 3 < before < 16 and leftovers > 5
    ended = run_all(life, (run, None), (tmp_path / "whole", None))
    assert [process.exitcode for process in ended] == [0, 0]
    assert not differing(state_of(tmp_path / "whole"), state_of(run))


def sharded(group, folder):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    FileSystemWriter.write_data = slowed(FileSystemWriter.write_data, 0.3)  # steps take milliseconds
    for name, beside in (("sync", False), ("async", True)):
        runtime = Runtime(torch.device("cpu"), rank, world)
        made = partial(toys.trainer, folder / name, runtime=runtime, parallel="fsdp", keep_last=9)
        assert made(save_async=beside).fit()
    toys.trainer(folder / "plain", runtime=runtime, parallel="fsdp", ema=None, steps=4).fit()


@pytest.mark.process
def test_shards_are_those_of_their_step(tmp_path, caplog):
    in_processes(2, sharded, tmp_path)
    steps = {name: steps_of(tmp_path / name, "last") for name in ("sync", "async")}
    assert [step for step, _ in steps["async"]] == [6, 4, 2]
    for (_, a), (_, b) in zip(steps["sync"], steps["async"], strict=True):
        assert not differing(join_shards(a), join_shards(b))
        assert not differing(load_state(a / "state.pt"), load_state(b / "state.pt"))
    (tmp_path / "plain" / RECIPE).touch()
    assert consolidate.main([str(tmp_path / "plain")]) == 0  # a run without averaged weights, which have no shards
    resumed = toys.trainer(tmp_path / "plain", ema=None, steps=4)
    assert resumed.fit() and resumed.state.step == 4 and "is damaged" not in caplog.text


def shared_life(rank, folder, meeting, victim=None):
    """Train in one of two processes that shard the state; process `victim` dies in the middle of its third save."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=limit)
    owner, name = (checkpointer, "seal") if rank == 0 else (FileSystemWriter, "write_data")
    act, saves = getattr(owner, name), itertools.count(1)

    def act_or_die(*args, **kwargs):
        if rank == victim and next(saves) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **kwargs)

    setattr(owner, name, act_or_die)
    runtime = Runtime(torch.device("cpu"), rank, 2)
    assert toys.trainer(folder, runtime=runtime, parallel="fsdp", steps=8, **BESIDE).fit()
    dist.barrier()
    dist.destroy_process_group()


@linux
@pytest.mark.process
def test_a_kill_of_one_process_leaves_a_whole_sharded_checkpoint(tmp_path):
    """Kill a process before its shard is written, then the first one when all shards are written."""
    killed, reached = tmp_path / "killed", [0]
    for victim in (1, 0):
        meeting = tmp_path / f"meeting-{victim}"
        both = [CONTEXT.Process(target=shared_life, args=(rank, killed, meeting, victim)) for rank in range(2)]
        for process in both:
            process.start()
        both[victim].join(60)
        assert both[victim].exitcode == -signal.SIGKILL
        both[1 - victim].kill()  # as the launcher does
        both[1 - victim].join(60)
        assert any(name.startswith(".last") for name in os.listdir(killed / FOLDER))
        reached.append(newest(killed, "last", quiet=True).step)
    assert 0 < reached[1] < reached[2] < 8
    for folder in (killed, tmp_path / "whole"):
        both = run_all(shared_life, *((rank, folder, tmp_path / f"meeting-{folder.name}") for rank in range(2)))
        assert [process.exitcode for process in both] == [0, 0]
    shards = [join_shards(newest(folder, "last").path) for folder in (killed, tmp_path / "whole")]
    assert not differing(*shards)
    assert not [name for name in os.listdir(killed / FOLDER) if not name.startswith(("last-", "best-"))]


def test_a_difference_is_found():
    a = {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}
    assert differing(a, {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}) == []
    assert differing(a, {"w": -torch.zeros(2), "n": [1, {"x": 2.5}]}) == [".w", ".n[1].x"]
    assert differing(a, {"w": torch.zeros(3), "n": [1, {"x": 2.0}]}) == [".w"]
    assert differing(a, {"w": torch.zeros(2)}) == [""]
