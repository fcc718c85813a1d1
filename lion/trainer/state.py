"""Where a run stands: what its checkpoints hold beside the tensors, and what going on from them promises."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from lion.config import ConfigError
from lion.tasks.base import Task
from lion.tasks.seeds import derive
from lion.trainer.guard import FiniteGuard
from lion.trainer.plan import Plan
from lion.trainer.run_data import RunData
from lion.trainer.runtime import Runtime, conditions, random_state, restore_random_state, seed_everything
from lion.trainer.schedule import learning_rate

log = logging.getLogger("lion")


KEPT = {  # by `RunState.to_dict`, and needed by `RunState.restore`
    "step": int,
    "samples": int,
    "seconds": float,
    "evaluated": int,
    "info": dict,
    "skipped": Tensor,
    "random": list,
    "next": dict | None,
    "made": dict,
}


def check_kept(kept: dict[str, Any]) -> None:
    """Refuse what `RunState.restore` cannot go on from.

    Raises:
        KeyError, TypeError: What is missing, or of another kind.
    """
    for name, kind in KEPT.items():
        if not isinstance(kept[name], kind):
            raise TypeError(f"{name} is {kept[name]!r}")


class RunState:
    """The place of a run in its plan.

    `step` is how many steps were taken, `samples` on how many samples, `taken` on how many in the last of them,
    `seconds` how long that took where the run is as long as a time, `evaluated` after which step `val` was last
    measured, `best` value and step of the best checkpoint, `compiled` whether the blocks are.
    """

    def __init__(self, run: Path, plan: Plan, task: Task, data: RunData, runtime: Runtime) -> None:
        self.run, self.plan, self.task, self.data, self.runtime = run, plan, task, data, runtime
        self.step = self.samples = self.taken = self.evaluated = 0
        self.seconds = 0.0
        self.best: dict[str, Any] = {"value": task.metric.worst, "step": 0}
        self.guard = FiniteGuard(runtime.device)
        self.peak = plan.optim.peak(plan.trainer.batch_size)
        self.compiled = False

    @property
    def finished(self) -> bool:
        return self.at >= self.plan.length

    @property
    def at(self) -> float:
        """The place in the plan's `length`."""
        return self.step if self.plan.seconds is None else self.seconds

    @property
    def epoch(self) -> float:
        return self.samples / (self.plan.steps_per_epoch * self.plan.trainer.batch_size)

    def advance(self, seconds: float) -> None:
        """A step was taken, in so many seconds; of several processes the first one's count."""
        self.taken = self.plan.batch(self.at)
        if self.plan.seconds is not None:
            self.seconds += self.runtime.agree(seconds)
        self.step += 1
        self.samples += self.taken

    def place(self) -> dict[str, float]:
        """What a line of metrics says of where it was written, beside the step."""
        more = {"samples": self.samples} if self.plan.ramp is not None else {}
        return {"epoch": self.epoch, **more, **({} if self.plan.seconds is None else {"seconds": self.seconds})}

    def due(self, every: int | None) -> bool:
        """Whether it is the turn of what is done every so many steps, and at the end."""
        return self.finished or (every is not None and self.step % every == 0)

    @property
    def evaluation_due(self) -> bool:
        """Whether `val` is to be measured at this step and has not been."""
        return self.step > self.evaluated and self.due(self.plan.eval_every)

    def learning_rate(self) -> float:
        plan = self.plan
        return learning_rate(self.at, config=plan.schedule, peak=self.peak, warmup=plan.warmup, total=plan.length)

    def upcoming(self) -> dict[str, Any] | None:
        """The learning rate and the first samples of the next step."""
        if self.finished:
            return None
        return {"lr": self.learning_rate(), "samples": self.data.sampler(self.samples).samples(8)}

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; every process takes part."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": self.seconds,
            "evaluated": self.evaluated,
            **self.about(),
            "skipped": self.guard.counts.cpu(),
            "random": self.runtime.gather(random_state()),
            "next": self.upcoming(),
            "made": self.conditions(),
        }

    def about(self) -> dict[str, Any]:
        """Describe the data, in every checkpoint."""
        return {"info": self.task.info.to_dict(), "data": self.data.splits.fingerprint}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go to the place in the run, and in the random numbers, that `to_dict` gave.

        Raises:
            ConfigError: The data are others.
        """
        self.task.info.check_same(f"{self.run}: its checkpoint", kept["info"])
        then, now = kept.get("data"), self.data.splits.fingerprint
        if then != now and None not in (then, now):
            raise self.changed(kept["step"], f"their fingerprint was {then}, and is {now} now")
        self.step, self.samples, self.seconds = kept["step"], kept["samples"], kept["seconds"]
        self.evaluated = kept["evaluated"]
        self.guard.counts.copy_(kept["skipped"])
        if self.same_world(kept):
            restore_random_state(kept["random"][self.runtime.rank])
        else:
            seed_everything(derive(self.plan.seed, self.step, self.runtime.rank))
        if (upcoming := self.upcoming()) != kept["next"] and self.runtime.main:  # the launcher ends the others
            then, now = (in_words(place) for place in (kept["next"], upcoming))
            raise self.changed(self.step, f"the next were {then}, and are {now} now")

    def changed(self, step: int, how: str) -> ConfigError:
        """The refusal of other training data than those of the steps so far."""
        return ConfigError(
            f"{self.run}: the training samples have changed since step {step}: {how}; restore them, or start anew with "
            "--fresh"
        )

    def same_world(self, kept: dict[str, Any]) -> bool:
        return len(kept["random"]) == self.runtime.world

    def announce(self, kept: dict[str, Any]) -> None:
        """Say where the run goes on, and what that promises."""
        drawn = "" if self.same_world(kept) else ", random states drawn anew for another number of processes"
        log.info("resuming at %s: exact state%s", self.told(), drawn)
        if (upcoming := self.upcoming()) is not None:
            log.info("next: %s", in_words(upcoming))
        if self.plan.seconds is None:
            log.info("%s", promise(kept["made"], self.conditions()))
        else:
            log.info("from here on: same data order, not the same bits (how far a time goes is no two times the same)")

    def told(self) -> str:
        """The place in words."""
        if self.plan.seconds is None:
            return f"step {self.step} of {self.plan.total}"
        return f"step {self.step}, {in_time(self.seconds)} of {self.plan.trainer.time}"

    def conditions(self) -> dict[str, Any]:
        """What must be equal for equal bits."""
        return {
            **conditions(self.runtime),
            "micro_batch": self.plan.micro,
            "parallel": self.plan.trainer.parallel if self.runtime.world > 1 else "none",
            "compiled": self.compiled,
        }


def in_words(upcoming: dict[str, Any] | None) -> str:
    """Format `RunState.upcoming` for a message."""
    if upcoming is None:
        return "none, the run is complete"
    return f"samples {', '.join(map(str, upcoming['samples']))} .. at learning rate {upcoming['lr']:.3g}"


class TrainingClock:
    """Seconds that count for a run whose length is a time. A step that compiles, the first of a process, takes none."""

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.restart()

    def restart(self) -> None:
        """What took time since the last lap was no training."""
        self.started = time.perf_counter()

    def lap(self) -> float:
        """Since the last one, or the last `restart`."""
        before, self.started = self.started, time.perf_counter()
        if self.compiles:
            self.compiles = False
            return 0.0
        return self.started - before


class SaveTimer:
    """Says when a checkpoint is due, where they are saved by the clock; without `seconds`, never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.started = time.monotonic()

    def restart(self) -> None:
        self.started = time.monotonic()

    @property
    def due(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds


def in_time(seconds: float) -> str:
    """As recipes write a time: "1.5h", "2.3min"."""
    return f"{seconds / 3600:.4g}h" if seconds >= 3600 else f"{seconds / 60:.3g}min"


def promise(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What a resumed run has in common with the one that was never stopped, from here on."""
    changed = [f"{k} {then.get(k)} -> {v}" for k, v in now.items() if then.get(k) != v]
    if changed:
        return f"from here on: same data order, not the same bits ({', '.join(changed)})"
    if not now["deterministic"]:
        return "from here on: same data order, not the same bits (this GPU needs trainer.deterministic=true for them)"
    return "from here on: bit for bit what the run would have been without a stop"
