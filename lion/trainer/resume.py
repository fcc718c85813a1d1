"""Saving and resuming a run: every process takes part, all agree, and what is promised is said."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.trainer.checkpoint import (
    STATE,
    load_state,
    newest,
    prune,
    scratch_folder,
    scratch_path,
    seal,
    set_aside,
    steps_of,
)
from lion.trainer.faults import full_disk
from lion.trainer.parallel import Learner, load_shards, save_shards
from lion.trainer.runtime import Runtime

log = logging.getLogger("lion")

PLAIN = ("step", "evaluated", "info", "skipped", "random", "next", "made")  # what `save_last` is given
TENSORS = ("model", "ema", "optimizer")


class Checkpointer:
    """The checkpoints of one run. `saved` is the step of the newest that it can go on from."""

    def __init__(self, run: Path, learner: Learner, runtime: Runtime, *, keep: int) -> None:
        self.run, self.learner, self.runtime, self.keep = run, learner, runtime, keep
        self.saved: int | None = None

    @property
    def kept(self) -> str:
        if self.saved is None:
            return "there is no checkpoint"
        return f"the checkpoint of step {self.saved} is kept"

    def save_last(self, step: int, plain: dict[str, Any]) -> bool:
        """Save all that the run needs to go on, unless this step has been; False where the disk is full."""
        if step == self.saved:
            return True
        tensors = self.learner.state()
        sharded = self.learner.sharded
        if not self._save(
            "last", step, plain if sharded else {**plain, **tensors}, shards=tensors if sharded else None
        ):
            return False
        self.saved = step
        return True

    def save_best(self, step: int, plain: dict[str, Any]) -> bool:
        """Save the weights alone; False where the disk is full."""
        return self._save("best", step, {**plain, **self.learner.weights()}, shards=None)

    def _save(self, kind: str, step: int, state: dict[str, Any], shards: dict[str, Any] | None) -> bool:
        main, problem = self.runtime.main, None
        scratch = scratch_path(self.run, kind, step)
        try:
            if main:
                scratch_folder(self.run, kind, step)
        except OSError as error:
            problem = _no_room(error)
        problem = self.runtime.agree(problem)  # every process leaves here, or none
        try:
            if problem is None and shards is not None:
                save_shards(scratch, shards)
            if problem is None and main:
                with open(scratch / STATE, "wb") as file:
                    torch.save(state, file)
                prune(seal(scratch, sharded=shards is not None), self.keep if kind == "last" else 1)
        except Exception as error:
            problem = _no_room(error)
        problem = self.runtime.agree(problem)
        if problem is None:
            return True
        if main:
            shutil.rmtree(scratch, ignore_errors=True)
        log.warning("%s-%d is not saved: %s; %s", kind, step, problem, self.kept)
        return False

    def resume(self) -> dict[str, Any] | None:
        """Take over the newest whole checkpoint, and return its plain part; None where there is none."""
        found = newest(self.run, "last", repair=True) if self.runtime.main else None
        found = self.runtime.agree(found)
        if found is None:
            return None
        state = load_state(found.state)
        parts = () if found.sharded else TENSORS
        lacking = [name for name in (*PLAIN, *parts) if name not in state]
        if lacking:
            raise ConfigError(f"{found.state}: a run cannot go on from it, it holds no {lacking[0]!r}")
        if found.sharded:
            tensors = load_shards(found.path, into=self.learner.state())
        else:
            tensors = {name: state.pop(name) for name in TENSORS}
        self.learner.restore(tensors)
        self.saved = found.step
        return state

    def best(self) -> dict[str, Any] | None:
        """The value and step of the best checkpoint: the record of what is best is the checkpoint itself."""
        best = None
        if self.runtime.main:
            try:
                found = newest(self.run, "best", repair=True)
                best = found and load_state(found.state)["best"]
            except (ConfigError, LookupError) as error:
                log.warning("%s; the best is looked for anew from here on", error)
                for _, path in steps_of(self.run, "best"):
                    set_aside(path)
        return self.runtime.agree(best)


def _no_room(error: Exception) -> str:
    """The words of a full disk; every other error is raised again."""
    if not full_disk(error):
        raise error
    return str(error).splitlines()[0]


class Clock:
    """Says when the next checkpoint is late, where they are saved by the clock."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()

    @property
    def late(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds


def promise(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What a resumed run has in common with the one that was never stopped, from here on."""
    changed = [f"{k} {then.get(k)} -> {v}" for k, v in now.items() if then.get(k) != v]
    if changed:
        return f"from here on: same data order, not the same bits ({', '.join(changed)})"
    if not now["deterministic"]:
        return "from here on: same data order, not the same bits (this GPU needs trainer.deterministic=true for them)"
    return "from here on: bit for bit what the run would have been without a stop"
