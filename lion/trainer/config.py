"""The recipe's `trainer` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from lion.config import setting
from lion.trainer.faults import FaultsConfig
from lion.trainer.parallel import STRATEGIES
from lion.trainer.runtime import MATMUL
from lion.trainer.schedule import to_seconds, to_steps


@dataclass
class TrainerConfig:
    """How long, how large, how often. Durations are steps (2000), epochs ("5ep") or percent ("2%").

    A run is as long as its `epochs`, `steps`, or `time` ("24h", "30min"): of training, without compilation, evaluation
    and saving. `batch_size` is the global batch of a step and part of the recipe. `micro_batch` is what one process
    takes in one pass (null: its whole share); accumulation follows from both. With a `batch_ramp` batches grow linearly
    for that long ("60%"), from `batch_start` samples and by as many each time. `save_every` may also be a time; of the
    checkpoints that a run can go on from, the newest `keep_last` are kept. `parallel` is what
    several processes do with the model: each holds all of it (`ddp`) or a part (`fsdp`). `precision=bf16` is autocast,
    which leaves gates, masks and row sums in float32; `matmul` is how products of float32 are computed, all of them
    (`high`: TF32 on a GPU that has it; `medium`: bf16 products on a CPU that has them). `deterministic` makes a
    GPU give the same bits each time, where PyTorch can.
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
    clip_grad: float | None = setting(None, above=0)
    ema: float | None = setting(None, min=0, max=1)
    eval_every: str | int = "1ep"
    save_every: str | int = setting("1ep", free=True)
    keep_last: int = setting(2, min=1, free=True)
    log_every: int = setting(50, min=1, free=True)
    device: str = setting("auto", free=True)
    parallel: str = setting("ddp", choices=STRATEGIES, free=True)
    deterministic: bool = setting(False, free=True)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        given = [name for name in ("epochs", "steps", "time") if getattr(self, name) is not None]
        if len(given) != 1:
            which = "trainer.epochs, trainer.steps and trainer.time"
            raise ValueError(f"epochs: give exactly one of {which}, got {' and '.join(given) or 'none'}")
        if self.time is not None and not to_seconds(self.time):
            raise ValueError(f"time: expected hours ('24h') or minutes ('30min'), got {self.time!r}")
        for name in ("eval_every", "save_every", "batch_ramp"):
            timed = name == "save_every" or (name == "batch_ramp" and self.time is not None)
            value = getattr(self, name)
            if value is None or (timed and to_seconds(value)):
                continue
            try:
                steps = to_steps(value, steps_per_epoch=1000, total=100_000)
            except ValueError as error:
                raise ValueError(f"{name}: {error}{' (or a time, 30min)' if timed else ''}") from None
            if steps < 1:
                raise ValueError(f"{name}: expected more than 0, got {value!r}")
        self.check_ramp()

    def describe(self) -> str:
        """Length and batches, in words."""
        length = f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.steps:,} steps" if self.steps else ""
        return f"{length or f'{self.time} of training'} in batches of {self.batches()}"

    def batches(self) -> str:
        """How large they are, in words."""
        if self.batch_ramp is None:
            return str(self.batch_size)
        return f"{self.batch_start} to {self.batch_size}, reached after {self.batch_ramp}"

    def check_ramp(self) -> None:
        """Raises ValueError: What is said of growing batches does not go together."""
        if (self.batch_ramp is None) != (self.batch_start is None):
            missing = "batch_start" if self.batch_start is None else "batch_ramp"
            raise ValueError(f"{missing}: batch_ramp and batch_start go together, one is missing")
        if self.batch_start is None:
            return
        if self.epochs is not None:
            raise ValueError(
                "batch_ramp: epochs have no fixed number of steps under it, give trainer.steps or trainer.time"
            )
        if self.batch_size % self.batch_start:
            fits = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            near = min(fits, key=lambda n: abs(n - self.batch_start))
            raise ValueError(
                f"batch_start: {self.batch_start} does not divide batch_size {self.batch_size}, nearest: {near}"
            )
