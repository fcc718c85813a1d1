"""Saving and resuming a run: every process takes part, and all agree on what was saved and what is resumed."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lion.config import ConfigError
from lion.trainer.checkpoint import (
    STATE,
    Checkpoint,
    Unusable,
    load_state,
    newest,
    prune,
    scratch_folder,
    scratch_path,
    seal,
    set_aside,
    steps_of,
)
from lion.trainer.faults import full_disk, out_of_memory
from lion.trainer.parallel import Learner, load_shards, save_shards
from lion.trainer.runtime import Runtime
from lion.trainer.state import check_kept

log = logging.getLogger("lion")

TENSORS = ("model", "ema", "optimizer")  # of a plain checkpoint; everything else is what `save_last` was given


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
        """Save all that the run needs to go on, unless this step has been; False where the disk refuses."""
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
        """Save the weights alone; False where the disk refuses."""
        return self._save("best", step, {**plain, **self.learner.weights()}, shards=None)

    def _save(self, kind: str, step: int, state: dict[str, Any], shards: dict[str, Any] | None) -> bool:
        main, problem = self.runtime.main, None
        scratch = scratch_path(self.run, kind, step)
        try:
            if main:
                scratch_folder(self.run, kind, step)
        except OSError as error:
            problem = _refusal(error)
        problem = self.runtime.agree(problem)  # every process leaves here, or none
        try:
            if problem is None and shards is not None:
                save_shards(scratch, shards)
            if problem is None and main:
                with open(scratch / STATE, "wb") as file:
                    torch.save(state, file)
                prune(seal(scratch, sharded=shards is not None), self.keep if kind == "last" else 1)
        except Exception as error:
            problem = _refusal(error)
        problem = self.runtime.agree(problem)
        if problem is None:
            return True
        if main:
            shutil.rmtree(scratch, ignore_errors=True)
        log.warning("%s-%d is not saved: %s; %s", kind, step, problem, self.kept)
        return False

    def resume(self, restore: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Go on from the newest checkpoint that is whole and fits this run; None where there is none.

        `restore` is given its plain part, which is returned; an exception there, but for ConfigError, means that it
        does not fit, and that the one before it is tried.
        """
        found = state = None
        if self.runtime.main:
            taken = newest(self.run, "last", read=lambda c: (c, self._restore(c, restore, trial=True)), repair=True)
            found, state = taken or (None, None)
        found = self.runtime.agree(found)
        if found is not None:
            if self._together(found) or not self.runtime.main:
                state = self._restore(found, restore)
            self.saved = found.step
        return state

    def _together(self, found: Checkpoint) -> bool:
        """Whether all processes restore its tensors at once, so that none can try."""
        return self.runtime.world > 1 and (found.sharded or self.learner.sharded)

    def _restore(
        self, found: Checkpoint, restore: Callable[[dict[str, Any]], None], trial: bool = False
    ) -> dict[str, Any]:
        state = load_state(found.state)
        try:
            tensors = {} if found.sharded else {name: state[name] for name in TENSORS}
            plain = {name: value for name, value in state.items() if name not in TENSORS}
            check_kept(plain)
            if plain["step"] != found.step:
                raise ValueError(f"step is {plain['step']}")
            if not (trial and self._together(found)):
                self.learner.restore(load_shards(found.path, into=self.learner.state()) if found.sharded else tensors)
            restore(plain)
        except KeyError as error:
            raise Unusable(f"{found.state}: a run cannot go on from it, it holds no {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise Unusable(f"{found.state}: a run cannot go on from it ({reason})") from error
        return plain

    def best(self) -> dict[str, Any] | None:
        """The value and step of the best checkpoint: the record of what is best is the checkpoint itself."""
        best = None
        if self.runtime.main:
            try:
                best = newest(self.run, "best", read=_record, repair=True)
            except ConfigError as error:
                log.warning("%s; the best is looked for anew from here on", error)
                for _, path in steps_of(self.run, "best"):
                    set_aside(path)
        return self.runtime.agree(best)


def _record(found: Checkpoint) -> dict[str, Any]:
    best = load_state(found.state).get("best")
    try:
        if math.isnan(best["value"]) or best["step"] < 0:
            raise ValueError
    except (LookupError, TypeError, ValueError):
        raise Unusable(f"{found.state}: it does not say how good it is") from None
    return best


def _refusal(error: Exception) -> str:
    """The words of a full disk, or of what else the system refuses; every other error is raised again."""
    if not isinstance(error, OSError) and not full_disk(error):
        raise error
    return str(error).splitlines()[0]
