"""Long work in parts, in several processes: finished parts are kept, and an interrupt leaves no incomplete part."""

from __future__ import annotations

import errno
import functools
import logging
import multiprocessing
import os
import shutil
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

from data.base import locked
from lion.config import ConfigError
from lion.progress import progress

log = logging.getLogger("lion")


class InvalidPart(ConfigError):
    """The error for an invalid file in the place of a finished part; the other parts remain usable."""


def worker_count(workers: int | None) -> int:
    """Return the number of processes that prepare data: `data.workers`, by default one per core."""
    if workers is None:
        return len(os.sched_getaffinity(0))
    return workers


def beside(folder: Path) -> tuple[Path, Path]:
    """Return two paths beside `folder`: the folder of finished parts, and the folder in which they are assembled.

    Raises:
        ConfigError: One of the three paths exists and is not a folder.
    """
    parts = folder.with_name(f"{folder.name}.parts")
    partial = folder.with_name(f"{folder.name}.partial")
    for path in (folder, parts, partial):
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"{path}: exists and is not a folder; remove it")
    return parts, partial


def create(folder: Path, fill: Callable[[Path, Path], str]) -> None:
    """Create a folder of prepared data if it is missing; one process creates it, and others that need it wait.

    Args:
        folder: The folder, which appears complete or not at all.
        fill: Function of two folders. It keeps finished parts in the first, so that a killed process can resume, writes
            the content of `folder` into the second (see `emptied`), and returns a summary for the log.

    Raises:
        ConfigError: One of the paths exists and is not a folder.
    """
    parts, partial = beside(folder)
    if folder.exists() and not parts.exists():
        return
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            summary = fill(parts, partial)
            os.replace(partial, folder)
            log.info("%s: %s", folder, summary)
        shutil.rmtree(parts, ignore_errors=True)


def emptied(folder: Path) -> Path:
    """Return the folder, new and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def make_missing(
    work: Callable[[Any], None],
    parts: Sequence[Any],
    path: Callable[[Any], Path],
    *,
    workers: int,
    place: Path,
    unit: str,
    desc: str,
) -> None:
    """Call `work` for every part whose file `path(part)` in the folder `place` is missing, with a progress bar.

    `work` is sent once to each of the `workers` processes.

    Raises:
        ConfigError: A process died, or `work` raised the error.
    """
    place.mkdir(exist_ok=True)
    todo = [part for part in parts if not path(part).exists()]
    if todo and len(todo) < len(parts):
        log.info("%s: %d of %d %ss are finished, resuming", place, len(parts) - len(todo), len(parts), unit)
    bar = functools.partial(progress, total=len(parts), initial=len(parts) - len(todo), unit=unit, desc=desc)
    workers = min(workers, len(todo))
    if workers < 2:
        for part in bar(todo):
            work(part)
        return
    with start_pool(workers, work) as pool:
        try:
            running = [pool.submit(run, part) for part in todo]
            for done in bar(as_completed(running)):
                done.result()
        except BrokenProcessPool:
            raise ConfigError(
                f"{place}: a process died, out of memory? data.workers=1 uses one process, finished parts are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def read_part(path: Path, make: Callable[..., Any] = dict) -> Any:
    """Read the arrays of a finished part and pass them to `make` as keyword arguments.

    Raises:
        InvalidPart: The file is not a finished part.
    """
    try:
        with np.load(path) as held:
            return make(**held)
    except (ValueError, LookupError, TypeError, EOFError, IsADirectoryError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidPart(
            f"{path}: not a finished part ({type(error).__name__}); remove it, the next preparation creates it again"
        ) from None


def start_pool(workers: int, work: Callable[[Any], None]) -> ProcessPoolExecutor:
    """Return a pool of processes for a work.

    Raises:
        ConfigError: The shared memory is full.
    """
    try:
        return ProcessPoolExecutor(workers, initializer=start_worker, initargs=(work,))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            "the shared memory (/dev/shm) has no room for several processes: data.workers=1 uses one, or in Docker "
            "--shm-size=1g gives more"
        ) from None


task: Callable[[Any], None]  # the work of this process of the pool


def start_worker(work: Callable[[Any], None]) -> None:
    """Set up a process of the pool: it ends with its parent, or at once on an interrupt, so no partial part remains."""
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
