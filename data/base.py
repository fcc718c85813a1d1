"""What a data set is, and what all share: where bytes live, and the checks with clear words."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch.utils.data import default_collate

from lion.config import ConfigError, setting
from lion.tasks.data import Batch, Info, Splits

log = logging.getLogger("lion")


@dataclass
class DataConfig:
    """Settings of every data set. `root` is where its files are (null: its folder under the data root)."""

    name: str = ""
    root: str | None = setting(None, free=True)
    workers: int | None = setting(None, min=0, max=1000, free=True)

    def uncached(self) -> Self:
        """The same without a cache, for readers that read each sample once."""
        return self

    @property
    def of_training(self) -> tuple[str, ...]:
        """Settings that change nothing of what is held out: runs that differ in them are judged by the same."""
        return ()

    def label(self) -> str:
        """What tells apart the rows of a table whose runs differ in `of_training`."""
        return ""

    def describe(self) -> str:
        """Which data they are, wherever they lie, in a line; the Hub's with their id."""
        path = getattr(self, "path", None)
        hub = path is not None and re.fullmatch(r"[\w.-]+/[\w-]+", path) and not user_path(path).exists()
        return f"{self.name} ({path})" if hub else self.name

    def resized(self, sample_size: int) -> Self:
        """The same data in samples of another size, in `Info.size_unit`.

        Raises:
            ConfigError: They have one size only.
        """
        raise ConfigError(f"data set {self.name!r} has samples of one size only")


class DataSet(ABC):
    """A set of data, as a recipe's `data` section asks for it. A new one is a file, and its line in `DATASETS`."""

    Config: ClassVar[type[DataConfig]]  # the recipe's `data` section
    Info: ClassVar[type[Info]]  # what it tells a model: tasks that want this kind can learn from it
    workers: ClassVar[int] = 4  # loader processes that suit it; none for data in memory
    download: ClassVar[int] = 0  # bytes that are fetched where the files are absent; 0: nothing, or not known
    asks: tuple[str, ...] = ("file",)  # what `load` takes, in the words of a heading

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare(self) -> None:  # noqa: B027
        """Make, once for all runs, what `build` only opens (token files, generated samples); most need nothing."""

    def keep(self, folder: Path) -> None:  # noqa: B027
        """Keep in a run's folder what its inputs depend on and prepared data may lose (a tokenizer)."""

    def restore(self, folder: Path, settings: dict[str, Any]) -> None:  # noqa: B027
        """Use what `keep` has kept in the folder of a run with these settings, where data have to be prepared anew."""

    def check(self) -> str:
        """What `prepare` has made, in words; all of it is read.

        Raises:
            ConfigError: It is damaged.
        """
        return f"data set '{self.config.name}' needs no preparation"

    @abstractmethod
    def build(self) -> Splits:
        """Its splits.

        Raises:
            ConfigError: What is missing, where it was looked for, and how to get it.
        """

    def published(self) -> tuple[Info, int] | None:
        """What the set is known to hold, without its files: its info and the number of training samples."""
        return None

    def disk(self) -> float:
        """Bytes that `prepare` writes, about; 0 where it writes nothing that counts."""
        return 0.0

    def filled(self) -> float:
        """The share of a training sample that is no padding, on average.

        Raises:
            ConfigError: Its files are not there.
        """
        return 1.0

    def way_out(self) -> str:
        """What to set so that a model of these data takes others, where they do not serve it; "" if nothing helps."""
        return ""

    def load(self, path: str, info: Info) -> dict[str, Any]:
        """A file, or what else it `asks` for, as a sample for a model that was trained with `info`: as the splits' own,
        but for the label.

        Raises:
            ConfigError: It cannot be read, or no file is a sample of such data.
        """
        raise ConfigError(f"{path}: a file is no sample of data set '{self.config.name}'")

    def collate(self, samples: list[Any]) -> Batch:
        """A batch of samples of `load`, as its splits make one of theirs, which needs no file of the set."""
        return default_collate(samples)


def data_root() -> Path:
    """`$LION_DATA`, else the user's cache folder."""
    if os.environ.get("LION_DATA"):
        return user_path(os.environ["LION_DATA"])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lion"


def user_path(path: str) -> Path:
    """A path whose `~` is the home folder; one of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which may mean to wait for another process.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    except OSError as error:
        where = "data.root or $LION_DATA names another folder"
        raise ConfigError(f"{path}: cannot be written ({error.strerror}), {where}") from None
    with file:  # closing it gives the lock back, as the process's end does
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process prepares these data, waiting for it", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_root(config: DataConfig, folder: str, how: str) -> Path:
    """The data set's folder; where it is missing, what is missing, where it was looked for, and `how` to get it."""
    root = user_path(config.root) if config.root else data_root() / folder
    if not root.is_dir():
        raise ConfigError(f"data set '{config.name}': no folder {root} (data.root=PATH or $LION_DATA set it); {how}")
    return root


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """`root` and every folder below it, each with the names of its files; links are followed.

    Hidden names (`._1.jpg`, `.ipynb_checkpoints`) and what is no file (pipes, devices) are passed over. A link to
    nothing counts as a file: reading it fails, with its name.

    Raises:
        ConfigError: A folder is reached twice, or lies above itself, or cannot be read.
    """
    top = Path(os.path.realpath(root))
    reached = {str(path): str(path) for path in (top, *top.parents)}
    todo = [str(root)]
    while todo:
        folder, files = todo.pop(), []
        try:
            for entry in sorted(os.scandir(folder), key=lambda e: e.name):
                if entry.name.startswith("."):
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
