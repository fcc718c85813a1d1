"""The page `reports/paper.md`: tables beside the papers' values, and verdicts on all claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from lion.tasks.metrics import Metric
from tools.claims import CLAIM, INCOMPLETE, NOT_RUN, QUESTION, UNDECIDED, VERDICTS, table_of, verdicts
from tools.glue.scores import Scores, scores_table
from tools.paper.measured import on_gpu
from tools.paper.overview import Judged, overview
from tools.paper.parts import Part, comparisons, parts_of
from tools.paper.results import Results, rows_of
from tools.paper.tables import Table
from tools.statistics import POWER, RULE, interval, power, seeds_needed
from tools.store import Row, Store
from tools.tables import Table as TextTable
from tools.tables import digits, pipes

# columns of text
TEXT = ("row", "claim", "question", "verdict", "table", "model", "fine-tuned as", "answers")
HEADINGS = {CLAIM: "Claims of the papers", QUESTION: "Questions: our controls, and what the papers disagree on"}
FIGURES = Path(__file__).parent / "figures_of_papers.yaml"
LEGEND = f"""\
A claim is a pair of rows that a paper prints in one order, by their metric on the same data, at all sizes and in all
tables in which both stand. The rows differ in one part, or one of them is a baseline (softmax, Hydra, Vim), or a
sentence of the text compares them. All pairs that differ in one setting or have a baseline are listed. A question is a
pair with a control of ours, or one that the papers print in opposite orders; each is listed once, and not at all if a
claim has the same runs. Claims of two tables about the same runs are listed twice, and count once in the correction.
"Paper" is the difference of the paper's values in the first column that has both rows. "Parameters" is the first row's
number divided by the second's.

