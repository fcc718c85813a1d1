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
    found: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        task, expected = run.recipe.task.name, runs[0].recipe.task.name
        if task != expected:
            raise ConfigError(f"{run.folder}: task {task!r}, but {runs[0].folder} has {expected!r}; use --section")
        run.info.check_same(f"{run.folder}: not comparable, {runs[0].folder}", runs[0].info.to_dict())
        name = called(run.recipe)
        own = settings_of(run.recipe)
        first = next(iter(settings.values()), own)
        trained_on = {f"data.{key}" for key in run.recipe.data.of_training}
        for key in own:
            shared = key.startswith(SHARED) or key in BUDGET
            if shared and key not in trained_on and own[key] != first.get(key):
                raise ConfigError(f"{run.folder}: not comparable with {runs[0].folder}, they differ in {key}")
        row = settings.setdefault(name, own)
        if row != own:
            odd = next(key for key in own if own[key] != row.get(key))
            raise ConfigError(f"{run.folder}: named {name!r} as {found[name][0].folder}, but differs in {odd}")
        others = found.setdefault(name, [])
        if run.recipe.seed in [other.recipe.seed for other in others]:
            raise ConfigError(f"{run.folder}: a second run of {name!r} with seed {run.recipe.seed}")
        others.append(run)
    return {name: sorted(found[name], key=seed_of) for name in sorted(found, key=place)}


def seed_of(run: Run) -> int:
    return run.recipe.seed


def place(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a row: softmax first, then the mixers as they are listed."""
    mixer = name.split()[0]
    return mixer != SOFTMAX, list(MIXERS).index(mixer), name


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all runs of a row share."""
    settings = flatten(to_dict(recipe))
    for key in (*free_keys(recipe), "seed", "init_from", "about.row", "about.expected", "about.hardware"):
        settings.pop(key, None)
    return settings
