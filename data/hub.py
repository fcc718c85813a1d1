"""Set-up of the Hugging Face Hub libraries for machines with and without a network, and their errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from data.splits import split_of
from lion.config import ConfigError, first_line, nearest


def configure_hub() -> None:
    """Configure the Hub libraries.

    Their warnings are silenced, because the errors here say more. If the host name of the Hub cannot be resolved, the
    libraries use only their cache; otherwise they would retry for half a minute.
    """
    for variable, name, level in (
        ("HF_HUB_VERBOSITY", "huggingface_hub", "error"),  # warns of every retry
        ("DATASETS_VERBOSITY", "datasets", "critical"),  # unreadable files become a ConfigError here
    ):
        os.environ.setdefault(variable, level)
        logging.getLogger(name).setLevel(level.upper())  # in case the library is already imported
    if hub_unreachable() and os.environ.setdefault("HF_HUB_OFFLINE", "1") == "1":
        for name in ("huggingface_hub.constants", "datasets.config"):  # in case the library is already imported
            if module := sys.modules.get(name):
                module.HF_HUB_OFFLINE = True


def import_datasets() -> ModuleType:
    """Import the `datasets` library, with the Hub configured; this takes a second."""
    configure_hub()
    import datasets

    return datasets


def is_saved(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of the `datasets` library."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_saved(path: Path) -> dict[str, Any]:
    """Return the tables of a folder written by `save_to_disk`, by split; a single table is `train`."""
    found = import_datasets().load_from_disk(str(path))
    if isinstance(found, dict):
        return dict(found)
    return {"train": found}


@contextlib.contextmanager
def readable(path: Path | str, exists: bool) -> Iterator[None]:
    """Turn errors of the `datasets` library inside the context into a ConfigError.

    Args:
        path: What is read: local files, or a Hub id.
        exists: Whether `path` is known to exist, here or on the Hub.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # errors of the network, a missing set or a broken file share no type
        what = "is not a local file or folder and cannot be loaded from the Hub"
        if exists:
            what = "cannot be read"
        raise ConfigError(f"data.path: {str(path)!r} {what} ({type(error).__name__}: {first_line(error)})") from None


def configuration(root: Path, files: list[Path], split: str, subset: str | None) -> tuple[Path, list[Path]]:
    """Return the folder of the configuration `subset` of a clone from the Hub, and its files, relative to this folder.

    A configuration is a folder of parquet files, one of which is of the split; `subset` may also name a folder of other
    files. The folder `data` is that of a clone whose configuration has no name. A clone without configurations is
    returned as it is.

    Args:
        root: The folder of the clone.
        files: Its files, relative to `root`.
        split: A split that every configuration has.
        subset: The name of the configuration, or None if there is one at most.

    Raises:
        ConfigError: There are several configurations, or others than the one that is set.
    """
    below = [f for f in files if len(f.parts) > 1]
    if subset is not None and (own := [f.relative_to(subset) for f in below if f.parts[0] == subset]):
        return root / subset, own
    found = [f for f in below if split_of(f.relative_to(f.parts[0])) == split]
    names = sorted({f.parts[0] for f in found if f.suffix == ".parquet"})
    if len(names) > 1 or (subset is not None and names not in ([], ["data"])):
        raise ConfigError(f"data.subset: {root} has {', '.join(names)}, {nearest(str(subset), names)}")
    others = sorted({f.parts[0] for f in found})
    if subset is not None and not names and len(others) > 1:
        hint = f"{nearest(subset, others)}; data.subset=null reads all of them"
        raise ConfigError(f"data.subset: {root} has {', '.join(others)}, {hint}")
    return root, files


def check_names(files: Iterable[Path | str]) -> None:
    """Check that the classes of a column have the same names in all parquet files.

    `datasets` reads the labels 0, 1, .. of all files by the names of one of them.

    Raises:
        ConfigError: Two files have different names of classes.
    """
    datasets, known = import_datasets(), dict[str, tuple[list[str], Path | str]]()
    for file in files:
        with readable(file, True):
            rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for column, feature in (rows.features or {}).items():
            if (names := getattr(feature, "names", None)) is None:
                continue
            first, where = known.setdefault(column, (names, file))
            if names != first:
                shown = f"{', '.join(first[:4])} in {where} and {', '.join(names[:4])} in {file}"
                raise ConfigError(f"data.path: the classes of column {column!r} differ: {shown}")


@functools.cache
def hub_unreachable() -> bool:
    """Return whether the host name of the Hub cannot be resolved; False with a proxy, which resolves names itself."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname, 443)
    except OSError:
        return True
    return False
