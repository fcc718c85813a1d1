"""The papers' statements about a task: numbers, and which row is better than which other row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from lion.recipe import NO_RESULT, Recipe
from lion.tasks import TASKS
from tools.compose import metric_of, resolve
from tools.listing import recipe_files

PAPERS = Path(__file__).parent / "papers"
USER_FILES = ("hf", "imagefolder", "text")  # data sets of user files, for which no paper has numbers


@dataclass(frozen=True)
class Paper:
    """Statements of the papers about a task, from a file of `tools/report/papers`.

    Args:
        title: Title of a report of this task.
        name: Name of the report's files.
        columns: Columns of numbers. The numbers of a column are the claims of our recipes that match its pattern or
            patterns.
        numbers: {row: {column: number}} for rows without a recipe.
        order: Order of the rows.
        better: Pairs of rows (better, worse), as claimed by the paper.
        asked: Pairs of rows to compare in the same way, about which the paper makes no claim.
        alike: Suffixes of row names; each pair is also compared between the two rows with this suffix.
        quoted: Tables of the papers as printed, including models that this package does not implement: title, columns
            and rows.
        judged_by: Measure of the claims: "metric" (the metric of the task) or "distance" (`./run.sh distance`).
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
    """Return the title, header and rows of each quoted table for reports with these titles."""
    found = []
    for paper in map(read_paper, TASKS):
        for table in paper.quoted if paper.title in titles else ():
            rows = [[name, *map(str, cells)] for name, cells in table["rows"].items()]
            found.append((table["title"], ["model", *table["columns"]], rows))
    return found


def read_paper(task: str) -> Paper:
    """Read the paper's statements about a task; without a file for the task, they are empty."""
    path = PAPERS / f"{task}.yaml"
    return Paper(**yaml.safe_load(path.read_text())) if path.is_file() else Paper(task, task)


def claimed(paper: Paper, data: str = "") -> dict[str, dict[str, str]]:
    """Return the paper's numbers by row and column: {"lion_s": {"CIFAR-100": "77.56", ..}, ..}.

    If some columns belong to the data set `data`, only these columns are returned, because the others belong to other
    tasks. For data sets of user files, the result is empty.
    """
    if data in USER_FILES:
        return {}
    columns = {
        name: [r for p in ([patterns] if isinstance(patterns, str) else patterns) for r in recipes(p)]
        for name, patterns in paper.columns.items()
    }
    own = {name: each for name, each in columns.items() if any(recipe.data.name == data for recipe in each)}
    found: dict[str, dict[str, str]] = {}
    for column, each in (own or columns).items():
        for recipe in each:
            if recipe.about.expected == NO_RESULT:
                continue
            number = recipe.about.expected.removesuffix(f" {metric_of(recipe).title}")
            found.setdefault(recipe.model.label(), {})[column] = number
        for row, numbers in paper.numbers.items():
            if column in numbers:
                found.setdefault(row, {})[column] = numbers[column]
    return found


def recipes(pattern: str) -> list[Recipe]:
    return [resolve(path) for name, path in recipe_files().items() if fnmatch(path.name, pattern)]
