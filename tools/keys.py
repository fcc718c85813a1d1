"""Check of the keys of a recipe before PyTorch is loaded, which takes seconds.

The names of settings are read from the source of the dataclasses. A key that is the name of some setting passes;
`lion.recipe.load_recipe` checks all keys against the classes that the recipe selects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lion
from data.folders import DOWNLOADED, PLACED, check_downloaded, check_path, find_root, user_path
from lion.config import ConfigError, flatten, merge, nearest, parse_overrides
from lion.recipe_files import OVERRIDE, SUMMARY, read_layers

FOLDERS = {"lion": Path(lion.__file__).parent, "data": Path(__file__).parents[1] / "data"}  # also of a wheel
SOURCES = {  # the dataclasses of each section, as patterns of files or as `file:class`
    "": "lion/recipe.py:Recipe",
    "task": "lion/tasks/*.py",
    "model": "lion/models/*.py",
    "data": "data/**/*.py",
    "optim": "lion/trainer/optim.py:OptimConfig",
    "trainer": "lion/trainer/plan.py:TrainerConfig",
    "schedule": "lion/trainer/optim.py:ScheduleConfig",
    "about": "lion/recipe.py:AboutConfig",
    "run": "lion/recipe.py:RunConfig",
    "model.attention": "lion/layers/mixers/*.py",
}
Layers = list[tuple[str, dict[str, Any]]]
MANY = 40  # with more settings than these, an error does not list them


def check_files(recipe: Path, layers: Layers) -> None:
    """Check that the files of data which a person puts in place are there; a complete run needs none.

    Raises:
        ConfigError: There is no such file or folder.
    """
    run = section_of(layers, "run")
    folder = user_path(str(run.get("root", "runs"))) / str(run.get("name") or recipe.stem)
    if (folder / SUMMARY).is_file():
        return
    data = section_of(layers, "data")
    name = data.get("name")
    root = data.get("root")
    path = data.get("path")
    if not all(is_text(value) for value in (name, root, path)):
        return  # `lion.recipe.load_recipe` names the key
    if name in PLACED:
        find_root(name, root)
    if name in DOWNLOADED and str(data.get("download", False)).lower() == "false":
        check_downloaded(name, root)
    if path is not None:
        check_path(path)


def is_text(value: Any) -> bool:
    """Return whether a value is None, or text that may be a path."""
    return value is None or (isinstance(value, str) and "\0" not in value)


def section_of(layers: Layers, section: str) -> dict[str, Any]:
    """Return the settings of a section that a recipe and its overrides name."""
    found: dict[str, Any] = {}
    for _, layer in layers:
        held = layer.get(section)
        if isinstance(held, dict):
            found = merge(found, held)
    return found


def layers_of(recipe: Path, overrides: Iterable[str]) -> Layers:
    """Return the files of a recipe and its overrides, each with its source; later ones take precedence.

    Raises:
        ConfigError: A file or an override that cannot be read.
    """
    return [*read_layers(recipe), (OVERRIDE, parse_overrides(overrides))]


def check_keys(layers: Layers) -> None:
    """Check that every key of a recipe and its overrides is the name of a setting.

    A recipe with modules of its own (`imports`) is left out, because they may add settings.

    Raises:
        ConfigError: An unknown key.
    """
    if any("imports" in layer for _, layer in layers):
        return
    settings = {section: names_in(source) for section, source in SOURCES.items()}
    known = frozenset().union(*settings.values())
    for origin, layer in reversed(layers):
        for key in flatten(layer):
            section, _, name = key.rpartition(".")
            top = key.partition(".")[0]
            if top not in settings[""]:
                hint = places_of(name, settings) or nearest(top, settings[""])
                raise ConfigError(f"{origin}: unknown key '{top}': {hint}")
            if section in settings and name not in known:
                otherwise = None
                if len(settings[section]) > MANY:
                    otherwise = "./run.sh show prints all settings of a recipe"
                raise ConfigError(f"{origin}: unknown key '{key}': {nearest(name, settings[section], otherwise)}")


def places_of(name: str, settings: Mapping[str, frozenset[str]]) -> str:
    """Return a hint with the sections that have a setting of this name; empty if none has."""
    places = [repr(f"{section}.{name}") for section in settings if section and name in settings[section]]
    if not places:
        return ""
    return f"did you mean {' or '.join(places[:3])}?"


@cache
def names_in(source: str) -> frozenset[str]:
    """Return the names of the fields of the dataclasses of a section, see `SOURCES`."""
    place, _, wanted = source.partition(":")
    folder, _, pattern = place.partition("/")
    found = set()
    for path in FOLDERS[folder].glob(pattern):
        text = path.read_text(encoding="utf-8")
        if "@dataclass" in text:
            found |= field_names(ast.parse(text), wanted)
    return frozenset(found)


def field_names(module: ast.Module, wanted: str) -> set[str]:
    """Return the names of the fields of the dataclasses in a module; of the class `wanted`, if it is not empty."""
    found = set()
    for kind in module.body:
        if not isinstance(kind, ast.ClassDef) or not kind.decorator_list or wanted not in ("", kind.name):
            continue
        for line in kind.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            if not ast.unparse(line.annotation).startswith("ClassVar"):
                found.add(line.target.id)
    return found
