"""Estimate of the training time on this machine, from training steps that are timed now."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from lion.recipe import Recipe
from lion.samples.base import Batch
from lion.tasks import Task
from lion.tasks.base import to_device
from lion.trainer.diagnostics import free_bytes
from lion.trainer.optim import make_optimizer
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime, slow_precision
from tools.compose import runtime_of
from tools.probe import best
from tools.tables import digits

ENOUGH = 0.5  # seconds that a pass must take to be a reliable measurement
LARGEST = 16  # most samples of a timed batch
BUSY = 0.5  # processes that run or wait, per core, from which on other programs slow a measurement down
SPREAD = 1.2  # ratio of two measurements of the same work, from which on neither is reliable


class StepTime(NamedTuple):
    """Seconds of the parts of a training step, and the ratio of the slower of two measurements to the faster one."""

    sample: float
    update: float
    spread: float


class EagerStep:
    """A training step of a recipe without compilation, in parts that can be timed."""

    def __init__(self, task: Task, recipe: Recipe, runtime: Runtime, precision: str) -> None:
        self.task, self.runtime, self.precision = task, runtime, precision
        self.model = task.build_model(recipe.model).to(runtime.device).train()
        self.optimizer, _ = make_optimizer(self.model, recipe.optim)

    def passes(self, batch: Batch) -> float:
        """Return the seconds of the forward and backward pass of a batch."""
        batch = to_device(batch, self.runtime.device)

        def once() -> None:
            with self.runtime.autocast(self.precision):
                loss = self.task.loss(self.model, batch).loss
            loss.backward()

        return best(once, self.runtime.device, 2)

    def update(self) -> float:
        """Return the seconds of an update of the weights; call `passes` first, for the gradients."""
        return best(self.optimizer.step, self.runtime.device, 2)


def describe_time(task: Task, recipe: Recipe, plan: Plan, state: int, activations: int) -> str:
    """Describe the training time of a run in one process on this machine, or why it is unknown.

    Args:
        task, recipe, plan: The run.
        state: Bytes of weights, gradients and moments.
        activations: Bytes of the activations of a micro-batch.
    """
    runtime = runtime_of(recipe)
    if runtime.device.type == "cpu" and state + activations / plan.micro > free_bytes(runtime.device) / 2:
        return "not measured: training does not fit into the memory of this machine"
    load = os.getloadavg()[0]  # of the last minute, before the measurement
    sample, update, spread = time_step(task, recipe, plan, runtime)
    batch, threads = recipe.trainer.batch_size, torch.get_num_threads()
    where = "1 GPU"
    if runtime.device.type != "cuda":
        where = f"{threads} CPU thread{'s' * (threads > 1)}, float32"
    parts = f"{duration_text(sample)} per sample, {duration_text(update)} per update, measured now"
    how = f"{where}, eager: {parts}; without compilation and evaluation"
    if hint := slow_precision(recipe.trainer.precision, runtime.device):
        how += f"; {hint}"
    if busy := describe_busy(load, spread):
        how += f"; {busy}"
    if plan.total is None:
        steps = plan.seconds / (sample * batch + update)
        return f"as specified; about {steps:,.0f} steps fit here ({how})"
    return f"about {duration_text(plan.samples * sample + plan.total * update)} here ({how})"


def describe_busy(load: float, spread: float) -> str:
    """Return a warning that other programs slow this machine down, or an empty text."""
    cores = os.cpu_count() or 1
    if load > BUSY * cores:
        return f"other programs keep this machine busy (load {load:.1f}, {cores} cores): repeat this when it is idle"
    if spread > SPREAD:
        return f"two measurements differ by {spread - 1:.0%}: repeat this when the machine is idle"
    return ""


def time_step(task: Task, recipe: Recipe, plan: Plan, runtime: Runtime) -> StepTime:
    """Return the time of the forward and backward pass per sample, and of an update of the weights; eager."""
    size, most = 1, min(LARGEST, plan.micro)
    precision = recipe.trainer.precision if runtime.device.type == "cuda" else "fp32"  # many CPUs emulate bf16
    step = EagerStep(task, recipe, runtime, precision)
    while (passes := step.passes(task.example(size, "cpu"))) < ENOUGH and size < most:
        size = min(most, size * 4)
    again = step.passes(task.example(size, "cpu"))
    fastest = min(passes, again)
    return StepTime(fastest / size, step.update(), max(passes, again) / fastest)


def duration_text(seconds: float) -> str:
    """Format a time with a suitable unit: 35 ms, 12.0 s, 3.2 min, 5.1 h, 12 days."""
    for least, unit, name in ((172_800, 86_400, "days"), (3600, 3600, "h"), (90, 60, "min"), (1, 1, "s")):
        if seconds >= least:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds * 1e3)} ms"
