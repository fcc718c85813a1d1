"""Finished runs, loaded with what their training measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from lion.config import ConfigError
from lion.files import read_json
from lion.recipe import Recipe
from lion.recipe_files import SUMMARY, find_run
from lion.runs import ENVIRONMENT, build_on_meta, count_parameters, read_run
from lion.samples.base import Info
from lion.tasks import Task
from lion.tasks.metrics import Metric, MetricOfMeans
from lion.trainer.optim import to_seconds
from tools.compose import open_data, resolve_run


class Run(NamedTuple):
    """A finished run.

    Attributes:
        folder: The folder of the run.
        recipe: The recipe of the run.
        task: The task of the run.
        metric: The metric that chose the checkpoint `best`.
        curve: (epoch, value) of every validation; (step, value) if the recipe does not count in epochs.
        beside: Other metrics, with their values at the step where `metric` was best.
        more: All metrics on further held-out sets at that step, by the name of the set.
        test: The test metric, if it was evaluated.
        seen: Number of `task.speed_unit`s in training, without padding; None if the data are missing.
        speed: `task.speed_unit`s per second; None if the data are missing or the log has no rates.
        parameters: Number of parameters of the model.
        environment: Metadata of the machine, the software versions and the command.
        info: Metadata of the data.
        remark: A warning about the run (e.g. that it is stuck at chance), if any.
        data: The fingerprint of the data, if they have one.
    """

    folder: Path
    recipe: Recipe
    task: Task
    metric: Metric
    curve: list[tuple[float, float]]
    beside: list[tuple[Metric, float]]
    more: dict[str, dict[str, float]]
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
    """Load a finished run.

    Raises:
        ConfigError: There is no such run, the run is not finished, or its metrics cannot be read.
    """
    folder = find_run(name)
    recipe = resolve_run(folder)
    if not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder}: no metrics.jsonl: it is not trained yet, or it is a converted checkpoint")
    try:
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [line for line in lines if line["kind"] == "train"]
        held_out = [line for line in lines if line["kind"] == "val"]
        if not held_out:
            raise ConfigError(f"{folder}: not validated yet, train it first")
        if not finished(recipe, held_out[-1]):
            raise ConfigError(f"{folder}: stopped at step {held_out[-1]['step']:,}, finish its training first")
        task, checkpoint = read_run(folder, recipe, "best")
        metric, *others = task.metrics
        unit = "epoch"
        if recipe.trainer.epochs is None:
            unit = "step"
        scored = [line for line in held_out if line[metric.name] is not None]
        if not scored:
            raise ConfigError(f"{folder}: no validation has a finite {metric.name}")
        curve = [(line[unit], line[metric.name]) for line in scored]
        top = metric.best(value for _, value in curve)
        best = next(line for line in reversed(held_out) if line[metric.name] == top)  # of equal values, the latest
        beside = [(other, best[other.name]) for other in others if not isinstance(other, MetricOfMeans)]
        more = {}
        for line in lines:
            kind = line["kind"]
            if kind.startswith("val_") and not kind.endswith("_ema") and line["step"] == best["step"]:
                more[kind.removeprefix("val_")] = {each.name: line[each.name] for each in task.metrics}
        environment = dict(read_json(folder / ENVIRONMENT))
        test, remark = read_summary(folder / SUMMARY)
        if remark is None:
            remark = task.remark(best)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder}: its metrics cannot be read ({error})") from None
    parameters = count_parameters(build_on_meta(task, recipe.model))
    key = f"{task.unit}_per_second"
    rates = [line[key] for line in trained if key in line]
    of_sample = units_per_sample(recipe, task)
    seen = speed = None
    if of_sample is not None:
        seen = of_sample * samples_of(recipe, held_out[-1])
        if rates:
            speed = of_sample * statistics.median(rates)
    return Run(
        folder=folder,
        recipe=recipe,
        task=task,
        metric=metric,
        curve=curve,
        beside=beside,
        more=more,
        test=test,
        seen=seen,
        speed=speed,
        parameters=parameters,
        environment=environment,
        info=task.info,
        remark=remark or None,
        data=checkpoint.get("data"),
    )


def read_summary(path: Path) -> tuple[float | None, str | None]:
    """Return the test metric and the remark of the evaluation of a run: None without one, "" without a remark."""
    if not path.exists():
        return None, None
    summary = read_json(path)
    test = None
    if summary["split"] == "test" and summary["value"] is not None:
        test = float(summary["value"])
    if "remark" not in summary:
        return test, None
    return test, summary["remark"] or ""


def finished(recipe: Recipe, last: dict[str, Any]) -> bool:
    """Return whether the last validation happened at the last step of the training."""
    c = recipe.trainer
    step = last["step"]
    if c.time is not None:
        return last["seconds"] >= to_seconds(c.time)
    if c.steps is not None:
        return step >= c.steps
    return step >= round(c.epochs * step / last["epoch"])


def samples_of(recipe: Recipe, last: dict[str, Any]) -> int:
    """Return the number of samples that a run was trained on until its last validation."""
    c = recipe.trainer
    if c.batch_ramp is None:
        return last["step"] * c.batch_size
    return last["samples"]


def units_per_sample(recipe: Recipe, task: Task) -> float | None:
    """Return the average number of `task.speed_unit`s per training sample, without padding; None without the data."""
    try:
        return task.pieces * open_data(recipe).filled()
    except ConfigError:
        return None
