"""State of a run: its batches, plain data of its checkpoints, restoring, and what a resumed run reproduces."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.tasks.base import Task
from lion.trainer.loader import Batches, Loading, SeededDataset, StepSampler, eval_batches
from lion.trainer.optim import learning_rate
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime, name_of, random_state, restore_random_state, seed_everything

log = logging.getLogger("lion")


TICK = 0.2  # seconds between two looks at the clock
LATE = 1.0  # seconds after which a look is late
KEPT = {  # entries of `RunState.to_dict` that `RunState.restore` needs, with their types
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
    """Check that a checkpoint has all entries that `RunState.restore` needs.

    Raises:
        KeyError: An entry is missing.
        TypeError: An entry has the wrong type.
    """
    for name, kind in KEPT.items():
        if not isinstance(kept[name], kind):
            raise TypeError(f"{name} is {kept[name]!r}")


class RunState:
    """The progress of a run.

    Attributes:
        step: Number of steps taken.
        samples: Number of samples in these steps.
        taken: Number of samples in the last step.
        seconds: Training time so far, in a time-limited run.
        evaluated: Step of the last evaluation on `val`.
        best: Metric value and step of the best checkpoint.
        peak: Peak learning rate.
        compiled: Whether the blocks of the model are compiled.
    """

    def __init__(self, run: Path, plan: Plan, task: Task, data: RunData, runtime: Runtime) -> None:
        self.run = run
        self.plan = plan
        self.task = task
        self.data = data
        self.runtime = runtime
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
        """The progress in the unit of `Plan.length`: steps or seconds."""
        if self.plan.seconds is None:
            return self.step
        return self.seconds

    @property
    def epoch(self) -> float:
        return self.samples / (self.plan.steps_per_epoch * self.plan.trainer.batch_size)

    def advance(self, seconds: float) -> None:
        """Record that a step was taken in `seconds`, as measured by the first process."""
        self.taken = self.plan.batch(self.at)
        if self.plan.seconds is not None:
            self.seconds += self.runtime.agree(seconds)
        self.step += 1
        self.samples += self.taken

    def place(self) -> dict[str, float]:
        """Return the place of a metrics line in the run, besides its step."""
        place = {"epoch": self.epoch}
        if self.plan.ramp is not None:
            place["samples"] = self.samples
        if self.plan.seconds is not None:
            place["seconds"] = self.seconds
        return place

    def due(self, every: int | None) -> bool:
        """Return whether an action is due that is repeated every `every` steps and at the end of the run."""
        return self.finished or (every is not None and self.step % every == 0)

    @property
    def evaluation_due(self) -> bool:
        """Return whether an evaluation is due at this step and has not been done."""
        return self.step > self.evaluated and self.due(self.plan.eval_every)

    def learning_rate(self) -> float:
        plan = self.plan
        return learning_rate(self.at, config=plan.schedule, peak=self.peak, warmup=plan.warmup, total=plan.length)

    def upcoming(self) -> dict[str, Any] | None:
        """Return the learning rate and the first samples of the next step, or None at the end of the run."""
        if self.finished:
            return None
        return {"lr": self.learning_rate(), "samples": self.data.sampler(self.samples).samples(8)}

    def to_dict(self) -> dict[str, Any]:
        """Return the plain data of a checkpoint; all processes must call this method."""
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
        """Return the description of the data, which every checkpoint contains."""
        return {"info": self.task.info.to_dict(), "data": self.data.splits.fingerprint}

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the progress and the random states that `to_dict` returned.

        Raises:
            ConfigError: The training data have changed.
        """
        self.task.info.check_same(f"{self.run}: its checkpoint", kept["info"])
        then = kept.get("data")
        now = self.data.splits.fingerprint
        if then != now and None not in (then, now):
            raise self.changed(kept["step"], f"their fingerprint was {then}, and is {now} now")
        self.step = kept["step"]
        self.samples = kept["samples"]
        self.seconds = kept["seconds"]
        self.evaluated = kept["evaluated"]
        self.guard.counts.copy_(kept["skipped"])
        if self.same_world(kept):
            restore_random_state(kept["random"][self.runtime.rank])
        else:
            seed_everything(derive(self.plan.seed, self.step, self.runtime.batch_rank))
        upcoming = self.upcoming()
        if upcoming != kept["next"] and self.runtime.main:  # the launcher stops the others
            then = upcoming_text(kept["next"])
            now = upcoming_text(upcoming)
            raise self.changed(self.step, f"the next were {then}, and are {now} now")

    def changed(self, step: int, how: str) -> ConfigError:
        """Return the error for training data that have changed since `step`."""
        return ConfigError(
            f"{self.run}: the training samples have changed since step {step}: {how}; restore them, or start over with "
            "--fresh (fresh=True)"
        )

    def same_world(self, kept: dict[str, Any]) -> bool:
        """Return whether as many processes made a checkpoint, and as many of them shared a row."""
        sequence = kept["made"].get("sequence", 1)
        return len(kept["random"]) == self.runtime.world and sequence == self.runtime.sequence

    def log_resume(self, kept: dict[str, Any]) -> None:
        """Log where the run resumes, and whether the result will be reproducible."""
        drawn = "" if self.same_world(kept) else ", random states reseeded for another number of processes"
        log.info("resuming at %s: exact state%s", self.progress_text(), drawn)
        if self.plan.seconds is None:
            log.info("%s", reproducibility_text(kept["made"], self.conditions()))
        else:
            log.info(
                "from here on: same data order, not the same bits (time-limited runs are not bitwise reproducible)"
            )

    def progress_text(self) -> str:
        """Return the progress as text."""
        if self.plan.seconds is None:
            return f"step {self.step} of {self.plan.total}"
        return f"step {self.step}, {time_text(self.seconds)} of {self.plan.trainer.time}"

    def conditions(self) -> dict[str, Any]:
        """Return the conditions, besides the recipe, that the last bit of a result depends on."""
        runtime = self.runtime
        parallel = "none"
        if runtime.world > 1:
            parallel = self.plan.trainer.parallel
        return {
            "torch": str(torch.__version__),
            "device": name_of(runtime.device),
            "processes": runtime.world,
            "sequence": runtime.sequence,
            "threads": torch.get_num_threads(),
            "deterministic": runtime.device.type != "cuda" or torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "micro_batch": self.plan.micro,
            "parallel": parallel,
            "compiled": self.compiled,
            **self.plan.rounding,
        }


