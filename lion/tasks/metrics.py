"""Metrics: a name, which way is better, how a value is written, and how it follows from what an evaluation collected.

Four kinds: `Mean` of sums, `OfMeans` (perplexity), `OfAll` predictions and labels (F1, Matthews, Spearman), and
`OwnPass` over model and data (Frechet distance). A task names its own, and the first of them chooses `best`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclass(frozen=True)
class Metric:
    """What a model is judged by; values are raw numbers everywhere, and percent where they are shown.

    Args:
        name: Its key in `metrics.jsonl`.
        label: In headings; the name, where that will do.
        higher_is_better: Which of two values is the better one.
        percent: Whether it is shown times 100.
        digits: After the point, where it is shown.
    """

    name: str
    label: str = ""
    higher_is_better: bool = field(default=True, kw_only=True)
    percent: bool = field(default=False, kw_only=True)
    digits: int = field(default=2, kw_only=True)

    rows: ClassVar[tuple[str, ...]] = ()  # what is kept of every sample

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def heading(self) -> str:
        """Of a column of `number`s: top-1 %, perplexity."""
        return f"{self.title}{' %' if self.percent else ''}"

    def scaled(self, value: float) -> float:
        """As it is shown: 98.22 for 0.9822 where it is in percent."""
        return 100 * value if self.percent else value

    def number(self, value: float) -> str:
        """For a column with the `heading`: 98.22, 17.42."""
        return f"{self.scaled(value):.{self.digits}f}"

    def text(self, value: float) -> str:
        """With its unit: 98.22 %, 17.42."""
        return f"{self.number(value)}{' %' if self.percent else ''}"

    @property
    def worst(self) -> float:
        """What every value is as good as."""
        return -math.inf if self.higher_is_better else math.inf

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def gain(self, value: float, over: float) -> float:
        """How much better one value is than another; negative where it is worse."""
        return value - over if self.higher_is_better else over - value

    def as_good(self, value: float, other: float) -> bool:
        """Whether a value is better than another, or equal; NaN is not."""
        return value >= other if self.higher_is_better else value <= other

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        """Of the means of all sums, and of the kept rows (samples, ..) in order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Metric):
    """The sum of its name over the weight beside it."""

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        return means[self.name]


@dataclass(frozen=True)
class OfMeans(Metric):
    """A function of means, as `exp` of the mean loss; what overflows is infinite."""

    function: Callable[..., float] = field(kw_only=True)
    of: tuple[str, ...] = field(kw_only=True)

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        try:
            return float(self.function(*(means[name] for name in self.of)))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class OfAll(Metric):
    """A function of whole columns of rows, each (samples, ..) on the CPU, as of ("prediction", "label").

    It must be finite whatever the model predicts, all samples alike included: what is not counts as divergence.
    """

    function: Callable[..., float] = field(kw_only=True)
    of: tuple[str, ...] = field(kw_only=True)

    @property
    def rows(self) -> tuple[str, ...]:
        return self.of

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        return float(self.function(*(rows[name] for name in self.of)))


@dataclass(frozen=True)
class OwnPass(Metric):
    """What goes through the data by itself: `measure(task, model, batches, gather)`, in every process.

    `batches` are the process's share, on the device, with a `mask` of real samples; `gather(x)` gives each
    process's x to all, by rank. The model is in evaluation mode, without gradients.
    """

    measure: Callable[[Any, nn.Module, Iterable[dict[str, Tensor]], Callable[[Any], list[Any]]], float] = field(
        kw_only=True
    )


ACCURACY = Mean("accuracy", percent=True)
LOSS = Mean("loss", higher_is_better=False, digits=3)
