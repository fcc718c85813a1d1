"""Grouping of finished runs into the rows of a table."""

from __future__ import annotations

from typing import Any

from lion.config import ConfigError, flatten, to_dict
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.recipe import Recipe, free_keys
from tools.finished import Run
from tools.report.paper import called

SHARED = ("data.", "task.", "optim.", "schedule.")
BUDGET = tuple(f"trainer.{key}" for key in ("epochs", "steps", "time", "batch_size", "batch_ramp", "batch_start"))


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs into rows by name; the runs of a row differ in their seeds only. Rows are sorted by `place`.

    Raises:
        ConfigError: Tasks, data or budgets differ, runs of one name differ in settings, or two runs are equal.
    """
    first = runs[0]
    task = first.recipe.task.name
    of_first = settings_of(first.recipe)
    found: dict[str, list[Run]] = {}
    for run in runs:
        recipe = run.recipe
        if recipe.task.name != task:
            raise ConfigError(
                f"{run.folder}: task {recipe.task.name!r}, but {first.folder} has {task!r}; use --section"
            )
        run.info.check_same(f"{run.folder}: not comparable, {first.folder}", first.info.to_dict())
        own = settings_of(recipe)
        trained_on = {f"data.{key}" for key in recipe.data.of_training}
        for key in differing(own, of_first):
            if (key.startswith(SHARED) or key in BUDGET) and key not in trained_on:
                raise ConfigError(f"{run.folder}: not comparable with {first.folder}, they differ in {key}")
        name = called(recipe)
        row = found.setdefault(name, [])
        for other in row:
            for key in differing(own, settings_of(other.recipe)):
                raise ConfigError(f"{run.folder}: named {name!r} as {other.folder}, but differs in {key}")
            if recipe.seed == other.recipe.seed:
                raise ConfigError(f"{run.folder}: a second run of {name!r} with seed {recipe.seed}")
        row.append(run)
    return {name: sorted(found[name], key=lambda run: run.recipe.seed) for name in sorted(found, key=place)}


def place(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a row: softmax first, then the mixers as they are listed."""
    mixer = name.split()[0]
    return mixer != SOFTMAX, list(MIXERS).index(mixer), name


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all runs of a row share."""
    settings = flatten(to_dict(recipe))
    for key in free_keys(recipe) | {"seed", "init_from", "about.row", "about.expected", "about.hardware"}:
        settings.pop(key, None)
    return settings


def differing(settings: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Return the keys of settings that have another value in `others`, or none."""
    return [key for key, value in settings.items() if others.get(key) != value]