def upcoming_text(upcoming: dict[str, Any] | None) -> str:
    """Format `RunState.upcoming` for a message."""
    if upcoming is None:
        return "none, the run is complete"
    return f"samples {', '.join(map(str, upcoming['samples']))} .. at learning rate {upcoming['lr']:.3g}"


class StoppedTime:
    """A measure of the time in which this process is stopped (SIGSTOP, Slurm's suspend, a frozen container).

    A thread looks at the clock every `TICK` seconds. A look that comes late shows that the process was stopped.
    """

    def __init__(self) -> None:
        self.lost = 0.0
        self.last = time.monotonic()
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def __enter__(self) -> StoppedTime:
        threading.Thread(target=self.watch, name="stopped_time", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()

    def watch(self) -> None:
        while not self.ended.wait(TICK):
            self.seconds()

    def seconds(self) -> float:
        """Return the time lost so far; this is a look at the clock, too."""
        with self.lock:
            now = time.monotonic()
            late = now - self.last - TICK
            self.last = now
            if late > LATE:
                self.lost += late
            return self.lost


class TrainingClock:
    """The clock of a time-limited run, without the time in which the process is stopped.

    The first step of a process counts 0 seconds if it compiles.
    """

    def __init__(self, compiles: bool, stopped: StoppedTime | None = None) -> None:
        self.compiles = compiles
        self.stopped = stopped
        self.restart()

    def restart(self) -> None:
        """Restart the current lap, because the time since its start was not training."""
        self.started = self.now()

    def now(self) -> float:
        lost = 0.0
        if self.stopped is not None:
            lost = self.stopped.seconds()
        return time.perf_counter() - lost

    def lap(self) -> float:
        """Return the seconds since the last lap or `restart`, and start a new lap."""
        before = self.started
        self.started = self.now()
        if self.compiles:
            self.compiles = False
            return 0.0
        return self.started - before


class SaveTimer:
    """A timer for checkpoints that are saved every `seconds`; None: a checkpoint is never due."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        self.started = time.monotonic()

    @property
    def due(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds


def time_text(seconds: float) -> str:
    """Format seconds as a time in recipes: "1.5h", "2.3min"; below a minute: "12 s"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.4g}h"
    if 0 < seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g}min"


