"""What goes wrong in long runs: how much of it a run survives, and the words for it."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lion.config import ConfigError, setting

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunError(Exception):
    """A run cannot go on; the message is one line that says why, what is kept, and what to try. Exit code 1."""


@dataclass
class FaultsConfig:
    """How many faults a run survives: `nonfinite` steps in a row without a finite loss and gradient (each is skipped;
    the device is asked every `nonfinite` steps), samples that cannot be read and loader workers that die (counted by
    each process for itself)."""

    nonfinite: int = setting(10, min=1, free=True)
    unreadable: int = setting(100, min=0, free=True)
    workers: int = setting(10, min=0, free=True)


def full_disk(error: BaseException) -> bool:
    """Whether an error says that there is no room; libraries wrap it, so its causes are asked, too."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NO_ROOM:
            return True
        seen = seen.__cause__ or seen.__context__
    return "No space left on device" in str(error)


def cut_library(error: BaseException) -> str | None:
    """The file in a compiler's cache that a loader cannot read, where an error tells of one: a compile was killed as it
    wrote."""
    found = re.search(r"(/[^\n:]*\.so): (?:file too short|invalid ELF header)", str(error))
    caches = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    ours = found and any(cache in found[1] for cache in ("/torchinductor_", "/.triton/", *filter(None, caches)))
    return found[1] if ours else None


def refusal(error: OSError) -> str:
    """What the system refuses, and where."""
    place = error.filename2 or error.filename  # the second of two is where a file was to go
    return f"{place}: {error.strerror}" if place else str(error.strerror)


def explain(error: Exception, *, step: int, micro: int, kept: str) -> Exception | None:
    """The same in the user's terms, with the setting to change, where there are such; `kept` says what is not lost."""
    if out_of_memory(error):
        return memory_advice(step, micro)
    if "does not have a deterministic implementation" in str(error):
        return ConfigError(f"trainer.deterministic: {str(error).partition('.')[0]}; try false")
    if isinstance(error, OSError) and error.strerror:
        return RunError(f"{refusal(error)}; {kept}")
    return None


def divergence_advice(best: Path | None) -> str:
    """What to try in a new run; `best` is a run whose best weights can be started from."""
    start = f"run.name=NAME, init_from={best} keeps the best weights" if best else "run.name=NAME"
    return (
        f"In a new run ({start}) try trainer.clip_grad=1, a lower optim.lr, a longer schedule.warmup, "
        f"trainer.precision=fp32"
    )


def out_of_memory(error: BaseException) -> bool:
    named = type(error).__name__ == "OutOfMemoryError"  # of torch, which the words for an error do not need
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def memory_advice(step: int, micro: int) -> ConfigError:
    """Out of memory, in the user's terms."""
    smaller = max((m for m in range(1, micro) if micro % m == 0), default=None)
    advice = (
        f"try trainer.micro_batch={smaller}; the global batch stays what it is"
        if smaller
        else "trainer.micro_batch cannot be smaller: try a smaller model or input"
    )
    return ConfigError(f"out of memory at step {step} with trainer.micro_batch={micro}: {advice}")
