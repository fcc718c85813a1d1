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

    `batch_size` is the global batch of a step and part of the recipe. `micro_batch` is what one process takes
    in one pass (null: its whole share); accumulation follows from both. `save_every` may also be minutes
    ("30min"); of the checkpoints that a run can go on from, the newest `keep_last` are kept. `parallel` is what
    several processes do with the model: each holds all of it (`ddp`) or a part (`fsdp`). `precision=bf16` is autocast,
    which leaves gates, masks and row sums in float32; `matmul` is how products of float32 are computed, all of them
    (`high`: TF32 on a GPU that has it; `medium`: bf16 products on a CPU that has them). `deterministic` makes a
    GPU give the same bits each time, where PyTorch can.
    """

    batch_size: int = setting(min=1)
    epochs: float | None = setting(None, above=0, max=1_000_000)
    steps: int | None = setting(None, min=1)
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
        if (self.epochs is None) == (self.steps is None):
            given = "neither" if self.epochs is None else "both"
            raise ValueError(f"epochs: give exactly one of trainer.epochs and trainer.steps, got {given}")
        for name in ("eval_every", "save_every"):
            if name == "save_every" and to_seconds(self.save_every):
                continue
            try:
                steps = to_steps(getattr(self, name), steps_per_epoch=1000, total=100_000)
            except ValueError as error:
                minutes = " (or minutes, '30min')" if name == "save_every" else ""
                raise ValueError(f"{name}: {error}{minutes}") from None
            if steps < 1:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)!r}")
