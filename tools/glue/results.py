"""Results of the fine-tuning: the score of each task over its seeds, and the scores of the papers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.text.glue import TASKS
from lion.config import ConfigError, flatten, to_dict
from lion.recipe import Recipe, free_keys
from lion.recipe_files import SUMMARY
from lion.tasks.sequence_classification import METRICS
from tools.compose import resolve, resolve_run
from tools.glue.plan import Table as TaskSettings
from tools.store import Row, Store, grouped
from tools.tables import Cell, Table, fill, hundredths, pipes, spread, table

# (split, metric) pairs of which the score of a task is the mean, if they were measured; the score of any other task is
# its first metric
ENTERS = {
    "mnli": (("val", "accuracy"), ("val_mismatched", "accuracy")),
    "qqp": (("val", "accuracy"), ("val", "f1")),
}
SAME_RATE = "same rate for all"
TEXT = ("task", "metric", "also", "start", "size", "model", "recipe")  # columns of text
SETTINGS = ("data.", "task.", "optim.", "schedule.")
SETTINGS += ("trainer.batch_size", "trainer.epochs", "trainer.steps", "trainer.clip_grad", "trainer.ema")


def collect(folder: Path) -> list[Row]:
    """Read all finished runs of a folder, in the order of the tasks."""
    rows = [read(path.parent) for path in folder.glob(f"*_seed*/{SUMMARY}")]
    return sorted(rows, key=place)


def place(row: Row) -> tuple:
    return list(TASKS).index(row["task"]), -row["lr"], row["seed"]


def read(run: Path) -> Row:
    """Read a finished run: its score after the last step, its best score, and its settings.

    Raises:
        ConfigError: The metrics of the run cannot be read.
    """
    recipe = resolve_run(run)
    try:
        steps: dict[int, dict[str, float]] = {}
        epochs = {}
        for text in (run / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "train":
                continue
            values = steps.setdefault(line["step"], {})
            for name in (*recipe.task.metrics, "loss"):
                values[f"{line['kind']} {name}"] = line[name]
            if line["kind"] == "val":
                epochs[line["step"]] = line["epoch"]
        entering = enters(recipe.data.task, recipe.task.metrics)
        scores = {step: score(values, entering) for step, values in steps.items()}
        last = max(scores)
        samples = round(last / epochs[last]) * recipe.trainer.batch_size
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{run}: its metrics cannot be read ({type(error).__name__}: {error})") from None
    return {
        "task": recipe.data.task,
        "seed": recipe.seed,
        "lr": recipe.optim.lr,
        "score": scores[last],
        "best": max(scores.values()),
        "steps": last,
        "settings": settings_of(recipe),
        "start": str(recipe.init_from),
        "samples": samples,
        "missing": [name for name in entering if name not in steps[last]],
        "metrics": steps[last],
    }


def score(values: dict[str, float], entering: Sequence[str]) -> float:
    """Return the score of an evaluation, the mean of those metrics that were measured."""
    return 100 * statistics.mean(values[name] for name in entering if name in values)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that affect a score, except those of the model."""
    free = free_keys(recipe)
    found = {}
    for key, value in flatten(to_dict(recipe)).items():
        if key.startswith(SETTINGS) and key not in free:
            found[key] = value
    return found


def enters(task: str, metrics: Sequence[str]) -> list[str]:
    """Return the metrics of a task that form its score, as "SPLIT METRIC"."""
    known = [f"{split} {metric}" for split, metric in ENTERS.get(task, ()) if metric in metrics]
    return known or [f"val {metrics[0]}"]


def summarise(folder: Path, pretrained: Recipe, name: str, asked: TaskSettings) -> str:
    """Write `results.json` and `results.md` for the finished runs of a folder, and return the text to print.

    Args:
        folder: Folder of the runs.
        pretrained: Recipe of the pre-training run.
        name: Name of the folder.
        asked: The recipe for GLUE that the runs were meant to follow.
    """
    every = collect(folder)
    if not every:
        return "no task is finished yet"
    store = Store(folder / "results.json", rows=("task", "seed", "lr"))
    for row in every:
        store.add(row)
    rows = every
    if asked.rates:
        rows = best_rate(every)
    average = mean_of_tasks(rows, asked.average)
    notes = remarks(rows, asked) + changes(rows, asked)
    who = f"{pretrained.run.name}: {pretrained.model.label()}, {pretrained.model.shape()}; {name}"
    header, body = task_table(rows, average)
    text = ["# GLUE", who, pipes(header, body, text=TEXT), *notes]
    printed = [who, table(header, body), "\n".join(notes)]
    more = {}
    if asked.rates:
        more["## Learning rates"] = rate_table(every, asked)
    more["## The papers' scores, and their averages over all eight tasks"] = paper_table()
    for heading, (header, body) in more.items():
        text += [heading, pipes(header, body, text=TEXT)]
        printed.append(table(header, body))
    store.save("\n\n".join(text) + "\n", average=average, average_over=asked.average, recipe=name)
    return "\n\n".join([*printed, store.files()])


def best_rate(rows: list[Row]) -> list[Row]:
    """Select the runs of each task with the learning rate that has the best mean score over its seeds.

    While some seeds are missing, only the rates with the most seeds are compared.
    """
    kept: list[Row] = []
    for own in grouped(rows, ("task",)):
        kept += max(grouped(own, ("lr",)), key=by_score)
    return kept


def by_score(rows: list[Row]) -> tuple[int, float]:
    """Return the number of runs and their mean score."""
    return len(rows), statistics.mean(row["score"] for row in rows)


