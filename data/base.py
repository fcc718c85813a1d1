"""Base classes of data sets, and helpers that all data sets share: paths, locks and walks over folders."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from torch.utils.data import default_collate

from data.folders import user_path
from lion.config import ConfigError, setting
from lion.samples.base import Batch, DeviceDataset, Info, Splits

log = logging.getLogger("lion")

SYSTEM = {"@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "System Volume Information", "__MACOSX", "lost+found"}


@dataclass
class DataConfig:
    """Settings of every data set. `root` is the folder of its files (null: its folder under the data root)."""

    name: str = ""
    root: str | None = setting(None, free=True)
    workers: int | None = setting(None, min=0, max=1000, free=True)

    def uncached(self) -> Self:
        """Return these settings without a cache, for callers that read each sample once."""
        return self

    @property
    def of_training(self) -> tuple[str, ...]:
        """Names of settings that do not change the held-out data.

        Runs that differ only in these settings are evaluated on the same samples.
        """
        return ()

    def label(self) -> str:
        """Return a label that distinguishes runs that differ in `of_training`, for the rows of a table."""
        return ""

    def describe(self) -> str:
        """Return a line that describes the data without their location; for data of the Hub it holds their id."""
        path = getattr(self, "path", None)
        if path is not None and re.fullmatch(r"[\w.-]+/[\w-]+", path) and not user_path(path).exists():
            return f"{self.name} ({path})"
        return self.name

    def resized(self, sample_size: int) -> Self:
        """Return settings of the same data in samples of another size, in `Info.size_unit`.

        Raises:
            ConfigError: The data set has samples of one size only.
        """
        raise ConfigError(f"data set {self.name!r} has samples of one size only")


class DataSet(ABC):
    """A data set, specified by the `data` section of a recipe. A new data set is a file and an entry in `DATASETS`."""

    Config: ClassVar[type[DataConfig]]  # the recipe's `data` section
    Info: ClassVar[type[Info]]  # metadata for a model: tasks with this kind of info can train on it
    workers: ClassVar[int] = 4  # suitable number of loader processes; 0 for data in memory
    download: ClassVar[int] = 0  # bytes to download where the files are missing; 0: none, or unknown
    asks: tuple[str, ...] = ("file",)  # the arguments of `load`, as column headings

    def __init__(self, config: Any) -> None:
        self.config = config

    def chosen(self) -> str:
        """Return a line about what the data set found in its files where the recipe leaves it open; empty: nothing."""
        return ""

    def prepare(self) -> None:  # noqa: B027
        """Create, once for all runs, the files that `build` opens (token files, generated samples).

        Most data sets need no preparation.
        """

    def is_prepared(self) -> bool:
        """Return whether the files that `prepare` creates exist; by default only if it creates none."""
        return type(self).prepare is DataSet.prepare

    def keep(self, folder: Path) -> None:  # noqa: B027
        """Save in a run's folder what its inputs depend on (a tokenizer), because prepared data may be lost."""

    def restore(self, folder: Path, settings: dict[str, Any]) -> None:  # noqa: B027
        """Use the files that `keep` saved in `folder`, for data that must be prepared again.

        `settings` are the data settings of that run.
        """

    def check(self) -> str:
        """Read all prepared files and return a line that describes them.

        Raises:
            ConfigError: A file is damaged.
        """
        return f"data set '{self.config.name}' needs no preparation"

    @abstractmethod
    def build(self) -> Splits:
        """Return the splits of the data set.

        Raises:
            ConfigError: Files are missing. The message names them, their expected place, and how to get them.
        """

    def published(self) -> tuple[Info, int] | None:
        """Return the published info and number of training samples, which need no files; None if unknown."""
        return None

    def disk(self) -> float:
        """Return the approximate number of bytes that `prepare` writes; 0 if it is negligible."""
        return 0.0

    def filled(self) -> float:
        """Return the average share of a training sample that is not padding.

        Raises:
            ConfigError: The files of the data set are missing.
        """
        return 1.0

    def transfer_hint(self) -> str:
        """Return a hint how to set other data so that a model trained on these data accepts them; "" if impossible."""
        return ""

    def load(self, path: str, info: Info) -> dict[str, Any]:
        """Load a file, or the other inputs that `asks` names, as a sample for a model that was trained with `info`.

        The sample has the format of the splits, without the label.

        Raises:
            ConfigError: The file cannot be read, or a file cannot be a sample of these data.
        """
        raise ConfigError(f"{path}: a file cannot be a sample of data set '{self.config.name}'")

    def collate(self, samples: list[Any]) -> Batch:
        """Return a batch of samples from `load` in the format of the splits; no files of the data set are needed."""
        return default_collate(samples)


class BatchedSamples(DeviceDataset):
    """Samples that are built as whole batches; a sample is a row of a batch of one."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: values[0] for name, values in self.batch([index], "cpu").items()}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; wait while another process holds it.

    Raises:
        ConfigError: The lock file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
    except OSError as error:
        where = "set data.root or $LION_DATA to another folder"
        raise ConfigError(f"{path}: cannot be written ({error.strerror}), {where}") from None
    with file:  # closing the file releases the lock, and so does the end of the process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process is preparing these data, waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, which may belong to another user: reading suffices to hold it."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        number = os.open(path, os.O_RDONLY)
    return open(number, "rb")


@functools.cache
def say_once(line: str) -> None:
    """Log a line about data, which a command may open several times."""
    log.info(line)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is no data: a hidden one, or one of a file server or an archive program."""
    return name.startswith(".") or name in SYSTEM


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield `root` and every folder below it, each with the names of its files; links are followed.

    Hidden names (`._1.jpg`, `@eaDir`, see `is_hidden`) and pipes or devices are skipped. A broken link counts as a
    file: the error that reading raises names it.

    Raises:
        ConfigError: A folder is reached twice, contains itself, or cannot be read.
    """
    top = Path(os.path.realpath(root))
    reached = {str(path): str(path) for path in (top, *top.parents)}
    todo = [str(root)]
    while todo:
        folder, files = todo.pop(), []
        try:
            for entry in sorted(os.scandir(folder), key=lambda e: e.name):
                if is_hidden(entry.name):
                    continue
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real in reached:
                        again = f"the same folder as {reached[real]}"
                        raise ConfigError(f"{entry.path}: {again}, its files would count twice; remove the link")
                    reached[real] = entry.path
                    todo.append(entry.path)
                elif entry.is_file() or not os.path.exists(entry.path):
                    files.append(entry.name)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        yield folder, files


def files_below(root: Path) -> list[Path]:
    """Return the files in and below a folder, see `walk`."""
    found: list[Path] = []
    for folder, names in walk(root):
        found += [Path(folder, name) for name in names]
    return found
