"""The recipe's `trainer` section."""

from __future__ import annotations

from dataclasses import dataclass

from lion.config import setting
from lion.trainer.optim import OptimConfig
from lion.trainer.schedule import ScheduleConfig, to_steps


@dataclass
class TrainerConfig:
    """How long, how large, how often. Durations are steps (2000), epochs ("5ep") or percent ("2%").

    `batch_size` is the global batch of a step and part of the recipe. `micro_batch` is what one process takes
    in one pass (null: its whole share); accumulation follows from both.
    """

    batch_size: int = setting(min=1)
    epochs: float | None = setting(None, above=0)
    steps: int | None = setting(None, min=1)
    micro_batch: int | None = setting(None, min=1, free=True)
    precision: str = setting("fp32", choices=("fp32", "bf16"))
    compile: bool = setting(True, free=True)
    clip_grad: float | None = setting(None, above=0)
    ema: float | None = setting(None, min=0, max=1)
    eval_every: str | int = "1ep"
    save_every: str | int = setting("1ep", free=True)
    log_every: int = setting(50, min=1, free=True)
    device: str = setting("auto", free=True)

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            given = "neither" if self.epochs is None else "both"
            raise ValueError(f"epochs: give exactly one of trainer.epochs and trainer.steps, got {given}")
        for name in ("eval_every", "save_every"):
            try:
                steps = to_steps(getattr(self, name), steps_per_epoch=1000, total=100_000)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if steps < 1:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Plan:
    """A run as the trainer sees it: the recipe's settings, lengths in steps, and how a step's batch is made."""

    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int
    total: int
    steps_per_epoch: int
    warmup: int
    eval_every: int
    save_every: int
    micro: int
    accumulation: int
