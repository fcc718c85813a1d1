"""Splits of a data set, found by words in the names of its files and folders.

The words are those of the `datasets` library: `ptb.valid.txt`, `Training` and `seg_test` name a split; `latest.txt`
does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from data.base import say_once
from lion.config import ConfigError

VAL, TEST = ("validation", "val", "valid", "dev"), ("test",)  # names of splits on the Hub
SPELLINGS = {
    "train": "train(ing)?|trn",
    "validation": "val(id(ation)?)?|dev(el(opment)?)?",
    "test": "test(ing)?|tst|devtest|eval(uation)?|heldout|holdout",
}
PATTERNS = {split: re.compile(f"({words})(set|data|split)?") for split, words in SPELLINGS.items()}
SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(-.+)?")  # a file of a split on the Hub
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # also `Train` in `wikiTrain2`
SHOWN = 3  # names of files in a message


def canonical(word: str) -> str | None:
    """Return the split, `train`, `validation` or `test`, that a word is a spelling of, or None."""
    for split, pattern in PATTERNS.items():
        if pattern.fullmatch(word.lower()):
            return split
    return None


def split_named(name: str) -> str | None:
    """Return the split that the words of a name contain, or None.

    Raises:
        ConfigError: The words name several splits.
    """
    found = {canonical(word) for word in WORD.findall(name)} - {None}
    if len(found) > 1:
        raise ConfigError(f"{name}: names several splits ({', '.join(sorted(found))}); rename it, or move it away")
    if not found:
        return None
    return found.pop()


def split_of(file: Path) -> str | None:
    """Return the split of a file, by its name or else by the nearest folder above it that names one; None if none does.

    A file on the Hub, `SPLIT-00000-of-00001`, may have a split of any name. The path is relative to the folder of the
    data set.

    Raises:
        ConfigError: A name contains several splits.
    """
    if found := SHARD.fullmatch(file.stem):
        return canonical(found[1]) or found[1]
    for name in reversed(file.parts):
        split = split_named(name)
        if split is not None:
            return split
    return None


def by_split(root: Path, files: Iterable[Path], train: str = "train") -> dict[str, list[Path]]:
    """Group files by split; files that name no split are those of `train`. A line says what each file is taken for.

    Args:
        root: The folder of the data set.
        files: Its files, relative to `root`.
        train: The split for training.
    """
    train = canonical(train) or train
    groups: dict[str, list[Path]] = {}
    unnamed = 0
    for file in files:
        split = split_of(file)
        unnamed += split is None
        groups.setdefault(split or train, []).append(file)
    if len(groups) == 1 and not groups.keys() & PATTERNS.keys():  # shards of one name, `data-00000-of-00002`
        groups = {train: groups.popitem()[1]}
    if len(groups) > 1 or 0 < unnamed < len(groups.get(train, [])):
        taken = "; ".join(f"{split}: {names_text(group)}" for split, group in groups.items())
        say_once(f"{root}: files by split: {taken}")
    return {split: [root / file for file in group] for split, group in groups.items()}


def names_text(files: list[Path]) -> str:
    """Return the names of a few files, and the number of the others."""
    shown = ", ".join(map(str, files[:SHOWN]))
    more = len(files) - SHOWN
    if more > 0:
        return f"{shown} and {more:,} more"
    return shown
