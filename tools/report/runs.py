"""Finished runs, and those of one recipe as one row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lion.config import ConfigError, flatten, to_dict
from lion.recipe import Recipe, free_keys
from lion.runs import ENVIRONMENT, SUMMARY, build_on_meta, count_parameters, find_run, read_run
from lion.tasks import Task
from lion.tasks.data import Info
from lion.tasks.metrics import Metric, OfMeans
from lion.trainer.schedule import to_seconds
from tools.compose import open_data, resolve_run
from tools.report.paper import Paper

SHARED = ("data.", "task.", "optim.", "schedule.")
BUDGET = tuple(f"trainer.{key}" for key in ("epochs", "steps", "time", "batch_size", "batch_ramp", "batch_start"))


class Run(NamedTuple):
    """A finished run.

    Attributes:
        metric: What `best` was chosen by.
        curve: (epoch, value), or (step, value) where the recipe does not count in epochs, of every validation.
        beside: Other metrics, with their values where `metric` was best.
        test: The test metric, if it was evaluated.
        seen: `task.speed_unit`s that it was trained on, without padding; None where the data, which know, are gone.
        speed: The same of a second; None also where it was not written.
        remark: What must be told of it (that it is stuck at chance), if anything.
        data: The fingerprint of its data, where they have one.
    """

    folder: Path
    recipe: Recipe
    task: Task
    metric: Metric
    curve: list[tuple[float, float]]
    beside: list[tuple[Metric, float]]
    test: float | None
    seen: float | None
    speed: float | None
    parameters: int
    environment: dict[str, Any]
    info: Info
    remark: str | None
    data: str | None

    @property
    def val(self) -> float:
        return self.metric.best(value for _, value in self.curve)


def load(name: str) -> Run:
    """Raises ConfigError: no run there, or one that is not finished."""
    folder = find_run(name)
    recipe = resolve_run(folder)
    try:
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        trained, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "val"))
        if not held_out:
            raise ConfigError(f"{folder}: not validated yet, train it first")
        if not finished(recipe, held_out[-1]):
            raise ConfigError(f"{folder}: stopped at step {held_out[-1]['step']:,}, train it to its end first")
        _, task, checkpoint = read_run(folder, "best")
        metric, *others = task.metrics
        unit = "step" if recipe.trainer.epochs is None else "epoch"
        curve = [(line[unit], line[metric.name]) for line in held_out]
        top = metric.best(value for _, value in curve)
        best = next(line for line in reversed(held_out) if line[metric.name] == top)  # of equals, the longer trained
        beside = [(m, best[m.name]) for m in others if not isinstance(m, OfMeans)]
        environment = json.loads((folder / ENVIRONMENT).read_text())
        summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).exists() else None
        test = summary["value"] if summary and summary["split"] == "test" else None
        remark = summary["remark"] if summary and "remark" in summary else task.remark(best)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder}: its metrics cannot be read ({error})") from None
    parameters = count_parameters(build_on_meta(task, recipe.model))
    rates = [line[key] for line in trained if (key := f"{task.unit}_per_second") in line]
    of_sample = pieces_of(recipe, task)
    seen = of_sample and of_sample * samples_of(recipe, held_out[-1])
    speed = of_sample and of_sample * statistics.median(rates) if rates else None
    measured = (metric, curve, beside, test, seen, speed, parameters)
    return Run(folder, recipe, task, *measured, environment, task.info, remark, checkpoint.get("data"))


def finished(recipe: Recipe, last: dict[str, Any]) -> bool:
    """Whether the last validation was that of the last step."""
    c, step = recipe.trainer, last["step"]
    if c.time is not None:
        return last["seconds"] >= to_seconds(c.time)
    return step >= (c.steps if c.steps is not None else round(c.epochs * step / last["epoch"]))


def samples_of(recipe: Recipe, last: dict[str, Any]) -> int:
    """That a run has been trained on by its last validation."""
    c = recipe.trainer
    return last["step"] * c.batch_size if c.batch_ramp is None else last["samples"]


def pieces_of(recipe: Recipe, task: Task) -> float | None:
    """Of a training sample, on average, without padding; None where its data, which know, are not here."""
    try:
        return task.pieces * open_data(recipe).filled()
    except ConfigError:
        return None


def group(runs: list[Run], paper: Paper) -> dict[str, list[Run]]:
    """Runs by what they are called, which differ in their seeds only; rows in the paper's order.

    Raises:
        ConfigError: Data or budget differ, or two runs are the same.
    """
    found: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        tasks = [one.recipe.task.name for one in (run, runs[0])]
        if tasks[0] != tasks[1]:
            raise ConfigError(f"{run.folder}: of task {tasks[0]!r}, {runs[0].folder} of {tasks[1]!r}; use --section")
        run.info.check_same(f"{run.folder}: not comparable, {runs[0].folder}", runs[0].info.to_dict())
        name, own = called(run.recipe), settings_of(run.recipe)
        first = next(iter(settings.values()), own)
        trained_on = {f"data.{key}" for key in run.recipe.data.of_training}
        for key in own:
            if (key.startswith(SHARED) or key in BUDGET) and key not in trained_on and own[key] != first.get(key):
                raise ConfigError(f"{run.folder}: not comparable with {runs[0].folder}, they differ in {key}")
        if settings.setdefault(name, own) != own:
            odd = next(k for k in own if own[k] != settings[name].get(k))
            raise ConfigError(f"{run.folder}: called {name!r} as {found[name][0].folder}, but differs in {odd}")
        if any(other.recipe.seed == run.recipe.seed for other in found.get(name, ())):
            raise ConfigError(f"{run.folder}: a second run of {name!r} with seed {run.recipe.seed}")
        found.setdefault(name, []).append(run)
    return {
        name: sorted(found[name], key=lambda r: r.recipe.seed)
        for name in sorted(found, key=lambda name: place(name, paper.order))
    }


def called(recipe: Recipe) -> str:
    """By model, by the data of training where all are judged by the same, and by whether it started from a run."""
    started = "" if recipe.init_from is None else "pre-trained"
    return " ".join(filter(None, (recipe.model.label(), recipe.data.label(), started)))


def place(name: str, order: Sequence[str]) -> tuple[int, bool, str]:
    """Where a row stands; one that the paper does not have comes after the others of its mixer."""
    if name in order:
        return order.index(name), False, name
    kin = [i for i, row in enumerate(order) if row.split()[0] == name.split()[0]]
    return max(kin, default=len(order)), True, name


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All that a row's runs share."""
    left_out = free_keys(recipe) | {"seed", "init_from", "about.row", "about.expected", "about.hardware"}
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k not in left_out}
