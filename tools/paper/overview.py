"""The first tables of the page: the verdicts on all claims, and the answers to all questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.claims import CLAIM, COLUMNS, INCOMPLETE, NOT_RUN, UNDECIDED, VERDICTS, Comparison, row_of
from tools.paper.parts import Part
from tools.tables import pipes

TEXT = ("claim", "question", "table", "data", "verdict", "note")  # columns of text


class Judged(NamedTuple):
    """A comparison of two rows of a table, its verdict, and a mark of the runs that it compares."""

    part: Part
    comparison: Comparison
    verdict: str
    runs: tuple[Any, ...]


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
                rows.append(row(each, group, level))
    header = [kind, "table", "data", "here", "paper", "p", "verdict", "smallest visible", "parameters", "note"]
    return f"Of {len(best)}: {', '.join(counts)}.\n\n{pipes(header, rows, text=TEXT)}"


def row(judged: Judged, group: Sequence[Judged], level: float) -> list[str]:
    """Return the cells of a comparison, which stands in all tables of a group."""
    part = judged.part
    comparison = judged.comparison
    cells = dict(zip(COLUMNS, row_of(comparison, judged.verdict, level)))
    return [
        cells["pair"],
        places(group),
        part.cells[0].recipe.data.name,
        f"{cells['difference']} {comparison.unit}",
        printed(part, comparison.pair),
        cells["p"],
        cells["verdict"],
        cells["smallest visible"],
        parameters(judged),
        part.table.notes.get(comparison.name, ""),
    ]


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


def places(group: Sequence[Judged]) -> str:
    """Return the tables of comparisons, by their numbers in the papers."""
    names = []
    for each in group:
        table = each.part.table
        names.append(table.title.partition(":")[0] if table.columns else each.part.name)
    return "; ".join(dict.fromkeys(names))


def parameters(judged: Judged) -> str:
    """Return the parameters of the first row of the comparison divided by those of the second."""
    runs = judged.part.results.runs
    first, second = (next(iter(runs[name].values()))["parameters"] for name in judged.comparison.pair)
    return f"{first / second:.2f}"


def printed(part: Part, pair: tuple[str, str]) -> str:
    """Return the difference of two rows in the paper, positive where the first row is better; "-" if it has none."""
    for column in part.table.columns:
        first, second = (part.table.printed(row, column) for row in pair)
        if first and second:
            return f"{part.metric.gain(first[0], second[0]):+.2f}"
    return "-"
