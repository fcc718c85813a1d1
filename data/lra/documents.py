"""Documents of LRA's "text" and "retrieval" tasks: single documents or pairs, as bytes or as characters."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.folders import root_of, user_path
from data.hub import check_names, import_datasets, readable
from data.lra.lines import Lines, Place
from data.lra.sequences import END, LENGTHS, PAD, UNKNOWN, SequenceSet, TokenConfig, checked_files, read_text
from data.lra.store import ArrayKind, Arrays, Part, Source, in_parts
from data.manifest import short_hash, stamps
from data.splits import TEST, VAL
from data.text.corpus import whole
from data.vision.hf import tables_by_split
from lion.config import ConfigError, setting
from lion.samples.base import Splits
from lion.samples.sequences import SequenceInfo

FIRST = 1 + max(PAD, UNKNOWN, END)  # id of the first byte or character
ROWS = 1000  # rows of a table in a part
EMPTY = ("", "b''", 'b""')  # empty documents: as text, and in the notation for bytes of LRA's files
PAIRS = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
SPLITS = ("train", *VAL, *TEST)  # names of splits of files and tables


@dataclass
class DocumentConfig(TokenConfig):
    """Settings of documents, which are truncated to `length` tokens.

    tokenizer: `bytes` of UTF-8, as in LRA, or `characters`, as in S5.
    min_count: Minimum count of a character in the training documents; rarer characters are unknown.
    """

    tokenizer: str = setting("bytes", choices=("bytes", "characters"))
    min_count: int = setting(15, min=1)


class Row(NamedTuple):
    """The documents of a sample and its class."""

    texts: tuple[str, ...]
    label: int


class Ids:
    """An encoder from text to ids; the last id is the end token, also for truncated text."""

    def __init__(self, length: int, characters: str | None = None) -> None:
        self.length = length
        self.of = None
        if characters is not None:
            self.of = dict(zip(characters, itertools.count(FIRST)))

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids (L,), with L at most `length`."""
        if self.of is None:
            ids = np.frombuffer(text.encode()[: self.length - 1], np.uint8).astype(np.uint16) + FIRST
        else:
            ids = np.array([self.of.get(c, UNKNOWN) for c in text[: self.length - 1]], np.uint16)
        return np.append(ids, np.uint16(END))

    def arrays(self, rows: list[Row]) -> Arrays:
        arrays = {"label": np.array([row.label for row in rows], np.uint8)}
        documents = zip(*(row.texts for row in rows))
        for (name, lengths), texts in zip(LENGTHS.items(), documents):
            ids = list(map(self.encode, texts))
            arrays[name] = np.concatenate(ids)
            arrays[lengths] = np.array(list(map(len, ids)), np.int32)
        return arrays


def count_characters(rows: Iterator[Row], config: DocumentConfig) -> str | None:
    """Return the characters that have an id, in the order of Unicode; None for bytes."""
    if config.tokenizer == "bytes":
        return None
    found = Counter[str]()
    for row in rows:
        for text in row.texts:
            found.update(text[: config.length - 1])
    frequent = ""
    for character, count in sorted(found.items()):
        if count >= config.min_count:
            frequent += character
    return frequent


