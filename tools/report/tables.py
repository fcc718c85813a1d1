"""Tables of runs: results beside the papers' numbers, and comparisons of two rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from lion.samples.labels import TokenLabelsInfo
from lion.samples.text import TextInfo
from lion.tasks.metrics import Metric
from tools.claims import CLAIM, QUESTION, Comparison, compare, not_judged
from tools.finished import Run
from tools.glue.scores import Scores, read_counts, read_scores, scores_table
from tools.report.paper import Claims, published
from tools.store import spread

Groups = dict[str, list[Run]]
Table = tuple[list[str], list[list[str]]]
Values = dict[Path, float]  # value of each run, by its folder
Judge = Callable[[list[Run]], tuple[Metric, str, Values]]  # returns the metric, what it was measured on, and its values


def result_table(groups: Groups) -> Table:
    """Return the table of results, a row for each recipe; columns without information are left out."""
    first = next(iter(groups.values()))[0]
    beside = [metric for metric, _ in first.beside]
    header = ["model", f"test {first.metric.heading}", f"val {first.metric.heading}"]
    header += [f"val {metric.heading}" for metric in beside]
    unit = first.task.speed_unit
    header += ["n", "parameters", f"{unit} seen", f"{unit}/s", "paper"]
    rows = []
    for name, runs in groups.items():
        tests = [run.test for run in runs if run.test is not None]
        speeds = [run.speed for run in runs if run.speed is not None]
        some = f" (n = {len(tests)})" if 0 < len(tests) < len(runs) else ""
        row = [name, spread(tests, first.metric.number) + some]
        row.append(spread([run.val for run in runs], first.metric.number))
        for i, metric in enumerate(beside):  # the log has null for a value that was not finite
            row.append(spread([x for run in runs if (x := run.beside[i][1]) is not None], metric.number))
        row += [str(len(runs)), f"{runs[0].parameters:,}", "-" if runs[0].seen is None else f"{runs[0].seen:,.0f}"]
        row.append(f"{statistics.median(speeds):,.0f}" if speeds else "-")
        rows.append([*row, published(runs[0].recipe)])
    shown = {i: {row[i] for row in rows} for i in range(len(header))}
    kept = [i for i in shown if shown[i] != {"-"} and (len(shown[i]) > 1 or not header[i].endswith(" seen"))]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def glue_table(groups: Groups) -> Table:
    """Return a table of the scores that `./run.sh glue` measured for runs (RUN/glue/RECIPE/results.json)."""
    found: dict[tuple[str, str], list[Scores]] = {}
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for name, runs in groups.items():
        for path in sorted(p for run in runs for p in run.folder.glob("glue/*/results.json")):
            row = name, path.parent.name
            found.setdefault(row, []).append(read_scores(path))
            if own := read_counts(path):
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
    metric, _, values = judge([run for some in groups.values() for run in some])
    shown = {
        name: {run.recipe.seed: metric.scaled(values[run.folder]) for run in runs if run.folder in values}
        for name, runs in groups.items()
    }
    noise, found = noise_of(next(iter(groups.values()))[0]), []
    for kind, pairs in ((CLAIM, about.claims), (QUESTION, about.open)):
        named = [(a + end, b + end) for a, b in pairs for end in endings(a, shown)]
        judged = {each.pair for each in found}  # a question of one table may be a claim by its ending
        there = dict.fromkeys(pair for pair in named if pair not in judged and all(shown.get(name) for name in pair))
        found += compare(kind, there, shown, metric, noise=noise)
    unfit = {name for name, runs in groups.items() if judge is own_metric and any(run.remark for run in runs)}
    return not_judged(found, unfit)


def noise_of(run: Run) -> str:
    """Return the model of the noise of such runs, a name of `tools.statistics.NOISES`; its docstring says why."""
    if isinstance(run.info, TokenLabelsInfo):
        return "own"
    return "pairs" if isinstance(run.info, TextInfo) or run.recipe.data.name == "digits" else "frame"


def endings(row: str, names: Iterable[str]) -> list[str]:
    """Return what follows the name of a row in the names that begin with it; "" for the row itself."""
    return [name.removeprefix(row) for name in names if f"{name} ".startswith(f"{row} ")]
