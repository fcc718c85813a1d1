"""Claims and questions about pairs of rows: differences of runs, and verdicts that are corrected for their number."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from lion.tasks.metrics import Metric
from tools.statistics import LEVEL, MOST, NOISES, Difference, Values, holm
from tools.tables import digits

CLAIM, QUESTION = "claim", "question"
VERDICTS = {CLAIM: ("confirmed", "contradicted"), QUESTION: ("yes", "no, the other way round")}
UNDECIDED, INCOMPLETE, NOT_RUN = "undecided", "incomplete", "not run"
COLUMNS = ("pair", "difference", "p", "verdict", "smallest visible", "seeds needed")  # of `row_of`
POINTS = "points"  # unit of differences of percentages


class Comparison(NamedTuple):
    """A claim of a paper or an open question (pair of rows), and the difference that runs show.

    Attributes:
        kind: `CLAIM` or `QUESTION`.
        pair: The rows, (better, worse).
        found: The difference, in favour of the first row; None: too few runs.
        missing: `NOT_RUN` if a row has no runs, `INCOMPLETE` if it lacks some of its runs, or a second one, or if one
            is stuck at chance; else empty.
        unit: Unit of the difference.
    """

    kind: str
    pair: tuple[str, str]
    found: Difference | None
    missing: str
    unit: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> Comparison:
        """Return the comparison that `as_row` made a row of JSON."""
        found = None
        if row["found"] is not None:
            found = Difference(**row["found"])
        return cls(row["kind"], tuple(row["pair"]), found, row["missing"], row["unit"])

    @property
    def name(self) -> str:
        return " > ".join(self.pair)

    def as_row(self) -> dict[str, Any]:
        return {**self._asdict(), "found": self.found and self.found._asdict()}


def compare(
    kind: str, pairs: Iterable[tuple[str, str]], values: Values, metric: Metric, *, noise: str, seeds: int = 1
) -> list[Comparison]:
    """Compare pairs of rows by values as shown.

    Args:
        kind: `CLAIM` or `QUESTION`.
        pairs: Names of rows, (better, worse).
        values: Values by row and seed.
        metric: The metric of the values.
        noise: Model of the noise, a name of `tools.statistics.NOISES`.
        seeds: Number of runs of a complete row.
    """
    unit = POINTS if metric.percent else metric.title
    found = []
    for first, second in pairs:
        fewest = min(len(values.get(first, ())), len(values.get(second, ())))
        made = None
        missing = NOT_RUN
        if fewest:
            made = NOISES[noise](values, first, second)
            missing = INCOMPLETE
            if made and fewest >= seeds:
                missing = ""
        if made and not metric.higher_is_better:
            made = made._replace(mean=-made.mean)
        found.append(Comparison(kind, (first, second), made, missing, unit))
    return found


def not_judged(found: Iterable[Comparison], unfit: Collection[str]) -> list[Comparison]:
    """Return the comparisons; those with a row in `unfit` are incomplete."""
    judged = []
    for each in found:
        first, second = each.pair
        if not each.missing and (first in unfit or second in unfit):
            each = each._replace(missing=INCOMPLETE)
        judged.append(each)
    return judged


def verdicts(found: Sequence[Comparison], marks: Iterable[Hashable] | None = None) -> tuple[list[str], float]:
    """Return the verdict on each comparison, and the level of p below which one more would be decided.

    The verdicts are corrected by Holm's method for all comparisons, also for those that lack runs. Comparisons with
    equal `marks` are of the same runs, and count once.
    """
    marks = range(len(found)) if marks is None else list(marks)
    once: dict[Hashable, float] = {}  # p; a pair may have all runs that one table asks for, and lack those of another
    for each, mark in zip(found, marks):
        once.setdefault(mark, 1.0)
        if each.found and not each.missing:
            once[mark] = min(each.found.p, once[mark])
    corrected = dict(zip(once, holm(list(once.values()))))
    words = [verdict_of(each, corrected[mark]) for each, mark in zip(found, marks)]
    undecided = sum(p >= LEVEL for p in corrected.values())
    return words, LEVEL / max(1, undecided)


def verdict_of(each: Comparison, p: float) -> str:
    """Return the verdict on a comparison with the corrected probability p."""
    if each.missing:
        return each.missing
    if each.found is None or p >= LEVEL:
        return UNDECIDED
    first, other = VERDICTS[each.kind]
    if each.found.mean < 0:
        return other
    return first


def table_of(kind: str, found: Sequence[tuple[Comparison, str]], level: float) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of the comparisons of a kind, with their verdicts; `level` as in `verdicts`."""
    difference = "difference"
    rows = []
    for each, verdict in found:
        if each.kind != kind:
            continue
        rows.append(row_of(each, verdict, level))
        if each.found:
            difference = f"difference, {each.unit}"
    return [kind, difference, *COLUMNS[2:]], rows


def row_of(each: Comparison, verdict: str, level: float) -> list[str]:
    """Return the cells of a comparison, in the order of `COLUMNS`."""
    found = each.found
    if found is None:
        return [each.name, "-", "-", verdict, "-", "-"]
    mean = f"{round(found.mean, 2) + 0.0:+.2f}"  # + 0.0: never -0.00
    if not found.error:
        return [each.name, f"{mean}, without spread", "-", verdict, "-", "-"]
    row = [each.name, f"{mean} ± {found.half:.2f}", chance(found.p), verdict]
    if verdict != UNDECIDED:
        return [*row, "-", "-"]
    smallest = found.smallest(level)
    visible = "none" if each.unit == POINTS and smallest > 100 else digits(smallest)
    seeds = found.seeds(level)
    needed = f"> {MOST}" if seeds > MOST else str(seeds)
    return [*row, visible, needed]


def chance(p: float) -> str:
    """Format a probability: three decimals, or its order of magnitude below 0.001."""
    if p >= 0.001:
        return f"{p:.3f}"
    return f"{p:.0e}"
