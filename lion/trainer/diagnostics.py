"""Monitoring of a run during training: speed, faults, divergence, decays of the layers, and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lion.layers.mixers.decay import Decay, Gating
from lion.models.base import Model
from lion.progress import rate
from lion.samples.base import Batch
from lion.tasks.base import Task
from lion.trainer.evaluate import evaluating
from lion.trainer.loader import Batches
from lion.trainer.log import Histogram, NoLog, RunLog, histogram
from lion.trainer.state import RunState

log = logging.getLogger("lion")


@dataclass
class Monitor:
    """Reporter of training metrics; each line covers the steps since the previous line."""

    state: RunState
    batches: Batches
    out: RunLog | NoLog
    skipped: int = 0  # number of skipped steps at the last report
    saving: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the measurement, because the time since the last report was partly spent outside training."""
        self.started = time.perf_counter()
        self.waited = 0.0
        self.samples = 0

    def report(self, loss: Tensor, lr: float, norm: Tensor) -> None:
        """Write a line with the values of the last step and the speed since the previous line."""
        state = self.state
        unit = state.task.unit
        last_loss = loss.item()  # waits for the steps so far, whose time counts
        last_norm = norm.item()
        seconds = time.perf_counter() - self.started
        shown = {}
        if state.plan.seconds is not None:  # the progress bar counts seconds here
            shown["step"] = f"{state.step:,}"
        shown["loss"] = f"{last_loss:.3f}"
        shown["lr"] = f"{lr:.1e}"
        shown[f"{unit}/s"] = rate(self.samples, seconds)
        self.out.progress(state.at, **shown)
        values: dict[str, float] = {
            "loss": last_loss,
            "lr": lr,
            "gradient_norm": last_norm,
            f"{unit}_per_second": self.samples / seconds,
            "data_wait_share": self.waited / seconds,
            "memory_mib": peak_so_far(state.runtime.device) / 2**20,
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
        if self.saving:
            values["save_seconds"] = self.saving
            self.saving = 0.0
        if state.plan.ramp is not None:
            values["batch_size"] = state.taken
        faults = self.faults()
        if faults["skipped_steps"] > self.skipped:
            self.skipped = faults["skipped_steps"]
            log.warning("step %d: %d steps skipped so far, loss or gradient not finite", state.step, self.skipped)
        for name, count in faults.items():
            if count:
                values[name] = count
        self.out.write(state.step, "train", values, **state.place())
        self.restart()

    def faults(self) -> dict[str, int]:
        """Count the faults that the run has survived so far, summed over processes.

        The number of skipped steps is identical in all processes and is not summed.
        """
        unreadable = torch.tensor(len(self.batches.unreadable))
        died = torch.tensor(self.batches.died)
        unreadable, died = self.state.runtime.sum(unreadable, died).int().tolist()
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
    if not all(map(math.isfinite, metrics)):
        return False
    finite = torch.stack([weight.isfinite().all() for weight in weights])
    return all(finite.tolist())


def decay_histograms(model: Model, batch: Batch, task: Task) -> dict[str, Histogram]:
    """Return histograms of all decays lambda that the layers use on `batch`, by block (Fig. 12 of the paper).

    The values are counted on the device.
    """
    found: dict[str, Histogram] = {}

    def keep(name: str, module: nn.Module, inputs: tuple, gating: Gating) -> None:
        if gating.log_decay is not None and (counted := histogram(gating.log_decay.exp().float())):
            found[name] = counted

    hooks = []
    for i, unit in enumerate(model.units()):
        decays = [module for module in unit.modules() if isinstance(module, Decay)]
        for j, decay in enumerate(decays):  # a block has one decay, or one per direction or scan
            name = f"blocks.{i}.{j}" if j else f"blocks.{i}"
            hooks.append(decay.register_forward_hook(partial(keep, name)))
    if not hooks:
        return {}
    try:
        with evaluating(model), torch.compiler.set_stance("force_eager"):
            task.evaluate(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def progress_of(model: nn.Module, batch: Batch, task: Task) -> dict[str, Tensor | str]:
    """Return the images and texts that the task shows of a model at an evaluation."""
    with evaluating(model):
        return task.progress(model, batch)


def free_bytes(device: torch.device) -> float:
    """Return the number of free bytes, or infinity if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        return _read_bytes("/proc/meminfo", "MemAvailable")
    return float("inf")


def peak_so_far(device: torch.device) -> int:
    """Return the peak memory in bytes since the start: of tensors on CUDA, otherwise of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def process_peak(once: Callable[[], object], device: torch.device) -> int | None:
    """Measure the peak memory in bytes of one call, including its outputs, beyond the memory held before.

    The memory is counted by the operating system, or as tensors on CUDA. The result is None if it cannot be measured.
    """
    if device.type == "cuda":
        return tensor_peak(once, device)
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory cached by the allocator would hide the memory of the call
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _read_bytes("/proc/self/status", "VmRSS")
    except (OSError, AttributeError, StopIteration):  # not Linux, or forbidden by a sandbox
        return None
    once()
    return max(0, _read_bytes("/proc/self/status", "VmHWM") - before)


def tensor_peak(once: Callable[[], object], device: torch.device) -> int:
    """Measure the peak memory in bytes of the tensors of one call, exactly, as allocated by PyTorch."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _without_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        once()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            now += event.nbytes()
            most = max(most, now)
    return most


def _read_bytes(path: str, name: str) -> int:
    """Return the number of bytes in the line `name: N kB` of a file."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard stderr, because the C++ code of PyTorch's profiler prints when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
