"""Labelled sequences: one or two texts and a label for each sample, tokenized when the data set is opened."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from data.base import BatchedSamples, DataConfig, DataSet
from data.hub import import_datasets, load_saved, readable
from data.text.tables import DIALECTS, json_rows, table_rows
from data.text.tokenizers import Tokenizer
from lion.config import ConfigError, nearest, setting
from lion.samples.base import Batch, moved
from lion.samples.order import Order, Sequential, Shuffled
from lion.samples.sequences import SHAPES, padded_length
from lion.samples.text import LabelledTextInfo

JSON = (".jsonl", ".json")
KINDS = (*JSON, ".parquet", *DIALECTS)  # suffixes of files that can be read
AT_ONCE = 10_000  # texts that are tokenized in one call

log = logging.getLogger("lion")

Row = tuple[str, dict[str, Any]]  # (location, values by column)


@dataclass(kw_only=True)
class LabelledConfig(DataConfig):
    """Settings of labelled sequences.

    Args:
        tokenizer: A name (`bert-base-uncased`) or local files.
        length: Maximum number of tokens of a sample; the longer part of a pair is cut first.
        padding: Target of padding: `longest` is the longest sample of a batch, rounded up to a quarter of `length`;
            `max_length` is `length`. Both give the same logits.
        shuffle: Whether each epoch has a new order.
    """

    tokenizer: str = setting("bert-base-uncased", free=True)
    length: int = setting(128, min=8, max=2**20)
    padding: str = setting("longest", choices=("longest", "max_length"), free="rounding")
    shuffle: bool = True

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)


class Sample(NamedTuple):
    """The ids of a sequence; the first `first` ids belong to its first part."""

    ids: Sequence[int]
    first: int


class Sequences(BatchedSamples):
    """Samples in memory, with batches {tokens, types, segments (B, L), label (B,)}."""

    def __init__(self, samples: list[Sample], labels: list[int] | list[float], padding: Padding) -> None:
        parts = [np.asarray(sample.ids, np.int32) for sample in samples]
        self.ids = np.concatenate(parts)
        self.ends = np.cumsum(list(map(len, parts)))
        self.firsts = np.asarray([sample.first for sample in samples])
        self.labels, self.padding = torch.tensor(labels), padding

    def __len__(self) -> int:
        return len(self.ends)

    def sample(self, index: int) -> Sample:
        start = 0
        if index:
            start = self.ends[index - 1]
        return Sample(self.ids[start : self.ends[index]], int(self.firsts[index]))

    def batch(self, indices: list[int], device: torch.device | str, generator: torch.Generator | None = None) -> Batch:
        made = {**self.padding.rows([self.sample(i) for i in indices]), "label": self.labels[indices]}
        return {name: moved(values, device) for name, values in made.items()}


def fingerprint(parts: Mapping[str, Sequences]) -> str:
    """Return the fingerprint of the samples of all splits, by their names."""
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(name.encode())
        for values in (part.ids, part.ends, part.firsts, part.labels.numpy()):
            digest.update(values.tobytes())
    return digest.hexdigest()[:12]


class Padding(NamedTuple):
    """Padding of rows with `token`, to one of `shapes` lengths, at most `length` tokens."""

    token: int
    length: int
    shapes: int

    def to(self, longest: int) -> int:
        """Return the padded length of a batch whose longest sample has `longest` tokens."""
        return padded_length(longest, self.length, self.shapes)

    def rows(self, samples: Sequence[Sample]) -> Batch:
        """Return {tokens, types, segments}, each int64 (B, L)."""
        length = self.to(max(len(s.ids) for s in samples))
        tokens = np.full((len(samples), length), self.token, np.int64)
        types, segments = np.zeros_like(tokens), np.full_like(tokens, -1)
        for row, (ids, first) in enumerate(samples):
            tokens[row, : len(ids)] = ids
            types[row, first : len(ids)] = 1
            segments[row, : len(ids)] = 0
        return {
            "tokens": torch.from_numpy(tokens),
            "types": torch.from_numpy(types),
            "segments": torch.from_numpy(segments),
        }


class LabelledSequences(DataSet):
    """A data set of one or two texts and a label. A subclass defines the columns, the labels and the tokenizer."""

    Info = LabelledTextInfo
    workers = 0  # whole batches are built in microseconds
    columns: tuple[str, ...]  # of the one or two texts
    label_column: str = "label"

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the texts.

        Raises:
            ConfigError: There is no such tokenizer.
        """

    @abstractmethod
    def label(self, value: Any, where: str) -> int | float:
        """Return the class or the number of a label; `where` is its location.

        Raises:
            ConfigError: The value is not a label.
        """

    @property
    def order(self) -> Order:
        if self.config.shuffle:
            return Shuffled()
        return Sequential()

    @property
    def padding(self) -> Padding:
        shapes = SHAPES
        if self.config.padding == "max_length":
            shapes = 1
        return Padding(self.tokenizer.special.get("pad", 0), self.config.length, shapes)

    def described(self, classes: tuple[str, ...]) -> LabelledTextInfo:
        """Return the info of these sequences.

        Raises:
            ConfigError: The tokenizer does not have the tokens cls and sep.
        """
        made, name = self.tokenizer, Path(self.config.tokenizer).name
        info = LabelledTextInfo(made.vocabulary, self.config.length, name, made.fingerprint, made.special, classes)
        for needed in ("cls", "sep"):
            info.id(needed)
        return info

    def sequences(self, rows: Iterator[Row], source: Any, info: LabelledTextInfo) -> Sequences:
        """Tokenize the rows of a split, which `source` names in messages; a warning counts rows with an empty text.

        Raises:
            ConfigError: There are no rows, or one of them is invalid.
        """
        samples, labels, held, empty = [], [], [], 0
        for where, row in rows:
            held.append(self.texts(row, where))
            empty += not all(map(str.strip, held[-1]))
            labels.append(self.label(row.get(self.label_column), where))
            if len(held) == AT_ONCE:
                samples += self.encoded(held, info)
                held.clear()
        samples += self.encoded(held, info)
        if not samples:
            raise ConfigError(f"{source}: no rows, the file is empty")
        if empty:
            log.warning("%s: %d of %d rows have an empty text", source, empty, len(samples))
        return Sequences(samples, labels, self.padding)

    def texts(self, row: dict[str, Any], where: str) -> tuple[str, ...]:
        for column in (*self.columns, self.label_column):
            if column not in row:
                raise ConfigError(f"{where}: no column {column!r}, {nearest(column, row)}")
        texts = tuple(row[column] for column in self.columns)
        for column, text in zip(self.columns, texts):
            if not isinstance(text, str):
                raise ConfigError(f"{where}: {column}: expected text, got {text!r}")
        return texts

    def encoded(self, texts: Sequence[tuple[str, ...]], info: LabelledTextInfo) -> list[Sample]:
        """Encode texts as [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; only a and b are truncated."""
        cls, sep = info.id("cls"), info.id("sep")
        parts = [self.tokenizer.encode_all(part) for part in zip(*texts)]
        found = []
        for ids in zip(*parts):
            second = []
            if len(ids) == 2:
                second = ids[1]
            keep_first, keep_second = cut(len(ids[0]), len(second), self.config.length - 1 - len(ids))
            sequence = [cls, *ids[0][:keep_first], sep]
            first = len(sequence)
            if len(ids) == 2:
                sequence += second[:keep_second]
                sequence.append(sep)
            found.append(Sample(sequence, first))
        return found

    @property
    def asks(self) -> tuple[str, ...]:
        return self.columns

    def load(self, *texts: str, info: LabelledTextInfo) -> Sample:
        return self.encoded([texts], info)[0]

    def collate(self, samples: list[Sample]) -> Batch:
        return self.padding.rows(samples)


