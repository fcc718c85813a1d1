"""Data sets: one module each, named as `data.name` in a recipe, with `Config`, `build` and `load_picture`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from lion.config import ConfigError, nearest

HELPERS = ("augment", "common", "pictures", "resident")  # modules that are no data set


def names() -> list[str]:
    """The data sets that exist."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in HELPERS)


def module(name: str) -> ModuleType:
    """The module of a data set; only the names listed here are ever imported."""
    if name not in names():
        raise ConfigError(f"data.name: {name!r} is no data set, {nearest(name, names())}")
    return importlib.import_module(f"data.{name}")
