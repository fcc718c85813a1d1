"""Samples made once: the arrays of each split in files that are mapped into memory, with a manifest and checksums.

A folder appears whole or not at all. While it is made, FOLDER.parts holds the finished parts: what was killed goes on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.base import locked
from data.manifest import FORMAT, MANIFEST, Held, compare_sums, open_manifest
from data.pool import beside, each, read_part
from lion.config import ConfigError
from lion.files import save_json, write_atomic

log = logging.getLogger("lion")

Arrays = dict[str, np.ndarray]


class Part(NamedTuple):
    """The `number`th stretch of a split, of at most `count` samples from sample `first` on."""

    split: str
    number: int
    first: int = 0
    count: int = 0


def in_parts(counts: dict[str, int], size: int) -> list[Part]:
    """Splits of so many samples, in stretches of `size`."""
    return [
        Part(split, number, first, min(size, count - first))
        for split, count in counts.items()
        for number, first in enumerate(range(0, count, size))
    ]


class Source(ABC):
    """Where samples come from: parts that any process can make, again and again the same."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """All of them, split by split, in order."""

    @abstractmethod
    def make(self, part: Part) -> Arrays:
        """The part's arrays, which are joined along their first dimension; `label` has a number for each sample.

        Raises:
            ConfigError: A sample cannot be had.
        """

    def finish(self, path: Callable[[Part], Path]) -> None:  # noqa: B027
        """Look at all parts together, and make those anew (`write_part`) that do not go with the others."""

    def origin(self, split: str) -> str:
        """Where a split comes from, in words."""
        return f"split {split}"

    def describe(self) -> dict[str, Any]:
        """What the manifest keeps, as JSON."""
        return {}


def prepare(folder: Path, open_source: Callable[[], Source], identity: Any, *, workers: int) -> None:
    """Make `folder` where it is missing; several processes that ask for it wait for one.

    Args:
        open_source: Where samples come from; not called where nothing is to do.
        identity: What decides the content, as JSON; the folder's name is of it.
        workers: Processes.

    Raises:
        ConfigError: A sample cannot be had, or a split has none.
    """
    kept, partial = beside(folder)
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            source = open_source()
            kept.mkdir(exist_ok=True)
            parts = source.parts()
            todo = [part for part in parts if not part_path(kept, part).exists()]
            if todo and len(todo) < len(parts):
                log.info("%s: %d of %d parts are there, going on", kept, len(parts) - len(todo), len(parts))
            bar = {"total": len(parts), "initial": len(parts) - len(todo), "unit": "part", "desc": folder.name}
            each(functools.partial(make_part, kept, source), todo, workers=workers, place=kept, **bar)
            source.finish(functools.partial(part_path, kept))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            arrays = join(partial, kept, parts)
            samples = {part.split: arrays[f"{part.split}.label"]["shape"][0] for part in parts}
            if empty := [split for split, size in samples.items() if not size]:
                shutil.rmtree(partial)
                raise ConfigError(f"{source.origin(empty[0])}: no samples, none is left for {empty[0]}")
            manifest = {"format": FORMAT, "samples": samples, "arrays": arrays, **source.describe()}
            save_json(partial / MANIFEST, {**manifest, "of": identity})
            os.replace(partial, folder)
            log.info("%s: %s samples", folder, ", ".join(f"{n:,} {split}" for split, n in samples.items()))
        shutil.rmtree(kept, ignore_errors=True)


def part_path(kept: Path, part: Part) -> Path:
    return kept / f"{part.split}.{part.number}.npz"


def make_part(kept: Path, source: Source, part: Part) -> None:
    write_part(part_path(kept, part), source.make(part))


def write_part(path: Path, arrays: Arrays) -> None:
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # pictures of lines take a tenth


def join(folder: Path, kept: Path, parts: list[Part]) -> dict[str, Any]:
    """Write the arrays of all parts, one after another; returns what each file holds."""
    made: dict[str, Any] = {}
    sums: dict[str, Any] = {}
    for part in parts:
        for name, values in read_part(part_path(kept, part)).items():
            name = f"{part.split}.{name}"
            held = made.setdefault(name, {"type": values.dtype.name, "shape": [0, *values.shape[1:]]})
            held["shape"][0] += len(values)
            sums.setdefault(name, hashlib.sha256()).update(values.tobytes())
            with open(folder / f"{name}.bin", "ab") as file:
                file.write(values.tobytes())
    for name, held in made.items():
        held["sha256"] = sums[name].hexdigest()
        with open(folder / f"{name}.bin", "rb") as file:
            os.fsync(file.fileno())
    return made


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder holds, see `data.manifest`."""
    return open_manifest(folder, files_of, "file")


def files_of(held: dict[str, Any]) -> dict[str, Held]:
    """The files of the arrays, by their manifest."""
    return {
        f"{name}.bin": Held(int(np.prod(a["shape"])) * np.dtype(a["type"]).itemsize, a["sha256"])
        for name, a in held["arrays"].items()
    }


def open_arrays(folder: Path, manifest: dict[str, Any], split: str) -> Arrays:
    """Those of a split; nothing is read before it is asked for."""
    return {
        name.partition(".")[2]: np.memmap(folder / f"{name}.bin", held["type"], "r", shape=tuple(held["shape"]))
        for name, held in manifest["arrays"].items()
        if name.startswith(f"{split}.")
    }


def check_sums(folder: Path) -> dict[str, Any]:
    """Read every byte and compare it with the manifest, which is returned.

    Raises:
        ConfigError: A file is damaged.
    """
    held = read_manifest(folder)
    compare_sums(folder, files_of(held))
    return held
