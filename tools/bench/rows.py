"""Measurements that grow over several runs, as JSON with a Markdown file made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.trainer.checkpoint import save_text

SCHEMA = 1
Row = dict[str, Any]


class Rows:
    """Rows by key in `folder/name.json`; `new` are the keys measured in this run."""

    def __init__(self, folder: Path, name: str, key: Sequence[str]) -> None:
        self.path, self.key = folder / f"{name}.json", tuple(key)
        self.rows: dict[tuple, Row] = {}
        self.new: dict[tuple, None] = {}

    @classmethod
    def load(cls, folder: Path, name: str, key: Sequence[str], fresh: bool = False) -> Rows:
        """What is in a folder, or nothing.

        Raises:
            ConfigError: No place for a report, or one that cannot be read.
        """
        report = cls(folder, name, key)

        def take(held: dict[str, Any]) -> None:
            report.rows = {report.key_of(row): row for row in held["rows"]}

        read_report(report.path, fresh, take)
        return report

    def key_of(self, row: Row) -> tuple:
        return tuple(row[name] for name in self.key)

    def add(self, row: Row) -> None:
        """A later measurement takes the place of an earlier one."""
        key = self.key_of(row)
        self.rows.pop(key, None)
        self.rows[key] = row
        self.new[key] = None

    def groups(self, names: Sequence[str]) -> list[list[Row]]:
        """Rows that agree in `names`, the group measured last first."""
        found: dict[tuple, list[Row]] = {}
        for row in self.rows.values():
            found.setdefault(tuple(row[n] for n in names), []).append(row)
        return sorted(found.values(), key=lambda rows: max(row["date"] for row in rows), reverse=True)

    def commands(self, rows: Iterable[Row]) -> str:
        """What was typed for these rows, and when."""
        runs = dict.fromkeys((row["date"][:10], row["torch"], row["command"]) for row in rows)
        return "\n".join(f"- {date}, torch {torch}: `{command}`" for date, torch, command in runs)

    def save(self, markdown: Callable[[Rows], str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_text(self.path, json.dumps({"schema": SCHEMA, "rows": list(self.rows.values())}, indent=1) + "\n")
        save_text(self.path.with_suffix(".md"), markdown(self))


def read_report(path: Path, fresh: bool, take: Callable[[dict[str, Any]], None]) -> None:
    """Hand what an earlier run wrote to `take`, unless it is to be forgotten.

    Raises:
        ConfigError: No place for a report, or one that cannot be read.
    """
    folder = path.parent
    if any(p.exists() and not p.is_dir() for p in (folder, *folder.parents)):
        raise ConfigError(f"--out: {folder} is no folder")
    if fresh or not path.exists():
        return
    try:
        held = json.loads(path.read_text())
        if held["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {held['schema']}, this is {SCHEMA}; --fresh starts over")
        take(held)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: not a report of this command; --fresh starts over") from None


def digits(x: float) -> str:
    """Three that count."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.3f}"


def pipes(header: list[str], rows: list[list[str]], text: Sequence[str] = ("mixer", "form")) -> str:
    """A Markdown table: columns of `text` to the left, numbers to the right."""
    head = [
        "|".join(["", *header, ""]),
        "|".join(["", *("---" if h in text else "--:" for h in header), ""]),
    ]
    return "\n".join([*head, *("| " + " | ".join(r) + " |" for r in rows)])