def reproducibility_text(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a message on how far a resumed run reproduces a run without a stop, by the conditions of both.

    A condition that an earlier version did not record counts as unchanged.
    """
    changed = [f"{k} {then[k]} -> {v}" for k, v in now.items() if then.get(k, v) != v]
    if changed:
        return f"from here on: same data order, not the same bits ({', '.join(changed)})"
    if not now["deterministic"]:
        return "from here on: same data order, not the same bits (this GPU needs trainer.deterministic=true for them)"
    return "from here on: bit for bit what the run would have been without a stop"


class FiniteGuard:
    """A guard that skips optimizer steps whose loss or gradient is not finite, without waiting for the device.

    The decision is a tensor that the fused optimizer reads. The counts stay on the device until `read` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, device=device)  # skipped steps: in total, and consecutive at present

    def skip(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 if the step must be skipped, else 0.0; the result is the same in every process."""
        bad = (~torch.isfinite(loss.float() + norm.float())).float()
        self.counts[0] += bad
        self.counts[1] = (self.counts[1] + 1) * bad
        return bad

    def read(self) -> tuple[int, int]:
        """Return the number of skipped steps, in total and consecutive at present."""
        skipped, row = self.counts.tolist()
        return int(skipped), int(row)


@dataclass(frozen=True)
class RunData:
    """The training split and the held-out splits in batches; `workers` is the number of loader processes."""

    splits: Splits
    plan: Plan
    runtime: Runtime
    workers: int = 0

    @property
    def loading(self) -> Loading:
        return Loading(self.splits.collate, self.workers, self.plan.trainer.faults, self.runtime.device)

    def sampler(self, start: int) -> StepSampler:
        """Return the sampler of this process's micro-batches, from sample `start` of the run on."""
        plan = self.plan
        return StepSampler(
            len(self.splits.train),
            batch=plan.trainer.batch_size,
            micro=plan.micro,
            seed=plan.seed,
            start=start,
            end=plan.samples,
            order=self.splits.order,
            rank=self.runtime.batch_rank,
            world=self.runtime.batch_world,
        )

    def train(self, start: int) -> Batches:
        """Return the micro-batches of this process from sample `start` of the run on, across epochs."""
        return Batches(SeededDataset(self.splits.train, self.plan.seed), self.sampler(start), self.loading)

    def held_out(self) -> dict[str, Batches]:
        """Return the held-out splits: first `val`, which selects the best checkpoint, then `more` as `val_NAME`."""
        splits = {"val": self.splits.val}
        for name, dataset in self.splits.more.items():
            splits[f"val_{name}"] = dataset
        batches = {}
        for name, dataset in splits.items():
            batches[name] = eval_batches(
                dataset,
                self.loading,
                seed=self.plan.seed,
                split=name,
                batch=self.plan.micro,
                rank=self.runtime.batch_rank,
                world=self.runtime.batch_world,
            )
        return batches
