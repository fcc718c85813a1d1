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
        tasks = [one.recipe.task.name for one in (run, runs[0])]
        if tasks[0] != tasks[1]:
            raise ConfigError(f"{run.folder}: task {tasks[0]!r}, but {runs[0].folder} has {tasks[1]!r}; use --section")
        run.info.check_same(f"{run.folder}: not comparable, {runs[0].folder}", runs[0].info.to_dict())
        name, own = called(run.recipe), settings_of(run.recipe)
        first = next(iter(settings.values()), own)
        trained_on = {f"data.{key}" for key in run.recipe.data.of_training}
        for key in own:
            if (key.startswith(SHARED) or key in BUDGET) and key not in trained_on and own[key] != first.get(key):
                raise ConfigError(f"{run.folder}: not comparable with {runs[0].folder}, they differ in {key}")
        if settings.setdefault(name, own) != own:
            odd = next(k for k in own if own[k] != settings[name].get(k))
            raise ConfigError(f"{run.folder}: named {name!r} as {found[name][0].folder}, but differs in {odd}")
        if any(other.recipe.seed == run.recipe.seed for other in found.get(name, ())):
            raise ConfigError(f"{run.folder}: a second run of {name!r} with seed {run.recipe.seed}")
        found.setdefault(name, []).append(run)
    return {name: sorted(found[name], key=lambda run: run.recipe.seed) for name in sorted(found, key=place)}


def place(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a row: softmax first, then the mixers as they are listed."""
    mixer = name.split()[0]
    return mixer != SOFTMAX, [*MIXERS].index(mixer), name


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all runs of a row share."""
    left_out = free_keys(recipe) | {"seed", "init_from", "about.row", "about.expected", "about.hardware"}
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k not in left_out}
