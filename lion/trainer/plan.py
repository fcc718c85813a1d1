"""The `trainer` section of a recipe, and its durations and batches in steps, for a data set and its processes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lion.config import ConfigError, nearest_divisor, rounding, setting
from lion.models.base import Model
from lion.trainer.faults import FaultsConfig
from lion.trainer.loader import steps_per_epoch
from lion.trainer.optim import OptimConfig, ScheduleConfig, to_seconds, to_share, to_steps
from lion.trainer.runtime import MATMUL


@dataclass
class TrainerConfig:
    """Settings of training: length, batch size, precision, evaluation and checkpoints.

    Durations are steps (2000), epochs ("5ep") or percent of the run ("2%").

    The length of a run is `epochs`, `steps` or `time` ("24h", "30min"). `time` counts training only, without
    compilation, evaluation and saving. `batch_size` is the global batch size of a step, for any number of processes.
    `micro_batch` is the number of samples in one forward pass of one process (null: the whole share of the process).
    The number of accumulation passes follows from both. With `batch_ramp` ("60%"), the batch size grows linearly
    during that time, from `batch_start` samples in increments of `batch_start`.

    `eval_every` and `save_every` are durations; `save_every` may also be a time. The newest `keep_last` checkpoints
    from which a run can resume are kept. With `save_async`, a step waits only until the state is copied into the memory
    of the CPU, and a thread writes the copy. `parallel` selects how processes share the model: each process holds the
    whole model (`ddp`) or a shard of it (`fsdp`). With `sequence`, each holds the whole model, and a part of the tokens
    of each row. `sequence` is the number of processes that share a row, which makes a mesh of `data x sequence`
    processes, also with `ddp` and `fsdp` (null: all processes with `parallel=sequence`, otherwise 1).

    `precision=bf16` is autocast, which leaves gates, masks and row sums in float32. `matmul` is the precision of all
    float32 matrix products (`high`: TF32 on a GPU that supports it; `medium`: bf16 products on a CPU that supports
    them). `deterministic` selects kernels that give the same bits every time, as far as PyTorch has them for a GPU.
    `compiled_code` is a file of compiled code, which is read at the start, if it exists, and written at the end. With
    `autotune`, compilation takes a minute or more longer: it times generated kernels for every matrix product beside
    those of the libraries, and takes the fastest. With `memory_budget` below 1, compiled blocks save about that share
    of what they would save for the backward pass, which recomputes the rest.
    """

    batch_size: int = setting(min=1)
    epochs: float | None = setting(None, above=0, max=1_000_000)
    steps: int | None = setting(None, min=1)
    time: str | None = None
    batch_ramp: str | int | None = None
    batch_start: int | None = setting(None, min=1)
    micro_batch: int | None = setting(None, min=1, free=True)
    precision: str = setting("fp32", choices=("fp32", "bf16"))
    matmul: str = setting("highest", choices=MATMUL)
    compile: bool = setting(True, free=True)
    compiled_code: str | None = setting(None, free=True)
    autotune: bool = setting(False, free="rounding")
    memory_budget: float = setting(1.0, above=0, max=1, free="rounding")
    clip_grad: float | None = setting(None, above=0)
    ema: float | None = setting(None, min=0, max=1)
    eval_every: str | int = "1ep"
    save_every: str | int = setting("1ep", free=True)
    keep_last: int = setting(2, min=1, free=True)
    save_async: bool = setting(False, free=True)
    log_every: int = setting(50, min=1, free=True)
    device: str = setting("auto", free=True)
    parallel: str = setting("ddp", choices=("ddp", "fsdp", "sequence"), free=True)
    sequence: int | None = setting(None, min=1, free=True)
    deterministic: bool = setting(False, free=True)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        given = [name for name in ("epochs", "steps", "time") if getattr(self, name) is not None]
        if len(given) != 1:
            which = "trainer.epochs, trainer.steps and trainer.time"
            raise ValueError(f"epochs: give exactly one of {which}, got {' and '.join(given) or 'none'}")
        if self.time is not None and not to_seconds(self.time):
            raise ValueError(f"time: expected hours ('24h') or minutes ('30min'), got {self.time!r}")
        if self.ema == 1:
            raise ValueError("ema: expected less than 1, with which the average would never change, got 1.0")
        for name in ("eval_every", "save_every", "batch_ramp"):
            timed = name == "save_every" or (name == "batch_ramp" and self.time is not None)
            value = getattr(self, name)
            if value is None or (timed and to_seconds(value)):
                continue
            try:
                steps = to_steps(value, steps_per_epoch=1000, total=100_000)
            except ValueError as error:
                more = " (or a time, 30min)" if timed else ""
                raise ValueError(f"{name}: {error}{more}") from None
            if steps < 1:
                raise ValueError(f"{name}: expected more than 0, got {value!r}")
        self.check_ramp()

    def processes_of_a_row(self, world: int) -> int:
        """Return how many of `world` processes are to share the tokens of a row, a divisor of `world` or not."""
        if self.sequence:
            return self.sequence
        return world if self.parallel == "sequence" else 1

    def sharing(self, world: int) -> int:
        """Return how many of `world` processes share the tokens of a row.

        Raises:
            ConfigError: `sequence` does not divide the number of processes.
        """
        count = self.processes_of_a_row(world)
        if world % count:
            near = nearest_divisor(count, world)
            raise ConfigError(f"trainer.sequence: {count} does not divide {world} processes, nearest: {near}")
        return count

    def describe(self) -> str:
        """Return length and batch size as text."""
        length = f"{self.time} of training"
        if self.epochs is not None:
            length = f"{self.epochs:g} epochs"
        elif self.steps:
            length = f"{self.steps:,} steps"
        return f"{length} in batches of {self.batches()}"

    def batches(self) -> str:
        """Return the batch size, or its ramp, as text."""
        if self.batch_ramp is None:
            return str(self.batch_size)
        return f"{self.batch_start} to {self.batch_size}, reached after {self.batch_ramp}"

    def check_ramp(self) -> None:
        """Check the settings of the batch-size ramp.

        Raises:
            ValueError: `batch_ramp`, `batch_start`, `batch_size` and `epochs` do not fit together.
        """
        if (self.batch_ramp is None) != (self.batch_start is None):
            missing = "batch_start" if self.batch_start is None else "batch_ramp"
            raise ValueError(f"{missing}: batch_ramp and batch_start go together, one is missing")
        if self.batch_start is None:
            return
        if self.epochs is not None:
            raise ValueError("batch_ramp: not possible with trainer.epochs, give trainer.steps or trainer.time")
        if self.batch_size % self.batch_start:
            near = nearest_divisor(self.batch_start, self.batch_size)
            raise ValueError(
                f"batch_start: {self.batch_start} does not divide batch_size {self.batch_size}, nearest: {near}"
            )


@dataclass(frozen=True)
class Plan:
    """The settings and lengths of a run, as the trainer uses them.

    The full batch of a step consists of `accumulation` passes of `micro` samples in every process.

    Attributes:
        total: Number of steps of the run; None if the run lasts `seconds` of training.
        seconds: Training time of a time-limited run; None for a run of `total` steps.
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
        if self.total is not None:
            return self.total
        assert self.seconds is not None  # one of both is set
        return self.seconds

    @functools.cached_property
    def samples(self) -> int | None:
        """The number of training samples, with repetitions; None if unknown."""
        if self.total is None:
            return None
        growing = min(self.total, math.ceil(self.ramp or 0))
        ramped = sum(map(self.batch, range(growing)))
        return ramped + (self.total - growing) * self.trainer.batch_size

    def batch(self, at: float) -> int:
        """Return the batch size of the step that begins at place `at` of `length`; it grows until `ramp`."""
        most = self.trainer.batch_size
        if self.ramp is None or at >= self.ramp:
            return most
        start = self.trainer.batch_start
        assert start is not None  # checked with `batch_ramp`
        return min(most, start * (1 + int(at * (most // start) / self.ramp)))

    def passes(self, at: float) -> int:
        """Return the number of micro-batches per process in the step that begins at place `at` of `length`."""
        return self.batch(at) * self.accumulation // self.trainer.batch_size


class TrainingRecipe(Protocol):
    """The sections of a recipe that determine training."""

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int


class Length(NamedTuple):
    """The length of a run: `total` steps of `steps_per_epoch`, or `seconds` of training."""

    steps_per_epoch: int
    total: int | None
    seconds: float | None

    def span(self, key: str, duration: str | int) -> float:
        """Return the duration at `key` of the recipe in the unit of `Plan.length`.

        Raises:
            ConfigError: It cannot be converted for a run of this length.
        """
        try:
            if self.seconds:
                return to_share(duration, self.seconds)
            return to_steps(duration, steps_per_epoch=self.steps_per_epoch, total=self.total)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None

    def every(self, key: str, duration: str | int) -> int:
        """Return the duration at `key` of the recipe in steps, at least 1.

        Raises:
            ConfigError: It is in percent of a run of unknown steps.
        """
        if self.seconds and "%" in str(duration):
            raise ConfigError(
                f"{key}: {duration!r} is undefined in a time-limited run: give steps (1000) or epochs ('1ep')"
            )
        return max(1, to_steps(duration, steps_per_epoch=self.steps_per_epoch, total=self.total))


def make_plan(recipe: TrainingRecipe, *, samples: int, world: int) -> Plan:
    """Compute the lengths of a run, and the gradient accumulation that makes up the global batch of the recipe.

    Raises:
        ConfigError: The batch cannot be divided into such micro-batches on `world` processes, `min_lr` or `warmup_lr`
            is above the peak learning rate, or a duration cannot be converted for a run of this length.
    """
    c = recipe.trainer
    world //= c.sharing(world)  # processes that share rows have the same samples
    per_epoch = steps_per_epoch(samples, c.batch_size)
    key = "batch_size"
    least = c.batch_size
    if c.batch_start is not None:
        key = "batch_start"
        least = c.batch_start
    if least % world:
        near = max(world, round(least / world) * world)
        raise ConfigError(f"trainer.{key}: {least} cannot be divided evenly among {world} processes, nearest: {near}")
    share = least // world
    micro = min(c.micro_batch or share, share)
    if share % micro:
        below = above = micro
        while share % below:
            below -= 1
        while share % above:
            above += 1
        raise ConfigError(
            f"trainer.micro_batch: {micro} does not divide the {share} samples of a process, nearest: {below}, {above}"
        )
    seconds = None
    total = c.steps
    if c.time is not None:
        seconds = to_seconds(c.time)
    elif c.epochs is not None:
        total = max(1, round(c.epochs * per_epoch))
    peak = recipe.optim.peak(c.batch_size)
    for name, value in (("min_lr", recipe.schedule.min_lr), ("warmup_lr", recipe.schedule.warmup_lr)):
        if value > peak:
            raise ConfigError(
                f"schedule.{name}: {value:g} is above the highest learning rate, {peak:.3g} for batches of "
                f"{c.batch_size}; lower it, or raise optim.lr"
            )

    run = Length(per_epoch, total, seconds)
    ramp = None
    if c.batch_ramp is not None:
        ramp = run.span("trainer.batch_ramp", c.batch_ramp)
        if ramp > (seconds or total or 0):
            raise ConfigError(f"trainer.batch_ramp: {c.batch_ramp!r} is longer than the run, nearest: '100%'")
    save_seconds = to_seconds(c.save_every)
    save_every = None
    if not save_seconds:
        save_every = run.every("trainer.save_every", c.save_every)
    return Plan(
        trainer=c,
        optim=recipe.optim,
        schedule=recipe.schedule,
        seed=recipe.seed,
        total=total,
        seconds=seconds,
        steps_per_epoch=per_epoch,
        warmup=run.span("schedule.warmup", recipe.schedule.warmup),
        ramp=ramp,
        micro=micro,
        accumulation=c.batch_size // (micro * world),
        eval_every=run.every("trainer.eval_every", c.eval_every),
        save_every=save_every,
        save_seconds=save_seconds,
        rounding=rounding(recipe),
    )


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