class Documents(SequenceSet):
    """A data set of documents, or of pairs of documents, with a class."""

    parts_of_a_sample = 1
    samples: int  # published number of training samples

    def identity(self) -> Any:
        config = self.config
        decided = {"tokenizer": config.tokenizer, "length": config.length}
        if config.tokenizer == "characters":
            decided["min_count"] = config.min_count
        return decided | {"files": self.place()}

    @abstractmethod
    def place(self) -> Any:
        """Return the identity of the documents, as JSON.

        Raises:
            ConfigError: The documents are missing.
        """

    def kinds(self) -> dict[str, ArrayKind]:
        found = {"label": ArrayKind("uint8")}
        for name, lengths in list(LENGTHS.items())[: self.parts_of_a_sample]:
            found |= {name: ArrayKind("uint16", None), lengths: ArrayKind("int32")}
        return found

    def info(self, manifest: dict[str, Any]) -> SequenceInfo:
        characters = manifest["characters"]
        kind = str
        if self.config.tokenizer == "bytes":
            kind = type(None)
        if not isinstance(characters, kind):
            raise ValueError(f"characters: got {characters!r}, data.tokenizer is {self.config.tokenizer}")
        vocabulary = FIRST + 256
        if characters is not None:
            vocabulary = FIRST + len(characters)
        alphabet = characters and short_hash(characters)
        return SequenceInfo(2, self.config.length, vocabulary, self.parts_of_a_sample, alphabet=alphabet)

    def published(self) -> tuple[SequenceInfo, int] | None:
        if self.config.tokenizer == "characters":  # the vocabulary depends on the documents
            return None
        return self.info({"characters": None}), min(self.samples, self.config.limit or self.samples)

    def load(self, path: str, info: SequenceInfo) -> dict[str, Tensor]:
        """Load a text file as {tokens}; for a pair of documents, {second} is the text after the first tab."""
        texts = read_text(path).split("\t", self.parts_of_a_sample - 1)
        if len(texts) != self.parts_of_a_sample:
            raise ConfigError(f"{path}: expected two documents separated by a tab")
        characters = None
        if self.config.tokenizer == "characters":
            characters = self.characters()
        ids = Ids(info.length, characters)
        return {name: torch.from_numpy(ids.encode(text).astype(np.int64)) for name, text in zip(LENGTHS, texts)}

    def characters(self) -> str:
        """Return the characters of the prepared samples."""
        return self.manifest()["characters"]


class DocumentLines(Lines):
    """A source of documents from files with one sample per line."""

    def __init__(self, files: dict[str, Path], config: DocumentConfig) -> None:
        super().__init__(files)
        self.characters = count_characters(self.training_rows(), config)
        self.ids = Ids(config.length, self.characters)

    def training_rows(self) -> Iterator[Row]:
        for part in self.parts():
            if part.split == "train":
                for where, line in self.rows(part):
                    yield self.row(where, line)

    def describe(self) -> dict[str, Any]:
        return {"characters": self.characters}

    def arrays(self, rows: list[tuple[Place, str]]) -> Arrays:
        return self.ids.arrays([self.row(where, line) for where, line in rows])

    @abstractmethod
    def row(self, where: Place, line: str) -> Row:
        """Parse a line.

        Raises:
            ConfigError: The line is not a valid sample.
        """


# text


@dataclass
class ImdbConfig(DocumentConfig):
    """Settings of IMDB.

    path: A Hub id, or a folder with train.jsonl and test.jsonl, and optionally val.jsonl (columns `text` and `label`),
        or with parquet files of these names.
    val_split: Share of the training documents used for validation, if there is no validation split; null: the test
        documents are used, as in S5.
    """

    name: str = "imdb"
    path: str | None = setting("stanfordnlp/imdb", free=True)
    length: int = setting(4096, min=2, max=2**20)
    val_split: float | None = setting(None, min=0.001, max=0.9)


class Imdb(Documents):
    """Reviews of IMDB, bad (0) or good (1)."""

    Config, samples = ImdbConfig, 25_000

    def build(self) -> Splits:
        if self.config.val_split and self.folder.is_dir() and "val" in self.manifest()["samples"]:
            raise ConfigError("data.val_split: data set 'imdb' already has validation documents, leave it null")
        return super().build()

    def place(self) -> Any:
        if not self.config.path:
            raise ConfigError("data.path: missing, expected a Hub id, or a folder with train.jsonl and test.jsonl")
        root = user_path(self.config.path)
        if not root.exists():
            return str(root)
        return stamps(itertools.chain.from_iterable(self.files(root).values()))

    def files(self, root: Path) -> dict[str, list[Path]]:
        """Return the files of JSON lines, or else of parquet, by split.

        Raises:
            ConfigError: There are no training documents, or no documents for validation.
        """
        found = {}
        for split in SPLITS:
            path = root / f"{split}.jsonl"
            if path.is_file():
                found[split] = [path]
        if not found and root.is_dir():
            tables = tables_by_split(root, "train")
            for split in SPLITS:
                if split in tables:
                    found[split] = list(map(Path, tables[split]))
        missing = None
        if "train" not in found:
            missing = "train"
        elif len(found) < 2 and not self.config.val_split:
            missing = "test"
        if missing is not None:
            raise ConfigError(
                f"data set '{self.config.name}': no {missing}.jsonl in {root}; "
                "data.path must be a Hub id, or a folder with train.jsonl and test.jsonl or such parquet files"
            )
        return found

    def source(self) -> Source:
        root = user_path(self.config.path)
        files = None
        if root.exists():
            files = self.files(root)
            if files["train"][0].suffix == ".jsonl":
                return Reviews({known(split): paths[0] for split, paths in files.items()}, self.config)
        tables = load_table(self.config.path, files)
        if "train" not in tables or (len(tables) < 2 and not self.config.val_split):
            raise ConfigError(
                f"data set '{self.config.name}': {self.config.path!r} has the splits {', '.join(tables) or 'none'}; "
                "expected train and test, or train with data.val_split=0.1"
            )
        return ReviewTable(tables, self.config)


