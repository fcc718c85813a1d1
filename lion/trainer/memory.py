"""Memory: what is free, what a process has held at most, and what one call takes, as the system or PyTorch sees it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> float:
    """Bytes that can still be taken; infinite where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        return _read_bytes("/proc/meminfo", "MemAvailable")
    return float("inf")


def peak_so_far(device: torch.device) -> int:
    """Most bytes ever held: on CUDA by tensors, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_peak(once: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that one call held beyond what was there, its outputs among them, as the system counts them (on CUDA
    those of tensors); None where that is not known."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps would hide what a call takes
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts over
        before = _read_bytes("/proc/self/status", "VmRSS")
    except (OSError, AttributeError, StopIteration):  # another system, or a sandbox that forbids it
        return None
    once()
    return max(0, _read_bytes("/proc/self/status", "VmHWM") - before)


def tensor_peak(once: Callable[[], object], device: torch.device) -> int | None:
    """As `process_peak`, of tensors alone: exact, the bytes that PyTorch's allocator gave out."""
    if device.type == "cuda":
        return process_peak(once, device)
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
    """The bytes of a line `name: N kB`."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """For what a C++ library prints as it works: PyTorch's profiler says when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
