"""The AdamW optimizer, durations and learning-rate schedules, and the average of a model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lion.config import setting
from lion.layers.optim_factors import OptimFactors, optim_factors
from lion.models.base import Model


@dataclass
class OptimConfig:
    """Settings of AdamW.

    `lr` is the learning rate for a batch of `lr_batch` samples and scales linearly with the batch size. With
    `lr_batch: null`, `lr` is used unchanged.

    `no_decay` selects the parameters without weight decay. `deit`: biases, parameters of at most one dimension, and
    parameters marked by the model (position embedding, cls). `gpt`: parameters of fewer than two dimensions, and
    parameters marked by the model. `none`: no parameters.
    """

    lr: float = setting(above=0)
    lr_batch: int | None = setting(None, min=1)
    weight_decay: float = setting(0.0, min=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = setting(1e-8, above=0)
    no_decay: str = setting("deit", choices=("deit", "gpt", "none"))

    def __post_init__(self) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")

    def peak(self, batch_size: int) -> float:
        """Return the peak learning rate for a global batch of `batch_size` samples."""
        if self.lr_batch is None:
            return self.lr
        return self.lr * batch_size / self.lr_batch


def factors(model: nn.Module, no_decay: str) -> dict[str, OptimFactors]:
    """Return the factors of every trained parameter by name, from `no_decay` and `lion.layers.optim_factors`."""
    named = optim_factors(model)
    own_factors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in named:
            own_factors[id(parameter)] = named[name]
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = own_factors.get(id(parameter), OptimFactors())
        if no_decay == "none":
            own = own._replace(weight_decay=1.0)
        elif parameter.dim() < 2 or (no_decay == "deit" and name.endswith("bias")):
            own = own._replace(weight_decay=0.0)
        found[name] = own
    return found


def make_optimizer(model: nn.Module, config: OptimConfig) -> tuple[torch.optim.AdamW, list[float]]:
    """Make the AdamW optimizer.

    Returns:
        The optimizer, and the learning-rate factor of each parameter group; the trainer sets the rate at every step.
    """
    parameters = dict(model.named_parameters())
    groups: dict[OptimFactors, list[nn.Parameter]] = {}
    for name, factor in factors(model, config.no_decay).items():
        groups.setdefault(factor, []).append(parameters[name])
    order = sorted(groups, key=attrgetter("weight_decay", "lr"), reverse=True)
    optimizer = torch.optim.AdamW(
        [{"params": groups[factor], "weight_decay": config.weight_decay * factor.weight_decay} for factor in order],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    return optimizer, [factor.lr for factor in order]


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
    if match is None:
        return None
    return {"min": 60, "h": 3600}[match[2]] * float(match[1])


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
    up = 0.25 + at.progress
    down = (1 - at.progress) / 0.25
    if up <= down:
        return max(at.least, at.peak * up)
    return at.least + (at.peak - at.least) * down


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


class Buffers:
    """The persistent buffers of a model (running statistics), which a skipped step must leave unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        held = model.state_dict().keys()
        self.names = [name for name, _ in model.named_buffers() if name in held]
        self.before: list[Tensor] = []

    def current(self) -> list[Tensor]:
        if not self.names:
            return []
        held = dict(self.model.named_buffers())
        return [held[name] for name in self.names]

    def keep(self) -> None:
        self.before = [buffer.clone() for buffer in self.current()]

    def put_back(self, skipped: Tensor) -> None:
        """Restore the kept buffers if the tensor `skipped` is not 0, without waiting for the device."""
        for buffer, before in zip(self.current(), self.before):
            buffer.copy_(torch.where(skipped.bool(), before, buffer))


class Average:
    """An exponential moving average of a model, `average = decay * average + (1 - decay) * model` at every step.

    The average covers the weights and persistent floating-point buffers of the model. Other persistent buffers
    (counts) are copied. A skipped step counts as a step in which the model did not change.
    """

    def __init__(self, model: Model, decay: float) -> None:
        self.source = model
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.buffers = Buffers(model)
        self.averaged_buffers = Buffers(self.model)

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.model.parameters()), list(self.source.parameters()), 1 - self.decay)
        for averaged, buffer in zip(self.averaged_buffers.current(), self.buffers.current()):
            if averaged.is_floating_point():
                averaged.lerp_(buffer, 1 - self.decay)
            else:
                averaged.copy_(buffer)