class Place(NamedTuple):
    """Source of the rows of a split: a file, a folder of `save_to_disk`, or a data set of the Hub."""

    source: Path | str
    subset: str | None
    split: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.source, Path)

    @property
    def suffix(self) -> str:
        return Path(self.source).suffix.lower()


def read_rows(place: Place) -> Iterator[Row]:
    """Yield the rows of a place; their locations are the file or Hub id, and a number from 1.

    Raises:
        ConfigError: It cannot be read.
    """
    source = place.source
    with readable(source, place.is_local):
        if not place.is_local or source.stat().st_size:
            for number, row in enumerate(open_rows(place), 1):
                yield f"{source}, row {number}", row


def open_rows(place: Place) -> Any:
    """Open a file as a stream, or a split of a folder of `save_to_disk` or of a Hub id."""
    source, split = place.source, place.split
    if not place.is_local:
        return import_datasets().load_dataset(source, place.subset, split=split)
    if place.suffix in DIALECTS:
        return table_rows(source)
    if place.suffix in JSON:
        return json_rows(source)
    if source.is_dir():
        return load_saved(source)[split]
    return import_datasets().load_dataset("parquet", data_files={split: str(source)}, split=split, streaming=True)


def names_of_classes(place: Place, column: str) -> Sequence[str]:
    """Return the names of the classes 0, 1, .. of a column, for a Hub id or file that has them, or else no names."""
    with readable(place.source, place.is_local):
        features = getattr(open_rows(place), "features", None) or {}
        return getattr(features.get(column), "names", ())


def cut(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each part are kept, so that both together fit into `room`.

    The longer part is truncated first, down to the length of the shorter part, like the fast tokenizers of
    transformers.
    """
    short, long = sorted((first, second))
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    if first <= second:
        return short, long
    return long, short
