"""Tests of runs with several real processes: death, restart, sharding, and signals during compilation."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from lion.config import to_dict
from lion.runs import open_run
from lion.trainer.checkpoint_files import newest, steps_of
from lion.trainer.compilation import missing_compiler
from tests.helpers import ended, refuse, refused, state_of, tiny_recipe
from tests.processes import CONTEXT, Command, as_rank, free_port, in_ranks, run_in
from tests.trainer.helpers import assert_close, differing, lines, linux, train, wait_for
from tools import checks, consolidate
from tools import train as tools_train
from tools.compose import resolve
from tools.launch import Machines
from tools.processes import descendants

pytest.importorskip("sklearn")
pytestmark = [pytest.mark.slow, pytest.mark.process]
STEPS = 40
DISTURBED = {"batch_size": 48, "steps": STEPS, "save_every": 4, "eval_every": 20}


def alive(pid):
    return Path(f"/proc/{pid}").exists()


def ranks(pid):
    """Return the process ids of a launcher's processes by rank."""
    found = {}
    for child in descendants(pid):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((v for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found.setdefault(int(rank[5:]), child)
    return found


def assert_ended_alike(root):
    """Check that the disturbed run has ended bit for bit like the undisturbed one."""
    assert not differing(state_of(root / "runs" / "undisturbed"), state_of(root / "runs" / "tiny"))
    assert lines(root / "runs" / "tiny")[-1]["step"] == STEPS


@linux
def test_a_dead_rank_ends_the_run_and_the_restart_goes_on_bit_for_bit(tmp_path):
    """Check a restart of three processes: with more than two, the order of adding gradients must not change."""
    path = tiny_recipe(tmp_path, trainer=DISTURBED)
    ended(in_ranks(3, "train", path, "--no-eval", "run.name=undisturbed"))
    folder = tmp_path / "runs" / "tiny"
    process = Command("train", path, "--processes", 3, "--no-eval")
    wait_for(lambda: steps_of(folder, "last"), process)
    os.kill(ranks(process.pid)[1], signal.SIGKILL)
    died = time.time()
    done = process.wait(60)
    assert time.time() - died < 60
    assert done.returncode == 1, done
    assert "error: process 1 of 3 died (SIGKILL), the others were stopped; the same command resumes" in done.stderr
    assert "Traceback" not in done.stderr, done
    assert newest(folder, "last").step < STEPS
    again = ended(in_ranks(3, "train", path, "--no-eval"))
    assert "resuming at step" in again.stderr and "bit for bit" in again.stderr, again.stderr
    assert_ended_alike(tmp_path)


@linux
@pytest.mark.every  # the test above, and the options of torchrun below
def test_a_machine_dies_and_comes_back_and_the_run_ends_bit_for_bit(tmp_path):
    """Check two machines, which are two launchers here; all processes of one of them are killed."""
    path = tiny_recipe(tmp_path, trainer=DISTURBED)
    ended(in_ranks(2, "train", path, "--no-eval", "run.name=undisturbed"))
    folder, head = tmp_path / "runs" / "tiny", f"localhost:{free_port()}"
    call = ("train", path, "--no-eval", "--processes", 1, "--nodes", 2, "--head", head, "--restarts", 3)

    def machine(host: bool) -> Command:
        """Start a machine; on one machine, torchrun cannot find out by the name whether it is the host."""
        return Command(*call, PET_RDZV_CONF=f"is_host={int(host)}", OMP_NUM_THREADS=1)

    first, second = machine(True), machine(False)
    wait_for(lambda: steps_of(folder, "last"), first)
    (trained,) = ranks(first.pid).values()
    for pid in (second.pid, *descendants(second.pid)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(trained), first)
    kept = newest(folder, "last").step
    assert kept < STEPS
    ends = [each.wait(300) for each in (machine(False), first)]
    assert [end.returncode for end in ends] == [0, 0], ends
    said = "".join(end.stderr for end in ends)
    assert f"resuming at step {kept} of {STEPS}: exact state" in said and "bit for bit" in said
    assert_ended_alike(tmp_path)


def test_the_launcher_builds_nothing(tmp_path, monkeypatch):
    """Check that the launching process does not build what every launched process builds."""
    path, folder, calls = tiny_recipe(tmp_path), tmp_path / "runs" / "tiny", []
    folder.mkdir(parents=True)
    builders = {tools_train: ("build_data", "start_runtime", "set_aside"), checks: ("make_plan", "make_task")}
    for module, names in builders.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: pytest.fail(name))
    monkeypatch.setattr(tools_train, "launch", lambda *call: calls.append(call) or 0)
    words = [str(path), "seed=2", "--processes", "2", "--fresh", "--no-eval"]
    assert tools_train.main(words) == 0
    assert calls == [(Machines(2), words)]
    machines = ("--nodes", "4", "--processes", "2", "--head", "127.0.0.1:1", "--restarts", "3")
    words = [str(path), "seed=2", *machines]
    assert tools_train.main(words) == 0
    assert calls.pop() == (Machines(2, 4, "127.0.0.1:1", 3), words)
    refused("--fresh: every restart would start anew", tools_train.main, [str(path), "--fresh", *machines])
    refused(
        r"trainer\.device: 'cuda:77' is not available",
        tools_train.main,
        [str(path), "--processes", "2", "trainer.device=cuda:77"],
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(to_dict(resolve(path, ["seed=1"]))))
    refused(
        "holds a run of another recipe, differing in seed: 1 -> 0", tools_train.main, [str(path), "--processes", "2"]
    )
    assert len(calls) == 1
    shutil.copytree(folder, tmp_path / "renamed")
    (tmp_path / "renamed" / "checkpoints").mkdir(exist_ok=True)
    moved = str(tmp_path / "renamed" / "recipe.yaml")
    refused(r"the run was renamed or moved, it was .*; add run.root=.* run.name=renamed", tools_train.main, [moved])
    tools_train.main([moved, "run.name=renamed", f"run.root={tmp_path}", "--processes", "2"])
    assert len(calls) == 2
    seeds = {tools_train.seed_of(rank, seed) for rank in range(3) for seed in range(3)}
    assert len(seeds) == 9 and tools_train.seed_of(0, 2) == 2


def test_the_options_of_torchrun():
    options = "--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:1 --nproc-per-node=2 --max-restarts=3"
    assert Machines(2, 4, "127.0.0.1:1", 3).options() == options.split()
    cases = [
        (Machines(2, head="127.0.0.1:1"), "--head: one machine needs none"),
        (Machines(2, 4), "--nodes: several machines need --head HOST:PORT"),
        (Machines(2, 4, "no.such.invalid:29500"), r"--head: host 'no\.such\.invalid' is not known here"),
    ]
    for head in ("node1", "node1:", ":29500", "node1:port", "node1:70000"):
        cases.append((Machines(2, 4, head), f"--head: expected HOST:PORT .*, got '{head}'"))
    for machines, message in cases:
        refused(message, machines.options)


def test_what_all_processes_refuse_is_said_once_and_the_run_ends_for_any_launcher(tmp_path):
    """Check that nothing is set aside before, that the recipe is kept, and that a complete run is evaluated."""
    path, runs = tiny_recipe(tmp_path), tmp_path / "runs"
    flags = ("--fresh", "--no-eval")
    (runs / "tiny").mkdir(parents=True)
    (runs / "tiny" / "mine.txt").touch()
    other = ("data.name=imagefolder", f"data.root={tmp_path / 'gone'}")
    gone = Command("train", path, *flags, "--processes", 2, *other).wait()
    assert gone.returncode == 2 and gone.stdout == ""
    assert gone.stderr.count("\n") == 1 and gone.stderr.startswith("error: data set 'imagefolder': no folder")
    assert [f.name for f in runs.iterdir()] == ["tiny"] and (runs / "tiny" / "mine.txt").exists()
    assert "the earlier run is kept as" in ended(in_ranks(2, "train", path, *flags)).stdout
    assert (runs / "tiny.old1" / "mine.txt").exists() and steps_of(runs / "tiny", "last")
    changed = in_ranks(1, "train", path, "optim.weight_decay=0.9")
    assert changed.returncode == 2 and "holds a run of another recipe" in changed.stderr
    assert "weight_decay: 0.9" not in (runs / "tiny" / "recipe.yaml").read_text()
    for said in ("best on val", "is complete, nothing to train"):
        assert said in ended(in_ranks(2, "train", path, "--form", "full")).stdout


def as_launcher(folder, port, path):
    """Start a command in two processes, as a launcher does, and wait."""
    for rank in range(2):
        os.makedirs(f"{folder}/{rank}")
        if os.fork() == 0:
            run_in(f"{folder}/{rank}", ["train", path, "--no-eval"], as_rank(rank, 2, port))
    time.sleep(600)


@linux
def test_ranks_end_with_their_launcher(tmp_path):
    path = tiny_recipe(tmp_path, trainer={"steps": 50_000, "save_every": 10})
    launcher = CONTEXT.Process(target=as_launcher, args=(str(tmp_path), free_port(), str(path)))
    launcher.start()
    wait_for(lambda: steps_of(tmp_path / "runs" / "tiny", "last"))
    orphans = descendants(launcher.pid)
    launcher.kill()
    for rank, pid in enumerate(orphans):
        wait_for(lambda pid=pid: not alive(pid), seconds=60)
        assert "Traceback" not in (tmp_path / str(rank) / "stderr").read_text()
    assert len(orphans) == 2


def test_sharded_runs_resume_anywhere_and_consolidate(tmp_path, capsys):
    changes = {"steps": 8, "ema": 0.9, "clip_grad": 1}
    path = tiny_recipe(tmp_path, task={"mixup": 0}, model={"drop_path": 0}, trainer=changes)
    runs = tmp_path / "runs"

    def in_two_ranks(name):
        return ended(in_ranks(2, "train", path, f"run.name={name}", "trainer.parallel=fsdp", "--no-eval")).stderr

    in_two_ranks("sharded")
    assert newest(runs / "sharded", "last").sharded and not newest(runs / "sharded", "best").sharded
    for name in ("again", "alone"):  # copies of the state at step 6
        shutil.copytree(runs / "sharded", runs / name)
        shutil.rmtree(newest(runs / name, "last").path)
        text = (runs / name / "recipe.yaml").read_text().replace("name: sharded", f"name: {name}")
        (runs / name / "recipe.yaml").write_text(text)
    assert "resuming at step 6" in in_two_ranks("again")
    train(path, runs / "alone")
    train(path, runs / "one")

    refused(r"is sharded: \./run\.sh consolidate", open_run, runs / "sharded", checkpoint="last")
    for name in ("sharded", "again"):
        assert consolidate.main([str(runs / name)]) == 0 and "step 8" in capsys.readouterr().out
        assert set(os.listdir(newest(runs / name, "last").path)) == {"consolidated.pt", "manifest.json"}
    assert consolidate.main([str(runs / "again")]) == 0 and "is not sharded" in capsys.readouterr().out
    assert not differing(state_of(runs / "sharded")["optimizer"], state_of(runs / "again")["optimizer"])
    assert not open_run(runs / "sharded", checkpoint="last", ema=True).model.training

    expected = state_of(runs / "one")
    for name in ("sharded", "again", "alone"):
        got = state_of(runs / name)
        assert got.keys() == expected.keys()
        for part in ("model", "ema"):
            assert_close(got[part], expected[part])
    for step, _ in steps_of(runs / "again", "last"):  # an unsharded checkpoint can also resume sharded
        shutil.rmtree(runs / f"again/checkpoints/last-{step}")
    shutil.copytree(runs / "one/checkpoints/last-6", runs / "again/checkpoints/last-6")
    assert "resuming at step 6" in in_two_ranks("again")
    assert newest(runs / "again", "last").sharded and consolidate.main([str(runs / "again")]) == 0
    first, second = (each["torch"] for each in state_of(runs / "again")["random"])
    assert not torch.equal(first, second), "both processes draw the same noise"


COMPILER = """#!/bin/sh
# a compiler of C++ that builds no test program, and needs a minute for a kernel until the signal
case "$*" in
*.main.cpp*) ;;
*.cpp*) exit 1 ;;
*) exec {compiler} "$@" ;;
esac
for word; do
    case "$word" in *.main.cpp) grep -q 'kernel(float\\* x) {{}}' "$word" && exit 1 ;; esac
done
test -e {signalled} && exit 1
: > {marker}
exec sleep 60
"""


@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
def test_a_signal_to_the_whole_group_while_compiling(tmp_path):
    """Signal the whole group, including the compiler, as Ctrl-C in a terminal and a cluster's scheduler do."""
    marker, signalled, slow = tmp_path / "compiling", tmp_path / "signalled", tmp_path / "bin" / "g++"
    slow.parent.mkdir()
    slow.write_text(COMPILER.format(marker=marker, signalled=signalled, compiler=shutil.which("g++")))
    slow.chmod(0o755)
    variables = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache", "PATH": f"{slow.parent}:{os.environ['PATH']}"}
    recipe = tiny_recipe(tmp_path, model={"mixer": "softmax"}, trainer={"compile": True})  # softmax compiles fastest
    process = Command("train", recipe, **variables)
    wait_for(marker.exists, process)
    signalled.touch()
    os.killpg(process.pid, signal.SIGINT)
    done = process.wait(50)
    out = done.stdout + done.stderr
    assert done.returncode == 130 and "the same command resumes from there" in out, done
    assert "Traceback" not in out, done
    assert "stopped at step 0 of 6" in out, done


def test_two_commands_do_not_train_one_run(tmp_path, capsys, monkeypatch):
    path = tiny_recipe(tmp_path, trainer={"steps": 50_000})
    metrics, others = tmp_path / "runs" / "tiny" / "metrics.jsonl", []

    def another():
        """Start a command, and wait until it has trained."""
        trained = metrics.read_text().count("\n") if metrics.exists() else 0
        others.append(Command("train", path))
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > trained, others[-1])
        return f"process {others[-1].pid} trains there now"

    said = another()
    for extra in ((), ("--fresh",)):
        assert said in refuse(capsys, "train", path, *extra)
    others.pop().wait(0)
    prepare = tools_train.prepare

    def slowly(*args, **kwargs):  # after the first look at the folder, another begins: the lock ended with its owner
        another()
        return prepare(*args, **kwargs)

    monkeypatch.setattr(tools_train, "prepare", slowly)
    line = refuse(capsys, "train", path, "--fresh")
    assert f"process {others[0].pid} trains there now" in line
    assert [folder.name for folder in metrics.parent.parent.iterdir()] == ["tiny"]
    others[0].wait(0)
