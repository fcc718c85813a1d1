"""Results of the fine-tuning: the score of each task over its seeds, and the scores of the papers."""

from __future__ import annotations

import itertools
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
from tools.glue.plan import Table
from tools.store import Row, Store
from tools.tables import pipes, spread, table

# (split, metric) pairs of which the score of a task is the mean, if they were measured; the score of any other task is
# its first metric
ENTERS = {
    "mnli": (("val", "accuracy"), ("val_mismatched", "accuracy")),
    "qqp": (("val", "accuracy"), ("val", "f1")),
}
SETTINGS = ("data.", "task.", "optim.", "schedule.")
SETTINGS += ("trainer.batch_size", "trainer.epochs", "trainer.steps", "trainer.clip_grad", "trainer.ema")
HEADER = ["task", "metric", "score", "best", "n", "also", "start", "samples an epoch", "of"]


def collect(folder: Path) -> list[Row]:
    """Read all finished runs of a folder, in the order of the tasks."""
    runs = [path.parent for path in folder.glob(f"*_seed*/{SUMMARY}")]
    rows = [read(run) for run in runs]
    return sorted(rows, key=lambda row: ([*TASKS].index(row["task"]), -row["lr"], row["seed"]))


def read(run: Path) -> Row:
    """Read a finished run: its score after the last step, its best score, and its settings.

    Raises:
        ConfigError: The metrics of the run cannot be read.
    """
    recipe = resolve_run(run)
    try:
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        steps: dict[int, dict[str, float]] = {}
        for line in (x for x in lines if x["kind"] != "train"):
            values = {f"{line['kind']} {name}": line[name] for name in (*recipe.task.metrics, "loss")}
            steps.setdefault(line["step"], {}).update(values)
        entering = enters(recipe.data.task, recipe.task.metrics)
        scores = {step: 100 * statistics.mean(v[e] for e in entering if e in v) for step, v in steps.items()}
        last = max(scores)
        end = next(line for line in lines if line["kind"] == "val" and line["step"] == last)
        samples = round(end["step"] / end["epoch"]) * recipe.trainer.batch_size
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
        "missing": [e for e in entering if e not in steps[last]],
        "metrics": steps[last],
    }


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that affect a score, except those of the model."""
    free = free_keys(recipe)
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k.startswith(SETTINGS) and k not in free}


def enters(task: str, metrics: Sequence[str]) -> list[str]:
    """Return the metrics of a task that form its score, as "SPLIT METRIC"."""
    known = [f"{split} {metric}" for split, metric in ENTERS.get(task, ()) if metric in metrics]
    return known or [f"val {metrics[0]}"]


def summarise(folder: Path, pretrained: Recipe, name: str, asked: Table) -> str:
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
    rows = best_rate(every) if asked.rates else every
    average, notes = mean_of_tasks(rows, asked.average), [*remarks(rows, asked), *changes(rows, asked)]
    body = task_rows(rows)
    label = "average" if len(body) == len(TASKS) else f"average of {len(body)} tasks"
    body.append([label, "", f"{average:.2f}", *[""] * (len(HEADER) - 3)])
    paper = paper_rows()
    who = f"{pretrained.run.name}: {pretrained.model.label()}, {pretrained.model.shape()}; {name}"
    text = ["# GLUE", who, pipes(HEADER, body, text=("task", "metric", "also", "start")), *notes]
    grid = rate_rows(every, asked) if asked.rates else None
    if grid is not None:
        text += ["## Learning rates", pipes(*grid, text=("task",))]
    text += [
        "## The papers' scores, and their averages over all eight tasks",
        pipes(*paper, text=("size", "model", "recipe")),
    ]
    store.save("\n\n".join(text) + "\n", average=average, average_over=asked.average, recipe=name)
    tables = [table(HEADER, body), "\n".join(notes), *([] if grid is None else [table(*grid)]), table(*paper)]
    return "\n\n".join([who, *tables, store.files()])


def best_rate(rows: list[Row]) -> list[Row]:
    """Select the runs of each task with the learning rate that has the best mean score over its seeds.

    While some seeds are missing, only the rates with the most seeds are compared.
    """
    kept = []
    for _, own in itertools.groupby(rows, lambda row: row["task"]):
        by_rate: dict[float, list[Row]] = {}
        for row in own:
            by_rate.setdefault(row["lr"], []).append(row)
        kept += max(by_rate.values(), key=lambda rows: (len(rows), statistics.mean(row["score"] for row in rows)))
    return kept


def rate_rows(rows: list[Row], asked: Table) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of all tasks and rates, with the average of each rate that all tasks have."""
    rates = sorted({row["lr"] for row in rows}, reverse=True)
    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    columns = [[row for row in rows if row["lr"] == rate] for rate in rates]
    body = [[t, *(spread([r["score"] for r in own if r["task"] == t], hundredths) for own in columns)] for t in tasks]
    whole = [len({row["task"] for row in own}) == len(tasks) for own in columns]
    means = (hundredths(mean_of_tasks(own, asked.average)) if all_ else "-" for own, all_ in zip(columns, whole))
    return ["task", *(f"{rate:g}" for rate in rates)], [*body, ["same rate for all", *means]]


