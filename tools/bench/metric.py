"""The metric of a run on some of its held-out samples, at any size of the inputs."""

from __future__ import annotations

import dataclasses

from lion.config import ConfigError
from lion.models.base import Model
from lion.runs import LoadedRun
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.tasks.base import Task
from lion.trainer.evaluate import evaluate
from lion.trainer.loader import Loading, eval_batches
from lion.trainer.runtime import start_runtime
from tools.compose import build_data, resolve_run
from tools.image_sources import drawn
from tools.probe import pick_device


def held_out(loaded: LoadedRun, size: int) -> tuple[str, Splits]:
    """Return the name of the split to evaluate ("test", or "val" without a test split) and the run's data at this size.

    Raises:
        ConfigError: The data exist at one size only, or differ from the data of the run's checkpoint.
    """
    recipe = resolve_run(loaded.folder)
    try:
        recipe = dataclasses.replace(recipe, data=recipe.data.resized(size))
    except ConfigError as error:
        raise ConfigError(f"--evaluate: {error}") from None
    splits = build_data(recipe, loaded.folder)
    splits.info.check_same(f"{loaded.folder}: its checkpoint", loaded.task.info.resized(size).to_dict())
    return splits.reported, splits


def value_of(loaded: LoadedRun, size: int, task: Task, model: Model, limit: int) -> float:
    """Return the task's metric on samples of the split, `limit` at most, drawn by the run's seed."""
    split, splits = held_out(loaded, size)
    data, seed = getattr(splits, split), loaded.recipe.seed
    some = drawn(len(data), limit, seed)
    batch = min(16, len(some))
    batches = eval_batches(data, Loading(splits.collate), seed=seed, split=split, batch=batch, chosen=some)
    runtime, seed = start_runtime(str(pick_device())), derive(loaded.recipe.seed, split)
    return evaluate(model, batches, task, runtime, seed=seed)[task.metric.name]
