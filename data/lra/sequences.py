"""Base classes of the Long Range Arena (arXiv 2011.04006) data sets: samples that are prepared once, and batches."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from data.base import DataConfig, DataSet
from data.folders import root_of, user_path
from data.lra.store import (
    ArrayKind,
    Arrays,
    Source,
    check_manifest,
    counted,
    files_of,
    open_arrays,
    prepare,
)
from data.manifest import FORMAT, FileRecord, compare_sums, fingerprint_of, open_manifest, short_hash
from data.pool import worker_count
from data.vision.sources import drawn, split_indices
from lion.config import ConfigError, setting
from lion.samples.base import Batch, DeviceDataset, Splits, moved
from lion.samples.sequences import SHAPES, SequenceInfo, padded_length

PAD, UNKNOWN, END = range(3)  # the first ids of every vocabulary
LENGTHS = {"tokens": "lengths", "second": "second_lengths"}  # by array of tokens, the array of lengths
MOST = 10_000_000  # maximum number of generated samples of a split, a hundred times LRA's


@dataclass
class SequenceConfig(DataConfig):
    """Settings of every data set of long sequences.

    root: Folder of the prepared samples; null: `lra` in the data root.
    workers: Number of processes that prepare samples; null: one per core.
    path: Files to read instead of generated or downloaded samples.
    limit: Maximum number of training samples, drawn once.
    """

    path: str | None = setting(None, free=True)
    limit: int | None = setting(None, min=1)


@dataclass
class TokenConfig(SequenceConfig):
    """Settings of sequences of tokens.

    length: Maximum number of tokens of a sample, including the end token.
    pad: Target of padding: `length`, which gives all batches one shape, or the longest sample of a `batch`, rounded up
        to a quarter of `length`.
    """

    length: int = setting(2048, min=2, max=2**20)
    pad: str = setting("length", choices=("batch", "length"), free="rounding")

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)


@dataclass
class GeneratedConfig(SequenceConfig):
    """Settings of generated data sets; they have no effect if `path` names files.

    seed: Seed of the samples, independent of the seed of a run.
    samples: Number of training samples.
    val_samples, test_samples: Number of samples of these splits; null: the same share of `samples` as in LRA.
    """

    seed: int = setting(0, min=0)
    samples: int = setting(160_000, min=1, max=MOST)
    val_samples: int | None = setting(None, min=1, max=MOST)
    test_samples: int | None = setting(None, min=1, max=MOST)
    share: ClassVar[int] = 8  # training samples per validation or test sample

    def counts(self) -> dict[str, int]:
        """Return the number of samples of each split."""
        other = max(1, self.samples // self.share)
        return {"train": self.samples, "val": self.val_samples or other, "test": self.test_samples or other}

    def decided(self, *outside: str) -> dict[str, Any]:
        """Return the settings that determine the samples; the settings named in `outside` do not."""
        outside += ("name", "root", "workers", "path", "limit", "samples", "val_samples", "test_samples")
        settings = dict(vars(self))
        for name in outside:
            del settings[name]
        return settings | {"counts": self.counts()}


class Collate:
    """A function that collates samples into a batch and pads tokens."""

    def __init__(self, length: int, pad: str = "length") -> None:
        self.length, self.pad = length, pad

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Return a batch: pixels uint8 (B, L), or tokens and segments, both int64 (B, L), (B, 2, L) for pairs.

        Segments are 0 for tokens and -1 for padding. The batch has label (B,) if the samples have labels.
        """
        batch = {}
        if "label" in samples[0]:
            batch["label"] = torch.tensor([sample["label"] for sample in samples])
        if "pixels" in samples[0]:
            return {"pixels": torch.stack([sample["pixels"] for sample in samples]), **batch}
        names, shape = ["tokens"], (len(samples), -1)
        if "second" in samples[0]:
            names, shape = ["tokens", "second"], (len(samples), 2, -1)
        shapes = SHAPES
        if self.pad == "length":
            shapes = 1
        rows = [sample[name] for sample in samples for name in names]
        longest = max(map(len, rows))
        length = padded_length(longest, self.length, shapes)
        tokens = torch.full((len(rows), max(length, longest)), PAD)
        segments = torch.full_like(tokens, -1)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
            segments[i, : len(row)] = 0
        return {"tokens": tokens.view(shape), "segments": segments.view(shape), **batch}


