"""The page `reports/paper.md`: tables beside the papers' values, and verdicts on all claims."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lion.tasks.metrics import Metric
from tools.claims import (
    CLAIM,
    INCOMPLETE,
    NOT_RUN,
    QUESTION,
    UNDECIDED,
    VERDICTS,
    Comparison,
    compare,
    row_of,
    table_of,
    verdicts,
)
from tools.glue.scores import Scores, scores_table
from tools.paper.results import Results, results_of
from tools.paper.tables import SCALES, Cell, Table, cells
from tools.statistics import RULE, Values, interval
from tools.store import Row, Store, digits, pipes

# columns of text
TEXT = ("row", "claim", "question", "verdict", "note", "table", "model", "fine-tuned as", "answers")
HEADINGS = {CLAIM: "Claims of the papers", QUESTION: "Questions of our own, and on which the papers disagree"}
FIGURES = Path(__file__).parent / "figures_of_papers.yaml"
LEGEND = f"""\
Values are means over seeds ± half of the 95 % interval of the mean (Student's t), or [lowest, highest] where that
interval would leave 0 to 100 %, and in brackets the number of seeds. The papers' columns are as printed. A table shows
all seeds that its rows have, also those that another table asks for.

{RULE}

History of the rule and of the tables. The rule was written before the runs, and changed on three occasions.
2026-11-24, after 38 runs: Holm's correction counts claims without runs, and the noise of unpaired differences is
estimated by all tables with the same frame (recipe, budget, data) in place of one table. 2026-11-25, after 220 runs: a
comparison that stands in several tables counts once in the correction. 2026-11-25, after 253 runs: rows of recall and
selective copying have noise of their own, which took back five verdicts; verdicts wait for all runs of both rows; and
the tables of masked language models, of which no two rows had two runs, estimate their noise by the frame, because
three pairs of runs are hardly ever enough after the correction. Seeds were added after results were seen: Shakespeare
and `recall-start` have five in place of three. After first runs, recall was made easier (which changed all its rows),
and `recall-start`, the temperatures and `readout-cifar10` were added as questions.

Runs at scale `mini` are small, on the data named above each table: they test the order of rows, not the values.
A row is bound to its runs by a hash of all settings that are not default. Where the runs of a table have several data
sets, those on the most frequent one count.
`./run.sh paper --table NAME` makes the runs of a table that are missing, and writes this page."""


class Part(NamedTuple):
    """A table at one scale, with its results."""

    name: str
    table: Table
    scale: str
    cells: list[Cell]
    metric: Metric
    results: Results

    @property
    def has_runs(self) -> bool:
        return any(self.results.values.values())

    @property
    def seeds(self) -> int:
        """Return the number of runs of a complete row."""
        return 1 + max(cell.seed for cell in self.cells)

    @property
    def frame(self) -> tuple[Any, ...]:
        """Return the scale, recipe, budget, data and metric; the noise of runs with the same frame is alike."""
        first = self.cells[0].recipe
        return self.scale, self.table.mini and self.table.mini.recipe, first.trainer, first.data, self.metric.name

    def runs_of(self, each: Comparison) -> tuple[Any, ...]:
        """Return a mark that is equal for comparisons of the same runs, in any table and order."""
        keys = {cell.row: cell.key for cell in self.cells}
        pair = {keys.get(row, (self.name, row)) for row in each.pair}
        return self.metric.name, self.table.noise, frozenset(pair)


def parts_of(tables: Mapping[str, Table], store: Store) -> list[Part]:
    """Return all tables: at scale `mini`, and at scale `published` if they have such runs or no others."""
    found = []
    for name, table in tables.items():
        for scale in SCALES:
            own = cells(name, table, scale)
            results = results_of(table, own, store)
            if own and (scale == "mini" or table.mini is None or any(results.values.values())):
                found.append(Part(name, table, scale, own, table.metric(own), results))
    return found


def comparisons(part: Part, parts: Sequence[Part]) -> list[Comparison]:
    """Compare the rows of all claims and questions of a table.

    The noise of unpaired differences is estimated by the runs of all tables with the frame and the data of this one.
    """
    if part.scale == "published" and not part.table.judged:
        values: Values = {}  # the claims are about another metric than that of the runs
    else:
        values = pooled(part, parts) if part.table.noise == "frame" else part.results.values
    return [
        each
        for kind, pairs in ((CLAIM, part.table.claims), (QUESTION, part.table.open))
        for each in compare(kind, pairs, values, part.metric, noise=part.table.noise, seeds=part.seeds)
    ]


def pooled(part: Part, parts: Sequence[Part]) -> Values:
    """Return the values of a table, and by the keys of their runs those of other tables of its frame and data."""
    own = {cell.key for cell in part.cells}
    others: dict[str, dict[int, float]] = {}
    for each in parts:
        if (each.frame, each.results.data, each.results.split) != (part.frame, part.results.data, part.results.split):
            continue
        keys = {cell.row: cell.key for cell in each.cells}
        others |= {keys[row]: found for row, found in each.results.values.items() if found and keys[row] not in own}
    return {**others, **part.results.values}


def markdown(tables: Mapping[str, Table], store: Store, figures: Mapping[str, str]) -> str:
    """Return the page; `figures` are the file names of plots, by table."""
    parts = sorted(parts_of(tables, store), key=lambda part: not part.has_runs)
    compared = {id(part): comparisons(part, parts) for part in parts}
    every = [each for part in parts for each in compared[id(part)]]
    counted = [(part, each) for part in parts if part.scale == "mini" or part.has_runs for each in compared[id(part)]]
    words, level = verdicts([each for _, each in counted], [part.runs_of(each) for part, each in counted])
    judged = {**dict.fromkeys(map(id, every), NOT_RUN), **{id(each): word for (_, each), word in zip(counted, words)}}
    judge = Judge(judged, level)
    text = ["# The papers' tables, run again", "Written by `./run.sh paper`; raw results of every run: `paper.json`."]
    for kind, heading in HEADINGS.items():
        text += [f"## {heading}", overview(kind, parts, compared, judge)]
    text += ["## How to read this page", LEGEND, "## Runs", summary(parts, compared, judged, store)]
    for part in parts:
        text += section(part, compared[id(part)], judge)
        if part.name in figures:
            text.append(f"![{part.name}]({figures[part.name]})")
    text += ["## Figures of the papers", figure_table(figures)]
    return "\n\n".join(text) + "\n"


class Judge(NamedTuple):
    """Verdicts on all comparisons, by their ids, and the level of p at which one more would be decided."""

    words: Mapping[int, str]
    level: float


def overview(kind: str, parts: Sequence[Part], compared: Mapping[int, list[Comparison]], judge: Judge) -> str:
    """Return a table of the claims that have all their runs, or of the questions that are decided, and their counts."""
    own = [(part, each) for part in parts for each in compared[id(part)] if each.kind == kind]
    words = [judge.words[id(each)] for _, each in own]
    names = (*VERDICTS[kind], UNDECIDED, INCOMPLETE, NOT_RUN)
    counts = ", ".join(f"{words.count(word)} {word}" for word in names)
    rows = []
    for (part, each), word in zip(own, words):
        if word in (NOT_RUN, INCOMPLETE) or (kind == QUESTION and word == UNDECIDED):
            continue
        (_, difference, p, _, _, seeds) = row_of(each, word, judge.level)
        rows.append(
            [each.name, part.name, f"{difference} {each.unit}", p, word, seeds, part.table.notes.get(each.name, "")]
        )
    header = [kind, "table", "difference", "p", "verdict", "seeds needed", "note"]
    return f"Of {len(own)}: {counts}.\n\n{pipes(header, rows, text=TEXT)}"


def figure_table(figures: Mapping[str, str]) -> str:
    """Return a table of the papers' figures, and of what shows the same here."""
    found = yaml.safe_load(FIGURES.read_text(encoding="utf-8"))
    rows = []
    for name, text in found.items():
        plot, comma, more = text.partition(", ")
        if plot.startswith("plot of "):
            file = figures.get(plot.removeprefix("plot of "))
            text = f"[plot]({file}){comma}{more}" if file else NOT_RUN
        rows.append([name, text])
    return pipes(["figure", "here"], rows, text=("figure", "here"))


def summary(
    parts: Sequence[Part], compared: Mapping[int, list[Comparison]], judged: Mapping[int, str], store: Store
) -> str:
    """Return a table of the numbers of runs, of verdicts on claims, of answered questions, and of hours, by table."""
    words = (*VERDICTS[CLAIM], UNDECIDED, INCOMPLETE, NOT_RUN)
    rows, total = [], sum(hours(row) for row in store.rows.values())
    for part in parts:
        claims, questions = ([judged[id(e)] for e in compared[id(part)] if e.kind == kind] for kind in VERDICTS)
        yes, no = map(questions.count, VERDICTS[QUESTION])
        runs = f"{part.results.made} of {len(part.cells)}"
        counts = (str(claims.count(word)) if claims else "-" for word in words)
        asked = f"{yes} yes, {no} no, of {len(questions)}" if questions else "-"
        rows.append([f"{part.name}, {part.scale}", runs, *counts, asked, left(part, store)])
    text = pipes(["table", "runs", *words, "answers", "core hours left"], rows, text=TEXT)
    return (
        f"{text}\n\nAll runs so far took {digits(total)} core hours. The hours left are the missing runs times\n"
        "the median of the runs of their table, or, before the first run, the estimate of `--dry-run --save`.\n"
        "Hours are those of training; runs stored before 2026-11-25 include evaluation and interruptions."
    )


def hours(row: Row) -> float:
    """Return the core hours of a run or of an estimate; rows stored before 2026-11-25 include interruptions."""
    return row["seconds"] * (row.get("threads") or 1) / 3600


def left(part: Part, store: Store) -> str:
    """Return the core hours of the runs that are missing in a table, or "-" where nothing is known of them."""
    runs = [hours(row) for own in part.results.runs.values() for row in own.values()]
    estimated = store.tables["estimates"].get((part.name, part.scale))
    missing = len(part.cells) - part.results.made
    if not missing:
        return "0"
    each = statistics.median(runs) if runs else hours(estimated) if estimated else None
    return "-" if each is None else digits(missing * each)


def replaced(part: Part) -> list[str]:
    """Return the settings of the runs' data that replace those of the recipe, as on the command line."""
    rows = [row for own in part.results.runs.values() for row in own.values() if row["command"]]
    settings = dict.fromkeys(word for row in rows for word in shlex.split(row["command"]) if word.startswith("data."))
    return [word for word in settings if not any(word in cell.argv for cell in part.cells)]


def section(part: Part, compared: Sequence[Comparison], judge: Judge) -> list[str]:
    """Return the Markdown of a table: its text, its rows, its verdicts, and where its runs were made."""
    table, results, metric = part.table, part.results, part.metric
    text = [f"## {table.title} ({part.scale})", table.text.strip()]
    text.append(facts(part))
    shapes = shapes_of(results) if table.more or table.lengths else []
    header = ["row", *table.columns, f"{results.split} {metric.heading}".strip(), *shapes, "parameters"]
    text.append(pipes(header, [row_text(part, name, shapes) for name in table.rows], text=TEXT))
    for kind in VERDICTS:
        header, rows = table_of(kind, [(each, judge.words[id(each)]) for each in compared], judge.level)
        if rows:
            text.append(pipes(header, rows, text=TEXT))
    if scores := glue_scores(results):
        text.append(pipes(*scores_table(scores), text=TEXT))
    return [each for each in [*text, origin(part)] if each]


def glue_scores(results: Results) -> dict[tuple[str, str], list[Scores]]:
    """Return the scores of the runs on GLUE, by row and fine-tuning recipe."""
    found: dict[tuple[str, str], list[Scores]] = {}
    for row, own in results.runs.items():
        for run in own.values():
            for recipe, scores in run.get("glue", {}).items():
                found.setdefault((row, recipe), []).append(scores)
    return found


def facts(part: Part) -> str:
    """Return what the runs of a table share, as a Markdown list."""
    results, lines = part.results, []
    if part.scale == "mini" and part.table.mini.note:
        head = "Differences from the paper" if part.table.columns else "Setup, of no table in the papers"
        lines.append(f"- {head}: {part.table.mini.note}")
    name, other = part.cells[0].recipe.data.name, replaced(part)
    if results.data:
        read = f", read with `{' '.join(other)}`" if other else ""
        lines.append(f"- Data: {part.cells[0].recipe.data.describe()}, fingerprint {results.data}{read}")
    if results.left_out:
        lines.append(f"- Left out: {results.left_out} runs on other data")
    scale = "" if part.scale == "mini" else f" --scale {part.scale}"
    data = f" --data {name} {' '.join(other)}" if other else ""
    lines.append(f"- Made by: `./run.sh paper --table {part.name}{scale}{data}`")
    return "\n".join(lines)


def origin(part: Part) -> str:
    """Return the machines and commits of the runs of a table; empty without runs."""
    rows = [row for own in part.results.runs.values() for row in own.values()]
    machines = sorted(
        {f"{r['device']}, {r['threads']} thread(s), Python {r['python']}, torch {r['torch']}" for r in rows}
    )
    commits = sorted({str(r["commit"])[:9] + "+" * bool(r["changed"]) for r in rows})
    return f"Ran on {'; '.join(machines)}. Commits (+: with changes): {', '.join(commits)}." if rows else ""


def shapes_of(results: Results) -> list[str]:
    """Return the names of the further held-out sets."""
    rows = [row for own in results.runs.values() for row in own.values()]
    return list(dict.fromkeys(name for row in rows for name in row["more"]))


def row_text(part: Part, name: str, shapes: Sequence[str]) -> list[str]:
    """Return a row of a table: published values, ours, those on further held-out sets, and the parameters."""
    results, metric = part.results, part.metric
    published = [str(part.table.rows[name].published.get(column, "-")) for column in part.table.columns]
    runs = list(results.runs[name].values())
    if not runs:
        return [name, *published, NOT_RUN, *("-" for _ in shapes), "-"]
    further = [[metric.scaled(run["more"][s][metric.name]) for run in runs if s in run["more"]] for s in shapes]
    more = [spread(metric, values, count=len(values) < len(runs)) for values in further]
    own = spread(metric, list(results.values[name].values()), count=True)
    return [name, *published, own, *more, f"{runs[0]['parameters']:,}"]


def bounds(metric: Metric, values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean, or of the range if the interval would leave 0 to 100 %."""
    mean, half = statistics.mean(values), interval(values)
    if out_of_range(metric, mean, half):
        return min(values), max(values)
    return mean - half, mean + half


def out_of_range(metric: Metric, mean: float, half: float) -> bool:
    return metric.percent and math.isfinite(half) and not half <= mean <= 100 - half


def spread(metric: Metric, values: Sequence[float], count: bool = False) -> str:
    """Format the mean of values and half of its 95 % interval, and their number if `count` is set.

    The range of the values replaces an interval of percentages that would leave 0 to 100.
    """
    if not values:
        return "-"
    mean, half, places = statistics.mean(values), interval(values), metric.digits
    text = f"{mean:.{places}f}"
    if out_of_range(metric, mean, half):
        text += f" [{min(values):.{places}f}, {max(values):.{places}f}]"
    elif len(values) > 1:
        text += f" ± {half:.{places}f}"
    return f"{text} ({len(values)})" if count else text
