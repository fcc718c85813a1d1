"""Evaluation of a model on a split, batch by batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

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
        self.sums: dict[str, Tensor] = {}  # (2,): total and weight
        self.rows: dict[str, list[Tensor]] = {}
        for metric in self.metrics:
            for name in metric.rows:
                self.rows[name] = []

    def add(self, outcome: Outcome, mask: Tensor) -> None:
        """Add the outcome of a batch; `mask` (B,) is True for real samples and False for padding."""
        for name, (total, weight) in outcome.sums.items():
            pair = torch.stack((total.double(), weight.double()))
            self.sums[name] = self.sums.get(name, 0) + pair
        for name, kept in self.rows.items():
            kept.append(outcome.rows[name][mask])

    def values(self, runtime: Runtime) -> dict[str, float]:
        """Compute every metric over all processes.

        Sums are added over processes before they are divided. Rows are concatenated in the order of the split.
        """
        means = {}
        if self.sums:
            sums = runtime.sum(*self.sums.values()).tolist()
            for name, (total, weight) in zip(self.sums, sums):
                means[name] = math.nan
                if weight:
                    means[name] = total / weight
        rows = {}
        for name, kept in self.rows.items():
            parts = runtime.gather(torch.cat(kept).cpu())
            rows[name] = torch.cat(parts[:: runtime.sequence])  # processes that share rows have the same outputs
        return {metric.name: metric.value(means, rows) for metric in self.metrics}


class Stopped(Exception):
    """Signal that an evaluation was asked to end early."""


@dataclass
class StoppableBatches:
    """Batches that raise `Stopped` once `stop` returns True, and keep the first; they can be iterated repeatedly."""

    batches: Iterable[Batch]
    stop: Callable[[], bool]
    first: Batch = field(default_factory=dict)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.stop():
                raise Stopped
            self.first = self.first or batch
            yield batch


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    *,
    precision: str = "fp32",
    seed: int = 0,
) -> dict[str, float]:
    """Compute the metrics of a task over all samples and processes.

    `batches` are iterated once, and once more for every `MetricOfPass` metric. Random numbers depend on `seed` and the
    rank alone, so they are the same for every model and form. The random state of training is not affected.

    Raises:
        Stopped: The batches are `StoppableBatches`, and were stopped.
    """
    totals = Totals(task.metrics)
    with evaluating(model):
        with runtime.seeded(seed):
            for batch in batches:
                batch = to_device(batch, runtime.device)
                with runtime.autocast(precision):
                    outcome = task.evaluate(model, batch)
                totals.add(outcome, batch["mask"])
        return all_values(totals, model, batches, task, runtime, precision, seed)


def all_values(
    totals: Totals,
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    precision: str,
    seed: int,
) -> dict[str, float]:
    """Return all metrics: those of `totals`, and those that need separate passes over the batches of this process.

    The model must be in evaluation mode; `seed` is used as in `evaluate`.
    """
    values = totals.values(runtime)
    for metric in task.metrics:
        if isinstance(metric, MetricOfPass):
            read = (to_device(batch, runtime.device) for batch in batches)
            with torch.no_grad(), runtime.autocast(precision), runtime.seeded(seed):
                values[metric.name] = float(metric.measure(task, model, read, runtime.gather))
    return {metric.name: values[metric.name] for metric in task.metrics}