def task_rows(rows: list[Row]) -> list[list[str]]:
    """Return the rows of the table of results, one per task."""
    body = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        first = own[0]
        entering = [e for e in enters_of(first) if e not in first["missing"]]
        beside = [name for name in first["metrics"] if name not in entering and not name.endswith(" loss")]
        body.append(
            [
                task,
                " + ".join(map(words, entering)),
                spread([row["score"] for row in own], hundredths),
                spread([row["best"] for row in own], hundredths),
                str(len(own)),
                ", ".join(f"{words(n)} {spread([100 * r['metrics'][n] for r in own], hundredths)}" for n in beside)
                or "-",
                ", ".join(dict.fromkeys(Path(row["start"]).name for row in own)),
                f"{first['samples']:,}",
                f"{TASKS[task].samples:,}",
            ]
        )
    return body


def enters_of(row: Row) -> list[str]:
    """Return the keys of the metrics of a row that form its score."""
    return enters(row["task"], [key.removeprefix("val ") for key in row["metrics"] if key.startswith("val ")])


def words(key: str) -> str:
    """Return the title of a metric: `val_mismatched accuracy` is "mismatched accuracy"."""
    split, _, metric = key.partition(" ")
    return f"{split.removeprefix('val').removeprefix('_')} {METRICS[metric].title}".strip()


def hundredths(value: float) -> str:
    return f"{value:.2f}"


def mean_of_tasks(rows: list[Row], average: str) -> float:
    """Average the mean scores of the tasks; a task counts once, or (`average` "numbers") once per number."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["score"])
    return statistics.fmean(map(statistics.mean, by_task.values()), counts_of(rows, average).values())


def counts_of(rows: list[Row], average: str) -> dict[str, int]:
    """Return how often each task counts in the average: once, or (`average` "numbers") once per measured number."""
    numbers = average == "numbers"
    return {row["task"]: len(enters_of(row)) - len(row["missing"]) if numbers else 1 for row in rows}


def remarks(rows: list[Row], asked: Table) -> list[str]:
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
    if missing := [task for task in TASKS if task not in there]:
        notes.append(f"Not run: {', '.join(missing)}; the average is not the GLUE average.")
    if short := [row["task"] for row in rows if row["samples"] < 0.9 * TASKS[row["task"]].samples]:
        notes.append(f"Trained on a part of the training set: {', '.join(dict.fromkeys(short))}.")
    for row in rows:
        for name in row["missing"]:
            notes.append(
                f"{row['task']}: no {words(name)}, because its data are missing; the score is the mean of the rest."
            )
    return list(dict.fromkeys(notes))


def changes(rows: list[Row], asked: Table) -> list[str]:
    """Return notes on settings of runs that differ from the recipe for GLUE."""
    notes = []
    for row in rows:
        task, own = row["task"], row["settings"]
        if (cell := asked.tasks.get(task)) is None:
            notes.append(f"{task}: not in this recipe; its runs are from earlier calls.")
            continue
        named = settings_of(resolve(f"glue_{task}", asked.own(task)))
        named["optim.lr"] = row["lr"] if row["lr"] in asked.rates else cell.lr
        named["optim.weight_decay"] = cell.torch_decay(own["optim.lr"])
        if other := [f"{key} {own[key]} in place of {value}" for key, value in named.items() if own[key] != value]:
            notes.append(f"{row['task']}: {', '.join(other)}.")
    return list(dict.fromkeys(notes))


def paper_rows() -> tuple[list[str], list[list[str]]]:
    held: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
    tasks = ("mnli", "rte", "qqp", "qnli", "sst2", "stsb", "mrpc", "cola")
    rows = [
        [row["size"], row["model"], row["recipe"], *row.get("tasks", ["-"] * len(tasks)), row["average"]]
        for row in held
    ]
    return ["size", "model", "recipe", *tasks, "the paper"], rows
