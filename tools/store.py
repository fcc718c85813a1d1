"""Reports that grow over several runs: a JSON file of rows, with Markdown and a plot generated from the rows."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from PIL import Image

from lion.config import ConfigError
from lion.files import read_json, save_text, write_atomic

SCHEMA = 1
Row = dict[str, Any]


class Store:
    """A JSON file of tables; each table is a list of rows, one a line, identified by the keys of the table.

    Args:
        path: The JSON file; generated files are written next to it.
        later: Fields of keys that rows of earlier versions may lack.
        ordered: Whether the file has the rows in the order of their keys, else in the order in which they were added.
        keys: For each table, the fields that form the key of a row; the main table is "rows".

    Attributes:
        tables: The rows of each table by their keys; `rows` is the main table.
        new: Keys of the rows that were added after the file was read.
        unsaved: Tables and keys of the rows that were added after the last `save`.
        fresh: Whether the next `save` replaces the rows of other processes.
    """

    def __init__(self, path: Path, *, later: Sequence[str] = (), ordered: bool = False, **keys: Sequence[str]) -> None:
        self.path, self.later, self.ordered, self.keys = path, later, ordered, keys
        self.tables: dict[str, dict[tuple, Row]] = {name: {} for name in keys}
        self.new: dict[tuple, None] = {}
        self.unsaved: dict[tuple[str, tuple], None] = {}
        self.fresh = False

    @property
    def rows(self) -> dict[tuple, Row]:
        return self.tables["rows"]

    def load(self, fresh: bool = False) -> Self:
        """Read the rows of earlier runs, unless `fresh` is set.

        Raises:
            ConfigError: The folder cannot hold a report, or the report cannot be read.
        """
        folder = self.path.parent.absolute()
        place = next(p for p in (folder, *folder.parents) if p.exists())
        if not place.is_dir():
            raise ConfigError(f"--out: {place} is not a folder")
        if not os.access(place, os.W_OK):
            raise ConfigError(f"--out: {place} cannot be written to")
        self.fresh = fresh
        if fresh or not self.path.exists():
            return self
        try:
            held = read_json(self.path)
            if held["schema"] != SCHEMA:
                raise ConfigError(f"{self.path}: schema {held['schema']}, expected {SCHEMA}; delete it to start over")
            self.tables = {name: {self.key_of(row, name): row for row in held[name]} for name in self.keys}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{self.path}: not a report of this command; delete it to start over") from None
        return self

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the report's folder, and first read what other processes have stored; unsaved rows of ours are kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not self.fresh:
                own = [(self.tables[table][key], table) for table, key in self.unsaved]
                self.load()
                for row, table in own:
                    self.add(row, table)
            yield
        finally:
            os.close(folder)  # releases the lock

    def key_of(self, row: Row, table: str = "rows") -> tuple:
        return tuple(row.get(name) if name in self.later else row[name] for name in self.keys[table])

    def add(self, row: Row, table: str = "rows") -> None:
        """Add a row, which replaces an earlier row with the same key."""
        key = self.key_of(row, table)
        self.tables[table].pop(key, None)
        self.tables[table][key] = row
        self.unsaved[table, key] = None
        if table == "rows":
            self.new[key] = None

    def groups(self, names: Sequence[str]) -> list[list[Row]]:
        """Return groups of rows that agree in these fields; the group measured last comes first."""
        found = grouped(self.rows.values(), names)
        return sorted(found, key=lambda rows: max(row["date"] for row in rows), reverse=True)

    def commands(self, rows: Iterable[Row]) -> str:
        """Return the commands that measured these rows, with dates, as a Markdown list."""
        runs = dict.fromkeys((r["date"][:10], r["torch"], r["command"]) for r in sorted(rows, key=lambda r: r["date"]))
        return "\n".join(f"- {date}, torch {torch}: `{command}`" for date, torch, command in runs)

    def save(self, markdown: str, **derived: Any) -> None:
        """Write the JSON file with its rows and the values `derived` from them, and the Markdown file next to it."""
        self._write_json(derived)
        save_text(self.path.with_suffix(".md"), markdown)

    def save_rows(self) -> None:
        """Write the JSON file alone, with the rows that other processes have stored meanwhile."""
        with self.alone():
            self._write_json({})

    def _write_json(self, derived: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = [f'"schema":{SCHEMA}']
        for name, rows in self.tables.items():
            keys = rows
            if self.ordered:
                keys = sorted(rows)
            lines = ",".join("\n" + compact(rows[key]) for key in keys)
            parts.append(f"{compact(name)}:[{lines}\n]")
        for name, value in derived.items():
            parts.append(f"{compact(name)}:{compact(value)}")
        text = ",\n".join(parts)
        save_text(self.path, f"{{{text}}}\n")
        self.unsaved.clear()
        self.fresh = False

    def draw(self, path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path | None:
        """Call `draw` with a figure of `size` inches, and write the figure to a file.

        Returns:
            The file, or None (and no file) without matplotlib.
        """
        try:
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
        except ImportError:
            return None
        draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(drawn := io.BytesIO(), format="png", dpi=120)
        write_atomic(path, lambda file: Image.open(drawn).quantize(256).save(file, format="png", optimize=True))
        return path

    def files(self) -> str:
        return f"written: {self.path.with_suffix('.md')}, {self.path}"

    def files_and(self, *pictures: Path | None) -> str:
        """Return the names of the files, and of pictures that were drawn: all, or none without matplotlib."""
        if None in pictures:
            return f"{self.files()}; no plot, because matplotlib is missing (pip install matplotlib)"
        return ", ".join([self.files(), *map(str, pictures)])


def grouped(rows: Iterable[Row], names: Sequence[str]) -> list[list[Row]]:
    """Return groups of rows that agree in these fields, in order of their first rows."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(map(row.get, names)), []).append(row)
    return list(found.values())


def compact(value: Any) -> str:
    """Return a value as JSON in one line, without blanks."""
    return json.dumps(value, separators=(",", ":"))
