"""What came out: the score of each task over its seeds, beside the paper's averages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from data.text.glue import TASKS
from lion.config import ConfigError, flatten, to_dict
from lion.recipe import Recipe, free_keys
from lion.runs import SUMMARY
from lion.tasks.sequence_classification import METRICS
from tools.cli import table
from tools.compose import RECIPES, resolve, resolve_run
from tools.glue.plan import Cell
from tools.store import Row, Store, pipes, spread

# what enters the average, as (split, metric): a task's score is their mean; of the others it is their first metric
ENTERS = {
    "mnli": (("val", "accuracy"), ("val_mismatched", "accuracy")),
    "qqp": (("val", "accuracy"), ("val", "f1")),
}
SETTINGS = ("data.", "task.", "optim.", "schedule.")
SETTINGS += ("trainer.batch_size", "trainer.epochs", "trainer.steps", "trainer.clip_grad", "trainer.ema")
HEADER = ["task", "metric", "score", "best", "n", "also", "start", "samples an epoch", "of"]


def collect(folder: Path) -> list[Row]:
    """All finished runs of a folder, in the order of the tasks."""
    runs = [path.parent for path in folder.glob(f"*_seed*/{SUMMARY}")]
    rows = [read(run) for run in runs]
    return sorted(rows, key=lambda row: ([*TASKS].index(row["task"]), row["seed"]))


def read(run: Path) -> Row:
    """A finished run: its scores after the last step, and at best.

    Raises:
        ConfigError: Its metrics cannot be read.
    """
    recipe = resolve_run(run)
    try:
        lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        steps: dict[int, dict[str, float]] = {}
        for line in (x for x in lines if x["kind"] != "train"):
            values = {f"{line['kind']} {name}": line[name] for name in (*recipe.task.metrics, "loss")}
            steps.setdefault(line["step"], {}).update(values)
        entering = [f"{split} {metric}" for split, metric in enters(recipe)]
        scores = {step: 100 * statistics.mean(v[e] for e in entering if e in v) for step, v in steps.items()}
        last = max(scores)
        end = next(line for line in lines if line["kind"] == "val" and line["step"] == last)
        samples = round(end["step"] / end["epoch"]) * recipe.trainer.batch_size
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{run}: its metrics cannot be read ({type(error).__name__}: {error})") from None
    return {
        "task": recipe.data.task,
        "seed": recipe.seed,
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
    """What decides a score, beside the model."""
    free = free_keys(recipe)
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k.startswith(SETTINGS) and k not in free}


def enters(recipe: Recipe) -> tuple[tuple[str, str], ...]:
    return ENTERS.get(recipe.data.task, (("val", recipe.task.metrics[0]),))


def summarise(folder: Path, pretrained: Recipe, recipe: str, length: int, cells: Mapping[str, Cell]) -> str:
    """Write `results.json` and `results.md` of a folder's finished runs; returns what to print.

    Args:
        folder: Of the runs.
        pretrained: What they started from, in the end.
        recipe, length, cells: The row of Table 8.
    """
    rows = collect(folder)
    if not rows:
        return "no task is finished yet"
    store = Store(folder / "results.json", rows=("task", "seed"))
    for row in rows:
        store.add(row)
    body, average, notes = task_rows(rows), mean_of_tasks(rows), [*remarks(rows), *changes(rows, length, cells)]
    label = "average" if len(body) == len(TASKS) else f"average of {len(body)} tasks"
    body.append([label, "", f"{average:.2f}", *[""] * (len(HEADER) - 3)])
    paper = paper_rows()
    who = f"{pretrained.run.name}: {pretrained.model.label()}, {pretrained.model.shape()}; {recipe}"
    text = ["# GLUE", who, pipes(HEADER, body, text=("task", "metric", "also", "start")), *notes]
    text += ["## The paper's averages over all eight tasks", pipes(*paper, text=("size", "model", "recipe"))]
    store.save("\n\n".join(text) + "\n", average=average, recipe=recipe)
    return "\n\n".join([who, table(HEADER, body), "\n".join(notes), table(*paper), store.files()])


def task_rows(rows: list[Row]) -> list[list[str]]:
    """A line a task."""
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
    """The keys of a row's metrics that enter its score."""
    known = ENTERS.get(row["task"]) or (("val", next(iter(row["metrics"])).partition(" ")[2]),)
    return [f"{split} {metric}" for split, metric in known]


def words(key: str) -> str:
    """`val_mismatched accuracy` as it is said: mismatched accuracy."""
    split, _, metric = key.partition(" ")
    return f"{split.removeprefix('val').removeprefix('_')} {METRICS[metric].title}".strip()


def hundredths(value: float) -> str:
    return f"{value:.2f}"


def mean_of_tasks(rows: list[Row]) -> float:
    """Each task's mean over its seeds counts once."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["score"])
    return statistics.mean(map(statistics.mean, by_task.values()))


def remarks(rows: list[Row]) -> list[str]:
    """What a reader must know of these numbers."""
    there = {row["task"] for row in rows}
    notes = [
        "Scores times 100, on the validation sets, after the last step (as published: nothing is chosen on them); "
        "`best` is of the best evaluation. Mean ± standard deviation over n seeds."
    ]
    if missing := [task for task in TASKS if task not in there]:
        notes.append(f"Not run: {', '.join(missing)}; the average is not that of GLUE.")
    if short := [row["task"] for row in rows if row["samples"] < 0.9 * TASKS[row["task"]].samples]:
        notes.append(f"Trained on a part of the training set: {', '.join(dict.fromkeys(short))}.")
    for row in rows:
        for name in row["missing"]:
            notes.append(f"{row['task']}: no {words(name)}, its data are not there; the score is of the rest.")
    return list(dict.fromkeys(notes))


def changes(rows: list[Row], length: int, cells: Mapping[str, Cell]) -> list[str]:
    """Where runs have other settings than the table and what all of its rows share."""
    notes = []
    for row in rows:
        cell, own = cells[row["task"]], row["settings"]
        named = settings_of(resolve(RECIPES / f"glue_{row['task']}.yaml"))
        named |= {"optim.lr": cell.lr, "optim.weight_decay": cell.torch_decay(own["optim.lr"])}
        named |= {"trainer.epochs": cell.epochs, "data.length": length}
        if other := [f"{key} {own[key]} in place of {value}" for key, value in named.items() if own[key] != value]:
            notes.append(f"{row['task']}: {', '.join(other)}.")
    return list(dict.fromkeys(notes))


def paper_rows() -> tuple[list[str], list[list[str]]]:
    held: list[dict[str, Any]] = yaml.safe_load((RECIPES / "paper" / "glue.yaml").read_text(encoding="utf-8"))
    rows = [[row["size"], row["model"], row["recipe"], f"{row['average']:.2f}"] for row in held]
    return ["size", "model", "recipe", "the paper"], rows
