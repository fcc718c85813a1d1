"""Tests of faults: loader workers that die, unreadable samples, full disks, and exhausted memory."""

import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import get_worker_info

from lion.config import ConfigError
from lion.samples.base import Unreadable
from lion.samples.order import Shuffled
from lion.trainer import checkpointer, parallel
from lion.trainer.checkpoint_files import check_space, newest
from lion.trainer.faults import FaultsConfig, RunError, full_disk, memory_advice, os_error_text
from lion.trainer.loader import Batches, Loading, SeededDataset, StepSampler, eval_batches
from lion.trainer.log import RunLog
from lion.trainer.loop import Trainer
from tests.helpers import ROOT, here, picture, pictures, refused, tiny_recipe
from tests.trainer import toys
from tests.trainer.helpers import before_steps, command_after, lines, linux, logged
from tests.trainer.test_loader import Noisy

pytest.importorskip("sklearn")
NO_SPACE = OSError(28, "No space left on device")


def no_space(*args, **kwargs):
    raise NO_SPACE


class Shaky(Noisy):
    """Numbers; sample 5 kills its worker while a marker file exists, and the samples in `bad` cannot be read."""

    def __init__(self, markers=(), bad=(), size=24):
        super().__init__(size)
        self.markers, self.bad = markers, bad

    def __getitem__(self, index):
        for marker in self.markers:
            if index == 5 and marker.exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise Unreadable(f"file {index}.jpg (OSError: truncated)")
        return super().__getitem__(index)


def stream(dataset, workers=0, faults=None):
    sampler = StepSampler(len(dataset), order=Shuffled(), batch=8, micro=4, seed=3, start=0, end=48, rank=0, world=1)
    return Batches(SeededDataset(dataset, 3), sampler, Loading(workers=workers, faults=faults or FaultsConfig()))


def values(batches):
    return [(b["index"].tolist(), b["draw"].tolist()) for b in batches]


@pytest.mark.slow
def test_a_dead_worker_is_named_and_replaced_at_the_batch_that_was_due_until_there_are_too_many(tmp_path, caplog):
    expected = values(stream(Shaky()))
    markers = [tmp_path / "1", tmp_path / "2"]
    for marker in markers:
        marker.touch()
    batches = stream(Shaky(markers), workers=2)
    assert values(batches) == expected and batches.died == 2
    for said in ("a loader worker died", "1 of at most 10", "2 of at most 10"):
        assert said in caplog.text
    markers[0].touch()
    with pytest.raises(RunError, match=r"a loader worker died .*code -9.*, death 1 of at most 0 .*data\.workers=N"):
        values(stream(Shaky(markers), workers=1, faults=FaultsConfig(workers=0)))


class Broken(Shaky):
    """Reading fails in the first worker, while the second one hangs."""

    error = KeyError("a bug")

    def __getitem__(self, index):
        if get_worker_info().id == 1:
            time.sleep(600)
        raise self.error


@pytest.mark.process
def test_an_error_of_a_worker_is_raised_and_no_worker_outlives_it():
    with pytest.raises(KeyError, match="a bug"):
        values(stream(Broken(), workers=2))
    assert not multiprocessing.active_children()


@pytest.mark.process
def test_full_shared_memory_is_named():
    data = Broken()
    data.error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    with pytest.raises(RunError, match=r"/dev/shm.* data\.workers=N .*--shm-size"):
        values(stream(data, workers=1))
    assert "ulimit -n" in os_error_text(OSError(24, "Too many open files"))


