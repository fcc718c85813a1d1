"""Tables of runs: results beside the papers' numbers, and comparisons of two rows."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from lion.samples.labels import TokenLabelsInfo
from lion.samples.text import TextInfo
from lion.tasks.metrics import Metric
from tools.claims import CLAIM, QUESTION, Comparison, compare, not_judged
from tools.finished import Run
from tools.glue.scores import Scores, read_scores, scores_table
from tools.report.paper import Claims, published
from tools.tables import Table, fill, spread

Groups = dict[str, list[Run]]
Values = dict[Path, float]  # value of each run, by its folder
Judge = Callable[[list[Run]], tuple[Metric, Values]]  # returns the metric that compares runs, and its values


def result_table(groups: Groups) -> Table:
    """Return the table of results, a row for each recipe; columns without information are left out."""
    rows = [result_row(name, runs) for name, runs in groups.items()]
    seen = f"{next(iter(groups.values()))[0].task.speed_unit} seen"
    columns = {heading: operator.itemgetter(heading) for heading in rows[0]}
    if len({row[seen] for row in rows}) == 1:  # of all rows alike
        del columns[seen]
    return fill(columns, rows)


def result_row(name: str, runs: list[Run]) -> dict[str, str | None]:
    """Return the cells of a row by headings, None without a value."""
    first = runs[0]
    metric, unit = first.metric, first.task.speed_unit
    row: dict[str, str | None] = {"model": name}
    row[f"test {metric.heading}"] = test_cell(runs)
    row[f"val {metric.heading}"] = spread([run.val for run in runs], metric.number)
    for place, (other, _) in enumerate(first.beside):
        values = [run.beside[place][1] for run in runs]
        row[f"val {other.heading}"] = spread_of(values, other.number)
    row["n"] = str(len(runs))
    row["parameters"] = f"{first.parameters:,}"
    row[f"{unit} seen"] = row[f"{unit}/s"] = row["paper"] = None
    if first.seen is not None:
        row[f"{unit} seen"] = f"{first.seen:,.0f}"
    speeds = [run.speed for run in runs if run.speed is not None]
    if speeds:
        row[f"{unit}/s"] = f"{statistics.median(speeds):,.0f}"
    paper = published(first.recipe)
    if paper != "-":
        row["paper"] = paper
    return row


def test_cell(runs: list[Run]) -> str | None:
    tests = [run.test for run in runs if run.test is not None]
    text = spread_of(tests, runs[0].metric.number)
    if text and len(tests) < len(runs):
        text += f" (n = {len(tests)})"
    return text


def spread_of(values: list[float | None], number: Callable[[float], str]) -> str | None:
    """Return mean and deviation, None without values; the log has null for a value that was not finite."""
    finite = [value for value in values if value is not None]
    if not finite:
        return None
    return spread(finite, number)


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


def own_metric(runs: list[Run]) -> tuple[Metric, Values]:
    """Return the metric that chose `best`, and its values: on test if all runs were tested, else on val."""
    split = "test"
    if None in [run.test for run in runs]:
        split = "val"
    return runs[0].metric, {run.folder: getattr(run, split) for run in runs}


def comparisons(groups: Groups, about: Claims, judge: Judge = own_metric) -> list[Comparison]:
    """Compare the two rows of each claim of the papers and of each open question, if both rows have runs.

    A claim about rows `a` and `b` is one about `a with positions` and `b with positions`, too, and so on for every
    ending that two rows share. A row with a remarked run, such as one that is stuck at chance, is not judged.
    """
    every = list(itertools.chain(*groups.values()))
    metric, values = judge(every)
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
