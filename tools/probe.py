"""Timing of calls: the device, warm-up, interleaved rounds, and seconds by the clock of the device."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.evaluation.timing import seconds
from lion.trainer.compilation import missing_compiler
from lion.trainer.diagnostics import free_bytes
from lion.trainer.runtime import code_version, name_of
from tools.cli import say

WARM_UP, FEWEST = 3, 3  # calls of a warm-up; least number of rounds, whatever their duration
LONG = 10.0  # seconds; after a longer call, warm-up stops


class Variant(NamedTuple):
    """A form, and its number of tokens per chunk or step, if it has one."""

    form: str
    chunk_size: int | None = None

    def __str__(self) -> str:
        if self.chunk_size is None:
            return self.form
        return f"{self.form} {self.chunk_size}"


def use_threads(count: int | None) -> int:
    """Use `count` threads from now on, by default as many as PyTorch uses; return their number."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def matrix_bytes(batch: int, heads: int, length: int) -> int:
    """Return the bytes of one float32 matrix of scores (L x L) for every head of a batch."""
    return 4 * batch * heads * length**2


def square_bytes(batch: int, heads: int, length: int, *, backward: bool = False, vectors: int = 0) -> int:
    """Estimate the bytes of the L x L matrices of a full form with decay.

    Args:
        batch: Batch size.
        heads: Number of heads.
        length: Sequence length.
        backward: Whether the backward pass runs, too.
        vectors: Numbers per token of a vector decay; 0 for a scalar decay. With a vector decay, a form also keeps a
            rescaled copy of the keys for every 64 queries.
    """
    return int((8 if backward else 5) * (1 + vectors / 32) * matrix_bytes(batch, heads, length))


def fits(size: int, device: torch.device) -> bool:
    """Return whether `size` bytes fit into 80 % of the free memory."""
    return size <= 0.8 * free_bytes(device)


def check_compiler(eager: bool) -> None:
    """Check that a compiler is there, unless the run is eager.

    Raises:
        ConfigError: The run needs a compiler and there is none.
    """
    missing = missing_compiler()
    if missing and not eager:
        raise ConfigError(f"bench: {missing}, or add --eager")


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return name_of(pick_device())


def stamp(command: str) -> dict[str, Any]:
    """Return versions, git commit, date and command of a measurement, without the folders of this machine."""
    words = [re.sub(r"^([\w.-]+=)?[/~].*/(?=[^/])", r"\1", word) for word in shlex.split(command)]
    command = shlex.join(re.sub(r"(?<![^\s=])[/~]\S*/(?=[^\s/])", "", word) for word in words)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    versions = {"python": platform.python_version(), "torch": torch.__version__, **code_version()}
    return {**versions, "date": now, "command": command}


def step(run: Callable, tensors: dict[str, Tensor], which: str) -> tuple[Callable[[], object], Tensor]:
    """Return a function that runs one pass, and the output of its first call (which compiles)."""
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


@contextlib.contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Wait until no other benchmark of this user is timing on a GPU, and let others wait meanwhile."""
    if device.type != "cuda":
        yield
        return
    path = Path(tempfile.gettempdir(), f"lion-{os.getuid()}-cuda{device.index or 0}.lock")
    with open(path, "a") as file:  # closing it releases the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  waiting for another benchmark on this GPU")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_rounds(
    runs: dict[Hashable, Callable], rounds: int, limit: float, device: torch.device
) -> dict[Hashable, list[float]]:
    """Call every function once per round, for `limit` seconds at most; return the seconds of every call.

    On a GPU, other benchmarks wait meanwhile.
    """
    times = {variant: [] for variant in runs}
    with alone_on(device):
        end = time.perf_counter() + limit
        for done in range(rounds):
            if done >= FEWEST and time.perf_counter() > end:
                break
            for variant, once in runs.items():
                times[variant].append(seconds(once, device))
    return times


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of times to `others`, round by round."""
    return [time / other for time, other in zip(times, others)]


def repeat(once: Callable[[], object], times: int) -> None:
    for _ in range(times):
        once()


def best(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the seconds of the fastest of `repeats` calls."""
    run()
    return min(seconds(run, device) for _ in range(repeats))
