"""Text files with one sample per line, in parts that any process can read."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.lra.store import Arrays, Part, Source, in_parts
from data.text.corpus import BORDERS, SHARD, Slice, cut
from lion.config import ConfigError


class Place(NamedTuple):
    """The line `index` lines after a byte offset; its number in the file is counted only for an error message."""

    path: Path
    byte: int
    index: int

    def __str__(self) -> str:
        return f"{self.path}, line {1 + count_lines(self.path, self.byte) + self.index}"


class Lines(Source):
    """A source of one text file per split; each part is read by its position alone.

    Args:
        files: The file of each split.
        header: The expected first line of each file, with the names of the columns; None: no header.
    """

    def __init__(self, files: dict[str, Path], *, header: str | None = None) -> None:
        self.files, self.header = files, header
        for path in files.values():
            if not path.stat().st_size:
                raise ConfigError(f"{path}: no rows, the file is empty")

    def parts(self) -> list[Part]:
        return in_parts({split: path.stat().st_size for split, path in self.files.items()}, SHARD)

    def make(self, part: Part) -> Arrays:
        return self.arrays(list(self.rows(part)))

    @abstractmethod
    def arrays(self, rows: list[tuple[Place, str]]) -> Arrays:
        """Return the arrays of rows (place, line).

        Raises:
            ConfigError: A line is not a valid sample.
        """

    def origin(self, split: str) -> str:
        return str(self.files[split])

    def rows(self, part: Part) -> Iterator[tuple[Place, str]]:
        """Yield (place, line) for each nonempty line of a part.

        Raises:
            ConfigError: The file cannot be read, or its header is wrong.
        """
        path = self.files[part.split]
        size = os.path.getsize(path)
        try:
            raw, begin = cut(Slice(str(path), part.first, part.first + part.count, size), BORDERS["line"])
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        for index, line in enumerate(raw.split(b"\n")):
            if not line.strip(b" \r"):  # a line of tabs is a row of empty columns, so it counts
                continue
            where, top = Place(path, begin, index), begin == index == 0
            encoding = "utf-8"
            if top:
                encoding = "utf-8-sig"
            try:
                text = line.decode(encoding).rstrip("\r")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 text ({error.reason})") from None
            if not top or self.header is None:
                yield where, text
            elif text.strip() != self.header:
                raise ConfigError(f"{where}: expected the header {self.header!r}, got {text[:40]!r}")


def count_lines(path: Path, end: int) -> int:
    """Count the lines that end in the first `end` bytes of a file."""
    found = 0
    with open(path, "rb") as file:
        while end and (block := file.read(min(end, 2**20))):
            found, end = found + block.count(b"\n"), end - len(block)
    return found
