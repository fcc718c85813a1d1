"""Texts with labels of one's own, as rows of a file or of the Hub: columns, classes and splits are set or detected."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.base import is_hidden, say_once
from data.folders import check_path, user_path
from data.hub import check_names, import_datasets, is_saved, load_saved, readable
from data.splits import by_split, canonical, names_text, split_of
from data.text.sequences import (
    KINDS,
    LabelledConfig,
    LabelledSequences,
    Place,
    Row,
    fingerprint,
    names_of_classes,
    read_rows,
)
from data.text.store import KeepsTokenizer, read_tokenizer
from data.text.tables import DIALECTS, MISSING, kinds_of, number_in
from data.text.tokenizers import BUILT_IN, Tokenizer, local_files, make_tokenizer, open_tokenizer
from data.vision.sources import split_indices
from lion.config import ConfigError, nearest, setting
from lion.files import read_json, save_json
from lion.samples.base import Splits
from lion.samples.text import LabelledTextInfo

NAMES = {"train": "train", "validation": "val", "test": "test"}  # of splits here, by those of their files
TEXTS = (  # names of the columns of texts, in the order in which they are looked for
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2")),
    *(("text",), ("sentence",), ("document",), ("content",), ("review",)),
)
LABELS = ("label", "labels", "class", "category", "target")
COLUMNS = "columns.json"  # in the folder of a run: the text columns
NO_CLASS = ("", "nan", "null", "n/a", "#n/a", "<na>")  # labels that are missing, in lower case
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
CLASSES = 1_000  # at most; more different labels are a wrong column

log = logging.getLogger("lion")


@dataclass(kw_only=True)
class LabelledTextConfig(LabelledConfig):
    """Settings of labelled texts.

    Args:
        path: A folder with train.csv and, if there are any, validation.csv and test.csv (or .tsv, .jsonl, .json,
            .parquet); a file; or a Hub id.
        subset: Configuration of a Hub id.
        text_columns: Columns of the one or two texts; null: detected.
        label_column: Column of the label, a class or a number; null: detected.
        val_split: Held-out share of the training rows, if there is no split for validation.
        tokenizer: `wordpiece`, trained on the training texts to `vocabulary` tokens; `bytes`; a name
            (`bert-base-uncased`); or local files.
    """

    name: str = "labelled_text"
    path: str | None = setting(None, free=True)
    subset: str | None = None
    text_columns: tuple[str, ...] | None = None
    label_column: str | None = None
    val_split: float = setting(0.1, above=0, max=0.5)
    tokenizer: str = setting("wordpiece", free=True)
    vocabulary: int = setting(8192, min=300, max=2**20)

    def __post_init__(self) -> None:
        if self.text_columns is not None and len(self.text_columns) not in (1, 2):
            raise ValueError(f"text_columns: expected one or two columns, got {', '.join(self.text_columns) or 'none'}")


class LabelledText(LabelledSequences, KeepsTokenizer):
    """Texts with labels: names of classes, or numbers."""

    Config = LabelledTextConfig
    kept_columns: tuple[str, ...] = ()  # the text columns, from the folder of a run

    def build(self) -> Splits:
        info, rows = self.described(self.classes), dict(self.rows)
        if "test" in rows and not any(self.is_label(row.get(self.label_column)) for _, row in rows["test"]):
            log.warning("%s: test is skipped, none of its labels is one of the training rows", self.origin("test"))
            del rows["test"]
        built = {name: self.sequences(iter(some), self.origin(name), info) for name, some in rows.items()}
        same = fingerprint(built)
        return Splits(built["train"], built["val"], built.get("test"), info, order=self.order, fingerprint=same)

    def published(self) -> tuple[LabelledTextInfo, int] | None:
        path = self.config.path
        if path is None or not user_path(path).exists():
            return None
        return self.described(self.classes), len(self.rows["train"])

    def chosen(self) -> str:
        return f"texts: {', '.join(self.columns)}; label: {self.label_column}"

    @property
    def asks(self) -> tuple[str, ...]:
        return self.kept_columns or self.columns

    def keep(self, folder: Path) -> None:
        super().keep(folder)
        save_json(folder / COLUMNS, self.columns)

    def restore(self, folder: Path, settings: dict[str, Any]) -> None:
        super().restore(folder, settings)
        if settings.get("text_columns") == self.config.text_columns:
            with contextlib.suppress(OSError, ValueError, TypeError):  # a run is used where its data may not be
                self.kept_columns = tuple(read_json(folder / COLUMNS))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        name = self.config.tokenizer
        if self.kept is not None and name != BUILT_IN[0] and local_files(name) is None:
            return read_tokenizer(self.kept, name)
        if name not in BUILT_IN[1:]:
            return open_tokenizer(name)
        texts: list[str] = []
        for where, row in self.rows["train"]:
            texts += self.texts(row, where)
        return make_tokenizer(name, texts, self.config.vocabulary)

    @functools.cached_property
    def read(self) -> dict[str, list[Row]]:
        """The rows of the splits that exist, as they were read.

        Raises:
            ConfigError: The data are missing or cannot be read.
        """
        found = {name: list(read_rows(place)) for name, place in self.places.items()}
        for name, rows in found.items():
            if not rows:
                raise ConfigError(f"{self.origin(name)}: no rows, the file is empty")
        return found

    @functools.cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of each split, in memory; of `val` always, held out of `train` if it has no file.

        Rows with the label -1, "no label" in columns with names of classes, are left out.

        Raises:
            ConfigError: The data are missing or cannot be read, or there are too few rows.
        """
        found = dict(self.read)
        for name, rows in found.items():
            kept = [(where, row) for where, row in rows if row.get(self.label_column) != -1]
            if 0 < len(kept) < len(rows) and names_of_classes(self.places[name], self.label_column):
                log.info(
                    "%s: %d rows of %s are left out, their label is -1", self.origin(name), len(rows) - len(kept), name
                )
                found[name] = kept
        if "val" not in found:
            every, share = found["train"], self.config.val_split
            kept, held = split_indices(len(every), (share,))
            if not kept or not held:
                raise ConfigError(f"data.val_split: {share:g} of {len(every)} rows leaves a split empty")
            found["train"] = [every[i] for i in sorted(kept)]
            found["val"] = [every[i] for i in sorted(held)]
        return found

    @functools.cached_property
    def places(self) -> dict[str, Place]:
        """The place of each split that exists.

        Raises:
            ConfigError: There are no training data.
        """
        config = self.config
        if config.path is None:
            raise ConfigError("data.path: missing, expected a folder, a file or a Hub id")
        path, kinds = user_path(config.path), ", ".join(KINDS)
        if path.is_file():
            if path.suffix.lower() not in KINDS:
                raise ConfigError(f"data.path: {path} ends with {path.suffix or 'nothing'}, expected one of {kinds}")
            return {"train": Place(path, None, "train")}
        if is_saved(path):
            return named({split: Place(path, None, split) for split in load_saved(path)})
        if path.is_dir():
            found = named(tables_in(path))
            if "train" not in found:
                raise ConfigError(f"data.path: no file train.csv in {path} (or train with one of {kinds})")
            places, parquet = {}, []
            for name, files in found.items():
                file = files[0]
                if len(files) > 1:
                    both = f"{file.name} and {files[1].name}"
                    raise ConfigError(f"data.path: {path}: {both} are both of split {name}; remove or rename one")
                places[name] = Place(file, None, name)
                if file.suffix.lower() == ".parquet":
                    parquet.append(file)
            check_names(parquet)
            return places
        check_path(config.path)
        names = hub_splits(config.path, config.subset)
        if "train" not in names:
            raise ConfigError(f"data.path: {config.path!r} has no split 'train', it has {', '.join(names)}")
        return named({split: Place(config.path, config.subset, split) for split in names})

    def origin(self, split: str) -> str:
        return str(self.places.get(split, self.places["train"]).source)

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        if self.config.text_columns is not None:
            return tuple(self.config.text_columns)
        _, row = self.rows["train"][0]
        for names in TEXTS:
            if all(isinstance(row.get(name), str) for name in names):
                return names
        others, texts = [], []
        for name, value in row.items():
            if name != self.label_column:
                others.append(name)
                if isinstance(value, str):
                    texts.append(name)
        if not texts:
            raise ConfigError(f"data.path: {self.origin('train')}: no column holds text: {kinds_of(row)}")
        if len(texts) != 1:
            raise ConfigError(f"data.text_columns: must be set to one or two of {', '.join(others)}")
        return (texts[0],)

    @functools.cached_property
    def label_column(self) -> str:
        if self.config.label_column is not None:
            return self.config.label_column
        _, row = self.read["train"][0]
        for name in LABELS:
            if name in row:
                return name
        raise ConfigError(f"data.label_column: must be set to one of {', '.join(row)}")

    @functools.cached_property
    def labelled(self) -> list[Row]:
        """The rows whose labels are known in training."""
        if "val" in self.places:
            return self.rows["train"]
        return self.rows["train"] + self.rows["val"]

    @functools.cached_property
    def labels(self) -> list[Any]:
        """The labels of all training rows, as they were read.

        Raises:
            ConfigError: There is no such column, or it holds the text.
        """
        _, first = self.labelled[0]
        if self.label_column not in first:
            raise ConfigError(
                f"data.label_column: no column {self.label_column!r}, {nearest(self.label_column, first)}"
            )
        if self.label_column in self.columns:
            raise ConfigError(f"data.label_column: {self.label_column!r} is the text, expected the column of the label")
        return [row.get(self.label_column) for _, row in self.labelled]

    @functools.cached_property
    def numeric(self) -> bool:
        """Return whether all training labels are numbers; text in the cells of a table may be a number.

        Raises:
            ConfigError: A column of fractions holds something else, or one of numbers a missing value.
        """
        place = self.places["train"]
        cells = place.is_local and place.suffix in DIALECTS
        odd, fractions = [], False
        for label in self.labels:
            number = label
            if cells and isinstance(label, str):
                number = number_in(label)
            if not isinstance(number, (int, float)):
                odd.append(label)
            elif isinstance(number, float) and not number.is_integer():
                fractions = True
        if odd and all(isinstance(x, str) and DECIMAL_COMMA.fullmatch(x.strip()) for x in odd):
            right = odd[0].strip().replace(",", ".")
            raise ConfigError(f"data.label_column: {self.label_column!r} holds {odd[0]!r}; write numbers as {right}")
        missing = all(isinstance(x, str) and x.strip().lower() in MISSING for x in odd)
        if odd and (fractions or (missing and len(odd) < len(self.labels))):
            raise ConfigError(f"data.label_column: {self.label_column!r} holds {odd[0]!r} among numbers")
        return not odd

    def typed(self, value: Any) -> Any:
        """Return a label as a number if the training labels are numbers; else text without blanks around it."""
        if not isinstance(value, str):
            return value
        if self.numeric and (number := number_in(value)) is not None:
            return number
        return value.strip()

    @functools.cached_property
    def place(self) -> dict[Any, int]:
        """The number of each class by its label in the training rows; empty: labels are numbers to predict.

        Raises:
            ConfigError: Labels that are neither classes nor numbers.
        """
        values = [self.typed(label) for label in self.labels]
        for (where, _), value in zip(self.labelled, values):
            missing = isinstance(value, str) and value.lower() in NO_CLASS
            if missing or not isinstance(value, (str, int, float)):
                found = f"{self.label_column!r} holds {value!r}, expected classes or numbers"
                raise ConfigError(f"{where}: data.label_column: {found}")
        labels = set(values)
        if any(isinstance(label, float) and not label.is_integer() for label in labels):
            return {}
        if not 2 <= len(labels) <= CLASSES:
            found = f"{self.label_column!r} has {len(labels):,} different labels"
            raise ConfigError(f"data.label_column: {found}, expected 2 to {CLASSES:,}")
        key = None
        if any(isinstance(label, str) for label in labels):
            key = str
        return dict(zip(sorted(labels, key=key), itertools.count()))

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        if not any(isinstance(label, str) for label in self.place):
            names = names_of_classes(self.places["train"], self.label_column)
            if names and all(label in range(len(names)) for label in self.place):
                return tuple(names[label] for label in self.place)
        texts = []
        for label in self.place:
            if isinstance(label, float):
                label = int(label)
            texts.append(str(label))
        return tuple(texts)

    def is_label(self, value: Any) -> bool:
        value = self.typed(value)
        if self.place:
            return isinstance(value, (str, int, float)) and value in self.place
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

    def label(self, value: Any, where: str) -> int | float:
        typed = self.typed(value)
        if self.is_label(typed):
            if self.place:
                return self.place[typed]
            return float(typed)
        if not self.place:
            raise ConfigError(f"{where}: {self.label_column}: expected a number, got {value!r}")
        raise ConfigError(
            f"{where}: {self.label_column}: {value!r} is not a label of the training rows, "
            f"{nearest(str(value), self.classes)}"
        )


def tables_in(folder: Path) -> dict[str, list[Path]]:
    """Return the tables in a folder by split; without one of the split train, tables that name no split are train."""
    splits: dict[Path, str | None] = {}
    for path in filter(is_table, sorted(folder.iterdir())):
        file = path.relative_to(folder)
        splits[file] = split_of(file)
    if "train" in splits.values():
        others = [file for file, split in splits.items() if split is None]
        if others:
            say_once(f"{folder}: files that name no split are left out: {names_text(others)}")
        for file in others:
            del splits[file]
    return by_split(folder, splits)


def is_table(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in KINDS and not is_hidden(path.name)


def named(splits: Mapping[str, Any]) -> dict[str, Any]:
    """Return splits under the names train, val and test; for each the first that has such a name."""
    found: dict[str, Any] = {}
    for name, value in splits.items():
        split = canonical(name)
        if split is not None:
            found.setdefault(NAMES[split], value)
    return found


def hub_splits(path: str, subset: str | None) -> list[str]:
    """Return the names of the splits of a Hub id.

    Raises:
        ConfigError: It cannot be reached.
    """
    datasets = import_datasets()
    with readable(path, exists=False):
        return datasets.get_dataset_split_names(path, subset)
