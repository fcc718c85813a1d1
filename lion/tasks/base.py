"""Base class of tasks: a task builds its model and defines the loss and the metrics that the trainer uses."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lion.config import ConfigError
from lion.models import base as models
from lion.samples import base as samples
from lion.samples.base import Batch
from lion.tasks.metrics import Metric

_Kind = TypeVar("_Kind", bound=nn.Module)


class Sums(NamedTuple):
    """Sum of a batch's losses, and the weight that divides this sum.

    Sums and weights of micro-batches add up, so that gradient accumulation equals one large batch.
    """

    loss: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Outcome:
    """Result of a task on one evaluation batch.

    Args:
        sums: Pairs (sum, weight) by name, over the samples where `batch["mask"]` is True.
        outputs: Outputs of the model (B, ..), to compare its forms.
        rows: Tensors (B, ..) by name, for metrics that need all samples at once. A row is kept only if a metric needs
            it.
    """

    sums: dict[str, tuple[Tensor, Tensor]]
    outputs: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)


class Task(ABC):
    """A learning problem. A new task is one file and its line in `TASKS`."""

    title: ClassVar[str]  # name of the problem, above the tables of its runs
    Config: ClassVar[type]  # the recipe's `task` section
    Model: ClassVar[type[models.Model]]  # base class of the models in `MODELS` that suit this task
    default_model: ClassVar[str]  # name of the model if the recipe has no `model.name`
    Info: ClassVar[type[samples.Info]]  # class that describes this task's data
    unit: ClassVar[str]  # name of the samples
    fills_masks: ClassVar[bool] = False  # whether predictions are tokens for the masks of a text

    def __init__(self, config: Any, info: samples.Info) -> None:
        self.config = config
        self.info = info
        self.metrics = self.metrics_of(config)

    @property
    def speed_unit(self) -> str:
        """Unit in which training speed is counted; a sample holds `pieces` of them."""
        return self.unit

    @property
    def pieces(self) -> int:
        return 1

    @property
    def metric(self) -> Metric:
        """Metric that selects the `best` checkpoint."""
        return self.metrics[0]

    @staticmethod
    @abstractmethod
    def metrics_of(config: Any) -> tuple[Metric, ...]:
        """Return the metrics under this `task` section; the first one selects `best`."""

    @abstractmethod
    def build_model(self, config: Any) -> models.Model:
        """Build the model for this task's data.

        Raises:
            ConfigError: Model and data do not fit.
        """

    def check_micro_batch(self, samples: int) -> None:  # noqa: B027 - most tasks take any
        """Check that micro-batches of so many samples have the loss that the settings describe.

        Raises:
            ConfigError: They do not.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the training loss of a micro-batch, summed over its samples.

        With several processes `model` may be a wrapper: call `model`, but access everything else through
        `unwrapped(model)`.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        """Compute what `metrics` need from an evaluation batch.

        The result depends only on the model and the batch, so that forms can be compared.
        """

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's outputs (B, ..) for a batch; the labels are not used."""

    def check_prediction(self) -> None:
        """Check that `describe` expresses the outputs of this task in words.

        Raises:
            ConfigError: It does not; the message says what to use.
        """
        if type(self).describe is Task.describe:
            raise ConfigError(
                f"task {self.config.name!r} cannot describe its outputs in words; lion.load returns them as tensors"
            )

    def describe(self, outputs: Tensor, count: int) -> list[list[str]]:
        """Describe the outputs (B, ..) of each sample in words: at most `count` answers, most likely first."""
        raise NotImplementedError

    @abstractmethod
    def example(self, size: int, device: torch.device | str) -> Batch:
        """Return a training batch of `size` random samples, for measurements."""

    @staticmethod
    def remark(values: dict[str, float]) -> str | None:
        """Return a warning about the metrics of an evaluation (such as: nothing was learned), or None."""
        return None

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """Return images (channels, height, width) or text on a model and its first training batch, for TensorBoard."""
        return {}

    def progress(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """Show what the model can do so far, as images (channels, height, width) or Markdown text.

        Every evaluation calls this method with its first batch. Every process calls it, in evaluation mode and without
        gradients.
        """
        return {}


def unwrapped(model: nn.Module, kind: type[_Kind]) -> _Kind:
    """Return the task's model, which is of a `kind`, without the wrapper (DDP) that several processes use."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return cast(_Kind, model)


def own_tokens(model: nn.Module, x: Tensor, fill: float | bool = 0) -> Tensor:
    """Return the tokens of whole rows x (B, L, ..) for which the model computes outputs in this process."""
    return unwrapped(model, models.Model).own(x, fill)


def build_or_explain(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model's constructor and turn its errors into recipe errors.

    Raises:
        ConfigError: The constructor refused its arguments, or memory did not suffice.
    """
    try:
        return build(*args, **kwargs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("alloc|out of memory|overflow", str(error)):
            raise
        raise ConfigError("model: too large for this machine's memory, try a smaller dim or depth") from None


def top_answers(logits: Tensor, names: Sequence[str], count: int) -> list[list[str]]:
    """Describe the `count` most likely classes of each row of logits (B, classes), with probabilities in percent."""
    top = logits.softmax(-1).topk(min(count, logits.shape[-1]))
    answers = []
    for shares, classes in zip(top.values.tolist(), top.indices.tolist()):
        answers.append([f"{names[c]} {100 * p:.1f}%" for p, c in zip(shares, classes)])
    return answers


def sums_where(values: dict[str, Tensor], counted: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs (sum, weight) by name, for an `Outcome`, of values (B, ..) where they are `counted` (B, ..)."""
    weight = counted.sum()
    sums = {}
    for name, value in values.items():
        sums[name] = ((value * counted).sum(), weight)
    return sums


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}