def test_few_open_files_leave_no_workers(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    batches = stream(Shaky(), workers=2)
    assert batches.workers == 0 and "at most 40 open files are allowed (ulimit -n)" in caplog.text


STUBBORN = """
import multiprocessing, resource, signal, time
from tools.cli import run_command

def ignore_and_wait(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(600)

def main(argv):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    fork.Process(target=ignore_and_wait, args=[ready], daemon=True).start()
    ready.wait()
    raise ValueError("a bug")

run_command(main, [])
"""


@pytest.mark.process
def test_a_command_ends_after_an_error_whatever_its_processes_do():
    allowed = ["bash", "-c", 'ulimit -S -n 300; exec "$@"', "bash"]
    call = [*allowed, sys.executable, "-c", STUBBORN]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ValueError: a bug" in done.stderr
    soft, hard = done.stdout.split()
    assert soft == hard != "300"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_read_is_named_counted_and_replaced_by_its_neighbour(caplog, workers):
    expected = values(stream(Shaky()))
    batches = stream(Shaky(bad=(7, 8)), workers=workers)
    got = values(batches)
    assert [[9 if i in (7, 8) else i for i in ids] for ids, _ in expected] == [ids for ids, _ in got]
    assert batches.unreadable == {7, 8}
    assert "unreadable, skipped: file 7.jpg (OSError: truncated) (" in caplog.text
    assert caplog.text.count("file 7.jpg") == 1  # though it comes every epoch


def test_too_much_that_cannot_be_read_stops_the_run():
    with pytest.raises(RunError, match=r"file \d\.jpg .*3 of at most 2 .*trainer\.faults\.unreadable"):
        values(stream(Shaky(bad=range(9)), faults=FaultsConfig(unreadable=2)))
    with pytest.raises(RunError, match="100 samples in a row"):
        values(stream(Shaky(bad=range(24)), faults=FaultsConfig(unreadable=1000)))


def test_evaluation_leaves_out_what_cannot_be_read():
    data = Shaky(bad=(0, 3), size=10)
    batches = eval_batches(data, Loading(), seed=0, split="val", batch=4)
    seen = []
    for batch in batches:
        assert len(batch["index"]) == 4
        seen += batch["index"][batch["mask"]].tolist()
    assert seen == [1, 2, 4, 5, 6, 7, 8, 9] and batches.unreadable == {0, 3}


@pytest.mark.slow
@pytest.mark.process
def test_a_corrupt_image_in_a_real_folder(tmp_path, caplog):
    root = tmp_path / "pictures"
    pictures(root, {"train": {"cat": 12, "dog": 12}, "val": {"cat": 4, "dog": 4}})
    corrupt = [root / "train/cat/3.jpg", root / "val/dog/1.png"]
    picture(3).save(corrupt[0])
    (root / "train/cat/3.png").unlink()
    for path in corrupt:
        path.write_bytes(path.read_bytes()[:200])
    data = {"name": "imagefolder", "root": str(root), "image_size": [8, 8], "workers": 1}
    recipe = tiny_recipe(tmp_path, data=data, trainer={"batch_size": 8, "log_every": 1})
    assert here("train", recipe, "--no-eval") == 0
    for path in corrupt:
        assert f"unreadable, skipped: {path} (" in caplog.text
    assert caplog.text.count(f"unreadable, skipped: {corrupt[0]} (") == 1
    assert logged(tmp_path / "runs" / "tiny", "train", "unreadable_samples")[-1] == 1
    with pytest.raises(RunError, match=r"^unreadable: "):
        here("train", recipe, "trainer.faults.unreadable=0", "run.name=strict")


def small_files():
    """Limit the size of this process's files, as a quota does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


def little_memory():
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 600 * 2**20,) * 2)


def a_bug():
    def train_step(*args):
        raise ValueError("a bug")

    Trainer.train_step = train_step


@linux
@pytest.mark.slow
@pytest.mark.process
def test_a_file_that_may_not_grow_leaves_the_previous_checkpoint(tmp_path):
    path = tiny_recipe(tmp_path)
    folder = tmp_path / "runs" / "tiny"
    assert here("train", path, "--no-eval") == 0
    shutil.rmtree(newest(folder, "last").path)
    code, said = command_after(small_files, tmp_path / "said", "train", path, "--no-eval", "trainer.save_every=1")
    assert code == 1, said
    assert "last-4 is not saved: " in said and "the checkpoint of step 3 is kept" in said
    assert said.splitlines()[-1] == "error: step 6 could not be saved: the checkpoint of step 3 is kept"
    assert newest(folder, "last").step == 3 and not list((folder / "checkpoints").glob(".*"))
    assert here("train", path, "--no-eval") == 0 and newest(folder, "last").step == 6


@linux
@pytest.mark.slow
@pytest.mark.process
def test_out_of_memory_names_the_micro_batch(tmp_path):
    path = tiny_recipe(tmp_path, model={"dim": 256, "depth": 12}, trainer={"batch_size": 1024})
    code, said = command_after(little_memory, tmp_path / "said", "train", path)
    assert code == 2, said
    last = said.splitlines()[-1]
    assert last.startswith("error: out of memory at step 0 with trainer.micro_batch=1024: try trainer.micro_batch=512")


@linux
@pytest.mark.slow
@pytest.mark.process
def test_an_error_ends_the_process_and_its_loader_workers(tmp_path):
    code, said = command_after(a_bug, tmp_path / "said", "train", tiny_recipe(tmp_path), "data.workers=2")
    assert code == 1 and "ValueError: a bug" in said


def can_mount():
    call = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m lion /mnt"]
    return shutil.which("unshare") and subprocess.run(call, capture_output=True).returncode == 0


FULL = """
import os, sys
from pathlib import Path
import data.vision.digits, sklearn.datasets, torch.utils.tensorboard
from lion.trainer.loop import Trainer
from tools import __main__ as commands, train
from tools.cli import run_command

def run(name, *more):
    if not (pid := os.fork()):
        run_command(commands.main, [*sys.argv[1:], f"run.root={disk}", *more])
    print(f"\\n{name} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)

def save_and_fill(self, *args, **kwargs):
    save(self, *args, **kwargs)
    if self.state.step == 10:
        os.system(f"cat /dev/zero >{disk}/filler")

disk = Path("disk").absolute()
os.system(f"mount -t tmpfs -o size=2m lion {disk}")
save, Trainer.save = Trainer.save, save_and_fill
run("full")
Trainer.save = save
run("still full", "trainer.keep_last=9")
run("room for checkpoints alone")
(disk / "filler").unlink()
run("free")
os.system(f"tail -n 1 {disk}/tiny/metrics.jsonl")
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_full_file_system_leaves_the_previous_checkpoint(tmp_path):
    if not can_mount():
        pytest.skip("no private mounts here")
    path = tiny_recipe(tmp_path, trainer={"steps": 30, "save_every": 5, "eval_every": 15})
    disk = tmp_path / "disk"
    disk.mkdir()
    call = ["unshare", "-rm", sys.executable, "-c", FULL, "train", str(path), "--no-eval"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    for code in ("full 1", "still full 2", "room for checkpoints alone 1", "free 0"):
        assert f"\n{code}\n" in done.stdout, done.stdout + done.stderr
    for said in (
        "is not saved: [Errno 28] No space left on device; the checkpoint of step",
        "error: step 30 could not be saved: the checkpoint of step",
        "error: run.root: checkpoints in",
        "resuming at step",
        f"error: {disk}/tiny/recipe.yaml: No space left on device",
    ):
        assert said in done.stderr, done.stderr
    assert '"step": 30,' in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stderr, done.stderr


class Normed(toys.Sides):
    def build_model(self, config):
        net = toys.Net()
        net.head = nn.Sequential(nn.BatchNorm1d(4), net.head)
        return net


def test_a_skipped_step_leaves_running_statistics_as_they_were(tmp_path):
    """Check that the third step of six, which reads a NaN, has no effect."""
    t = toys.trainer(tmp_path / "run", kind=Normed, eval_every=6)
    step, seen = t.train_step, []

    def train_step(batches, *rest):
        if t.state.step == 2:
            broken = next(batches)
            broken["x"] = broken["x"].clone()
            broken["x"][0] = math.nan
            batches = iter([broken])
        out = step(batches, *rest)
        seen.append({k: v.clone() for k, v in t.model.state_dict().items()})
        return out

    t.train_step = train_step
    assert t.fit() and t.state.guard.read()[0] == 1
    statistics = {"head.0.running_mean", "head.0.running_var", "head.0.num_batches_tracked", "steps"}
    for name, value in seen[1].items():
        assert torch.equal(seen[2][name], value) and seen[-1][name].isfinite().all(), name
        assert name not in statistics or not torch.equal(seen[3][name], value), name
    assert statistics < seen[0].keys() and seen[-1]["steps"].eq(5).all()
    assert all(value.isfinite().all() for value in t.ema.state_dict().values())


def test_a_full_disk_is_found_in_every_error_that_it_causes(monkeypatch, tmp_path):
    def save(*args, **kwargs):
        raise CheckpointException("failed", {1: (NO_SPACE, None)})

    monkeypatch.setattr(parallel.dcp, "save", save)
    with pytest.raises(OSError, match="No space left"):
        parallel.shard_writer(tmp_path, {}, beside=False)()
    for number, said in ((28, "[enforce fail] No space left on device"), (27, "Error: I/O error (os error 27)")):
        assert full_disk(RuntimeError(said)).errno == number
    for other in (RuntimeError("os error 2"), FileNotFoundError(2, "no")):
        assert full_disk(other) is None


def test_what_the_system_refuses_is_reported_like_a_full_disk(tmp_path, caplog, monkeypatch):
    """Check a file in the place of a checkpoint, and a full disk before the first byte."""
    folder = tmp_path / "run" / "checkpoints"
    t = toys.trainer(tmp_path / "run")

    def in_the_way():
        if t.state.step == 3:
            (folder / "last-4").touch()

    assert before_steps(t, in_the_way).fit()
    assert "last-4 is not saved: [Errno 20] Not a directory" in caplog.text and t.checkpoints.saved == 6
    assert newest(tmp_path / "run", "last").step == 6
    monkeypatch.setattr(checkpointer, "scratch_folder", no_space)
    assert t.checkpoints.save_last(7, {}) is False and t.checkpoints.saved == 6
    assert "last-7 is not saved: [Errno 28] No space left on device; the checkpoint of step 6 is kept" in caplog.text


def test_metrics_wait_for_room_and_lose_no_line(tmp_path):
    class Full:
        write = no_space

    log = RunLog(tmp_path, start=0, total=10)
    file, log.file = log.file, Full()
    for step in range(1, 2000):
        log.write(step, "train", {"loss": 1.0})
    log.file = file
    log.write(2000, "train", {"loss": 1.0})
    log.close()
    assert [x["step"] for x in lines(tmp_path)] == list(range(1, 2001))


def test_disk_need_is_checked_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(ConfigError) as error:
        check_space(tmp_path / "run", 2**60, 2**58, keep=2)
    for part in ("run.root: checkpoints in", "MiB are free", "trainer.keep_last=1"):
        assert part in str(error.value)
    check_space(tmp_path / "run", 1000, 100, keep=2)
    monkeypatch.setattr("os.access", lambda place, mode: False)  # this process may be root's, who can write anywhere
    refused(r"^run\.root: .* cannot be written to$", check_space, tmp_path / "run", 1000, 100, keep=2)


def test_memory_advice_names_a_micro_batch_that_fits_the_batch():
    assert "trainer.micro_batch=6: try trainer.micro_batch=3" in str(memory_advice(7, 6))
    assert "cannot be smaller" in str(memory_advice(7, 1))