def known(split: str) -> str:
    """Map the name of a split to `train`, `val` or `test`."""
    if split in VAL:
        return "val"
    return split


def load_table(path: str, files: dict[str, list[Path]] | None) -> dict[str, Any]:
    """Load tables with the `datasets` library, by split, from parquet files or from a Hub id.

    Raises:
        ConfigError: The tables cannot be loaded.
    """
    datasets = import_datasets()
    if files is not None:
        check_names(itertools.chain.from_iterable(files.values()))
    with readable(path, files is not None):
        if files is None:
            found = datasets.load_dataset(path)
        else:
            names = {split: list(map(str, paths)) for split, paths in files.items()}
            found = datasets.load_dataset("parquet", data_files=names)
    tables = {}
    for split in found:
        if split in SPLITS:
            tables[known(split)] = found[split]
    return tables


def review(row: Any, where: Any) -> Row:
    """Return the sample of a row with columns `text` and `label`.

    Raises:
        ConfigError: The row is not a valid sample.
    """
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or row.get("label") not in (0, 1):
        raise ConfigError(f"{where}: expected a text and a label 0 or 1, got {str(row)[:60]!r}")
    return Row((whole(row["text"], "text", str(where)),), int(row["label"]))


class Reviews(DocumentLines):
    """A source of reviews from JSON lines."""

    def row(self, where: Place, line: str) -> Row:
        try:
            return review(json.loads(line), where)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None


class ReviewTable(Source):
    """A source of reviews from tables of the `datasets` library."""

    def __init__(self, tables: dict[str, Any], config: ImdbConfig) -> None:
        self.tables, self.path = tables, config.path
        self.characters = count_characters((self.row("train", i) for i in range(len(tables["train"]))), config)
        self.ids = Ids(config.length, self.characters)

    def row(self, split: str, number: int) -> Row:
        return review(self.tables[split][number], f"{self.path}, {split} row {number + 1}")

    def describe(self) -> dict[str, Any]:
        return {"characters": self.characters}

    def parts(self) -> list[Part]:
        return in_parts({split: len(table) for split, table in self.tables.items()}, ROWS)

    def make(self, part: Part) -> Arrays:
        return self.ids.arrays([self.row(part.split, i) for i in range(part.first, part.first + part.count)])


# retrieval


@dataclass
class AanConfig(DocumentConfig):
    """Settings of AAN. `path` is LRA's folder tsv_data; null: `aan` in the data root."""

    name: str = "aan"
    length: int = setting(4000, min=2, max=2**20)
    min_count: int = setting(1, min=1)


class Aan(Documents):
    """Pairs of papers of the ACL Anthology Network; the label is 1 if one paper cites the other."""

    Config, samples, parts_of_a_sample = AanConfig, 147_086, 2

    def files(self) -> dict[str, Path]:
        return checked_files(self.config.name, root_of("aan", self.config.path), PAIRS)

    def place(self) -> Any:
        return stamps(self.files().values())

    def source(self) -> Source:
        return Pairs(self.files(), self.config)


class Pairs(DocumentLines):
    """A source of LRA's files: label, two names and two documents, separated by tabs; quotation marks are text."""

    def row(self, where: Place, line: str) -> Row:
        columns = line.split("\t")
        if len(columns) != 5:
            raise ConfigError(
                f"{where}: expected label, two names and two documents separated by tabs, got {len(columns)} columns"
            )
        label, _, _, first, second = columns
        for which, text in (("first", first), ("second", second)):
            if text.strip() in EMPTY:
                raise ConfigError(f"{where}: incomplete pair, the {which} document is empty")
        if label.strip() not in ("0", "1", "0.0", "1.0"):
            raise ConfigError(f"{where}: expected label 0 or 1, got {label[:20]!r}")
        return Row((first, second), int(float(label)))
