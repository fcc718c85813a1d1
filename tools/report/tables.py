"""Tables of runs: results beside the papers' numbers, and comparisons of two rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lion.samples.labels import TokenLabelsInfo
from lion.samples.text import TextInfo
from lion.tasks.metrics import Metric
from tools.claims import CLAIM, QUESTION, Comparison, compare, not_judged
from tools.finished import Run
from tools.glue.scores import Scores, read_scores, scores_table
from tools.report.paper import Claims, published
from tools.tables import Cell, Table, fill, spread

Groups = dict[str, list[Run]]
Values = dict[Path, float]  # value of each run, by its folder
Judge = Callable[[list[Run]], tuple[Metric, str, Values]]  # returns the metric, what it was measured on, and its values


def result_table(groups: Groups) -> Table:
    """Return the table of results, a row for each recipe; columns without information are left out."""
    first = next(iter(groups.values()))[0]
    metric, unit = first.metric, first.task.speed_unit
    columns: dict[str, Cell] = {
        "model": lambda row: row.name,
        f"test {metric.heading}": test_cell,
        f"val {metric.heading}": lambda row: spread([run.val for run in row.runs], metric.number),
    }
    for place, (other, _) in enumerate(first.beside):
        columns[f"val {other.heading}"] = partial(beside_cell, place=place)
    columns["n"] = lambda row: str(len(row.runs))
    columns["parameters"] = lambda row: f"{row.runs[0].parameters:,}"
    columns[f"{unit} seen"] = seen_cell
    columns[f"{unit}/s"] = speed_cell
    columns["paper"] = paper_cell
    rows = [Named(name, runs) for name, runs in groups.items()]
    if len(set(map(seen_cell, rows))) == 1:  # of all rows alike
        del columns[f"{unit} seen"]
    return fill(columns, rows)


class Named(NamedTuple):
    """A row of the table of results."""

    name: str
    runs: list[Run]


def test_cell(row: Named) -> str | None:
    tests = [run.test for run in row.runs if run.test is not None]
    if not tests:
        return None
    text = spread(tests, row.runs[0].metric.number)
    if len(tests) < len(row.runs):
        text += f" (n = {len(tests)})"
    return text


def beside_cell(row: Named, place: int) -> str | None:
    """Return the cell of another metric; the log has null for a value that was not finite."""
    metric, _ = row.runs[0].beside[place]
    values = [run.beside[place][1] for run in row.runs]
    finite = [value for value in values if value is not None]
    if not finite:
        return None
    return spread(finite, metric.number)


def paper_cell(row: Named) -> str | None:
    text = published(row.runs[0].recipe)
    if text == "-":
        return None
    return text


def seen_cell(row: Named) -> str | None:
    seen = row.runs[0].seen
    if seen is None:
        return None
    return f"{seen:,.0f}"


def speed_cell(row: Named) -> str | None:
    speeds = [run.speed for run in row.runs if run.speed is not None]
    if not speeds:
        return None
    return f"{statistics.median(speeds):,.0f}"


def glue_table(groups: Groups) -> Table:
    """Return a table of the scores that `./run.sh glue` measured for runs (RUN/glue/RECIPE/results.json)."""
    found: dict[tuple[str, str], list[Scores]] = {}
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for name, runs in groups.items():
        paths: list[Path] = []
        for run in runs:
            paths += run.folder.glob("glue/*/results.json")
        for path in sorted(paths):
            row = name, path.parent.name
            scores, own = read_scores(path)
            found.setdefault(row, []).append(scores)
            if own:
                counts[row] = own
    return scores_table(found, counts)


def own_metric(runs: list[Run]) -> tuple[Metric, str, Values]:
    """Return the metric that chose `best`, the split, and its values: on test if all runs were tested, else on val."""
    split = "test" if all(run.test is not None for run in runs) else "val"
    return runs[0].metric, split, {run.folder: getattr(run, split) for run in runs}


def comparisons(groups: Groups, about: Claims, judge: Judge = own_metric) -> list[Comparison]:
    """Compare the two rows of each claim of the papers and of each open question, if both rows have runs.

    A claim about rows `a` and `b` is one about `a with positions` and `b with positions`, too, and so on for every
    ending that two rows share. A row with a remarked run, such as one that is stuck at chance, is not judged.
    """
    every: list[Run] = []
    for runs in groups.values():
        every += runs
    metric, _, values = judge(every)
    shown: dict[str, dict[int, float]] = {}
    unfit = set()
    for name, runs in groups.items():
        shown[name] = {}
        for run in runs:
            if run.folder in values:
                shown[name][run.recipe.seed] = metric.scaled(values[run.folder])
            if run.remark and judge is own_metric:
                unfit.add(name)
    noise = noise_of(every[0])
    claims = pairs_of(about.claims, shown)
    asked = [pair for pair in pairs_of(about.open, shown) if pair not in claims]  # a claim by its ending is none
    found = compare(CLAIM, claims, shown, metric, noise=noise)
    found += compare(QUESTION, asked, shown, metric, noise=noise)
    return not_judged(found, unfit)


def pairs_of(pairs: Iterable[tuple[str, str]], shown: Mapping[str, Collection]) -> list[tuple[str, str]]:
    """Return pairs of rows that have values, for every ending that two rows share."""
    found: dict[tuple[str, str], None] = {}
    for a, b in pairs:
        for end in endings(a, shown):
            if shown.get(a + end) and shown.get(b + end):
                found[a + end, b + end] = None
    return list(found)


def noise_of(run: Run) -> str:
    """Return the model of the noise of such runs, a name of `tools.statistics.NOISES`; its docstring says why."""
    if isinstance(run.info, TokenLabelsInfo):
        return "own"
    if isinstance(run.info, TextInfo) or run.recipe.data.name == "digits":
        return "pairs"
    return "frame"


def endings(row: str, names: Iterable[str]) -> list[str]:
    """Return what follows the name of a row in the names that begin with it; "" for the row itself."""
    return [name.removeprefix(row) for name in names if f"{name} ".startswith(f"{row} ")]
