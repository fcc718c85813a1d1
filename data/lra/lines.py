"""Text files with a sample a line, in parts that any process can read."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

from data.lra.store import Arrays, Part, Source
from data.text.corpus import BORDERS, SHARD, Slice, cut
from lion.config import ConfigError


class Lines(Source):
    """Files by split, of which the lines of each part are read by their place alone.

    Args:
        files: The file of each split.
        header: The first line of each, the names of its columns.
    """

    def __init__(self, files: dict[str, Path], *, header: str | None = None) -> None:
        self.files, self.header = files, header
        empty = next((path for path in files.values() if not path.stat().st_size), None)
        if empty is not None:
            raise ConfigError(f"{empty}: no rows, the file is empty")

    def parts(self) -> list[Part]:
        return [
            Part(split, number, first, SHARD)
            for split, path in self.files.items()
            for number, first in enumerate(range(0, path.stat().st_size, SHARD))
        ]

    def make(self, part: Part) -> Arrays:
        return self.arrays(list(self.rows(part)))

    @abstractmethod
    def arrays(self, rows: list[tuple[str, str]]) -> Arrays:
        """Of (where it stands, line).

        Raises:
            ConfigError: A line holds no sample.
        """

    def rows(self, part: Part) -> Iterator[tuple[str, str]]:
        """Where each line of a part stands, and the line; empty ones are left out.

        Raises:
            ConfigError: It cannot be read.
        """
        path = self.files[part.split]
        size = os.path.getsize(path)
        try:
            end = min(part.first + part.count, size)
            raw = cut(Slice(str(path), part.first, end, size), BORDERS["line"])[0]
            start = 1 + count_lines(path, part.first)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        for number, line in enumerate(raw.split(b"\n"), start):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: no UTF-8 text ({error.reason})") from None
            if number > 1 or self.header is None:
                yield where, text
            elif text.strip() != self.header:
                raise ConfigError(f"{where}: expected the header {self.header!r}, got {text[:40]!r}")


def count_lines(path: Path, end: int) -> int:
    """Lines that begin before the first border at or after a place of the file."""
    if not end:
        return 0
    found, left = 0, end
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            found, left = found + block.count(b"\n"), left - len(block)
        while block := file.read(2**16):
            if b"\n" in block:
                return found + 1
    return found
