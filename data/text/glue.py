"""GLUE (arXiv 1804.07461): labelled sentences or pairs of sentences, from the Hub or from local files."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from data.base import DataConfig, DataSet, user_path
from data.hub import import_datasets
from data.text.text import KNOWN
from data.text.tokenizers import Tokenizer, looks_like_path, open_tokenizer
from lion.config import ConfigError, nearest, setting
from lion.samples.base import Batch, DeviceDataset, Splits
from lion.samples.order import Sequential, Shuffled
from lion.samples.text import LabelledTextInfo


class GlueTask(NamedTuple):
    """A task of GLUE.

    columns: names of the text columns.
    classes: class names in the order of the labels; empty: the labels are numbers in the range `NUMBERS`.
    samples: number of training samples.
    validation: splits for validation; the first one selects the best checkpoint.
    """

    columns: tuple[str, ...]
    classes: tuple[str, ...]
    samples: int
    validation: tuple[str, ...] = ("validation",)


ENTAILMENT, NUMBERS = ("entailment", "not_entailment"), (0, 5)
TASKS = {
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        392_702,
        ("validation_matched", "validation_mismatched"),
    ),
    "qnli": GlueTask(("question", "sentence"), ENTAILMENT, 104_743),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), 363_846),
    "rte": GlueTask(("sentence1", "sentence2"), ENTAILMENT, 2_490),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), 67_349),
    "mrpc": GlueTask(("sentence1", "sentence2"), ("not_equivalent", "equivalent"), 3_668),
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), 8_551),
    "stsb": GlueTask(("sentence1", "sentence2"), (), 5_749),
}
# readers of `datasets` by file suffix
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
AT_ONCE = 10_000  # texts that are tokenized in one call
SHAPES = 4  # number of batch lengths: few, because each is compiled


@dataclass(kw_only=True)
class GlueConfig(DataConfig):
    """Settings of GLUE.

    Args:
        task: One of the eight tasks in `TASKS`.
        path: A Hub id, or a folder with TASK/train.jsonl and TASK/validation.jsonl (MNLI: `validation_matched`,
            `validation_mismatched`), or .parquet or .csv files, with the Hub's columns.
        tokenizer: A name (`bert-base-uncased`) or local files.
        length: Maximum number of tokens of a sample; the longer part of a pair is cut first.
        padding: Target of padding: `longest` is the longest sample of a batch, rounded up to a quarter of `length`;
            `max_length` is `length`. Both give the same logits.
        shuffle: Whether each epoch has a new order; the published code reads the samples in file order.
    """

    name: str = "glue"
    task: str = setting(choices=TASKS)
    path: str = setting("nyu-mll/glue", free=True)
    tokenizer: str = setting("bert-base-uncased", free=True)
    length: int = setting(128, min=8, max=2**20)
    padding: str = setting("longest", choices=("longest", "max_length"), free=True)
    shuffle: bool = True

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)


class Sample(NamedTuple):
    """The ids of a sequence; the first `first` ids belong to its first part."""

    ids: Sequence[int]
    first: int


class Sequences(DeviceDataset):
    """Samples in memory, with batches {tokens, types, segments (B, L), label (B,)}."""

    def __init__(self, samples: list[Sample], labels: list[int] | list[float], padding: Padding) -> None:
        lengths = [len(s.ids) for s in samples]
        self.ids = np.concatenate([np.asarray(s.ids, np.int32) for s in samples])
        self.ends = np.cumsum(lengths)
        self.firsts = np.asarray([s.first for s in samples])
        self.labels, self.padding = torch.tensor(labels), padding

    def __len__(self) -> int:
        return len(self.ends)

    def sample(self, index: int) -> Sample:
        start = self.ends[index - 1] if index else 0
        return Sample(self.ids[start : self.ends[index]], int(self.firsts[index]))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: values[0] for name, values in self.batch([index], "cpu").items()}

    def batch(self, indices: list[int], device: torch.device | str, generator: torch.Generator | None = None) -> Batch:
        made = {**self.padding.rows([self.sample(i) for i in indices]), "label": self.labels[indices]}
        return {name: values.to(device) for name, values in made.items()}


class Padding(NamedTuple):
    """Padding of rows with `token`, to a multiple of `step` tokens, at most `length` tokens."""

    token: int
    step: int
    length: int

    def to(self, longest: int) -> int:
        """Return the padded length of a batch whose longest sample has `longest` tokens."""
        return min(-(-longest // self.step) * self.step, self.length)

    def rows(self, samples: Sequence[Sample]) -> Batch:
        """Return {tokens, types, segments}, each int64 (B, L)."""
        length = self.to(max(len(s.ids) for s in samples))
        tokens = np.full((len(samples), length), self.token, np.int64)
        types, segments = np.zeros_like(tokens), np.full_like(tokens, -1)
        for row, (ids, first) in enumerate(samples):
            tokens[row, : len(ids)], segments[row, : len(ids)], types[row, first : len(ids)] = ids, 0, 1
        arrays = {"tokens": tokens, "types": types, "segments": segments}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


class Glue(DataSet):
    """A single GLUE task, tokenized when the data set is built."""

    Config, Info = GlueConfig, LabelledTextInfo
    workers = 0  # whole batches are built in microseconds

    @property
    def task(self) -> GlueTask:
        return TASKS[self.config.task]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.config.tokenizer)

    def build(self) -> Splits:
        tokenizer = self.tokenizer
        info = self.info(tokenizer.vocabulary, tokenizer.fingerprint, tokenizer.special)
        for needed in ("cls", "sep"):
            info.id(needed)
        val, *more = self.task.validation
        train, val = (self.sequences(split, info) for split in ("train", val))
        found = {split.partition("_")[2]: self.sequences(split, info) for split in more if self.has(split)}
        return Splits(train, val, None, info, order=Shuffled() if self.config.shuffle else Sequential(), more=found)

    def info(self, vocabulary: int, fingerprint: str, special: Mapping[str, int]) -> LabelledTextInfo:
        name = Path(self.config.tokenizer).name
        return LabelledTextInfo(vocabulary, self.config.length, name, fingerprint, special, self.task.classes)

    def published(self) -> tuple[LabelledTextInfo, int]:
        name = Path(self.config.tokenizer).name
        if name in KNOWN:
            return self.info(*KNOWN[name]), self.task.samples
        tokenizer = self.tokenizer
        return self.info(tokenizer.vocabulary, tokenizer.fingerprint, tokenizer.special), self.task.samples

    @property
    def padding(self) -> Padding:
        length = self.config.length
        step = length if self.config.padding == "max_length" else -(-length // SHAPES)
        return Padding(self.tokenizer.special.get("pad", 0), step, length)

    def sequences(self, split: str, info: LabelledTextInfo) -> Sequences:
        """Read and tokenize a split.

        Raises:
            ConfigError: The split is missing or empty, or one of its rows is invalid.
        """
        samples, labels, held = [], [], []
        for where, row in self.rows(split):
            held.append(self.texts(row, where))
            labels.append(self.label(row.get("label"), where))
            if len(held) == AT_ONCE:
                samples += self.encoded(held, info)
                held.clear()
        samples += self.encoded(held, info) if held else []
        if not samples:
            raise ConfigError(f"{self.source(split)}: no rows, the file is empty")
        return Sequences(samples, labels, self.padding)

    def texts(self, row: dict[str, Any], where: str) -> tuple[str, ...]:
        for column in (*self.task.columns, "label"):
            if column not in row:
                raise ConfigError(f"{where}: no column {column!r}, {nearest(column, row)}")
        texts = tuple(row[column] for column in self.task.columns)
        for column, text in zip(self.task.columns, texts):
            if not isinstance(text, str):
                raise ConfigError(f"{where}: {column}: expected text, got {text!r}")
        return texts

    def label(self, value: Any, where: str) -> int | float:
        classes, (least, most) = self.task.classes, NUMBERS
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if classes and number and value == int(value) and 0 <= value < len(classes):
            return int(value)
        if not classes and number and least <= value <= most:
            return float(value)
        valid = ", ".join(f"{i} ({name})" for i, name in enumerate(classes)) or f"a number from {least} to {most}"
        raise ConfigError(f"{where}: label: {value!r} is not a label of {self.config.task}, valid: {valid}")

    def encoded(self, texts: Sequence[tuple[str, ...]], info: LabelledTextInfo) -> list[Sample]:
        """Encode texts as [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; only a and b are truncated."""
        cls, sep = info.id("cls"), info.id("sep")
        parts = [self.tokenizer.encode_all(part) for part in zip(*texts)]
        found = []
        for ids in zip(*parts):
            a, b = ids if len(ids) == 2 else (ids[0], [])
            keep_a, keep_b = cut(len(a), len(b), self.config.length - 1 - len(ids))
            first = [cls, *a[:keep_a], sep]
            found.append(Sample(first + ([*b[:keep_b], sep] if len(ids) == 2 else []), len(first)))
        return found

    def rows(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, row) of a split; the location is the file or Hub id with the number of the row."""
        datasets = import_datasets()
        source = self.source(split)
        try:
            if isinstance(source, Path):
                if not source.stat().st_size:
                    return
                options = {"data_files": {split: str(source)}, "split": split, "streaming": True}
                options |= {"keep_default_na": False} if source.suffix == ".csv" else {}  # "None" and "NA" are words
                table: Iterable[dict[str, Any]] = datasets.load_dataset(READERS[source.suffix], **options)
            else:
                table = datasets.load_dataset(source, self.config.task, split=split)
            for number, row in enumerate(table, 1):
                yield f"{source}, row {number}", row
        except Exception as error:  # errors of the network, a missing set or a broken file share no type
            reason = (str(error).splitlines() or [""])[0]
            what = (
                "cannot be read"
                if isinstance(source, Path)
                else "is not a local folder and cannot be loaded from the Hub"
            )
            raise ConfigError(f"data.path: {source} {what} ({type(error).__name__}: {reason})") from None

    def source(self, split: str) -> Path | str:
        """Return the file of a split, or the Hub id.

        Raises:
            ConfigError: The folder of the task or the file of the split is missing.
        """
        config, root = self.config, user_path(self.config.path)
        if not root.exists() and not looks_like_path(config.path):
            return config.path
        folder = root / config.task
        if not folder.is_dir():
            there = [name for name in TASKS if (root / name).is_dir()]
            has = f"{root} has {', '.join(there)}" if there else f"{root} has no GLUE task"
            raise ConfigError(f"data set 'glue': no folder {folder} (data.path is the folder of the tasks); {has}")
        found = next((folder / f"{split}{end}" for end in READERS if (folder / f"{split}{end}").is_file()), None)
        if found is None:
            raise ConfigError(f"data set 'glue': no {split}.jsonl (or {', '.join([*READERS][1:])}) in {folder}")
        return found

    def has(self, split: str) -> bool:
        """Return whether an optional split exists."""
        try:
            return bool(self.source(split))
        except ConfigError:
            return False

    @property
    def asks(self) -> tuple[str, ...]:
        return self.task.columns

    def load(self, *texts: str, info: LabelledTextInfo) -> Sample:
        return self.encoded([texts], info)[0]

    def collate(self, samples: list[Sample]) -> Batch:
        return self.padding.rows(samples)


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
    return (short, long) if first <= second else (long, short)
