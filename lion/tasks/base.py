"""What the trainer knows of a task: how to build its model, its loss, and its metrics."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lion.config import ConfigError
from lion.models.base import Model
from lion.tasks.data import Batch, Info
from lion.tasks.metrics import Metric


class Sums(NamedTuple):
    """A batch's loss as a sum and the weight to divide by, so that accumulating equals the big batch."""

    loss: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Outcome:
    """What a task finds on an evaluation batch.

    Args:
        sums: By name (sum, weight) over the samples where `batch["mask"]`.
        outputs: Of the model (B, ..), to compare its forms.
        rows: By name (B, ..) what metrics of all samples need; kept where one does.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    outputs: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)


class Task(ABC):
    """A learning problem. A new one is one file and its line in `TASKS`."""

    Config: ClassVar[type]  # the recipe's `task` section
    Model: ClassVar[type[Model]]  # what a model of `MODELS` must be, to be this task's
    default_model: ClassVar[str]  # the one that a recipe without `model.name` means
    Info: ClassVar[type[Info]]  # what the data tells the model
    unit: ClassVar[str]  # what a sample is called

    def __init__(self, config: Any, info: Info) -> None:
        self.config, self.info = config, info
        self.metrics = self.metrics_of(config)

    @property
    def speed_unit(self) -> str:
        """What its speed is counted in, of which a sample is `pieces`."""
        return self.unit

    @property
    def pieces(self) -> int:
        return 1

    @property
    def metric(self) -> Metric:
        """The one that `best` is chosen by."""
        return self.metrics[0]

    @staticmethod
    @abstractmethod
    def metrics_of(config: Any) -> tuple[Metric, ...]:
        """What is measured under this `task` section; the first chooses `best`."""

    @abstractmethod
    def build_model(self, config: Any) -> Model:
        """The model for this task's data; ConfigError where the two do not fit."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Training loss of a micro-batch, summed over its samples.

        `model` is what to call: with several processes it may be a wrapper, and everything but the call is asked of
        `unwrapped(model)`.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """What `metrics` need of an evaluation batch; it depends on model and batch alone, so that forms compare."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the model says of a batch's inputs (B, ..); labels are not read."""

    def describe(self, outputs: Tensor, count: int) -> list[list[str]]:
        """What outputs (B, ..) say of each sample, in words: of several answers the likeliest, `count` at most.

        Raises:
            ConfigError: The task's outputs cannot be said in words.
        """
        raise ConfigError(f"task {self.config.name!r} cannot say its outputs in words; lion.load gives them as tensors")

    @abstractmethod
    def example(self, size: int, device: torch.device | str) -> Batch:
        """A training batch of `size` samples of noise, to measure with."""

    @staticmethod
    def remark(values: dict[str, float]) -> str | None:
        """What a person must be told of the metrics of an evaluation (that nothing was learned), if anything."""
        return None

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """Pictures (channels, height, width) or text of a model and its first training batch, for TensorBoard."""
        return {}

    def progress(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """What the model can do by now, at every evaluation, whose first batch is `batch`: pictures (channels, height,
        width) or text, Markdown.

        Every process calls it, in evaluation mode and without gradients.
        """
        return {}


def unwrapped(model: nn.Module) -> nn.Module:
    """The task's own model, where several processes wrap it to call it (DDP)."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def build_or_explain(build: Any, *args: Any, **kwargs: Any) -> Model:
    """Call a model's constructor; what it refuses becomes a recipe error."""
    try:
        return build(*args, **kwargs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("alloc|out of memory|overflow", str(error)):
            raise
        raise ConfigError("model: too large for this machine's memory, try a smaller dim or depth") from None


def likeliest(logits: Tensor, names: Sequence[str], count: int) -> list[list[str]]:
    """The `count` likeliest classes of each row of logits (B, classes) and their shares, in words."""
    top = logits.softmax(-1).topk(min(count, logits.shape[-1]))
    rows = zip(top.values.tolist(), top.indices.tolist())
    return [[f"{names[c]} {100 * p:.1f}%" for p, c in zip(*row)] for row in rows]


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}
