"""The first tables of the page: the verdicts on all claims, and the answers to all questions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools.claims import CLAIM, INCOMPLETE, NOT_RUN, UNDECIDED, VERDICTS, Comparison, row_of
from tools.paper.parts import Part
from tools.tables import pipes

TEXT = ("claim", "question", "table", "data", "verdict", "note")  # columns of text


class Judge(NamedTuple):
    """Verdicts on all comparisons, by their ids, and the level of p at which one more would be decided."""

    words: Mapping[int, str]
    level: float


def overview(kind: str, own: Sequence[tuple[Part, Comparison]], judge: Judge, claimed: set[tuple[Any, ...]]) -> str:
    """Return a table of the claims that have all their runs, or of the questions that are decided, and their counts.

    Questions whose runs are those of claims (`claimed`) are left out.
    """
    once: dict[tuple[Any, ...], list[tuple[Part, Comparison]]] = {}
    for part, each in own:
        mark = part.runs_of(each)
        if kind == CLAIM or mark not in claimed:
            once.setdefault((*mark, each.name) if kind == CLAIM else mark, []).append((part, each))
    # a pair may have all runs that one of its tables asks for, and lack those of another
    order = (*reversed(VERDICTS[kind]), UNDECIDED, INCOMPLETE, NOT_RUN)
    best = [min(group, key=lambda item: order.index(judge.words[id(item[1])])) for group in once.values()]
    words = [judge.words[id(each)] for _, each in best]
    counts = ", ".join(f"{words.count(word)} {word}" for word in order)
    shown = order[: 3 if kind == CLAIM else 2]
    rows = [
        overview_row(part, each, word, judge.level, [other for other, _ in group])
        for wanted in shown
        for (part, each), word, group in zip(best, words, once.values())
        if word == wanted
    ]
    header = [kind, "table", "data", "here", "paper", "p", "verdict", "smallest visible", "parameters", "note"]
    return f"Of {len(best)}: {counts}.\n\n{pipes(header, rows, text=TEXT)}"


def overview_row(part: Part, each: Comparison, word: str, level: float, tables: Sequence[Part]) -> list[str]:
    name, difference, p, verdict, smallest, _ = row_of(each, word, level)
    places = dict.fromkeys(
        other.table.title.partition(":")[0] if other.table.columns else other.name for other in tables
    )
    sizes = [next(iter(part.results.runs[row].values()))["parameters"] for row in each.pair]
    return [
        name,
        "; ".join(places),
        part.cells[0].recipe.data.name,
        f"{difference} {each.unit}",
        printed(part, each.pair),
        p,
        verdict,
        smallest,
        f"{sizes[0] / sizes[1]:.2f}",
        part.table.notes.get(each.name, ""),
    ]


def printed(part: Part, pair: tuple[str, str]) -> str:
    """Return the difference of two rows in the paper, positive where the first row is better; "-" if it has none."""
    for column in part.table.columns:
        found = [
            re.match(r"[\d.]+", str(part.table.rows[row].published.get(column, "")).replace("×", "")) for row in pair
        ]
        if all(found):
            first, second = (float(number[0]) for number in found)
            return f"{(first - second) * (1 if part.metric.higher_is_better else -1):+.2f}"
    return "-"
