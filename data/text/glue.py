"""GLUE (arXiv 1804.07461): labelled sentences or pairs of sentences, from the Hub or from local files."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.folders import looks_like_path, user_path
from data.text.sequences import (
    KINDS,
    LabelledConfig,
    LabelledSequences,
    Place,
    Sequences,
    fingerprint,
    names_of_classes,
    read_rows,
)
from data.text.tables import number_in
from data.text.text import KNOWN
from data.text.tokenizers import Tokenizer, open_tokenizer
from lion.config import ConfigError, setting
from lion.samples.base import Splits
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


@dataclass(kw_only=True)
class GlueConfig(LabelledConfig):
    """Settings of GLUE.

    Args:
        task: One of the eight tasks in `TASKS`.
        path: A Hub id, or a folder with TASK/train.jsonl and TASK/validation.jsonl (MNLI: `validation_matched`,
            `validation_mismatched`), or .parquet or .csv files, with the Hub's columns.

    The published code reads the samples in file order (`shuffle=false`).
    """

    name: str = "glue"
    task: str = setting(choices=TASKS)
    path: str = setting("nyu-mll/glue", free=True)


class Glue(LabelledSequences):
    """A single GLUE task."""

    Config = GlueConfig

    @property
    def task(self) -> GlueTask:
        return TASKS[self.config.task]

    @property
    def columns(self) -> tuple[str, ...]:
        return self.task.columns

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.config.tokenizer)

    def build(self) -> Splits:
        info = self.described(self.task.classes)
        first = self.task.validation[0]
        parts = {"train": self.split("train", info), first: self.split(first, info)}
        found = {}
        for split in self.task.validation[1:]:
            if self.has(split):
                parts[split] = self.split(split, info)
                found[split.partition("_")[2]] = parts[split]
        same = fingerprint(parts)
        return Splits(parts["train"], parts[first], None, info, order=self.order, more=found, fingerprint=same)

    def published(self) -> tuple[LabelledTextInfo, int]:
        name, task = Path(self.config.tokenizer).name, self.task
        if name in KNOWN:
            vocabulary, fingerprint, special = KNOWN[name]
            length = self.config.length
            return LabelledTextInfo(vocabulary, length, name, fingerprint, special, task.classes), task.samples
        return self.described(task.classes), task.samples

    def split(self, split: str, info: LabelledTextInfo) -> Sequences:
        source = self.source(split)
        place = Place(source, self.config.task, split)
        names = tuple(names_of_classes(place, "label"))
        if names and self.task.classes and names != self.task.classes:
            classes = ", ".join(self.task.classes)
            raise ConfigError(f"{source}: the labels 0, 1, .. are {', '.join(names)}, those of GLUE are {classes}")
        return self.sequences(read_rows(place), source, info)

    def label(self, value: Any, where: str) -> int | float:
        classes, (least, most) = self.task.classes, NUMBERS
        number = value
        if isinstance(value, str):  # a cell of a table
            number = number_in(value)
        valued = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        if classes and valued and number == int(number) and 0 <= number < len(classes):
            return int(number)
        if not classes and valued and least <= number <= most:
            return float(number)
        valid = ", ".join(f"{i} ({name})" for i, name in enumerate(classes)) or f"a number from {least} to {most}"
        raise ConfigError(f"{where}: label: {value!r} is not a label of {self.config.task}, valid: {valid}")

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
            there = ", ".join(name for name in TASKS if (root / name).is_dir()) or "no GLUE task"
            raise ConfigError(
                f"data set 'glue': no folder {folder} (data.path is the folder of the tasks); {root} has {there}"
            )
        for end in KINDS:
            file = folder / f"{split}{end}"
            if file.is_file():
                return file
        raise ConfigError(f"data set 'glue': no {split}.jsonl (or {', '.join(KINDS[1:])}) in {folder}")

    def has(self, split: str) -> bool:
        """Return whether an optional split exists."""
        try:
            return bool(self.source(split))
        except ConfigError:
            return False
