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
        found = None if row["found"] is None else Difference(**row["found"])
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
    unit, found = POINTS if metric.percent else metric.title, []
    for first, second in pairs:
        fewest = min(len(values.get(row, ())) for row in (first, second))
        missing = NOT_RUN if not fewest else INCOMPLETE if fewest < seeds else ""
        made = NOISES[noise](values, first, second) if fewest else None
        missing = missing or ("" if made else INCOMPLETE)
        if made and not metric.higher_is_better:
            made = made._replace(mean=-made.mean)
        found.append(Comparison(kind, (first, second), made, missing, unit))
    return found


def not_judged(found: Iterable[Comparison], unfit: Collection[str]) -> list[Comparison]:
    """Return the comparisons; those with a row in `unfit` are incomplete."""
    return [each._replace(missing=each.missing or INCOMPLETE * bool({*unfit} & {*each.pair})) for each in found]


def verdicts(found: Sequence[Comparison], marks: Iterable[Hashable] | None = None) -> tuple[list[str], float]:
    """Return the verdict on each comparison, and the level of p below which one more would be decided.

    The verdicts are corrected by Holm's method for all comparisons, also for those that lack runs. Comparisons with
    equal `marks` are of the same runs, and count once.
    """
    marks = list(range(len(found)) if marks is None else marks)
    once: dict[Hashable, float] = {}  # p; a pair may have all runs that one table asks for, and lack those of another
    for each, mark in zip(found, marks):
        p = each.found.p if each.found and not each.missing else 1.0
        once[mark] = min(p, once.get(mark, 1.0))
    corrected = dict(zip(once, holm([*once.values()])))
    words = [
        each.missing or (UNDECIDED if corrected[mark] >= LEVEL else VERDICTS[each.kind][each.found.mean < 0])
        for each, mark in zip(found, marks)
    ]
    return words, LEVEL / max(1, sum(p >= LEVEL for p in corrected.values()))


def table_of(kind: str, found: Sequence[tuple[Comparison, str]], level: float) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of the comparisons of a kind, with their verdicts; `level` as in `verdicts`."""
    own = [(each, verdict) for each, verdict in found if each.kind == kind]
    unit = own[0][0].unit if own else ""
    header = [
        kind,
        f"difference, {unit}" if any(each.found for each, _ in own) else "difference",
        "p",
        "verdict",
        "smallest visible",
        "seeds needed",
    ]
    return header, [row_of(*each, level) for each in own]


def row_of(each: Comparison, verdict: str, level: float = LEVEL) -> list[str]:
    found = each.found
    if found is None:
        return [each.name, "-", "-", verdict, "-", "-"]
    mean = f"{round(found.mean, 2) + 0.0:+.2f}"  # + 0.0: never -0.00
    if not found.error:
        return [each.name, f"{mean}, without spread", "-", verdict, "-", "-"]
    row = [each.name, f"{mean} ± {found.half:.2f}", chance(found.p), verdict]
    if verdict != UNDECIDED:
        return [*row, "-", "-"]
    seeds, smallest = found.seeds(level), found.smallest(level)
    visible = "none" if each.unit == POINTS and smallest > 100 else digits(smallest)
    return [*row, visible, f"> {MOST}" if seeds > MOST else str(seeds)]


def chance(p: float) -> str:
    """Format a probability: three decimals, or its order of magnitude below 0.001."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
