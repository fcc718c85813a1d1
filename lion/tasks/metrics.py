"""Metrics: names, directions, number formats, and computation from the results of an evaluation.

There are four kinds: `Mean` of sums, `MetricOfMeans` (perplexity), `MetricOfRows` of predictions and labels (F1,
Matthews, Spearman), and `MetricOfPass` over model and data (Frechet distance). A task lists its metrics, and the first
one selects `best`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Metric:
    """A measure of a model's quality. Values are raw numbers everywhere, and percentages only where they are shown.

    Args:
        name: Key in `metrics.jsonl`.
        label: Text in headings; empty: the name.
        higher_is_better: Whether larger values are better.
        percent: Whether values are shown times 100.
        digits: Shown digits after the decimal point.
        partial: Whether a split may have no samples of it; the value is then NaN.
    """

    name: str
    label: str = ""
    higher_is_better: bool = field(default=True, kw_only=True)
    percent: bool = field(default=False, kw_only=True)
    digits: int = field(default=2, kw_only=True)
    partial: bool = field(default=False, kw_only=True)

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the outcome's rows that the metric needs."""
        return ()

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def heading(self) -> str:
        """Heading of a column of `number`s: top-1 %, perplexity."""
        if self.percent:
            return f"{self.title} %"
        return self.title

    def scaled(self, value: float) -> float:
        """Return the value as shown: 98.22 for 0.9822 if `percent`."""
        return 100 * value if self.percent else value

    def number(self, value: float) -> str:
        """Format a value for a column under `heading`: 98.22, 17.42."""
        return f"{self.scaled(value):.{self.digits}f}"

    def text(self, value: float) -> str:
        """Format a value with its unit: 98.22 %, 17.42."""
        if self.percent:
            return f"{self.number(value)} %"
        return self.number(value)

    @property
    def worst(self) -> float:
        """The worst possible value: minus infinity if higher is better, else infinity."""
        return -math.inf if self.higher_is_better else math.inf

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def gain(self, value: float, over: float) -> float:
        """Return how much better `value` is than `over`; negative if worse."""
        if self.higher_is_better:
            return value - over
        return over - value

    def as_good(self, value: float, other: float) -> bool:
        """Return whether `value` is at least as good as `other`; False for NaN."""
        if self.higher_is_better:
            return value >= other
        return value <= other

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        """Compute the metric from the means of all sums and from the kept rows (samples, ..), in sample order."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(Metric):
    """The mean of the sum of the same name: the sum divided by its weight."""

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        return means[self.name]


@dataclass(frozen=True)
class MetricOfMeans(Metric):
    """A function of means, such as `exp` of the mean loss; infinite if it overflows."""

    function: Callable[..., float] = field(kw_only=True)
    of: tuple[str, ...] = field(kw_only=True)

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        try:
            arguments = [means[name] for name in self.of]
            return float(self.function(*arguments))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class MetricOfRows(Metric):
    """A function of whole columns of rows, such as ("prediction", "label"), each (samples, ..) on the CPU.

    The function must be finite for all predictions, also when all samples are alike: other values count as divergence.
    """

    function: Callable[..., float] = field(kw_only=True)
    of: tuple[str, ...] = field(kw_only=True)

    @property
    def rows(self) -> tuple[str, ...]:
        return self.of

    def value(self, means: dict[str, float], rows: dict[str, Tensor]) -> float:
        columns = [rows[name] for name in self.of]
        return float(self.function(*columns))


@dataclass(frozen=True)
class MetricOfPass(Metric):
    """A metric with a separate pass over the data: every process calls `measure(task, model, batches, gather)`.

    `batches` are the process's share of the data, on the device, with a `mask` of real samples. `gather(x)` returns
    every process's x to all processes, by rank. The model is in evaluation mode, without gradients.
    """

    measure: Callable[[Any, nn.Module, Iterable[dict[str, Tensor]], Callable[[Any], list[Any]]], float] = field(
        kw_only=True
    )


ACCURACY = Mean("accuracy", percent=True)
LOSS = Mean("loss", higher_is_better=False, digits=3)


CHANCE_DEVIATIONS = 3.0  # an accuracy fewer standard deviations above chance counts as chance
LEAST = 0.005  # smallest standard deviation of accuracy: one point is no result, however many samples


def above_chance(prediction: Tensor, label: Tensor) -> float:
    """Compute how far the accuracy lies above that of always predicting the commonest class, in standard deviations.

    A standard deviation is at least `LEAST`. If all labels are equal, the result is never above 0.
    """
    share = torch.bincount(label.long()).max().item() / len(label)
    accuracy = (prediction == label).double().mean().item()
    return (accuracy - share) / max(math.sqrt(share * (1 - share) / len(label)), LEAST)


ABOVE_CHANCE = MetricOfRows(
    "above_chance", "deviations above chance", function=above_chance, of=("prediction", "label"), digits=1
)


def chance_remark(values: dict[str, float], accuracy: Metric) -> str | None:
    """Return a warning if an accuracy is not above that of always naming one class, or None."""
    above = values.get(ABOVE_CHANCE.name)
    if above is None or above >= CHANCE_DEVIATIONS:  # None: no value was finite, which is reported elsewhere
        return None
    how = f"{accuracy.text(values[accuracy.name])} is {above:.1f} standard deviations from always naming one class"
    return f"stuck at chance: {accuracy.title} {how}; this is no result of the model"
