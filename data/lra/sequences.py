"""What the sets of the Long Range Arena (2011.04006) share: samples made once, and batches of them."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from data.base import DataConfig, DataSet, data_root, user_path
from data.lra.store import Arrays, Source, check_sums, files_of, open_arrays, prepare, read_manifest
from data.manifest import FORMAT, fingerprint_of, mark_of
from data.vision.sources import split_indices
from lion.config import ConfigError, setting
from lion.tasks.data import Batch, DeviceDataset, Splits
from lion.tasks.sequences import SequenceInfo

PAD, UNKNOWN, END = range(3)  # the first ids of every vocabulary
STEP = 64  # of the lengths of batches with `pad: batch`
MOST = 10_000_000  # samples that are generated for a split, a hundred times LRA's
SPLIT_SEED = 0  # `seed` in a recipe moves no sample between splits


@dataclass
class SequenceConfig(DataConfig):
    """Settings of every set of long sequences.

    root: Where what was made is kept; null: `lra` in the data root.
    workers: Processes that make it; null: one a core.
    path: Files to read in place of what is generated, or fetched.
    limit: Training samples at most, drawn once.
    """

    path: str | None = setting(None, free=True)
    limit: int | None = setting(None, min=1)


@dataclass
class TokenConfig(SequenceConfig):
    """`length`: tokens of a sample at most, the end token included; `pad`: to this length, which gives all batches one
    shape, or to the longest sample of a `batch`, rounded up to a multiple of 64."""

    length: int = setting(2048, min=2, max=2**20)
    pad: str = setting("length", choices=("batch", "length"), free=True)

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)


@dataclass
class GeneratedConfig(SequenceConfig):
    """Settings of what is generated, unless `path` names files.

    seed: Of the samples; that of a run is another.
    samples: Training samples; LRA's share of them are the others, where `val_samples` and `test_samples` are null.
    """

    seed: int = setting(0, min=0)
    samples: int = setting(160_000, min=1, max=MOST)
    val_samples: int | None = setting(None, min=1, max=MOST)
    test_samples: int | None = setting(None, min=1, max=MOST)
    share: ClassVar[int] = 8  # training samples for one of the others

    def counts(self) -> dict[str, int]:
        """Samples by split."""
        other = max(1, self.samples // self.share)
        return {"train": self.samples, "val": self.val_samples or other, "test": self.test_samples or other}

    def decided(self, *outside: str) -> dict[str, Any]:
        """The settings that decide the samples, which those that are named do not."""
        outside += ("name", "root", "workers", "path", "limit", "samples", "val_samples", "test_samples")
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in outside}
        return settings | {"counts": self.counts()}


class Collate:
    """A batch of samples; tokens are padded."""

    def __init__(self, length: int, pad: str = "length") -> None:
        self.length, self.pad = length, pad

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """pixels uint8 (B, L), or tokens and segments int64, -1 for padding, (B, L), of pairs (B, 2, L); label (B,)
        where samples have one."""
        batch = {}
        if "label" in samples[0]:
            batch["label"] = torch.tensor([sample["label"] for sample in samples])
        if "pixels" in samples[0]:
            return {"pixels": torch.stack([sample["pixels"] for sample in samples]), **batch}
        names = [name for name in ("tokens", "second") if name in samples[0]]
        rows = [sample[name] for sample in samples for name in names]
        longest = max(map(len, rows))
        length = self.length if self.pad == "length" else min(self.length, -(-longest // STEP) * STEP)
        tokens = torch.full((len(rows), max(length, longest)), PAD)
        segments = torch.full_like(tokens, -1)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], segments[i, : len(row)] = row, 0
        shape = (len(samples), *((2,) if len(names) == 2 else ()), -1)
        return {"tokens": tokens.view(shape), "segments": segments.view(shape), **batch}


class Sequences(DeviceDataset):
    """The samples `indices` of a split.

    Args:
        arrays: `label` (N,), and `pixels` uint8 (N, L), or `tokens` (T,), the samples one after another, with `lengths`
            (N,); of pairs also `second` with `second_lengths`.
    """

    def __init__(self, arrays: Arrays, collate: Collate, indices: Sequence[int]) -> None:
        self.arrays, self.collate, self.indices = arrays, collate, np.asarray(indices)
        lengths = {"tokens": "lengths", "second": "second_lengths"}
        self.ends = {name: np.cumsum(arrays[n], dtype=np.int64) for name, n in lengths.items() if name in arrays}

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{pixels: uint8 (L,)} or {tokens: int64 (L,)}, of pairs also {second}, with its label."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        i = int(self.indices[index])
        sample: dict[str, Any] = {"label": int(self.arrays["label"][i])}
        if "pixels" in self.arrays:
            return {"pixels": torch.from_numpy(self.arrays["pixels"][i].copy()), **sample}
        for name, ends in self.ends.items():
            ids = self.arrays[name][ends[i - 1] if i else 0 : ends[i]]
            sample[name] = torch.from_numpy(ids.astype(np.int64))
        return sample

    def batch(
        self, indices: Sequence[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> Batch:
        """As `Collate` makes it; nothing is left to chance."""
        return {name: values.to(device) for name, values in self.collate([self[i] for i in indices]).items()}


class SequenceSet(DataSet):
    """A set of long sequences, made once; then read from memory-mapped files, whatever its size."""

    Info = SequenceInfo
    workers = 0  # batches are made whole, in microseconds
    held_out: dict[str, float] = {}  # noqa: RUF012  # shares of the training samples that become other splits

    @abstractmethod
    def identity(self) -> Any:
        """What decides the samples, as JSON.

        Raises:
            ConfigError: There are no files that it could be read from.
        """

    @abstractmethod
    def source(self) -> Source:
        """Where samples come from."""

    @abstractmethod
    def info(self, manifest: dict[str, Any]) -> SequenceInfo:
        """Of what was made."""

    @functools.cached_property
    def folder(self) -> Path:
        """Where the samples are; its name is of all that decides them."""
        decided = {"name": self.config.name, "format": FORMAT, "of": self.identity()}
        root = user_path(self.config.root) if self.config.root else data_root() / "lra"
        return root / f"{self.config.name}-{mark_of(decided)}"

    def prepare(self) -> None:
        """Make the samples where they are missing."""
        workers = self.config.workers or len(os.sched_getaffinity(0))
        prepare(self.folder, self.source, self.identity(), workers=workers)

    def check(self) -> str:
        """Read all of the samples; how many there are, in words.

        Raises:
            ConfigError: They are damaged.
        """
        samples = check_sums(self.folder)["samples"]
        return f"{self.folder}: {', '.join(f'{n:,} {split}' for split, n in samples.items())}, checksums match"

    def build(self) -> Splits:
        config, folder = self.config, self.folder
        if not folder.is_dir():
            raise ConfigError(f"data set '{config.name}': no samples {folder}, ./run.sh prepare RECIPE makes them")
        manifest = read_manifest(folder)
        info = self.info(manifest)
        collate = self.collate_of(info)
        chosen = {split: list(range(size)) for split, size in manifest["samples"].items()}
        if missing := {split: share for split, share in self.held_out.items() if split not in chosen}:
            parts = split_indices(len(chosen["train"]), tuple(missing.values()), SPLIT_SEED)
            chosen |= dict(zip(("train", *missing), parts))
        if config.limit is not None:
            kept = split_indices(len(chosen["train"]), (), SPLIT_SEED)[0][: config.limit]
            chosen["train"] = [chosen["train"][i] for i in kept]
        if empty := [split for split, indices in chosen.items() if not indices]:
            raise ConfigError(f"data set '{config.name}': too few samples in {folder}, none is left for {empty[0]}")
        arrays = {split: open_arrays(folder, manifest, split) for split in manifest["samples"]}
        arrays |= dict.fromkeys(missing, arrays["train"])
        made = {split: Sequences(arrays[split], collate, chosen[split]) for split in arrays}
        val, test = (made["val"], made.get("test")) if "val" in made else (made["test"], None)
        fingerprint = fingerprint_of(files_of(manifest))
        return Splits(made["train"], val, test, info, collate, fingerprint=fingerprint)

    def collate_of(self, info: SequenceInfo) -> Collate:
        return Collate(info.length, getattr(self.config, "pad", "length"))

    def collate(self, samples: list[dict[str, Tensor]]) -> Batch:
        return Collate(2**20, "batch")(samples)


def checked_files(name: str, root: Path, wanted: Sequence[str]) -> list[Path]:
    """These files of a folder.

    Raises:
        ConfigError: One is not there.
    """
    for file in wanted:
        if not (root / file).is_file():
            raise ConfigError(
                f"data set '{name}': no file {root / file}; data.path is a folder with {', '.join(wanted)}"
            )
    return [root / file for file in wanted]


def stamps(files: Sequence[Path]) -> list[list[Any]]:
    """Which files they are: with other bytes they are others."""
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in (Path(os.path.abspath(f)) for f in files)]
