"""The first tables of the page: the verdicts on all claims, and the answers to all questions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.claims import CLAIM, COLUMNS, INCOMPLETE, NOT_RUN, UNDECIDED, VERDICTS, Comparison, row_of
from tools.paper.parts import Part
from tools.tables import Cell, fill, pipes

TEXT = ("claim", "question", "table", "data", "verdict", "note")  # columns of text


class Judged(NamedTuple):
    """A comparison of two rows of a table, its verdict, and a mark of the runs that it compares."""

    part: Part
    comparison: Comparison
    verdict: str
    runs: tuple[Any, ...]


class Shown(NamedTuple):
    """A row of the overview: a comparison, its cells by `COLUMNS` of claims, and all tables that have it."""

    judged: Judged
    cells: dict[str, str]
    tables: list[Part]


def overview(kind: str, judged: Sequence[Judged], level: float) -> str:
    """Return a table of the claims that have all their runs, or of the questions that are decided, and their counts.

    Questions whose runs are those of claims are left out.
    """
    order = [*reversed(VERDICTS[kind]), UNDECIDED, INCOMPLETE, NOT_RUN]
    groups = list(same_runs(kind, judged).values())
    # a pair may have all runs that one of its tables asks for, and lack those of another
    best = [min(group, key=lambda each: order.index(each.verdict)) for group in groups]
    verdicts = [each.verdict for each in best]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in order]
    rows = []
    for wanted in order[: 3 if kind == CLAIM else 2]:
        for each, group in zip(best, groups):
            if each.verdict == wanted:
                cells = dict(zip(COLUMNS, row_of(each.comparison, each.verdict, level)))
                rows.append(Shown(each, cells, [other.part for other in group]))
    columns: dict[str, Cell] = {
        kind: lambda row: row.cells["pair"],
        "table": places,
        "data": lambda row: row.judged.part.cells[0].recipe.data.name,
        "here": lambda row: f"{row.cells['difference']} {row.judged.comparison.unit}",
        "paper": lambda row: printed(row.judged.part, row.judged.comparison.pair),
        "p": lambda row: row.cells["p"],
        "verdict": lambda row: row.cells["verdict"],
        "smallest visible": lambda row: row.cells["smallest visible"],
        "parameters": parameters,
        "note": lambda row: row.judged.part.table.notes.get(row.judged.comparison.name, ""),
    }
    header, cells = fill(columns, rows)
    return f"Of {len(best)}: {', '.join(counts)}.\n\n{pipes(header, cells, text=TEXT)}"


def same_runs(kind: str, judged: Sequence[Judged]) -> dict[tuple[Any, ...], list[Judged]]:
    """Return the comparisons of a kind in groups that compare the same runs; of claims also in the same order."""
    claimed = {each.runs for each in judged if each.comparison.kind == CLAIM}
    found: dict[tuple[Any, ...], list[Judged]] = {}
    for each in judged:
        if each.comparison.kind != kind:
            continue
        if kind == CLAIM:
            found.setdefault((each.runs, each.comparison.name), []).append(each)
        elif each.runs not in claimed:
            found.setdefault(each.runs, []).append(each)
    return found


def places(row: Shown) -> str:
    """Return the tables that have the comparison, by their numbers in the papers."""
    names: dict[str, None] = {}
    for part in row.tables:
        name = part.name
        if part.table.columns:
            name = part.table.title.partition(":")[0]
        names[name] = None
    return "; ".join(names)


def parameters(row: Shown) -> str:
    """Return the parameters of the first row of the comparison divided by those of the second."""
    runs = row.judged.part.results.runs
    first, second = (next(iter(runs[name].values()))["parameters"] for name in row.judged.comparison.pair)
    return f"{first / second:.2f}"


def printed(part: Part, pair: tuple[str, str]) -> str:
    """Return the difference of two rows in the paper, positive where the first row is better; "-" if it has none."""
    for column in part.table.columns:
        first, second = (published_number(part, row, column) for row in pair)
        if first is not None and second is not None:
            difference = first - second
            if not part.metric.higher_is_better:
                difference = -difference
            return f"{difference:+.2f}"
    return "-"


def published_number(part: Part, row: str, column: str) -> float | None:
    text = str(part.table.rows[row].published.get(column, ""))
    found = re.match(r"[\d.]+", text.replace("×", ""))
    if found is None:
        return None
    return float(found[0])
