"""Saving and resuming of a run, in which all processes take part and agree on the checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.trainer.checkpoint_files import (
    STATE,
    Checkpoint,
    UnusableCheckpoint,
    Writing,
    copied,
    load_state,
    newest,
    prune,
    refusal,
    scratch_folder,
    scratch_path,
    seal,
    set_aside,
    steps_of,
)
from lion.trainer.faults import out_of_memory
from lion.trainer.parallel import TrainedModels, load_shards, shard_writer
from lion.trainer.runtime import Runtime
from lion.trainer.state import check_kept

log = logging.getLogger("lion")

TENSORS = ("model", "ema", "optimizer")  # in a plain checkpoint, beside the `plain` of `save_last`


@dataclass
class Checkpointer:
    """The checkpoints of one run; `saved` is the step of the newest checkpoint that the run can resume from.

    At most one checkpoint at a time is written beside training: a save, and `finish`, wait for the one before.
    """

    run: Path
    learner: TrainedModels
    runtime: Runtime
    keep: int
    saved: int | None = None
    writing: Writing | None = None

    @property
    def kept(self) -> str:
        """A message about the newest checkpoint that is still available; waits for the one that is being written."""
        if self.writing is not None and self.writing.refusal() is None:
            return f"the checkpoint of step {self.writing.step} is kept"
        if self.saved is None:
            return "there is no checkpoint"
        return f"the checkpoint of step {self.saved} is kept"

    def save_last(self, step: int, plain: dict[str, Any], *, beside: bool = False) -> bool:
        """Save everything needed to resume, unless this step is already saved; return False if the disk refuses.

        With `beside`, return after the state is copied; a thread writes the copy, and `finish` reports a refusal.
        """
        self.finish()
        if step == self.saved:
            return True
        tensors = self.learner.state()
        if self.learner.sharded:
            return self._save("last", step, plain, shards=tensors, beside=beside)
        return self._save("last", step, {**plain, **tensors}, beside=beside)

    def save_best(self, step: int, plain: dict[str, Any]) -> bool:
        """Save the weights and `plain`, without the optimizer; return False if the disk refuses."""
        self.finish()
        return self._save("best", step, {**plain, **self.learner.weights()})

    def _save(
        self, kind: str, step: int, state: dict[str, Any], shards: dict[str, Any] | None = None, beside: bool = False
    ) -> bool:
        main = self.runtime.main
        problem = None
        scratch = scratch_path(self.run, kind, step)
        try:
            if main:
                scratch_folder(self.run, kind, step)
        except OSError as error:
            problem = refusal(error)
        problem = self.runtime.agree(problem)  # either all processes continue, or none
        if problem is not None:
            return self._refused(kind, step, scratch, problem)
        if beside and main:
            state = copied(state)
        save = None
        if shards is not None:
            save = shard_writer(scratch, shards, beside=beside)

        def write() -> None:
            if save is not None:
                save()
            if main:
                with open(scratch / STATE, "wb") as file:
                    torch.save(state, file)
                keep = self.keep if kind == "last" else 1
                prune(seal(scratch, sharded=save is not None), keep)

        self.writing = Writing(kind, step, scratch, write, beside=beside)
        return beside or self.finish()

    def finish(self) -> bool:
        """Wait for the checkpoint in writing, if any; return False if the disk refused it.

        All processes must call this method.
        """
        if self.writing is None:
            return True
        one = self.writing
        self.writing = None
        problem = self.runtime.agree(one.refusal())
        if problem is not None:
            return self._refused(one.kind, one.step, one.scratch, problem)
        if one.kind == "last":
            self.saved = one.step
        return True

    def _refused(self, kind: str, step: int, scratch: Path, problem: str) -> bool:
        if self.runtime.main:
            shutil.rmtree(scratch, ignore_errors=True)
        log.warning("%s-%d is not saved: %s; %s", kind, step, problem, self.kept)
        return False

    def resume(self, restore: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Resume from the newest usable checkpoint and return its plain data; None if there is no checkpoint.

        `restore` receives the plain data. Its LookupError, TypeError, ValueError, AttributeError or RuntimeError means
        that the checkpoint does not fit this run: the previous checkpoint is tried. A ConfigError ends the search.
        """
        found = state = None
        if self.runtime.main:
            taken = newest(self.run, "last", read=lambda c: (c, self._restore(c, restore, trial=True)), repair=True)
            if taken is not None:
                found, state = taken
        found = self.runtime.agree(found)
        if found is not None:
            if self._is_collective(found) or not self.runtime.main:
                state = self._restore(found, restore)
            self.saved = found.step
        return state

    def _is_collective(self, found: Checkpoint) -> bool:
        """Return whether restoring tensors is a collective operation, which the first process cannot try alone."""
        return self.runtime.world > 1 and (found.sharded or self.learner.sharded)

    def _restore(
        self, found: Checkpoint, restore: Callable[[dict[str, Any]], None], trial: bool = False
    ) -> dict[str, Any]:
        state = load_state(found.state)
        try:
            tensors = {}
            if not found.sharded:
                tensors = {name: state[name] for name in TENSORS}
            plain = {name: value for name, value in state.items() if name not in TENSORS}
            check_kept(plain)
            if plain["step"] != found.step:
                raise ValueError(f"step is {plain['step']}")
            if not (trial and self._is_collective(found)):
                if found.sharded:
                    tensors = load_shards(found.path, into=self.learner.state())
                self.learner.restore(tensors)
            restore(plain)
        except KeyError as error:
            raise UnusableCheckpoint(f"{found.state}: a run cannot resume from it, {error} is missing") from error
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise UnusableCheckpoint(f"{found.state}: a run cannot resume from it ({reason})") from error
        return plain

    def best(self, *, resumed: bool) -> dict[str, Any] | None:
        """Return metric value and step of the best checkpoint, as stored in the checkpoint; None if there is none.

        A run that did not resume sets aside the best checkpoint of an earlier attempt, whose data may have been others.
        """
        best = None
        if self.runtime.main:
            try:
                best = newest(self.run, "best", read=_record, repair=True)
            except ConfigError as error:
                self._start_over(str(error), "damaged")
            if best is not None and not resumed:
                self._start_over(f"best-{best['step']} is of an attempt without a checkpoint to resume from", "earlier")
                best = None
        return self.runtime.agree(best)

    def _start_over(self, reason: str, prefix: str) -> None:
        log.warning("%s; the search for the best checkpoint starts over", reason)
        for _, path in steps_of(self.run, "best"):
            set_aside(path, prefix)


def _record(found: Checkpoint) -> dict[str, Any]:
    best: dict[str, Any] = load_state(found.state).get("best") or {}
    try:
        if math.isnan(best["value"]) or best["step"] < 0:
            raise ValueError
    except (LookupError, TypeError, ValueError):
        raise UnusableCheckpoint(f"{found.state}: it has no valid metric value and step") from None
    return best