class Sequences(DeviceDataset):
    """The samples `indices` of a split.

    Args:
        arrays: Arrays of the split: `label` (N,), and either `pixels` uint8 (N, L), or the concatenated `tokens` (T,)
            with `lengths` (N,). Pairs also have `second` with `second_lengths`.
        collate: Function that builds a batch from a list of samples.
        indices: Samples of the split to use.
    """

    def __init__(self, arrays: Arrays, collate: Collate, indices: Sequence[int]) -> None:
        self.arrays, self.collate, self.indices = arrays, collate, np.asarray(indices)
        self.borders: dict[str, np.ndarray] = {}
        for name, lengths in LENGTHS.items():
            if name in arrays:
                self.borders[name] = np.pad(np.cumsum(arrays[lengths], dtype=np.int64), (1, 0))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample: {pixels: uint8 (L,), label} or {tokens: int64 (L,), label}; pairs also have {second}."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        i = int(self.indices[index])
        sample: dict[str, Any] = {"label": int(self.arrays["label"][i])}
        if "pixels" in self.arrays:
            return {"pixels": torch.from_numpy(self.arrays["pixels"][i].copy()), **sample}
        for name, borders in self.borders.items():
            ids = self.arrays[name][borders[i] : borders[i + 1]]
            sample[name] = torch.from_numpy(ids.astype(np.int64))
        return sample

    def batch(
        self, indices: Sequence[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> Batch:
        """Return the batch that `Collate` builds; it is deterministic."""
        return {name: moved(x, device) for name, x in self.collate([self[i] for i in indices]).items()}


class SequenceSet(DataSet):
    """A data set of long sequences, prepared once and then read from memory-mapped files of any size."""

    Info = SequenceInfo
    workers = 0  # whole batches are built in microseconds

    @property
    def held_out(self) -> dict[str, float]:
        """The shares of the training samples that become other splits."""
        share = getattr(self.config, "val_split", None)
        if share is None:
            return {}
        return {"val": share}

    @abstractmethod
    def identity(self) -> Any:
        """Return the values that determine the samples, as JSON.

        Raises:
            ConfigError: The files of the data set are missing.
        """

    @abstractmethod
    def source(self) -> Source:
        """Open the source of the samples."""

    @abstractmethod
    def kinds(self) -> dict[str, ArrayKind]:
        """Return the kinds of the arrays that `source` makes."""

    @abstractmethod
    def info(self, manifest: dict[str, Any]) -> SequenceInfo:
        """Return the info of prepared samples."""

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the samples; its name is a hash of all that determines them."""
        root = root_of("lra", self.config.root)
        return root / self.name_of(self.identity())

    def name_of(self, identity: Any) -> str:
        """Return the name of the folder of the samples with this identity."""
        return f"{self.config.name}-{short_hash({'name': self.config.name, 'format': FORMAT, 'of': identity})}"

    def is_prepared(self) -> bool:
        return self.folder.is_dir()

    def prepare(self) -> None:
        """Create the samples if they are missing."""
        workers = worker_count(self.config.workers)
        prepare(self.folder, self.source, self.identity(), workers=workers)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the prepared samples.

        Raises:
            ConfigError: It cannot be read or was edited, or a file is missing or truncated.
        """

        def files(held: dict[str, Any]) -> dict[str, FileRecord]:
            if self.name_of(held["of"]) != self.folder.name:
                raise ValueError("of: the samples of another recipe")
            check_manifest(held, self.kinds())
            self.info(held)
            listed = files_of(held)
            if more := {path.name for path in self.folder.glob("*.bin")} - listed.keys():
                raise ValueError(f"arrays: {min(more)} is not listed")
            return listed

        return open_manifest(self.folder, files, "file")

    def check(self) -> str:
        """Read all samples and return a line with their numbers.

        Raises:
            ConfigError: A file is damaged.
        """
        manifest = self.manifest()
        compare_sums(self.folder, files_of(manifest))
        return f"{self.folder}: {counted(manifest['samples'])}, checksums match"

    def build(self) -> Splits:
        config, folder = self.config, self.folder
        if not folder.is_dir():
            raise ConfigError(f"data set '{config.name}': no samples {folder}, ./run.sh prepare RECIPE makes them")
        manifest = self.manifest()
        info = self.info(manifest)
        collate = Collate(info.length, getattr(config, "pad", "length"))
        chosen: dict[str, list[int]] = {}
        arrays: dict[str, Arrays] = {}
        for split, size in manifest["samples"].items():
            chosen[split] = list(range(size))
            arrays[split] = open_arrays(folder, manifest, split)
        missing: dict[str, float] = {}
        for split, share in self.held_out.items():
            if split not in chosen:
                missing[split] = share
                arrays[split] = arrays["train"]
        if missing:
            parts = split_indices(len(chosen["train"]), tuple(missing.values()))
            chosen |= dict(zip(("train", *missing), parts))
        if config.limit is not None:
            chosen["train"] = drawn(chosen["train"], config.limit)
        made: dict[str, Sequences] = {}
        for split, indices in chosen.items():
            if not indices:
                raise ConfigError(f"data set '{config.name}': too few samples in {folder}, none is left for {split}")
            made[split] = Sequences(arrays[split], collate, indices)
        val, test = made.get("val"), made.get("test")
        if val is None:
            val, test = test, None
        fingerprint = fingerprint_of(files_of(manifest))
        return Splits(made["train"], val, test, info, collate, fingerprint=fingerprint)

    def collate(self, samples: list[dict[str, Tensor]]) -> Batch:
        return Collate(getattr(self.config, "length", 1), "batch")(samples)


def read_text(path: str) -> str:
    """Read a text file that the user names.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8.
    """
    try:
        return user_path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


def checked_files(name: str, root: Path, wanted: dict[str, str]) -> dict[str, Path]:
    """Return the paths of the files of a folder, by split.

    Raises:
        ConfigError: A file is missing.
    """
    found = {}
    for split, file in wanted.items():
        found[split] = root / file
        if not found[split].is_file():
            names = ", ".join(wanted.values())
            raise ConfigError(f"data set '{name}': no file {root / file}; data.path must be a folder with {names}")
    return found
