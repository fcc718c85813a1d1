"""Measurement of all forms of a model on the same batches: metric, speed, memory, deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lion.evaluation.timing import seconds
from lion.layers.mixers import set_form
from lion.ops.settings import CHUNK_SIZE
from lion.progress import progress, rate
from lion.samples.base import Batch
from lion.tasks.base import Outcome, Task, to_device
from lion.tasks.metrics import Metric, MetricOfPass
from lion.trainer.diagnostics import tensor_peak
from lion.trainer.evaluate import Totals, all_values
from lion.trainer.loader import Batches
from lion.trainer.runtime import Runtime

LONG = 1024  # tokens; for longer samples, L x L matrices and single steps are measured only on request
Form = tuple[str, int | None]  # name, and tokens per chunk or step


def forms_to_measure(
    form: str, chunk_sizes: int | Sequence[int] | None, available: tuple[str, ...], length: int = 0
) -> list[Form]:
    """Return the forms that the option `form` selects, for a model with the forms `available` and samples of `length`
    tokens.

    "all" includes the recurrence as printed, the rnn form with one token per step.
    """
    if form == "full":
        return [("full", None)]
    if chunk_sizes is None:
        chunk_sizes = CHUNK_SIZE
    if isinstance(chunk_sizes, int):
        chunk_sizes = (chunk_sizes,)
    chunks: list[Form] = [("chunk", size) for size in chunk_sizes]
    steps: list[Form] = [("rnn", size) for size in chunk_sizes]
    if form == "chunk":
        return chunks
    if form == "rnn":
        return steps
    every = [("full", None), *chunks, ("rnn", 1), *steps]
    if length > LONG and "chunk" in available:
        every = [*chunks, *steps]
    return list(dict.fromkeys(each for each in every if each[0] in available))


def form_label(form: str, size: int | None) -> str:
    """Return the name of a form in tables, such as "full" or "chunk (64)"."""
    if size is None:
        return form
    return f"{form} ({size})"


class Measured:
    """Results of a form so far."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.totals = Totals(task.metrics)
        self.seconds = 0.0
        self.peak = 0
        self.deviation = torch.zeros((), device=device)

    def shown(self, metric: Metric, samples: int) -> dict[str, str]:
        """Return the metric and the speed over the samples so far, as text."""
        if not samples or isinstance(metric, MetricOfPass):
            return {}
        value = self.totals.values(Runtime(self.deviation.device))[metric.name]
        return {metric.title: metric.text(value), "samples/s": rate(samples, self.seconds)}

    def add(self, outcome: Outcome, reference: torch.Tensor, mask: torch.Tensor) -> None:
        """Add a batch: its outcome, the outputs of the reference form (B, ..), and the mask of real samples (B,)."""
        self.totals.add(outcome, mask)
        for own, other, real in zip(outcome.outputs, reference, mask.tolist()):  # one by one: outputs of text are large
            if real:
                self.deviation = torch.maximum(self.deviation, (own - other).abs_().max())


def keep(run: Callable[[], Outcome], outcomes: list[Outcome]) -> None:
    """Run a call, and keep its outcome."""
    outcomes.append(run())


def measure(
    model: nn.Module,
    task: Task,
    batches: Batches,
    rounds: int,
    forms: list[Form],
    runtime: Runtime,
    precision: str,
    seed: int = 0,
) -> dict[Form, dict[str, Any]]:
    """Measure metrics, speed, peak memory, and the deviation from the first of the forms.

    Each of the `rounds` batches is read once, run in every form, and then dropped.
    """
    found = {form: Measured(task, runtime.device) for form in forms}
    samples = 0
    rows = 0
    seen = set()

    def forward(batch: Batch) -> Outcome:
        with torch.inference_mode(), runtime.autocast(precision):
            return task.evaluate(model, batch)

    shown = progress(total=rounds * len(forms), unit="batch", disable=not runtime.main)
    for batch in batches:
        batch = to_device(batch, runtime.device)
        once = partial(forward, batch)
        outcomes: list[Outcome] = []
        shapes = tuple(x.shape for x in batch.values())  # padded text has several shapes
        new = shapes not in seen
        seen.add(shapes)
        for (name, size), measured in found.items():
            set_form(model, name, size)
            shown.label(f"evaluating {form_label(name, size)}", partial(measured.shown, task.metric, samples))
            if new:
                with shown.paused():  # compilation is not timed
                    once()
                    peak = tensor_peak(once, runtime.device)
                measured.peak = max(measured.peak, peak)
            measured.seconds += seconds(partial(keep, once, outcomes), runtime.device)
            measured.add(outcomes[-1], outcomes[0].outputs, batch["mask"])
            del outcomes[1:]
            shown.update()
        samples += int(batch["mask"].sum())
        rows += len(batch["mask"])  # with the padding of the last batch, which takes the same time
    shown.close()
    results = {}
    for (name, size), measured in found.items():
        set_form(model, name, size)
        values = all_values(measured.totals, model, batches, task, runtime, precision, seed)
        results[name, size] = {
            "value": values[task.metric.name],
            "values": values,
            "remark": task.remark(values),
            "samples_per_second": runtime.batch_world * rows / measured.seconds,
            "peak_bytes": max(runtime.gather(measured.peak)),
            "deviation": max(runtime.gather(measured.deviation.item())),
        }
    return results
