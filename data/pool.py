"""Long work in parts, in several processes: what is finished stays, and an interrupt leaves no half of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lion.config import ConfigError
from lion.progress import progress


class NoPart(ConfigError):
    """Raised for a file in the place of a finished part that is none; other parts can be used."""


def beside(folder: Path) -> tuple[Path, Path]:
    """Paths beside `folder`: of its finished parts, and of the folder that is put together of them.

    Raises:
        ConfigError: Something else stands in the place of one of the three.
    """
    parts, partial = (folder.with_name(f"{folder.name}.{kind}") for kind in ("parts", "partial"))
    for path in (folder, parts, partial):
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"{path}: is there, and is no folder; remove it")
    return parts, partial


def read_part(path: Path, make: Callable[..., Any] = dict) -> Any:
    """Read the arrays of a finished part and pass them to `make` by their names.

    Raises:
        NoPart: It is none.
    """
    try:
        with np.load(path) as held:
            return make(**held)
    except (ValueError, LookupError, TypeError, EOFError, IsADirectoryError, zipfile.BadZipFile, zlib.error) as error:
        raise NoPart(
            f"{path}: no finished part ({type(error).__name__}); remove it, and what is prepared next makes it anew"
        ) from None


def each(work: Callable[[Any], None], parts: Sequence[Any], *, workers: int, place: Path, **bar: Any) -> None:
    """Call `work`, which is sent to each process once, with every part, under a progress bar.

    Args:
        place: Where finished parts are kept, to be named where a process dies.
        bar: Of tqdm.

    Raises:
        ConfigError: A process died, or `work` raised it.
    """
    workers = min(workers, len(parts))
    if workers < 2:
        for part in progress(parts, **bar):
            work(part)
        return
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(work,)) as pool:
        try:
            running = [pool.submit(run, part) for part in parts]
            for done in progress(as_completed(running), **bar):
                done.result()
        except BrokenProcessPool:
            raise ConfigError(
                f"{place}: a process died; is memory short? data.workers=1 takes one only, finished parts are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


task: Callable[[Any], None]  # of a process of the pool


def start_worker(work: Callable[[Any], None]) -> None:
    """Set up a process of the pool: it ends with its parent, and at once when interrupted, so no half part stays."""
    global task
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    task = work


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def run(part: Any) -> None:
    task(part)
