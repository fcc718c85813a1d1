"""A queue of training runs, each in a separate process, several at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import torch

from lion.layers.mixers import MIXERS
from lion.progress import progress
from lion.recipe import Recipe
from lion.recipe_files import SUMMARY
from lion.trainer.checkpoint_files import steps_of
from tools.cli import say
from tools.processes import ending, kill_tree, start_command

PAUSE = 0.5  # seconds between two checks of the processes
PATIENCE = 60  # seconds that a process has to save and end after SIGTERM


@dataclass(frozen=True)
class Job:
    """A run of the trainer.

    Args:
        argv: Recipe and overrides, as on the command line.
        recipe: The recipe that they resolve to; jobs with the same folder of logs have different names.
        after: A job that must be finished first, or None.
    """

    argv: tuple[str, ...]
    recipe: Recipe
    after: Job | None

    @property
    def name(self) -> str:
        return self.recipe.run.name

    @property
    def folder(self) -> Path:
        return self.recipe.folder

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()


class Running(NamedTuple):
    job: Job
    process: subprocess.Popen
    slot: int
    log: IO[str]


def at_once() -> int:
    """Return the default number of parallel jobs: one per GPU; without GPUs, one per two cores."""
    return torch.cuda.device_count() or max(1, len(os.sched_getaffinity(0)) // 2)


def work(jobs: Sequence[Job], steps: Mapping[str, int], most: int, *, title: str, result: Callable[[Job], str]) -> int:
    """Train all unfinished jobs.

    A failed job is reported, and the other jobs continue. A job that another command is training is waited for.

    Args:
        jobs: All jobs.
        steps: Number of steps of each job, by its name.
        most: Number of jobs at a time.
        title: Title of the progress bar.
        result: Function that stores the result of a finished job, and describes the result in a few words.

    Returns:
        0, the exit code of the first job that failed, or 130 after an interrupt, when all jobs have saved their state.
    """
    waiting = [job for job in jobs if not job.finished]
    running: list[Running] = []
    slots = list(range(min(most, len(waiting))))
    share = max(1, len(os.sched_getaffinity(0)) // max(1, len(slots)))
    noted = False
    code = 0
    with progress(total=sum(steps.values()), unit="step", desc=title, leave=True) as bar:
        try:
            while waiting or running:
                ready = [job for job in waiting if job.after is None or job.after.finished]
                busy = []
                for job in ready:
                    if not slots:
                        break
                    log = claim(job)
                    if log is None:
                        busy.append(job.name)
                        continue
                    waiting.remove(job)
                    if job.finished:  # another command finished this job meanwhile
                        log.close()
                        continue
                    running.append(start(job, slots.pop(0), share, log))
                    say(f"{job.name}: started, {log.name}")
                if busy and not running and not noted:
                    say(f"waiting for {', '.join(busy)}: another command is training them")
                    noted = True
                time.sleep(PAUSE)
                for each in list(running):
                    if each.process.poll() is None:
                        continue
                    running.remove(each)
                    slots.append(each.slot)
                    say(end(each, result))
                    code = code or each.process.returncode
                names = [each.job.name for each in running]
                left = names + [job.name for job in waiting]
                for job in list(waiting):
                    if job.after and not job.after.finished and job.after.name not in left:
                        waiting.remove(job)
                        say(f"{job.name}: not run, because {job.after.name} failed")
                bar.set_postfix_str(", ".join(names), refresh=False)
                bar.update(sum(min(step_of(job), steps[job.name]) for job in jobs) - bar.n)
        except KeyboardInterrupt:
            stop(running)
            say("stopped: the same command resumes from here")
            return 130
    return code


def claim(job: Job) -> IO[str] | None:
    """Open and lock the log file of a job; returns None while another command holds the lock.

    The lock lasts as long as this command or the process of the job holds the file.
    """
    place = job.folder.parent / "logs"
    place.mkdir(parents=True, exist_ok=True)
    log = open(place / f"{job.name}.log", "a", encoding="utf-8")
    try:
        # the process of the job inherits the lock, which is released when both have closed the file
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        return None
    return log


def start(job: Job, slot: int, threads: int, log: IO[str]) -> Running:
    """Start the process of a job, on the GPU of its slot, with its output in `log`.

    The process uses `threads` threads, unless $OMP_NUM_THREADS is set.
    """
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(threads))
    gpus = torch.cuda.device_count()
    if gpus > 1:
        visible = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = visible[slot % gpus]
    form = usual_form(job.recipe)
    process = start_command("train", *job.argv, "--form", form, "--processes", "1", out=log, env=env)
    return Running(job, process, slot, log)


def usual_form(recipe: Recipe) -> str:
    """Return the form in which a run is evaluated once: "full", or the first form of a mixer without it."""
    return MIXERS[recipe.model.mixer].layer.forms[0]


def end(running: Running, result: Callable[[Job], str]) -> str:
    """Describe in one line how a job ended. A finished run keeps only its best weights, because it is never resumed."""
    job, code = running.job, running.process.returncode
    running.log.close()
    if code == 0 and job.finished:
        for _, path in steps_of(job.folder, "last"):
            shutil.rmtree(path, ignore_errors=True)
        return f"{job.name}: finished, {result(job)}"
    lines = Path(running.log.name).read_text(encoding="utf-8", errors="replace").splitlines()
    reason = ending(code)
    for line in lines:  # the last one counts
        if line.startswith("error: "):
            reason = line.removeprefix("error: ")
    return f"{job.name}: failed, {reason} ({running.log.name})"


def step_of(job: Job) -> int:
    """Return the last logged step of a job, or 0."""
    try:
        with open(job.folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def stop(running: Sequence[Running]) -> None:
    """Ask all processes to save and end, and kill those that do not end in time."""
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            each.process.terminate()
    deadline = time.monotonic() + PATIENCE
    for each in running:
        try:
            each.process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            kill_tree(each.process)
        each.log.close()
