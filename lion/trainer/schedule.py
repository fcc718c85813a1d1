"""Durations and learning-rate schedules, as pure functions of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lion.config import setting

_DURATION = re.compile(r"\s*(\d{1,18}(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(ep|%|st)?\s*")


def to_steps(duration: str | int | float, *, steps_per_epoch: int, total: int | None = None) -> int:
    """Return the number of steps of a duration: `2000` or `"2000st"`, `"5ep"` (epochs), `"6%"` (of `total`).

    Raises:
        ValueError: `duration` is not a duration, or is percent without `total`.
    """
    match = _DURATION.fullmatch(str(duration))
    if match is None or (match[2] == "%" and total is None):
        raise ValueError(f"expected steps (2000), epochs ('5ep') or percent ('6%'), got {duration!r}")
    amount = float(match[1])
    scale = {"ep": steps_per_epoch, "%": (total or 0) / 100, "st": 1, None: 1}[match[2]]
    return round(amount * scale)


def to_seconds(duration: str | int) -> float | None:
    """Return the seconds of a time (`"30min"`, `"24h"`), or None for any other duration."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(min|h)\s*", str(duration))
    return {"min": 60, "h": 3600}[match[2]] * float(match[1]) if match else None


def to_share(duration: str | int, seconds: float) -> float:
    """Return the seconds of a duration (`"6%"`, `"30min"`, 0) in a run of `seconds`.

    Raises:
        ValueError: `duration` is in steps or epochs, which are unknown in a time-limited run.
    """
    if (found := to_seconds(duration)) is not None:
        return found
    match = _DURATION.fullmatch(str(duration))
    if match is None or (match[2] != "%" and float(match[1])):
        raise ValueError(f"expected percent ('6%') or a time ('30min') in a time-limited run, got {duration!r}")
    return float(match[1]) / 100 * seconds


class Moment(NamedTuple):
    """A step after the warm-up, as the input of a schedule.

    Attributes:
        step: The place in the run, in steps or seconds.
        warmup: The length of the warm-up, in the same unit.
        progress: The fraction of the curve that is completed, from 0 to 1.
        peak: The highest learning rate.
        least: The lowest learning rate.
    """

    step: float
    warmup: float
    progress: float
    peak: float
    least: float


def cosine(at: Moment) -> float:
    return at.least + (at.peak - at.least) * ((1 + math.cos(math.pi * at.progress)) / 2)


def linear(at: Moment) -> float:
    return at.least + (at.peak - at.least) * (1 - at.progress)


def inverse_sqrt(at: Moment) -> float:
    return max(at.least, at.peak * math.sqrt(max(1, at.warmup) / max(1, at.step, at.warmup)))


def constant(at: Moment) -> float:
    return at.peak


def budget_triangle(at: Moment) -> float:
    """Rise from 25 % of the peak to the peak over 75 % of the curve, then fall to the lowest rate (2212.14034)."""
    up, down = 0.25 + at.progress, (1 - at.progress) / 0.25
    return max(at.least, at.peak * up) if up <= down else at.least + (at.peak - at.least) * down


# learning rates after the warm-up, by name; a new schedule needs one function and one entry
SCHEDULES: dict[str, Callable[[Moment], float]] = {
    "cosine": cosine,
    "linear": linear,
    "inverse_sqrt": inverse_sqrt,
    "constant": constant,
    "budget_triangle": budget_triangle,
}


@dataclass
class ScheduleConfig:
    """Settings of the learning-rate schedule; `min_lr` and `warmup_lr` (the start of the warm-up) are absolute.

    With `overlay: true` the warm-up replaces the start of the curve (DeiT); otherwise the curve begins after the
    warm-up.
    """

    kind: str = setting("cosine", choices=SCHEDULES)
    warmup: str | int = 0
    warmup_lr: float = setting(0.0, min=0)
    min_lr: float = setting(0.0, min=0)
    overlay: bool = False

    def __post_init__(self) -> None:
        try:
            if to_seconds(self.warmup) is None:
                to_steps(self.warmup, steps_per_epoch=1, total=1)
        except ValueError as error:
            raise ValueError(f"warmup: {error}") from None


def learning_rate(step: float, *, config: ScheduleConfig, peak: float, warmup: float, total: float) -> float:
    """Return the learning rate at `step` (0 is the first); `step`, `warmup` and `total` may also be in seconds."""
    if step < warmup:
        return config.warmup_lr + (peak - config.warmup_lr) * step / warmup
    start = 0 if config.overlay else warmup
    progress = min(1.0, (step - start) / max(1, total - start))
    return SCHEDULES[config.kind](Moment(step, warmup, progress, peak, config.min_lr))