def rate_table(rows: list[Row], asked: TaskSettings) -> Table:
    """Return the table of all tasks and rates, with the average of each rate that all tasks have."""
    tasks = list(scores_of(rows))
    columns: dict[str, Cell] = {"task": lambda line: line}
    for own in sorted(grouped(rows, ("lr",)), key=rate_of, reverse=True):
        found = {task: spread(scores, hundredths) for task, scores in scores_of(own).items()}
        if len(found) == len(tasks):
            found[SAME_RATE] = hundredths(mean_of_tasks(own, asked.average))
        columns[f"{rate_of(own):g}"] = found.get
    return fill(columns, [*tasks, SAME_RATE])


def rate_of(rows: list[Row]) -> float:
    """Return the learning rate of the runs of one rate."""
    return rows[0]["lr"]


def task_table(rows: list[Row], average: float) -> Table:
    """Return the table of results: a row for each task, and the average."""
    header = ["task", "metric", "score", "best", "n", "also", "start", "samples an epoch", "of"]
    body = []
    for own in grouped(rows, ("task",)):
        first = own[0]
        entering = [name for name in enters_of(first) if name not in first["missing"]]
        starts = dict.fromkeys(Path(row["start"]).name for row in own)
        cells = [
            first["task"],
            " + ".join(map(words, entering)),
            spread([row["score"] for row in own], hundredths),
            spread([row["best"] for row in own], hundredths),
            str(len(own)),
            beside(own, entering),
            ", ".join(starts),
            f"{first['samples']:,}",
            f"{TASKS[first['task']].samples:,}",
        ]
        body.append(cells)
    last = [""] * len(header)
    last[0] = "average" if len(body) == len(TASKS) else f"average of {len(body)} tasks"
    last[2] = hundredths(average)
    return header, [*body, last]


def beside(rows: list[Row], entering: Sequence[str]) -> str:
    """Return the metrics of the runs of a task that do not enter its score."""
    found = []
    for name in rows[0]["metrics"]:
        if name not in entering and not name.endswith(" loss"):
            values = [100 * row["metrics"][name] for row in rows]
            found.append(f"{words(name)} {spread(values, hundredths)}")
    return ", ".join(found) or "-"


def enters_of(row: Row) -> list[str]:
    """Return the keys of the metrics of a row that form its score."""
    return enters(row["task"], [key.removeprefix("val ") for key in row["metrics"] if key.startswith("val ")])


def words(key: str) -> str:
    """Return the title of a metric: `val_mismatched accuracy` is "mismatched accuracy"."""
    split, _, metric = key.partition(" ")
    return f"{split.removeprefix('val').removeprefix('_')} {METRICS[metric].title}".strip()


def scores_of(rows: list[Row]) -> dict[str, list[float]]:
    """Return the scores of runs by task."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["task"], []).append(row["score"])
    return found


def mean_of_tasks(rows: list[Row], average: str) -> float:
    """Average the mean scores of the tasks; a task counts once, or (`average` "numbers") once per number."""
    means = map(statistics.mean, scores_of(rows).values())
    return statistics.fmean(means, counts_of(rows, average).values())


def counts_of(rows: list[Row], average: str) -> dict[str, int]:
    """Return how often each task counts in the average: once, or (`average` "numbers") once per measured number."""
    counts = {}
    for row in rows:
        counts[row["task"]] = 1
        if average == "numbers":
            counts[row["task"]] = len(enters_of(row)) - len(row["missing"])
    return counts


def remarks(rows: list[Row], asked: TaskSettings) -> list[str]:
    """Return notes that a reader needs in order to understand the scores."""
    there = {row["task"] for row in rows}
    chosen = "as published; nothing is selected on these sets"
    if asked.rates:
        chosen = "the learning rate of each task is selected on the same sets"
    notes = [
        f"Scores times 100, on the validation sets, after the last step ({chosen}); `best` is the best evaluation. "
        "Mean ± standard deviation over n seeds."
    ]
    if counts_of(rows, asked.average).get("mnli") == 2:
        notes.append("The average is over numbers: the two accuracies of MNLI count as two.")
    missing = [task for task in TASKS if task not in there]
    if missing:
        notes.append(f"Not run: {', '.join(missing)}; the average is not the GLUE average.")
    short = [row["task"] for row in rows if row["samples"] < 0.9 * TASKS[row["task"]].samples]
    if short:
        notes.append(f"Trained on a part of the training set: {', '.join(dict.fromkeys(short))}.")
    for row in rows:
        for name in row["missing"]:
            notes.append(
                f"{row['task']}: no {words(name)}, because its data are missing; the score is the mean of the rest."
            )
    return list(dict.fromkeys(notes))


def changes(rows: list[Row], asked: TaskSettings) -> list[str]:
    """Return notes on settings of runs that differ from the recipe for GLUE."""
    notes = []
    for row in rows:
        task, own = row["task"], row["settings"]
        cell = asked.tasks.get(task)
        if cell is None:
            notes.append(f"{task}: not in this recipe; its runs are from earlier calls.")
            continue
        named = settings_of(resolve(f"glue_{task}", asked.own(task)))
        named["optim.lr"] = row["lr"] if row["lr"] in asked.rates else cell.lr
        named["optim.weight_decay"] = cell.torch_decay(own["optim.lr"])
        other = [f"{key} {own[key]} in place of {value}" for key, value in named.items() if own[key] != value]
        if other:
            notes.append(f"{task}: {', '.join(other)}.")
    return list(dict.fromkeys(notes))


def paper_table() -> Table:
    """Return the table of the papers' scores."""
    held: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
    tasks = ["mnli", "rte", "qqp", "qnli", "sst2", "stsb", "mrpc", "cola"]
    rows = []
    for row in held:
        scores = row.get("tasks", ["-"] * len(tasks))
        rows.append([row["size"], row["model"], row["recipe"], *scores, row["average"]])
    return ["size", "model", "recipe", *tasks, "the paper"], rows
