"""A run in steps: what its recipe's durations and batches come to on so many samples and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lion.config import ConfigError
from lion.trainer.config import TrainerConfig
from lion.trainer.loader import steps_per_epoch
from lion.trainer.optim import OptimConfig
from lion.trainer.schedule import ScheduleConfig, to_seconds, to_steps


@dataclass(frozen=True)
class Plan:
    """A run as the trainer sees it: the recipe's settings, lengths in steps, and how a step's batch is made:
    `accumulation` passes of `micro` samples in every process."""

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int
    total: int
    steps_per_epoch: int
    warmup: int
    eval_every: int
    save_every: int | None  # null: by the clock, `save_seconds`
    save_seconds: float | None
    micro: int
    accumulation: int


class TrainingRecipe(Protocol):
    """What a recipe says of training."""

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int


def make_plan(recipe: TrainingRecipe, *, samples: int, world: int) -> Plan:
    """Lengths in steps and the accumulation that makes the recipe's global batch of micro-batches.

    Raises:
        ConfigError: The batch cannot be made of such micro-batches on so many processes, or the learning rate of such
            a batch would rise where it should fall.
    """
    c = recipe.trainer
    per_epoch = steps_per_epoch(samples, c.batch_size)
    if c.batch_size % world:
        near = max(world, round(c.batch_size / world) * world)
        raise ConfigError(
            f"trainer.batch_size: {c.batch_size} does not divide among {world} processes, nearest: {near}"
        )
    share = c.batch_size // world
    micro = min(c.micro_batch or share, share)
    if share % micro:
        fits = [m for m in range(1, share + 1) if share % m == 0]
        below, above = max(m for m in fits if m < micro), min(m for m in fits if m > micro)
        raise ConfigError(
            f"trainer.micro_batch: {micro} does not divide the {share} samples of a process, nearest: {below}, {above}"
        )
    total = c.steps if c.steps is not None else max(1, round(c.epochs * per_epoch))
    peak = recipe.optim.peak(c.batch_size)
    for name, value in (("min_lr", recipe.schedule.min_lr), ("warmup_lr", recipe.schedule.warmup_lr)):
        if value > peak:
            raise ConfigError(
                f"schedule.{name}: {value:g} is above the highest learning rate, {peak:.3g} for batches of "
                f"{c.batch_size}; lower it, or raise optim.lr"
            )

    def every(duration: str | int) -> int:
        return max(1, to_steps(duration, steps_per_epoch=per_epoch, total=total))

    seconds = to_seconds(c.save_every)
    warmup = to_steps(recipe.schedule.warmup, steps_per_epoch=per_epoch, total=total)
    return Plan(
        trainer=c,
        optim=recipe.optim,
        schedule=recipe.schedule,
        seed=recipe.seed,
        total=total,
        steps_per_epoch=per_epoch,
        warmup=warmup,
        micro=micro,
        accumulation=share // micro,
        eval_every=every(c.eval_every),
        save_every=None if seconds else every(c.save_every),
        save_seconds=seconds,
    )
