"""Claims and questions about pairs of rows: differences of runs, and verdicts that are corrected for their number."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from lion.tasks.metrics import Metric
from tools.statistics import LEVEL, MOST, Difference, Values, holm, paired, two_way
from tools.store import digits

CLAIM, QUESTION = "claim", "question"
VERDICTS = {CLAIM: ("confirmed", "contradicted"), QUESTION: ("yes", "no, the other way round")}
UNDECIDED, NOT_RUN = "undecided", "not run"


class Comparison(NamedTuple):
    """A claim of a paper or an open question (pair of rows), and the difference that runs show.

    Attributes:
        kind: `CLAIM` or `QUESTION`.
        pair: The rows, (better, worse).
        found: The difference, in favour of the first row; None: too few runs.
        missing: Whether a row has no runs.
        unit: Unit of the difference.
    """

    kind: str
    pair: tuple[str, str]
    found: Difference | None
    missing: bool
    unit: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> Comparison:
        """Return the comparison that `as_row` made a row of JSON."""
        found = None if row["found"] is None else Difference(**row["found"])
        return cls(row["kind"], tuple(row["pair"]), found, row["missing"], row["unit"])

    def as_row(self) -> dict[str, Any]:
        return {**self._asdict(), "found": self.found and self.found._asdict()}


def compare(
    kind: str, pairs: Iterable[tuple[str, str]], values: Values, metric: Metric, *, alike: bool
) -> list[Comparison]:
    """Compare pairs of rows by values as shown.

    Args:
        kind: `CLAIM` or `QUESTION`.
        pairs: Names of rows, (better, worse).
        values: Values by row and seed.
        metric: The metric of the values.
        alike: Whether runs of one seed are alike, see `tools.statistics`.
    """
    unit, found = "points" if metric.percent else metric.title, []
    for first, second in pairs:
        missing = not (values.get(first) and values.get(second))
        made = None if missing else (paired if alike else two_way)(values, first, second)
        if made and not metric.higher_is_better:
            made = made._replace(mean=-made.mean)
        found.append(Comparison(kind, (first, second), made, missing, unit))
    return found


def verdicts(found: Sequence[Comparison], marks: Iterable[Hashable] | None = None) -> list[str]:
    """Return the verdict on each comparison, after Holm's correction for all of them, also those without runs.

    Comparisons with equal `marks` are of the same runs, and count once.
    """
    marks = list(range(len(found)) if marks is None else marks)
    once = dict(zip(marks, found))
    corrected = dict(zip(once, holm([each.found.p if each.found else 1.0 for each in once.values()])))
    return [
        NOT_RUN if each.missing else UNDECIDED if corrected[mark] >= LEVEL else VERDICTS[each.kind][each.found.mean < 0]
        for each, mark in zip(found, marks)
    ]


def table_of(kind: str, found: Sequence[tuple[Comparison, str]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of the comparisons of a kind, with their verdicts."""
    own = [(each, verdict) for each, verdict in found if each.kind == kind]
    unit = own[0][0].unit if own else ""
    header = [kind, f"difference, {unit}", "p", "verdict", "smallest visible", "seeds needed"]
    return header, [row_of(*each) for each in own]


def row_of(each: Comparison, verdict: str) -> list[str]:
    name, found = f"{each.pair[0]} > {each.pair[1]}", each.found
    if found is None:
        return [name, "-", "-", verdict, "-", "-"]
    p = f"{found.p:.3f}" if found.p >= 0.001 else f"{found.p:.0e}"
    row = [name, f"{round(found.mean, 2) + 0.0:+.2f} ± {found.half:.2f}", p, verdict]  # + 0.0: never -0.00
    if verdict != UNDECIDED:
        return [*row, "-", "-"]
    seeds = "-" if found.seeds is None else f"> {MOST}" if found.seeds > MOST else str(found.seeds)
    return [*row, digits(found.smallest), seeds]
