"""What is to be seen of a run while it trains: speed, faults, divergence, and the decays of its layers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lion.layers.decay import Decay, Gating
from lion.progress import rate
from lion.tasks.base import Task
from lion.tasks.data import Batch
from lion.trainer.histogram import Histogram, histogram
from lion.trainer.loader import Batches
from lion.trainer.log import NoLog, RunLog
from lion.trainer.memory import peak_so_far
from lion.trainer.state import RunState

log = logging.getLogger("lion")


class Monitor:
    """Writes the lines of training metrics, each of the steps since the one before it."""

    def __init__(self, state: RunState, batches: Batches, out: RunLog | NoLog) -> None:
        self.state, self.batches, self.out = state, batches, out
        self.skipped = 0  # steps, as last reported
        self.restart()

    def restart(self) -> None:
        """Measure from now on: what took time between was no training."""
        self.started, self.waited, self.samples = time.perf_counter(), 0.0, 0

    def report(self, loss: Tensor, lr: float, norm: Tensor) -> None:
        """Write a line of the last step's values and the speed since the last line."""
        state, unit = self.state, self.state.task.unit
        seconds = time.perf_counter() - self.started
        step = {} if state.plan.seconds is None else {"step": f"{state.step:,}"}  # the bar counts seconds
        speed = {f"{unit}/s": rate(self.samples, seconds)}
        self.out.progress(state.at, **step, loss=f"{loss.item():.3f}", lr=f"{lr:.1e}", **speed)
        values = {
            "loss": loss.item(),
            "lr": lr,
            "gradient_norm": norm.item(),
            f"{unit}_per_second": self.samples / seconds,
            "data_wait_share": self.waited / seconds,
            "memory_mib": peak_so_far(state.runtime.device) / 2**20,
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
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
        """What went wrong so far and stopped nothing, over all processes; skipped steps are the same in each."""
        own = torch.tensor([len(self.batches.unreadable), self.batches.died])
        unreadable, died = self.state.runtime.sum(*own).int().tolist()
        return {"skipped_steps": self.state.guard.read()[0], "unreadable_samples": unreadable, "dead_workers": died}


def nonfinite_steps(state: RunState) -> str | None:
    """What to say of too many skipped steps in a row; None between the steps at which the device is asked."""
    limit = state.plan.trainer.faults.nonfinite
    if state.step % limit and not state.finished:
        return None
    row = state.guard.read()[1]
    if row < min(limit, state.step):
        return None
    where = f"in the {row} steps from {state.step - row} on (trainer.faults.nonfinite)"
    return f"no finite loss and gradient {where}, all skipped"


def all_finite(results: list[dict[str, float]], weights: list[Tensor]) -> bool:
    """Whether every metric and every weight is."""
    metrics = (value for part in results for value in part.values())
    return all(map(math.isfinite, metrics)) and all(torch.stack([w.isfinite().all() for w in weights]).tolist())


def decay_histograms(model: nn.Module, batch: Batch, task: Task) -> dict[str, Histogram]:
    """All decays lambda that the layers use on this batch, by block (the paper's Fig. 12); counted on the device."""
    found: dict[str, Histogram] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, gating: Gating) -> None:
            if gating.log_decay is not None and (counted := histogram(gating.log_decay.exp().float())):
                found[name] = counted

        return hook

    hooks = []
    for i, unit in enumerate(model.units()):
        decays = [module for module in unit.modules() if isinstance(module, Decay)]
        for j, decay in enumerate(decays):  # one for each direction or scan that has its own
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
    """What the task shows of a model at an evaluation."""
    training = model.training
    model.eval()
    try:
        return task.progress(model, batch)
    finally:
        model.train(training)
