"""Time and memory of calls: warm-up, interleaved rounds, the clock of the device, the high-water mark of memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import torch
from torch import Tensor

WARM_UP, FEWEST = 3, 3  # calls; rounds, however long they take
LONG = 10.0  # seconds of a call that needs no further warm-up


def step(run: Callable, tensors: dict[str, Tensor], which: str) -> tuple[Callable[[], object], Tensor]:
    """One call of a pass, to be repeated; and its output, from the first call, which compiles."""
    if which == "forward":

        def once() -> Tensor:
            with torch.inference_mode():
                return run(tensors)

        return once, once()
    out = run(tensors).detach()
    leaves, grad = [t for t in tensors.values() if t.requires_grad], torch.randn_like(out)

    def both() -> object:
        return torch.autograd.grad(run(tensors), leaves, grad)

    return both, out


def warm_up(once: Callable[[], object], device: torch.device) -> None:
    once()  # compiles the backward pass
    for _ in range(WARM_UP - 1):
        if seconds(once, device) > LONG:
            return


def time_rounds(
    runs: dict[Hashable, Callable], rounds: int, limit: float, device: torch.device
) -> dict[Hashable, list[float]]:
    """Seconds of every call in every round, until `limit` seconds are over."""
    times = {variant: [] for variant in runs}
    end = time.perf_counter() + limit
    for done in range(rounds):
        if done >= FEWEST and time.perf_counter() > end:
            break
        for variant, once in runs.items():
            times[variant].append(seconds(once, device))
    return times


def free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return float("inf")


def peak_beyond(once: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that one call held beyond what was there, its outputs among them; None where that is not known."""
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
        before = held("VmRSS")
    except (OSError, AttributeError, StopIteration):  # another system, or a sandbox that forbids it
        return None
    once()
    return max(0, held("VmHWM") - before)


def allocated_beyond(once: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes of tensors that one call held at a time beyond what was there, its outputs among them: exact, of what
    PyTorch's allocator gave out, where `peak_beyond` sees what the process took from the system."""
    if device.type == "cuda":
        return peak_beyond(once, device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with without_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        once()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            now += event.nbytes()
            most = max(most, now)
    return most


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """For what a C++ library prints on its way: PyTorch's profiler says when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def held(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def best(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of some calls."""
    run()
    return min(seconds(run, device) for _ in range(repeats))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call, by the clock of the device."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