Values are means over seeds ± half of the 95 % interval of the mean (Student's t), or [lowest, highest] where that
interval would go beyond 0 or 100 %, and in brackets the number of seeds. The papers' columns are as printed. A table
shows all seeds that its rows have, also those that another table asks for. All rows of a table share one learning rate
unless its text says otherwise; it was not searched for each row.

{RULE} Rows with a run that is stuck at chance are not judged: they are incomplete.
"""
HISTORY = """\
The rule was written before the runs. It and the tables were changed on these occasions:

- 2026-11-24, after 38 runs: Holm's correction counts claims without runs, and the noise of unpaired differences is
  estimated by all tables with the same frame (recipe, budget, data) in place of one table.
- 2026-11-25, after 220 runs: a comparison that stands in several tables counts once in the correction.
- 2026-11-25, after 253 runs: rows of recall and selective copying have noise of their own, which took back five
  verdicts; verdicts wait for all runs of both rows; the tables of masked language models, in which no two rows had two
  runs, estimate their noise by the frame. Two claims of Table 2, Lion-D and Lion-S with several scans against Hydra, of
  which one was contradicted, became questions, because small and base models have opposite orders; Lion-D with several
  scans against softmax, which has opposite orders too, remained a claim.
- 2026-11-26, after 291 runs: runs without any spread decide nothing.
- 2026-11-27, after 381 runs: what a claim is was written down, and claims and questions were filed again. Table 16 has
  its rows without positions, as in the paper; before, its claims were judged with positions. Its rows on recall, Lion-D
  with several scans against softmax (Table 2) and row [5] of Table 6 are questions; Vim against Hydra and Lion-D with
  several scans, softmax against Lion-lit, [6] against [7] and Lion-S against [5] and [7] of Table 14 are claims. Masked
  language models are compared by pairs again, because their noise differs from row to row; this took back five answers.
- 2026-11-27, after 404 runs: claims that the papers print and the tables did not have were added, of which these have
  runs: Hydra over Lion-D, and Lion-D over Lion-S with several scans (Table 2), and Lion-S over Lion-D on ListOps
  (Table 5). The rule has the words "on the same data", by which Lion-S over Lion-D is a claim on CIFAR-100 (Table 13),
  and a question for masked language models, as on ImageNet.
- 2026-11-27, after 424 runs: all pairs that differ in one setting or have a baseline are claims or questions, and a
  test keeps the list complete; before, it was chosen by hand. Of the new claims that have all runs, three are
  contradicted, eight confirmed and nine undecided. The longer list took back two answers, on a convolution in Lion-S.
- 2026-11-27, after 489 runs: softmax has the learning rate that is best for it in `mlm-rates`, in place of 5e-4, which
  it was given after first runs on another corpus; at 5e-4 its claim against Lion-S was contradicted. Two runs whose
  weights were gone were repeated on a GPU, to fine-tune them (`mlm-tiny`, rotary softmax and Hydra, seed 0). Rows with
  a run that is stuck at chance are not judged (rotary softmax on Pathfinder, below Lion-S).
- 2026-11-28, after 512 runs: Lion-S against softmax (Table 14) and Lion-S against Lion-D with positions (Table 9) are
  claims, because the paper prints one order of them on the data of these tables. The first was a question with the
  answer no, and is contradicted. The two runs that had been repeated on a GPU were repeated on CPUs, because their
  weights were gone again, to fine-tune them.

Seeds were added after results were seen: Shakespeare and `recall-start` have five in place of three, and rows that
stand in several tables have the seeds of all of them. After first runs, recall was made easier (which changed all its
rows), and `recall-start`, the temperatures and `readout-cifar10` were added as questions."""
HOW = """\
Runs at scale `mini` are small, on the data named above each table: they test the order of rows, not the values.
A row is bound to its runs by a hash of all settings that are not default. If the runs of a table used several
data sets, only those on the most frequent one count.
`./run.sh paper --table NAME` makes the runs of a table that are missing, and writes this page."""


SOLVED = 99  # percent


def markdown(tables: Mapping[str, Table], store: Store, figures: Mapping[str, str]) -> str:
    """Return the page; `figures` are the file names of plots, by table."""
    parts = sorted(parts_of(tables, store), key=lambda part: not part.has_runs)
    counted, others, level = judge(parts)
    judged = counted + others
    elsewhere = sum(each.comparison.kind == CLAIM for each in others)
    text = ["# The papers' tables, run again", opening(parts)]
    for kind, heading in HEADINGS.items():
        text += [f"## {heading}", overview(kind, counted, level)]
        if kind == CLAIM and elsewhere:
            text.append(f"{elsewhere} further claims need runs at the papers' scale, of which there are none yet.")
    different = {each.runs for each in counted}
    text += ["## How to read this page", LEGEND.rstrip(), correction(len(different), level), HOW]
    text += ["## History of the rule and of the tables", HISTORY, "## Runs", summary(parts, judged, store)]
    for part in parts:
        text += section(part, [each for each in judged if each.part is part], level)
        if part.name in figures:
            text.append(f"![{part.name}]({figures[part.name]})")
    text += ["## Figures of the papers", figure_table(figures)]
    return "\n\n".join(text) + "\n"


def judge(parts: Sequence[Part]) -> tuple[list[Judged], list[Judged], float]:
    """Judge the comparisons of all tables, corrected together without those of published tables that have no runs.

    Returns:
        The comparisons that are corrected, the others, and the level of p below which one more would be decided.
    """
    counted = []
    others = []
    for part in parts:
        own = others
        if part.scale == "mini" or part.has_runs:
            own = counted
        for each in comparisons(part, parts):
            own.append(Judged(part, each, NOT_RUN, part.runs_of(each)))
    words, level = verdicts([each.comparison for each in counted], [each.runs for each in counted])
    counted = [each._replace(verdict=word) for each, word in zip(counted, words)]
    return counted, others, level


def opening(parts: Sequence[Part]) -> str:
    """Return the first sentences of the page: the size of the runs, and their data."""
    sizes = []
    for part in parts:
        if part.scale == "mini":
            sizes += [row["parameters"] / 1e6 for row in part.rows]
    span = f"{min(sizes, default=0):.1f} to {max(sizes, default=0):.1f}"
    return (
        f"Small runs, of {span} million parameters on small data sets, in place of the papers': they test\n"
        "the orders of the papers' rows, and not their values. Written by `./run.sh paper`; raw results of every\n"
        'run: `paper.json`. "Here" is the difference of the means of two rows ± half of its 95 % interval, and\n'
        '"smallest visible" the smallest true difference that the runs would have shown\n'
        "([how to read this page](#how-to-read-this-page))."
    )


def correction(count: int, level: float) -> str:
    """Return the sentences about the number of comparisons and the power that their correction leaves."""
    three, five = power(3, 2, level), power(5, 2, level)
    return (
        f"The page counts {count} different comparisons, and a further one would need p < {level:.0e}. With that\n"
        f"limit, three paired seeds show a difference of two standard deviations in {three:.1%} of all cases, five in\n"
        f"{five:.1%}, and {seeds_needed(2, level)} seeds are needed for {POWER:.0%}. Tables with three pairs decide "
        "only\n"
        "larger differences. Three seeds show more where all rows of several tables estimate the noise together."
    )


def figure_table(figures: Mapping[str, str]) -> str:
    """Return a table of the papers' figures, and of what shows the same here."""
    found = yaml.safe_load(FIGURES.read_text(encoding="utf-8"))
    rows = []
    for name, text in found.items():
        plot, comma, more = text.partition(", ")
        if plot.startswith("plot of "):
            file = figures.get(plot.removeprefix("plot of "))
            text = NOT_RUN
            if file:
                text = f"[plot]({file}){comma}{more}"
        rows.append([name, text])
    return pipes(["figure", "here"], rows, text=("figure", "here"))


def summary(parts: Sequence[Part], judged: Sequence[Judged], store: Store) -> str:
    """Return a table of the numbers of runs, of verdicts on claims, of answered questions, and of hours, by table."""
    words = [*VERDICTS[CLAIM], UNDECIDED, INCOMPLETE, NOT_RUN]
    rows = []
    for part in parts:
        claims = verdicts_of(part, judged, CLAIM)
        row = [f"{part.name}, {part.scale}", f"{part.results.made} of {len(part.cells)}"]
        for word in words:
            row.append(str(claims.count(word)) if claims else "-")
        rows.append([*row, answers(part, judged), left(part, store)])
    every = rows_of(store).values()
    gpu = [row for row in every if on_gpu(row)]
    total = sum(hours(row) for row in every if not on_gpu(row))
    on_gpus = ""
    if gpu:
        spent = sum(row["seconds"] for row in gpu) / 3600
        on_gpus = f" {len(gpu)} on a GPU took {digits(spent)} hours, several at a time."
    changed = sum(bool(row["changed"]) for row in every)
    table = pipes(["table", "runs", *words, "answers", "core hours left"], rows, text=TEXT)
    return (
        f"{table}\n\nAll runs on CPUs so far took {digits(total)} core hours.{on_gpus} The hours left are the\n"
        "missing runs times the median of their table's runs on CPUs, or, before one, the estimate of\n"
        "`--dry-run --save`; tables that share missing runs count them each. Hours are those of training; runs\n"
        f"stored before 2026-11-25 include evaluation and interruptions. {changed} of {len(every)} runs come\n"
        'from working trees with changes that their commits do not have ("+" below the tables).'
    )


def verdicts_of(part: Part, judged: Sequence[Judged], kind: str) -> list[str]:
    """Return the verdicts on the comparisons of a kind of one table."""
    return [each.verdict for each in judged if each.part is part and each.comparison.kind == kind]


def answers(part: Part, judged: Sequence[Judged]) -> str:
    questions = verdicts_of(part, judged, QUESTION)
    if not questions:
        return "-"
    yes, no = map(questions.count, VERDICTS[QUESTION])
    return f"{yes} yes, {no} no, of {len(questions)}"


def hours(row: Row) -> float:
    """Return the core hours of a run or of an estimate; rows stored before 2026-11-25 include interruptions."""
    return row["seconds"] * (row.get("threads") or 1) / 3600


def left(part: Part, store: Store) -> str:
    """Return the core hours of the runs that are missing in a table, or "-" where nothing is known of them."""
    missing = len(part.cells) - part.results.made
    if not missing:
        return "0"
    known = [hours(row) for row in part.rows if not on_gpu(row)]
    if not known:
        estimated = store.tables["estimates"].get((part.name, part.scale))
        if not estimated:
            return "-"
        known = [hours(estimated)]
    return digits(missing * statistics.median(known))


def section(part: Part, judged: Sequence[Judged], level: float) -> list[str]:
    """Return the Markdown of a table: its text, its rows, its verdicts, and where its runs were made."""
    table = part.table
    text = [f"## {table.title} ({part.scale})", table.text.strip(), facts(part)]
    header, cells = rows_table(part)
    text += [pipes(header, cells, text=TEXT), remarks(part.results)]
    compared = [(each.comparison, each.verdict) for each in judged]
    tables = [table_of(kind, compared, level) for kind in VERDICTS]
    if table.glue:
        tables.append(scores_table(glue_scores(part.results)))
    for header, cells in tables:
        if cells:
            text.append(pipes(header, cells, text=TEXT))
    text.append(origin(part))
    return [each for each in text if each]


def remarks(results: Results) -> str:
    """Return the remarks on single runs as a Markdown list."""
    lines = []
    for name, own in results.runs.items():
        for seed, run in own.items():
            if run["remark"]:
                lines.append(f"- {name}, seed {seed}: {run['remark']}")
    return "\n".join(lines)


def glue_scores(results: Results) -> dict[tuple[str, str], list[Scores]]:
    """Return the scores of the runs on GLUE, by row and fine-tuning recipe."""
    found: dict[tuple[str, str], list[Scores]] = {}
    for row, own in results.runs.items():
        for run in own.values():
            for recipe, scores in run["glue"].items():
                found.setdefault((row, recipe), []).append(scores)
    return found


def facts(part: Part) -> str:
    """Return what the runs of a table share, as a Markdown list."""
    results = part.results
    data = part.cells[0].recipe.data
    other = " ".join(part.names_in("replaced"))
    lines = []
    if part.scale == "mini" and part.table.mini.note:
        head = "Setup, of no table in the papers"
        if part.table.columns:
            head = "Differences from the paper"
        lines.append(f"- {head}: {part.table.mini.note}")
    if results.data:
        line = f"- Data: {data.describe()}, fingerprint {results.data}"
        if other:
            line += f", read with `{other}`"
        lines.append(line)
    if results.left_out:
        lines.append(f"- Left out, on other data: {results.left_out} of the stored runs")
    command = f"./run.sh paper --table {part.name}"
    if part.scale != "mini":
        command += f" --scale {part.scale}"
    if other:
        command += f" --data {data.name} {other}"
    lines.append(f"- Made by: `{command}`")
    return "\n".join(lines)


def origin(part: Part) -> str:
    """Return the machines and commits of the runs of a table; empty without runs."""
    machines = set()
    commits = set()
    for row in part.rows:
        machines.add(f"{row['device']}, {row['threads']} thread(s), Python {row['python']}, torch {row['torch']}")
        commit = str(row["commit"])[:9]
        if row["changed"]:
            commit += "+"
        commits.add(commit)
    if not machines:
        return ""
    return f"Ran on {'; '.join(sorted(machines))}. Commits (+: with changes): {', '.join(sorted(commits))}."


def rows_table(part: Part) -> TextTable:
    """Return the rows of a table: published values, ours, those on further held-out sets, and the parameters."""
    results, metric, table = part.results, part.metric, part.table
    shapes = []
    if table.more or table.lengths:
        shapes = part.names_in("more")
    solvable = table.noise == "own" and metric.percent  # runs either solve their task or do not
    header = ["row", *table.columns, f"{results.split} {metric.heading}".strip()]
    if solvable:
        header.append("solved")
    header += [*shapes, "parameters"]
    body = []
    for name, row in table.rows.items():
        cells = [f"{name} ({row.called})" if row.called else name]
        for column in table.columns:
            cells.append(str(row.published.get(column, "-")))
        body.append(cells)
        runs = list(results.runs[name].values())
        if not runs:
            cells.append(NOT_RUN)
            cells += ["-"] * (len(header) - len(cells))
            continue
        values = list(results.values[name].values())
        cells.append(spread(metric, values, count=True))
        if solvable:
            cells.append(f"{sum(value >= SOLVED for value in values)} of {len(values)}")
        for shape in shapes:
            found = part.held_out(name, shape)
            cells.append(spread(metric, found, count=len(found) < len(runs)))
        cells.append(f"{runs[0]['parameters']:,}")
    return header, body


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
    mean = statistics.mean(values)
    half = interval(values)
    places = metric.digits
    text = f"{mean:.{places}f}"
    if out_of_range(metric, mean, half):
        text += f" [{min(values):.{places}f}, {max(values):.{places}f}]"
    elif len(values) > 1:
        text += f" ± {half:.{places}f}"
    if count:
        text += f" ({len(values)})"
    return text
