"""Monitoring of a run during training: speed, faults, divergence, and the decays of the layers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lion.layers.mixers.decay import Decay, Gating
from lion.progress import rate
from lion.samples.base import Batch
from lion.tasks.base import Task
from lion.trainer.histogram import Histogram, histogram
from lion.trainer.loader import Batches
from lion.trainer.log import NoLog, RunLog
from lion.trainer.memory import peak_so_far
from lion.trainer.state import RunState

log = logging.getLogger("lion")


class Monitor:
    """Reporter of training metrics; each line covers the steps since the previous line."""

    def __init__(self, state: RunState, batches: Batches, out: RunLog | NoLog) -> None:
        self.state, self.batches, self.out = state, batches, out
        self.skipped = 0  # number of skipped steps at the last report
        self.saving = 0.0
        self.restart()

    def restart(self) -> None:
        """Restart the measurement, because the time since the last report was partly spent outside training."""
        self.started, self.waited, self.samples = time.perf_counter(), 0.0, 0

    def report(self, loss: Tensor, lr: float, norm: Tensor) -> None:
        """Write a line with the values of the last step and the speed since the previous line."""
        state, unit = self.state, self.state.task.unit
        loss, norm = loss.item(), norm.item()  # waits for the steps so far, whose time counts
        seconds = time.perf_counter() - self.started
        step = {} if state.plan.seconds is None else {"step": f"{state.step:,}"}  # the progress bar counts seconds here
        speed = {f"{unit}/s": rate(self.samples, seconds)}
        self.out.progress(state.at, **step, loss=f"{loss:.3f}", lr=f"{lr:.1e}", **speed)
        values = {
            "loss": loss,
            "lr": lr,
            "gradient_norm": norm,
            f"{unit}_per_second": self.samples / seconds,
            "data_wait_share": self.waited / seconds,
            "memory_mib": peak_so_far(state.runtime.device) / 2**20,
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
        if self.saving:
            values["save_seconds"], self.saving = self.saving, 0.0
        if state.plan.ramp is not None:
            values["batch_size"] = state.taken
        faults = self.faults()
        if faults["skipped_steps"] > self.skipped:
            self.skipped = faults["skipped_steps"]
            log.warning("step %d: %d steps skipped so far, loss or gradient not finite", state.step, self.skipped)
        values.update({name: count for name, count in faults.items() if count})
        self.out.write(state.step, "train", values, **state.place())
        self.restart()

    def faults(self) -> dict[str, int]:
        """Count the faults that the run has survived so far, summed over processes.

        The number of skipped steps is identical in all processes and is not summed.
        """
        own = torch.tensor([len(self.batches.unreadable), self.batches.died])
        unreadable, died = self.state.runtime.sum(*own).int().tolist()
        return {"skipped_steps": self.state.guard.read()[0], "unreadable_samples": unreadable, "dead_workers": died}


def nonfinite_steps(state: RunState) -> str | None:
    """Return a message if too many consecutive steps were skipped, else None.

    The counter on the device is read only every `trainer.faults.nonfinite` steps and at the end of the run.
    """
    limit = state.plan.trainer.faults.nonfinite
    if state.step % limit and not state.finished:
        return None
    row = state.guard.read()[1]
    if row < min(limit, state.step):
        return None
    where = f"in the {row} steps from {state.step - row} on (trainer.faults.nonfinite)"
    return f"no finite loss and gradient {where}, all skipped"


def all_finite(metrics: list[float], weights: list[Tensor]) -> bool:
    """Return whether all metrics and all weights are finite."""
    return all(map(math.isfinite, metrics)) and all(torch.stack([w.isfinite().all() for w in weights]).tolist())


def decay_histograms(model: nn.Module, batch: Batch, task: Task) -> dict[str, Histogram]:
    """Return histograms of all decays lambda that the layers use on `batch`, by block (Fig. 12 of the paper).

    The values are counted on the device.
    """
    found: dict[str, Histogram] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, gating: Gating) -> None:
            if gating.log_decay is not None and (counted := histogram(gating.log_decay.exp().float())):
                found[name] = counted

        return hook

    hooks = []
    for i, unit in enumerate(model.units()):
        decays = [module for module in unit.modules() if isinstance(module, Decay)]
        for j, decay in enumerate(decays):  # a block has one decay, or one per direction or scan
            hooks.append(decay.register_forward_hook(keep(f"blocks.{i}.{j}" if j else f"blocks.{i}")))
    if not hooks:
        return {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            task.evaluate(model, batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def progress_of(model: nn.Module, batch: Batch, task: Task) -> dict[str, Tensor | str]:
    """Return the images and texts that the task shows of a model at an evaluation."""
    training = model.training
    model.eval()
    try:
        return task.progress(model, batch)
    finally:
        model.train(training)
