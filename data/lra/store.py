"""Storage of prepared samples: the arrays of each split in memory-mapped files, with a manifest and checksums.

A folder appears complete or not at all. During preparation FOLDER.parts holds the finished parts, from which a killed
preparation resumes.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.manifest import FORMAT, MANIFEST, FileRecord
from data.pool import create, emptied, make_missing, read_part
from lion.config import ConfigError
from lion.files import save_json, sync, write_atomic

Arrays = dict[str, np.ndarray]


class ArrayKind(NamedTuple):
    """The type of an array, and the shape of its part of a sample; None: as many values as `lengths` says."""

    type: str
    each: tuple[int, ...] | None = ()


class Part(NamedTuple):
    """Part `number` of a split: at most `count` samples, beginning with sample `first`."""

    split: str
    number: int
    first: int = 0
    count: int = 0


def in_parts(counts: dict[str, int], size: int) -> list[Part]:
    """Divide splits with these numbers of samples into parts of `size` samples."""
    parts = []
    for split, count in counts.items():
        for number, first in enumerate(range(0, count, size)):
            parts.append(Part(split, number, first, min(size, count - first)))
    return parts


class Source(ABC):
    """A source of samples in parts; any process can make a part, with the same result each time."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return all parts in order, split by split."""

    @abstractmethod
    def make(self, part: Part) -> Arrays:
        """Make the arrays of a part; the arrays of all parts are joined along their first dimension.

        `label` has one number per sample.

        Raises:
            ConfigError: A sample cannot be read or generated.
        """

    def finish(self, path: Callable[[Part], Path]) -> None:  # noqa: B027
        """Check all parts together, and write parts again (`write_part`) that conflict with others."""

    def origin(self, split: str) -> str:
        """Return the origin of a split, for messages."""
        return f"split {split}"

    def describe(self) -> dict[str, Any]:
        """Return additional entries of the manifest, as JSON."""
        return {}


def prepare(folder: Path, open_source: Callable[[], Source], identity: Any, *, workers: int) -> None:
    """Create `folder` if it is missing; one process creates it, and others that need it wait.

    Args:
        folder: Folder of the prepared samples.
        open_source: Function that opens the source of samples; not called if the folder exists.
        identity: Values that determine the content, as JSON; the folder's name is derived from them.
        workers: Number of processes.

    Raises:
        ConfigError: A sample cannot be read or generated, or a split has no samples.
    """

    def fill(kept: Path, partial: Path) -> str:
        source = open_source()
        parts, path = source.parts(), functools.partial(part_path, kept)
        work = functools.partial(make_part, kept, source)
        make_missing(work, parts, path, workers=workers, place=kept, unit="part", desc=folder.name)
        source.finish(path)
        arrays = join(emptied(partial), kept, parts)
        samples = {part.split: arrays[f"{part.split}.label"]["shape"][0] for part in parts}
        for split, size in samples.items():
            if not size:
                shutil.rmtree(partial)
                raise ConfigError(f"{source.origin(split)}: no samples, none is left for {split}")
        manifest = {"format": FORMAT, "samples": samples, "arrays": arrays, **source.describe()}
        save_json(partial / MANIFEST, {**manifest, "of": identity})
        return f"{counted(samples)} samples"

    create(folder, fill)


def counted(samples: dict[str, int]) -> str:
    """Return the numbers of samples of all splits, for a message."""
    return ", ".join(f"{size:,} {split}" for split, size in samples.items())


def part_path(kept: Path, part: Part) -> Path:
    return kept / f"{part.split}.{part.number}.npz"


def make_part(kept: Path, source: Source, part: Part) -> None:
    write_part(part_path(kept, part), source.make(part))


def write_part(path: Path, arrays: Arrays) -> None:
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # images of lines shrink to a tenth


def join(folder: Path, kept: Path, parts: list[Part]) -> dict[str, Any]:
    """Write the arrays of all parts, one after another; return the manifest entry of each file."""
    made: dict[str, Any] = {}
    sums: dict[str, Any] = {}  # computed while writing: the arrays may have gigabytes
    for part in parts:
        for name, values in read_part(part_path(kept, part)).items():
            name = f"{part.split}.{name}"
            held = made.setdefault(name, {"type": values.dtype.name, "shape": [0, *values.shape[1:]]})
            held["shape"][0] += len(values)
            raw = values.tobytes()
            sums.setdefault(name, hashlib.sha256()).update(raw)
            with open(folder / f"{name}.bin", "ab") as file:
                file.write(raw)
    for name, held in made.items():
        held["sha256"] = sums[name].hexdigest()
        sync(folder / f"{name}.bin")
    return made


def check_manifest(held: dict[str, Any], kinds: dict[str, ArrayKind]) -> None:
    """Check that a manifest lists samples, and arrays of these kinds for all of them.

    Raises:
        LookupError, TypeError, ValueError: The manifest is invalid.
    """
    samples, arrays = held["samples"], held["arrays"]
    generated = isinstance(held["of"], dict) and held["of"].get("counts")
    if "train" not in samples or (generated and samples != generated):
        raise ValueError(f"samples: expected {generated or 'train and others'}, got {samples}")
    if odd := arrays.keys() ^ {f"{split}.{name}" for split in samples for name in kinds}:
        what = "missing"
        if min(odd) in arrays:
            what = "not expected"
        raise ValueError(f"arrays: {min(odd)} is {what}")
    for split, size in samples.items():
        for name, (kind, each) in kinds.items():
            found = arrays[f"{split}.{name}"]
            shape = found["shape"]
            whole = all(type(n) is int and n > 0 for n in (size, *shape))
            wanted = [max(size, shape[0])]  # a sample has at least one token
            if each is not None:
                wanted = [size, *each]
            if not whole or found["type"] != kind or shape != wanted:
                raise ValueError(f"{split}.{name}: expected {kind} {wanted}, got {found['type']} {found['shape']}")


def files_of(held: dict[str, Any]) -> dict[str, FileRecord]:
    """Return the files of the arrays listed in a manifest."""
    files = {}
    for name, array in held["arrays"].items():
        size = int(np.prod(array["shape"])) * np.dtype(array["type"]).itemsize
        files[f"{name}.bin"] = FileRecord(size, array["sha256"])
    return files


def open_arrays(folder: Path, manifest: dict[str, Any], split: str) -> Arrays:
    """Memory-map the arrays of a split; data are read only on access."""
    arrays = {}
    for name, held in manifest["arrays"].items():
        owner, _, own = name.partition(".")
        if owner == split:
            arrays[own] = np.memmap(folder / f"{name}.bin", held["type"], "r", shape=tuple(held["shape"]))
    return arrays
