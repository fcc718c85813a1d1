"""Evaluation of a model on a split, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lion.samples.base import Batch
from lion.tasks.base import Outcome, Task, to_device
from lion.tasks.metrics import Metric, MetricOfPass
from lion.trainer.runtime import Runtime


class Totals:
    """Sums over the batches of an evaluation.

    Per-sample rows are kept only for metrics that need all samples at once.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = [metric for metric in metrics if not isinstance(metric, MetricOfPass)]
        self.sums: dict[str, list[Tensor]] = {}
        self.rows: dict[str, list[Tensor]] = {}
        for metric in self.metrics:
            for name in metric.rows:
                self.rows[name] = []

    def add(self, outcome: Outcome, mask: Tensor) -> None:
        """Add the outcome of a batch; `mask` (B,) is True for real samples and False for padding."""
        for name, (total, weight) in outcome.sums.items():
            pair = [total.double(), weight.double()]
            if name in self.sums:
                before = self.sums[name]
                pair = [before[0] + pair[0], before[1] + pair[1]]
            self.sums[name] = pair
        for name, kept in self.rows.items():
            kept.append(outcome.rows[name][mask])

    def values(self, runtime: Runtime) -> dict[str, float]:
        """Compute every metric over all processes.

        Sums are added over processes before they are divided. Rows are concatenated in the order of the split.
        """
        means = {}
        if self.sums:
            own = []
            for pair in self.sums.values():
                own.extend(pair)
            sums = runtime.sum(*own).tolist()
            for i, name in enumerate(self.sums):
                means[name] = divided(sums[2 * i], sums[2 * i + 1])
        rows = {}
        for name, kept in self.rows.items():
            parts = runtime.gather(torch.cat(kept).cpu())
            rows[name] = torch.cat(parts[:: runtime.sequence])  # processes that share rows have the same outputs
        return {metric.name: metric.value(means, rows) for metric in self.metrics}


def divided(total: float, weight: float) -> float:
    if not weight:
        return math.nan
    return total / weight


class FirstBatchKept:
    """An iterable of batches that keeps the first batch; it can be iterated any number of times."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.first: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.first is None:
                self.first = batch
            yield batch


class Stopped(Exception):
    """Signal that an evaluation was asked to end early."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    *,
    precision: str = "fp32",
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Compute the metrics of a task over all samples and processes; return None if `stop` ended the evaluation.

    `batches` are iterated once, and once more for every `MetricOfPass` metric. Random numbers depend on `seed` and the
    rank alone, so they are the same for every model and form. The random state of training is not affected.
    """

    def on_device() -> Iterator[Batch]:
        for batch in batches:
            if stop():
                raise Stopped
            yield to_device(batch, runtime.device)

    training = model.training
    model.eval()
    totals = Totals(task.metrics)
    try:
        with runtime.seeded(seed):
            for batch in on_device():
                with runtime.autocast(precision):
                    outcome = task.evaluate(model, batch)
                totals.add(outcome, batch["mask"])
        own = {}
        for metric in task.metrics:
            if isinstance(metric, MetricOfPass):
                own[metric.name] = own_value(metric, model, on_device(), task, runtime, precision, seed)
    except Stopped:
        return None
    finally:
        model.train(training)
    values = {**totals.values(runtime), **own}
    return {metric.name: values[metric.name] for metric in task.metrics}


def own_value(
    metric: MetricOfPass,
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    precision: str,
    seed: int = 0,
) -> float:
    """Compute a metric that needs a separate pass over the batches of this process.

    The model must be in evaluation mode; `seed` is used as in `evaluate`.
    """
    batches = (to_device(batch, runtime.device) for batch in batches)
    with torch.no_grad(), runtime.autocast(precision), runtime.seeded(seed):
        return float(metric.measure(task, model, batches, runtime.gather))
