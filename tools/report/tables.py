"""Tables of runs: results beside the paper's numbers, and comparisons of two rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from lion.tasks.metrics import Metric
from tools.report.paper import Paper, claimed
from tools.report.runs import Run
from tools.store import spread

Groups = dict[str, list[Run]]
Table = tuple[list[str], list[list[str]]]
Values = dict[Path, float]  # value of each run, by its folder
Judge = Callable[[list[Run]], tuple[Metric, str, Values]]  # returns the metric, what it was measured on, and its values
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, of 1, 2, .. degrees
CLAIMED = ("so here, too", "the other way round here")
ASKED = ("yes", "no, the other way round")


def result_table(groups: Groups, paper: Paper) -> Table:
    """Return the table of results, a row for each recipe; columns without information are left out."""
    first = next(iter(groups.values()))[0]
    numbers = claimed(paper, first.recipe.data.name)
    beside = [metric for metric, _ in first.beside]
    header = ["model", f"test {first.metric.heading}", f"val {first.metric.heading}"]
    header += [f"val {metric.heading}" for metric in beside]
    unit = first.task.speed_unit
    header += ["n", "parameters", f"{unit} seen", f"{unit}/s", *(f"paper: {column}" for column in paper.columns)]
    rows = []
    for name, runs in groups.items():
        tests = [run.test for run in runs if run.test is not None]
        speeds = [run.speed for run in runs if run.speed is not None]
        row = [name, spread(tests if len(tests) == len(runs) else [], first.metric.number)]
        row.append(spread([run.val for run in runs], first.metric.number))
        row += [spread([run.beside[i][1] for run in runs], metric.number) for i, metric in enumerate(beside)]
        row += [str(len(runs)), f"{runs[0].parameters:,}", "-" if runs[0].seen is None else f"{runs[0].seen:,.0f}"]
        row.append(f"{statistics.median(speeds):,.0f}" if speeds else "-")
        rows.append([*row, *(numbers.get(name, {}).get(column, "-") for column in paper.columns)])
    told = {i: {row[i] for row in rows} for i in range(len(header))}
    kept = [i for i in told if told[i] != {"-"} and (len(told[i]) > 1 or not header[i].endswith(" seen"))]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def own_metric(runs: list[Run]) -> tuple[Metric, str, Values]:
    """Return the metric that chose `best`, the split, and its values: on test if all runs were tested, else on val."""
    split = "test" if all(run.test is not None for run in runs) else "val"
    return runs[0].metric, split, {run.folder: getattr(run, split) for run in runs}


def claim_table(groups: Groups, paper: Paper, judge: Judge = own_metric) -> Table:
    """Compare the two rows of each claim of the paper, if both rows have runs."""
    return comparison(groups, paper.better, paper.alike, "the paper: ", CLAIMED, judge)


def asked_table(groups: Groups, paper: Paper, judge: Judge = own_metric) -> Table:
    """Compare the two rows of each question that the paper leaves open, if both rows have runs."""
    return comparison(groups, paper.asked, paper.alike, "asked: ", ASKED, judge)


def comparison(
    groups: Groups,
    pairs: Iterable[tuple[str, str]],
    alike: Iterable[str],
    title: str,
    words: tuple[str, str],
    judge: Judge,
) -> Table:
    """Compare pairs of rows by the differences between runs with the same seed.

    Args:
        groups: Rows of runs.
        pairs: Names of rows (better, worse), as claimed or asked.
        alike: Suffixes of row names; each pair is also compared between the two rows with this suffix.
        title: Header of the first column.
        words: Verdicts if the first row is better, and if the second row is better.
        judge: Function that returns the metric, what it was measured on, and the values of runs.
    """
    rows, pairs = [], list(pairs)
    metric = judge([run for some in groups.values() for run in some])[0]
    claims = [(f"{a} {so}".strip(), f"{b} {so}".strip()) for so in ("", *alike) for a, b in pairs]
    for better, worse in claims:
        if better in groups and worse in groups:
            _, on, values = judge([*groups[better], *groups[worse]])
            other, own = (
                {run.recipe.seed: values[run.folder] for run in groups[name] if run.folder in values}
                for name in (better, worse)
            )
            gaps = [metric.gain(other[seed], own[seed]) for seed in own if seed in other]
            if gaps:
                claim = [f"{better} > {worse}", on, spread(gaps, metric.number), str(len(gaps)), verdict(gaps, words)]
                rows.append(claim)
    unit = "points" if metric.percent else metric.title
    return [title, "on", f"difference, {unit}", "n", "here"], rows


def verdict(gaps: list[float], words: tuple[str, str] = CLAIMED) -> str:
    """Return the verdict on paired differences: whether their mean differs from 0, by Student's t at 95 %."""
    if len(gaps) < 2:
        return "one seed decides nothing"
    error, gap = statistics.stdev(gaps) / len(gaps) ** 0.5, statistics.mean(gaps)
    if abs(gap) <= T95[min(len(gaps) - 1, len(T95)) - 1] * error:
        return "undecided, within the noise"
    return words[0] if gap > 0 else words[1]
