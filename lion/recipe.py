"""Recipes: YAML files with `extends` and dotted overrides, checked and merged into one typed tree."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lion.config import (
    ConfigError,
    build,
    changed,
    first_line,
    flatten,
    merge,
    nearest,
    parse_overrides,
    setting,
    settings_of,
    to_dict,
)
from lion.models import MODELS
from lion.recipe_files import OVERRIDE, read_layers
from lion.tasks import TASKS
from lion.trainer.optim import OptimConfig, ScheduleConfig
from lion.trainer.plan import TrainerConfig

LENGTHS = {"trainer.epochs", "trainer.steps", "trainer.time"}  # a layer that sets one removes the others

NO_RESULT = "no number yet"  # `about.expected` if no paper has a result
KEYS_OF_DATA = {"data.name", "data.path", "data.subset"}  # overriding one of these removes the claim


@dataclass
class AboutConfig:
    """The claim of a recipe: its row in the paper, the metric expected there, and the hardware of that result.

    A recipe that extends another does not inherit this section.
    """

    row: str = ""
    expected: str = ""
    hardware: str = ""


@dataclass
class RunConfig:
    """The run folder `root/name`; `name` defaults to the file name of the recipe."""

    name: str | None = setting(None, free=True)
    root: str = setting("runs", free=True)

    def __post_init__(self) -> None:
        if self.name is not None and not re.fullmatch(r"\w[\w.+-]{0,99}", self.name):
            raise ValueError(f"name: expected letters, digits, '_', '-', '.' and '+', at most 100, got {self.name!r}")
        if os.path.expanduser(self.root).startswith("~"):
            raise ValueError(f"root: no such user, got {self.root!r}")


@dataclass
class Recipe:
    """A complete description of a run.

    `imports` names Python modules that are imported first; they register mixers, data sets or models of your own.
    """

    task: Any
    model: Any
    data: Any
    optim: OptimConfig
    trainer: TrainerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    about: AboutConfig = field(default_factory=AboutConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = setting(0, min=0)
    init_from: str | None = None
    imports: tuple[str, ...] = setting((), free=True)

    @property
    def folder(self) -> Path:
        return Path(self.run.root).expanduser() / str(self.run.name)


def load_recipe(
    path: str | Path, overrides: Iterable[str] = (), *, data_config: Callable[[str, str], type] | None = None
) -> Recipe:
    """Load a recipe with its bases and overrides; unknown keys and wrong types are errors.

    Args:
        path: The YAML file.
        overrides: Items `section.key=value`, which override all files.
        data_config: A function from `data.name` and `task.name` to the dataclass of the `data` section. Without it the
            section stays a plain mapping, and a trained model can be loaded without its data.

    Raises:
        ConfigError: Invalid input; the message names key, file and nearest valid choice.
    """
    path = Path(path)
    layers = read_layers(path)
    layers.append((OVERRIDE, parse_overrides(overrides)))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for origin, layer in layers:
        if "about" not in layer and (origin != OVERRIDE or KEYS_OF_DATA & flatten(layer).keys()):
            values = {name: section for name, section in values.items() if name != "about"}
        values = merge(drop_excluded(values, layer, origin), layer)
        for key in flatten(layer):
            sources.pop(key, None)  # moved to the end: the latest layer is searched first
            sources[key] = origin

    def source(key: str) -> str:
        """Return the latest layer that sets `key` or a key below it; the recipe itself if no layer does."""
        key = key.partition("[")[0]
        for name, origin in reversed(sources.items()):
            if name == key or name.startswith(f"{key}."):
                return origin
        return str(path)

    import_modules(values.get("imports"), source("imports"))
    values.setdefault("run", {})
    if isinstance(values["run"], dict) and values["run"].get("name") is None:
        values["run"]["name"] = path.stem
    for name in ("task", "model", "data"):
        if name not in values:
            raise ConfigError(f"{source(name)}: missing section '{name}'")
        if not isinstance(values[name], dict):
            raise ConfigError(f"{source(name)}: {name}: expected a section with settings, got {values[name]!r}")
    task_name = values["task"].get("name")
    if task_name not in list(TASKS):
        raise ConfigError(f"{source('task.name')}: task.name: unknown task {task_name!r}, {nearest(task_name, TASKS)}")
    task = TASKS[task_name]
    model_name = values["model"].setdefault("name", task.default_model)
    fits = [name for name, kind in MODELS.items() if issubclass(kind, task.Model)]
    if model_name not in fits:
        raise ConfigError(
            f"{source('model.name')}: model.name: {model_name!r} is not a model for task {task_name!r}, "
            f"{nearest(model_name, fits)}"
        )
    values.setdefault("about", own_claim(values["data"]))
    schemas = {"task": task.Config, "model": MODELS[model_name].Config}
    if data_config is not None:
        name = values["data"].get("name")
        try:
            schemas["data"] = data_config(name, task_name)
        except ConfigError as error:
            raise ConfigError(f"{source('data.name')}: {error}") from None
    built = {name: build(schema, values[name], source=source, key=name) for name, schema in schemas.items()}
    return build(Recipe, {**values, **built}, source=source)


def import_modules(names: Any, source: str) -> None:
    """Import the modules of a recipe, whose other settings may need them; `build` checks the type of `names`.

    Raises:
        ConfigError: A module cannot be imported.
    """
    if not isinstance(names, (list, tuple)):
        return
    for name in names:
        try:
            importlib.import_module(str(name))
        except Exception as error:  # a module of the user can raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{source}: imports: {name}: {reason}") from error


def own_claim(data: dict[str, Any]) -> dict[str, str]:
    """Return the `about` section of a recipe on custom data, which no paper reports."""
    name = str(data.get("path") or data.get("name"))
    return {"row": f"- ({name.rstrip('/').rpartition('/')[2]})", "expected": NO_RESULT, "hardware": "?"}


def drop_excluded(values: dict, layer: dict, source: str) -> dict:
    """Return `values` without the lengths that exclude the length of `layer` (see `LENGTHS`)."""
    given = {key for key, value in flatten(layer).items() if key in LENGTHS and value is not None}
    if len(given) > 1:
        raise ConfigError(f"{source}: give exactly one of {' and '.join(sorted(given))}")
    trainer = values.get("trainer")
    if not given or not isinstance(trainer, dict):
        return values
    excluded = LENGTHS - given
    kept = {name: value for name, value in trainer.items() if f"trainer.{name}" not in excluded}
    return {**values, "trainer": kept}


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe, as the user wrote it, as YAML that `load_recipe` can read."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, width=120)


def free_keys(config: Any, key: str = "") -> set[str]:
    """Return the dotted names of the fields that may change when a run is resumed."""
    return {path for path, f, _ in settings_of(config, key) if f.metadata.get("free")}


def differences(old: dict, new: Recipe) -> list[str]:
    """Return lines `key: old -> new` for the differences between a stored recipe of a run and a new recipe.

    A key that an earlier version did not store had its default.
    """
    free = free_keys(new) | {f"about.{f.name}" for f in dataclasses.fields(AboutConfig)}
    a = flatten(old)
    b = flatten(to_dict(new))
    given = changed(new)
    lines = []
    for key in {**a, **b}:
        if key in free or a.get(key) == b.get(key):
            continue
        named = any(key == name or key.startswith(f"{name}.") for name in given)
        if key in a or named:
            lines.append(f"{key}: {a.get(key)!r} -> {b.get(key)!r}")
    return lines
