"""Durations and learning rates as pure functions of the step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lion.config import setting

_DURATION = re.compile(r"\s*(\d{1,18}(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(ep|%|st)?\s*")


def to_steps(duration: str | int | float, *, steps_per_epoch: int, total: int | None = None) -> int:
    """Steps of a duration: `2000` or `"2000st"`, `"5ep"` (epochs), `"6%"` (of `total`).

    Raises:
        ValueError: Not a duration.
    """
    match = _DURATION.fullmatch(str(duration))
    if match is None or (match[2] == "%" and total is None):
        raise ValueError(f"expected steps (2000), epochs ('5ep') or percent ('6%'), got {duration!r}")
    amount = float(match[1])
    scale = {"ep": steps_per_epoch, "%": (total or 0) / 100, "st": 1, None: 1}[match[2]]
    return round(amount * scale)


def to_seconds(duration: str | int) -> float | None:
    """Seconds of `"30min"`; None for every other duration."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*min\s*", str(duration))
    return 60 * float(match[1]) if match else None


@dataclass
class ScheduleConfig:
    """Learning rate over time; `min_lr` and `warmup_lr` (where warm-up starts) are absolute.

    `overlay: true` lets the warm-up cover the start of the curve (DeiT); else the curve begins after it.
    """

    kind: str = setting("cosine", choices=("cosine", "linear", "inverse_sqrt", "constant"))
    warmup: str | int = 0
    warmup_lr: float = setting(0.0, min=0)
    min_lr: float = setting(0.0, min=0)
    overlay: bool = False

    def __post_init__(self) -> None:
        try:
            to_steps(self.warmup, steps_per_epoch=1, total=1)
        except ValueError as error:
            raise ValueError(f"warmup: {error}") from None


def learning_rate(step: int, *, config: ScheduleConfig, peak: float, warmup: int, total: int) -> float:
    """Learning rate of `step` (0 is the first), given the peak and the lengths in steps."""
    if step < warmup:
        return config.warmup_lr + (peak - config.warmup_lr) * step / warmup
    start = 0 if config.overlay else warmup
    progress = min(1.0, (step - start) / max(1, total - start))
    if config.kind == "constant":
        return peak
    if config.kind == "inverse_sqrt":
        return max(config.min_lr, peak * math.sqrt(max(1, warmup) / max(1, step, warmup)))
    curve = (1 + math.cos(math.pi * progress)) / 2 if config.kind == "cosine" else 1 - progress
    return config.min_lr + (peak - config.min_lr) * curve
