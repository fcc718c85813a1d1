"""Timing of one call, by the clock of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, by the clock of the device."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
