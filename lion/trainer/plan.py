"""Training plan: durations and batches of a recipe, converted to steps for a data set and a number of processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from lion.config import ConfigError, rounding
from lion.models.base import Model
from lion.trainer.config import TrainerConfig
from lion.trainer.loader import steps_per_epoch
from lion.trainer.optim import OptimConfig
from lion.trainer.schedule import ScheduleConfig, to_seconds, to_share, to_steps


@dataclass(frozen=True)
class Plan:
    """The settings and lengths of a run, as the trainer uses them.

    The full batch of a step consists of `accumulation` passes of `micro` samples in every process.

    Attributes:
        total: Number of steps of the run; None if the run lasts `seconds` of training.
        seconds: Training time of a time-limited run; None for a run of `total` steps.
        samples: Number of training samples, with repetitions; None if unknown.
        warmup: Length of the learning-rate warm-up, in the unit of `length`.
        ramp: Length of the batch-size ramp, in the unit of `length`; None: the batch size is constant.
        rounding: Settings by dotted key that change the rounding of results, but not the run.
    """

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int
    total: int | None
    seconds: float | None
    samples: int | None
    steps_per_epoch: int  # of the full batch
    warmup: float
    ramp: float | None
    eval_every: int
    save_every: int | None  # None: save every `save_seconds` seconds
    save_seconds: float | None
    micro: int
    accumulation: int
    rounding: dict[str, Any]

    @property
    def length(self) -> float:
        """The length of the run, in steps, or in seconds for a time-limited run."""
        return self.total if self.seconds is None else self.seconds

    def batch(self, at: float) -> int:
        """Return the batch size of the step that begins at place `at` of `length`."""
        return batch_at(at, self.trainer, self.ramp)

    def passes(self, at: float) -> int:
        """Return the number of micro-batches per process in the step that begins at place `at` of `length`."""
        return self.batch(at) * self.accumulation // self.trainer.batch_size


def batch_at(at: float, config: TrainerConfig, ramp: float | None) -> int:
    """Return the batch size of the step that begins at place `at` of a run whose batch size grows until `ramp`."""
    if ramp is None or at >= ramp:
        return config.batch_size
    return min(config.batch_size, config.batch_start * (1 + int(at * (config.batch_size // config.batch_start) / ramp)))


class TrainingRecipe(Protocol):
    """The sections of a recipe that determine training."""

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int


def make_plan(recipe: TrainingRecipe, *, samples: int, world: int) -> Plan:
    """Compute the lengths of a run, and the gradient accumulation that makes up the global batch of the recipe.

    Raises:
        ConfigError: The batch cannot be divided into such micro-batches on `world` processes, `min_lr` or `warmup_lr`
            is above the peak learning rate, or a duration cannot be converted for a run of this length.
    """
    c = recipe.trainer
    world //= c.sharing(world)  # processes that share rows have the same samples
    per_epoch = steps_per_epoch(samples, c.batch_size)
    least, key = (c.batch_size, "batch_size") if c.batch_start is None else (c.batch_start, "batch_start")
    if least % world:
        near = max(world, round(least / world) * world)
        raise ConfigError(f"trainer.{key}: {least} cannot be divided evenly among {world} processes, nearest: {near}")
    share = least // world
    micro = min(c.micro_batch or share, share)
    if share % micro:
        fits = [m for m in range(1, share + 1) if share % m == 0]
        below, above = max(m for m in fits if m < micro), min(m for m in fits if m > micro)
        raise ConfigError(
            f"trainer.micro_batch: {micro} does not divide the {share} samples of a process, nearest: {below}, {above}"
        )
    seconds = None if c.time is None else to_seconds(c.time)
    total = None if seconds else c.steps if c.steps is not None else max(1, round(c.epochs * per_epoch))
    peak = recipe.optim.peak(c.batch_size)
    for name, value in (("min_lr", recipe.schedule.min_lr), ("warmup_lr", recipe.schedule.warmup_lr)):
        if value > peak:
            raise ConfigError(
                f"schedule.{name}: {value:g} is above the highest learning rate, {peak:.3g} for batches of "
                f"{c.batch_size}; lower it, or raise optim.lr"
            )

    def span(key: str, duration: str | int) -> float:
        try:
            return (
                to_share(duration, seconds) if seconds else to_steps(duration, steps_per_epoch=per_epoch, total=total)
            )
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None

    def every(key: str, duration: str | int) -> int:
        if seconds and "%" in str(duration):
            raise ConfigError(
                f"{key}: {duration!r} is undefined in a time-limited run: give steps (1000) or epochs ('1ep')"
            )
        return max(1, to_steps(duration, steps_per_epoch=per_epoch, total=total))

    ramp = None if c.batch_ramp is None else span("trainer.batch_ramp", c.batch_ramp)
    if ramp is not None and ramp > (seconds or total):
        raise ConfigError(f"trainer.batch_ramp: {c.batch_ramp!r} is longer than the run, nearest: '100%'")
    save_seconds = to_seconds(c.save_every)
    return Plan(
        trainer=c,
        optim=recipe.optim,
        schedule=recipe.schedule,
        seed=recipe.seed,
        total=total,
        seconds=seconds,
        samples=None if total is None else samples_of(total, c, ramp),
        steps_per_epoch=per_epoch,
        warmup=span("schedule.warmup", recipe.schedule.warmup),
        ramp=ramp,
        micro=micro,
        accumulation=c.batch_size // (micro * world),
        eval_every=every("trainer.eval_every", c.eval_every),
        save_every=None if save_seconds else every("trainer.save_every", c.save_every),
        save_seconds=save_seconds,
        rounding=rounding(recipe),
    )


def samples_of(steps: int, config: TrainerConfig, ramp: float | None) -> int:
    """Return the number of samples in all steps of a run."""
    growing = min(steps, math.ceil(ramp or 0))
    return sum(batch_at(step, config, ramp) for step in range(growing)) + (steps - growing) * config.batch_size


def check_rows(model: Model, count: int) -> None:
    """Check that `count` processes can share the rows of the model.

    Raises:
        ConfigError: The model does not split its rows, or has fewer tokens than processes.
    """
    try:
        model.check_split(count)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if model.length < count:
        raise ConfigError(f"processes: rows of {model.length} tokens are too short for {count} processes")
