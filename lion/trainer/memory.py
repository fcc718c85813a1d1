"""Memory measurements: free memory, peak memory of a process, and peak memory of one call."""

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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_peak(once: Callable[[], object], device: torch.device) -> int | None:
    """Measure the peak memory in bytes of one call, including its outputs, beyond the memory held before.

    The memory is counted by the operating system, or as tensors on CUDA. The result is None if it cannot be measured.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory cached by the allocator would hide the memory of the call
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _read_bytes("/proc/self/status", "VmRSS")
    except (OSError, AttributeError, StopIteration):  # not Linux, or forbidden by a sandbox
        return None
    once()
    return max(0, _read_bytes("/proc/self/status", "VmHWM") - before)


def tensor_peak(once: Callable[[], object], device: torch.device) -> int | None:
    """Measure the peak memory in bytes of the tensors of one call, exactly, as allocated by PyTorch."""
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
