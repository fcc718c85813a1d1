"""Evaluation of a model on a split, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lion.tasks.base import Outcome, Task, to_device
from lion.tasks.data import Batch
from lion.tasks.metrics import Metric, OwnPass
from lion.trainer.runtime import Runtime


class Totals:
    """What the batches of an evaluation add up to; kept of each sample is only what a metric needs of all of them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = [metric for metric in metrics if not isinstance(metric, OwnPass)]
        self.sums: dict[str, list[Tensor]] = {}
        self.rows: dict[str, list[Tensor]] = {name: [] for metric in self.metrics for name in metric.rows}

    def add(self, outcome: Outcome, mask: Tensor) -> None:
        """A batch's outcome; `mask` (B,) says which samples are real."""
        for name, pair in outcome.sums.items():
            pair = [x.double() for x in pair]
            self.sums[name] = [a + b for a, b in zip(self.sums[name], pair)] if name in self.sums else pair
        for name, kept in self.rows.items():
            kept.append(outcome.rows[name][mask])

    def values(self, runtime: Runtime) -> dict[str, float]:
        """Every metric, over all processes: sums first, then one division; rows in the order of the split."""
        flat = runtime.sum(*[x for pair in self.sums.values() for x in pair]).tolist() if self.sums else []
        means = {name: flat[2 * i] / max(flat[2 * i + 1], 1) for i, name in enumerate(self.sums)}
        rows = {name: torch.cat(runtime.gather(torch.cat(kept).cpu())) for name, kept in self.rows.items()}
        return {metric.name: metric.value(means, rows) for metric in self.metrics}


class FirstBatchKept:
    """Batches, to be gone through any number of times, and the first of them."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.first: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.first is None:
                self.first = batch
            yield batch


class Stopped(Exception):
    """An evaluation was asked to end early."""


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
    """The task's metrics over all samples and processes; None when `stop` says so.

    `batches` are gone through once, and once more for every `OwnPass`. What is drawn follows from `seed` alone, the
    same for every model and form, and is not missed in training.
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
            if isinstance(metric, OwnPass):
                own[metric.name] = own_value(metric, model, on_device(), task, runtime, precision, seed)
    except Stopped:
        return None
    finally:
        model.train(training)
    values = {**totals.values(runtime), **own}
    return {metric.name: values[metric.name] for metric in task.metrics}


def own_value(
    metric: OwnPass,
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    runtime: Runtime,
    precision: str,
    seed: int = 0,
) -> float:
    """A metric's own pass of a model in evaluation mode over a process's batches; `seed` as in `evaluate`."""
    batches = (to_device(batch, runtime.device) for batch in batches)
    with torch.no_grad(), runtime.autocast(precision), runtime.seeded(seed):
        return float(metric.measure(task, model, batches, runtime.gather))
