"""Where measurements run, and the time of calls: warm-up, interleaved rounds, the clock of the device."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable
from datetime import datetime
from typing import NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.trainer.memory import free_bytes
from lion.trainer.runtime import cpu_name, missing_compiler

WARM_UP, FEWEST = 3, 3  # calls; rounds, however long they take
LONG = 10.0  # seconds of a call that needs no further warm-up


class Variant(NamedTuple):
    """A form, and its tokens a chunk or step where it has them."""

    form: str
    chunk_size: int | None = None

    def __str__(self) -> str:
        return self.form if self.chunk_size is None else f"{self.form} {self.chunk_size}"


def matrix_bytes(batch: int, heads: int, length: int) -> int:
    """Of one matrix of scores for every head, float32."""
    return 4 * batch * heads * length**2


def square_bytes(batch: int, heads: int, length: int, *, backward: bool = False, vectors: int = 0) -> int:
    """About what the L x L matrices of a full form take that has a decay; `vectors` of so many numbers a token also
    keep keys re-based for every 64 queries."""
    return int((8 if backward else 5) * (1 + vectors / 32) * matrix_bytes(batch, heads, length))


def fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes are free, with some to spare."""
    return size <= 0.8 * free_bytes(device)


def check_compiler(eager: bool) -> None:
    """Raises ConfigError: There is no compiler, and compiled code is to be timed."""
    missing = missing_compiler()
    if missing and not eager:
        raise ConfigError(f"bench: {missing}, or add --eager")


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def stamp(command: str) -> dict[str, str]:
    """Record of a measurement: its command, without the folders of this machine, its date and PyTorch's version."""
    command = re.sub(r"(?<![^\s=])[/~]\S*/(?=[^\s/])", "", command)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"torch": torch.__version__, "date": now, "command": command}


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
