"""What the paper says of a task: its numbers, and which row is better than which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from lion.recipe import NO_NUMBER, Recipe
from lion.tasks import TASKS
from tools.compose import metric_of, resolve
from tools.listing import recipe_files

PAPERS = Path(__file__).parent / "papers"
OWN_FILES = ("hf", "imagefolder", "text")  # data sets of files that no paper has read


@dataclass(frozen=True)
class Paper:
    """What the paper says of a task, a file of `tools/report/papers`.

    Args:
        title: Of a report of this task.
        name: Of the report's files.
        columns: Columns of numbers, each those that our recipes of this pattern, or these patterns, claim.
        numbers: {row: {column: number}} of rows that no recipe claims.
        order: Of the rows.
        better: Which row is better than which, as the paper has it.
        asked: The same of what it does not say.
        alike: What may be said of both rows at once.
        quoted: Tables of the papers, as they are printed, with models that are not built here; title, columns, rows.
        judged_by: What the paper's claims are of: "metric", that of the task, or "distance" (`./run.sh distance`).
    """

    title: str
    name: str
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    numbers: dict[str, dict[str, str]] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    better: tuple[tuple[str, str], ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    alike: tuple[str, ...] = ()
    quoted: tuple[dict[str, Any], ...] = ()
    judged_by: str = "metric"


def quoted(titles: Iterable[str]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each table that is quoted beside reports of these titles."""
    found = []
    for paper in map(read_paper, TASKS):
        for table in paper.quoted if paper.title in titles else ():
            rows = [[name, *map(str, cells)] for name, cells in table["rows"].items()]
            found.append((table["title"], ["model", *table["columns"]], rows))
    return found


def read_paper(task: str) -> Paper:
    """What the paper says of a task; of some it says nothing."""
    path = PAPERS / f"{task}.yaml"
    return Paper(**yaml.safe_load(path.read_text())) if path.is_file() else Paper(task, task)


def claimed(paper: Paper, data: str = "") -> dict[str, dict[str, str]]:
    """The paper's numbers, by the names of rows: {"lion_s": {"CIFAR-100": "77.56", ..}, ..}.

    Where some columns are of the data set called `data`, only these: the others are other tasks' then. On files of
    one's own no paper has a number.
    """
    if data in OWN_FILES:
        return {}
    columns = {
        name: [r for p in ([patterns] if isinstance(patterns, str) else patterns) for r in recipes(p)]
        for name, patterns in paper.columns.items()
    }
    own = {name: each for name, each in columns.items() if any(recipe.data.name == data for recipe in each)}
    found: dict[str, dict[str, str]] = {}
    for column, each in (own or columns).items():
        for recipe in each:
            if recipe.about.expected == NO_NUMBER:
                continue
            number = recipe.about.expected.removesuffix(f" {metric_of(recipe).title}")
            found.setdefault(recipe.model.label(), {})[column] = number
        for row, numbers in paper.numbers.items():
            if column in numbers:
                found.setdefault(row, {})[column] = numbers[column]
    return found


def recipes(pattern: str) -> list[Recipe]:
    return [resolve(path) for name, path in recipe_files().items() if fnmatch(path.name, pattern)]
