"""Token files: the concatenated ids of a corpus, memory-mapped, with the ends of its documents and a manifest.

The folder of a token file holds NAME.bin (uint16 or uint32 ids) and NAME.ends (int64: the offset behind each document's
last id) for `train` and `val`, `tokenizer.json` and `manifest.json`. The folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data.base import DataSet
from data.manifest import MANIFEST, FileRecord, again, compare_sums, open_manifest
from data.text.tokenizers import Tokenizer
from lion.config import ConfigError
from lion.files import save_text
from lion.samples.text import TextInfo

TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")


def id_type(vocabulary: int) -> np.dtype:
    """Return the smallest dtype that holds the ids of a vocabulary."""
    if vocabulary <= 2**16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


class Tokens:
    """A memory-mapped split; data are read only on access.

    Attributes:
        ids: Ids (T,) of all documents in order.
        ends: Ends (N,) of the documents, int64, increasing; the last end is T.
    """

    def __init__(self, folder: Path, split: str, vocabulary: int) -> None:
        self.path, self.vocabulary = folder / f"{split}.bin", vocabulary
        self.ids = np.memmap(self.path, id_type(vocabulary), "r")
        self.ends = np.memmap(folder / f"{split}.ends", np.int64, "r")

    def take(self, places: np.ndarray | slice) -> np.ndarray:
        """Return the ids at `places`, in the same shape.

        Raises:
            ConfigError: An id is outside of the vocabulary.
        """
        ids = self.ids[places]
        if ids.max(initial=0) >= self.vocabulary:
            raise ConfigError(
                f"{self.path}: damaged, it holds id {ids.max()} and the vocabulary has {self.vocabulary:,}; "
                "./run.sh prepare RECIPE checks the whole file"
            )
        return ids


class Writer:
    """A writer of one split, document after document, in constant memory."""

    def __init__(self, folder: Path, split: str, kind: np.dtype) -> None:
        self.names = (f"{split}.bin", f"{split}.ends")
        self.files = [open(folder / name, "wb") for name in self.names]
        self.sums = [hashlib.sha256() for _ in self.names]
        self.kind, self.count, self.documents, self.last = kind, 0, 0, 0

    def write(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Append ids (T,) and the ends (N,) of documents, counted from the first of these ids."""
        self._append(0, ids.astype(self.kind))
        if len(ends):
            self._append(1, self.count + ends.astype(np.int64))
            self.last = self.count + int(ends[-1])
        self.count, self.documents = self.count + len(ids), self.documents + len(ends)

    def _append(self, which: int, values: np.ndarray) -> None:
        self.files[which].write(values.tobytes())
        self.sums[which].update(values.tobytes())

    def close(self) -> dict[str, Any]:
        """End the last document, close the files, and return the manifest entry of the split."""
        if self.last < self.count:
            self.write(np.empty(0), np.zeros(1))
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        files = {name: sum_.hexdigest() for name, sum_ in zip(self.names, self.sums)}
        return {"tokens": self.count, "documents": self.documents, "sha256": files}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a token file, see `data.manifest`."""
    return open_manifest(folder, files_of, "token file")


def files_of(held: dict[str, Any]) -> dict[str, FileRecord]:
    """Return the files listed in the manifest of a token file.

    Raises:
        LookupError, TypeError, ValueError: The manifest is invalid.
    """
    TextInfo.from_dict({**held["tokenizer"], "tokenizer": held["tokenizer"]["name"], "length": 1})
    each = id_type(held["tokenizer"]["vocabulary"]).itemsize
    files = {}
    for split in SPLITS:
        sums = held[split]["sha256"]
        ids, ends = f"{split}.bin", f"{split}.ends"
        files[ids] = FileRecord(held[split]["tokens"] * each, sums[ids])
        files[ends] = FileRecord(held[split]["documents"] * 8, sums[ends])
    return files


def check_sums(folder: Path) -> None:
    """Read every byte of a token file and compare the files with the manifest.

    Raises:
        ConfigError: A file is damaged.
    """
    held = read_manifest(folder)
    found, said = read_tokenizer(folder, ""), held["tokenizer"]
    if found.fingerprint != said["fingerprint"]:
        raise ConfigError(f"{folder / TOKENIZER}: damaged, not the tokenizer of the manifest; {again(folder)}")
    for name in ("vocabulary", "special"):
        if getattr(found, name) != said[name]:
            raise ConfigError(f"{folder / MANIFEST}: damaged, its {name} differs from {TOKENIZER}; {again(folder)}")
    compare_sums(folder, files_of(held))


class KeepsTokenizer(DataSet):
    """A data set whose runs save their tokenizer; its text may be lost.

    Attributes:
        tokenizer: The tokenizer of the data.
        kept: Folder of a run that saved its tokenizer.
    """

    tokenizer: Tokenizer
    kept: Path | None = None

    def keep(self, folder: Path) -> None:
        if self.kept is None:
            save_text(folder / TOKENIZER, self.tokenizer.inner.to_str())

    def restore(self, folder: Path, settings: dict[str, Any]) -> None:
        same = settings.get("tokenizer") == self.config.tokenizer
        self.kept = None
        if same and (folder / TOKENIZER).is_file():
            self.kept = folder


def read_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Read the tokenizer of a token file.

    Raises:
        ConfigError: The tokenizer cannot be read.
    """
    try:
        return Tokenizer(name, tokenizers.Tokenizer.from_file(str(folder / TOKENIZER)))
    except Exception as error:  # the library `tokenizers` has no error types
        raise ConfigError(
            f"{folder / TOKENIZER}: cannot be read ({error}); remove {folder} and prepare it again"
        ) from None
