"""Agreement of the processes of a run, which may be on several machines: the same recipe, code and PyTorch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import data
import lion
import tools
from lion.config import ConfigError, flatten, to_dict
from lion.distribution import VERSION
from lion.recipe import Recipe
from lion.trainer.runtime import gathered


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return by name what must be equal in all processes: versions, and the settings of the recipe."""
    code = hashlib.sha256()
    for package in (lion, data, tools):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            code.update(path.read_bytes())
    versions = {"lion": f"{VERSION} with code {code.hexdigest()[:8]}", "torch": str(torch.__version__)}
    return {**versions, **flatten(to_dict(recipe))}


def check_agreement(recipe: Recipe) -> None:
    """Check that all processes train the same recipe with the same code and the same PyTorch.

    Raises:
        ConfigError: They do not; every process raises it.
    """
    first, *others = gathered(fingerprint(recipe))
    for rank, other in enumerate(others, 1):
        for name in {**first, **other}:
            a, b = first.get(name), other.get(name)
            if a != b:
                raise ConfigError(f"processes 0 and {rank} differ in {name}: {a} and {b}; give all machines the same")
