"""What the trainer knows of a task: how to build its model, its loss, and its metrics."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lion.config import ConfigError
from lion.models.base import Model

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ImageInfo:
    """What a model must know of image data: (height, width), channels, the classes' names in label order, and the
    mean and deviation of each channel of pixels in [0, 1]."""

    size: tuple[int, int]
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ImageInfo:
        """Of what `to_dict` gave.

        Raises:
            LookupError, TypeError, ValueError: Of something else.
        """
        size, classes, mean, std = (tuple(values[name]) for name in ("size", "classes", "mean", "std"))
        counts, colours, channels = (*size, values["channels"]), (*mean, *std), values["channels"]
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in counts):
            raise ValueError(f"no height, width and channels: {counts}")
        if not len(mean) == len(std) == channels or not all(isinstance(x, (int, float)) for x in colours):
            raise ValueError(f"no mean and deviation of {channels} channels: {colours}")
        return ImageInfo(size, channels, classes, mean, std)


def numbered(count: int) -> tuple[str, ...]:
    """Names of classes that nothing names."""
    return tuple(f"class {i}" for i in range(count))


def same_names(old: Any, new: Any) -> bool:
    """Whether two lists of classes are the same; those of a converted checkpoint may be only numbered."""
    return old == new or (old == list(numbered(len(old or ()))) and len(old) == len(new or ()))


def check_same_data(whose: str, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse data of other classes or shapes than those that a checkpoint was made with: its labels mean others.

    Raises:
        ConfigError: What differs.
    """
    for name in now:
        old, new = then.get(name), now[name]
        if old == new or (name == "classes" and same_names(old, new)):
            continue
        if name == "classes":
            odd = next((i for i, (a, b) in enumerate(zip(old or (), new)) if a != b), None)
            counts = "number of classes", len(old or ()), len(new)
            name, old, new = counts if odd is None else (f"class {odd}", old[odd], new[odd])
        raise ConfigError(f"{whose} is of other data: {name} was {old!r}, and is {new!r} now")


class Unreadable(Exception):
    """A data set's sample cannot be read; the message names its file and the reason."""


class Sums(NamedTuple):
    """A batch's loss as a sum and the weight to divide by, so that accumulating equals the big batch."""

    loss: Tensor
    weight: Tensor


class Task(ABC):
    """A learning problem. A new one is one file and its line in `TASKS`."""

    Config: ClassVar[type]  # the recipe's `task` section
    Model: ClassVar[type[Model]]  # what a model of `MODELS` must be, to be this task's
    default_model: ClassVar[str]  # the one that a recipe without `model.name` means
    Info: ClassVar[type]  # what the data tells the model
    metric: ClassVar[str]  # the metric that `best` is chosen by; higher is better
    unit: ClassVar[str]  # what a sample is called

    def __init__(self, config: Any, info: Any) -> None:
        self.config, self.info = config, info

    @abstractmethod
    def build_model(self, config: Any) -> Model:
        """The model for this task's data; ConfigError where the two do not fit."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Training loss of a micro-batch, summed over its samples."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Metrics of an evaluation batch as (sum, count) over the samples where `batch["mask"]`, and the outputs."""

    @abstractmethod
    def example(self, size: int, device: torch.device | str) -> Batch:
        """A training batch of `size` empty samples, to measure with."""

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Pictures (channels, height, width) of a model and a training batch for TensorBoard."""
        return {}


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


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}
