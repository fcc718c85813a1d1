"""Faults of long runs: limits on the faults that a run survives, and error messages with advice."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lion.config import ConfigError, setting

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunError(Exception):
    """Error that ends a run with exit code 1.

    The message is one line with the reason, the checkpoint that is kept, and advice.
    """


@dataclass
class FaultsConfig:
    """Limits on the faults that a run survives.

    `nonfinite` is the number of consecutive steps without a finite loss and gradient at which the run ends. Each of
    these steps is skipped; the device is queried every `nonfinite` steps. `unreadable` limits the samples that cannot
    be read, and `workers` the loader workers that die. Both are counted per process.
    """

    nonfinite: int = setting(10, min=1, free=True)
    unreadable: int = setting(100, min=0, free=True)
    workers: int = setting(10, min=0, free=True)


def full_disk(error: BaseException) -> OSError | None:
    """Return the error of a full disk that an error is or was caused by, or None.

    Some libraries have it in their message alone, as text or, those in Rust, as "os error 28".
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NO_ROOM:
            return seen
        for number in NO_ROOM:
            if os.strerror(number) in str(seen) or f"(os error {number})" in str(seen):
                return OSError(number, os.strerror(number))
        seen = seen.__cause__ or seen.__context__
    return None


def truncated_library(error: BaseException) -> str | None:
    """Return the truncated library in a compiler cache that an error reports, or None.

    Such a file remains when a compilation was killed while writing.
    """
    found = re.search(r"(/[^\n:]*\.so): (?:file too short|invalid ELF header)", str(error))
    if found is None:
        return None
    caches = ["/torchinductor_", "/.triton/"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if os.environ.get(name):
            caches.append(os.environ[name])
    if any(cache in found[1] for cache in caches):
        return found[1]
    return None


def os_error_text(error: OSError) -> str:
    """Return the message of an error of the operating system, with the path if there is one."""
    place = error.filename2 or error.filename  # of two paths, the second is the destination
    if error.errno == errno.EMFILE:
        return f"{error.strerror}: raise their limit (ulimit -n), or use fewer processes with data.workers=N"
    if place:
        return f"{place}: {error.strerror}"
    return str(error.strerror)


def advised_error(error: Exception, *, step: int, micro: int, kept: str) -> Exception | None:
    """Translate an error into a message that names the setting to change, or return None for an unknown error.

    `kept` is a message about the checkpoint that is still available.
    """
    if out_of_memory(error):
        return memory_advice(step, micro)
    if "does not have a deterministic implementation" in str(error):
        return ConfigError(f"trainer.deterministic: {str(error).partition('.')[0]}; try false")
    if isinstance(error, OSError) and error.strerror:
        return RunError(f"{os_error_text(error)}; {kept}")
    return None


def divergence_advice(best: Path | None) -> str:
    """Return advice after divergence; `best` is the folder of a run whose best weights can initialise a new run."""
    start = "run.name=NAME"
    if best:
        start = f"run.name=NAME, init_from={best} keeps the best weights"
    return (
        f"In a new run ({start}) try trainer.clip_grad=1, a lower optim.lr, a longer schedule.warmup, "
        f"trainer.precision=fp32"
    )


def out_of_memory(error: BaseException) -> bool:
    named = type(error).__name__ == "OutOfMemoryError"  # by name: torch need not be imported
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def memory_advice(step: int, micro: int) -> ConfigError:
    """Return the error for running out of memory, with advice on `trainer.micro_batch`."""
    smaller = max((m for m in range(1, micro) if micro % m == 0), default=None)
    advice = "trainer.micro_batch cannot be smaller: try a smaller model or input"
    if smaller:
        advice = f"try trainer.micro_batch={smaller}; the global batch size does not change"
    return ConfigError(f"out of memory at step {step} with trainer.micro_batch={micro}: {advice}")
