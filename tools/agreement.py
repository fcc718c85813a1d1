"""Agreement of the processes of a run, which may be on several machines: the same recipe, code, PyTorch and data."""

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
from lion.samples.base import Splits
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
    check_equal(fingerprint(recipe))


def check_data_agreement(splits: Splits) -> None:
    """Check that all processes read the same data: as many samples, with the same fingerprint.

    Raises:
        ConfigError: They do not; every process raises it.
    """
    parts = {"train": splits.train, "val": splits.val, "test": splits.test, **splits.more}
    counts = {f"the number of {name} samples": len(part) for name, part in parts.items() if part is not None}
    check_equal({**counts, "the fingerprint of the data": splits.fingerprint})


def check_equal(values: dict[str, Any]) -> None:
    """Check that named values are the same in all processes.

    Raises:
        ConfigError: They are not; every process raises it.
    """
    first, *others = gathered(values)
    for rank, other in enumerate(others, 1):
        for name in {**first, **other}:
            a, b = first.get(name), other.get(name)
            if a != b:
                raise ConfigError(f"processes 0 and {rank} differ in {name}: {a} and {b}; give all machines the same")
