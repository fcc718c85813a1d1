"""Training and evaluation from Python: `lion.train` and `lion.evaluate`, which the commands call as well."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lion.distribution import clone_folder
from lion.models.base import Model
from lion.recipe import Recipe
from lion.runs import LoadedRun
from lion.samples.base import Splits


def train(
    recipe: Recipe | str | Path,
    *,
    splits: Splits | None = None,
    model: Model | Mapping[str, Any] | None = None,
    form: str | None = None,
    fresh: bool = False,
    **overrides: Any,
) -> LoadedRun:
    """Train a recipe in this process, and return the run with the weights of its best checkpoint.

    The run folder, its checkpoints and its curves are those of `./run.sh RECIPE`. The same call resumes a run that was
    interrupted, and returns a complete one without training.

    Args:
        recipe: Name or file of a recipe, or a `Recipe`.
        splits: Data of your own, a `lion.samples.base.Splits`; by default the data set of the recipe.
        model: Settings that override the section `model`, or a model of your own, of the class that the task needs
            (`lion.models.base`).
        form: Form of a final evaluation, or "all"; by default there is none (`lion.evaluate`).
        fresh: Whether to rename the folder of an earlier run of this name, and start anew.
        **overrides: Settings that override the other sections, such as `trainer={"epochs": 2}`, or `seed=1`.

    Returns:
        The run: `folder`, `recipe`, `task`, `model` in evaluation mode on the CPU, and `checkpoint`.

    Raises:
        ConfigError: The recipe is invalid, or does not fit its data, this machine or the run folder.
        KeyboardInterrupt: A signal stopped the training; its state is saved.

    Example:
        >>> import lion
        >>> run = lion.train("quickstart", trainer={"steps": 2, "epochs": None, "compile": False})
        quickstart: lion_s, ...
        >>> run.model.classes[:3]
        ('0', '1', '2')
    """
    if isinstance(model, Mapping):
        overrides["model"] = dict(model)
        model = None
    return assembled("tools.train").train_here(
        recipe, splits=splits, model=model, form=form, fresh=fresh, overrides=overrides
    )


def evaluate(
    run: LoadedRun | str | Path,
    splits: Splits | None = None,
    form: str = "all",
    chunk_size: int | Sequence[int] | None = None,
    *,
    split: str | None = None,
    checkpoint: str = "best",
    ema: bool = False,
    eager: bool = False,
) -> list[dict[str, Any]]:
    """Measure a run in one form, or in all forms of its mixer: metric, speed, memory, deviation.

    Args:
        run: Folder of a run, its name under `runs/`, or a `LoadedRun` (`lion.train`, `lion.open_run`).
        splits: Data of your own, a `lion.samples.base.Splits`; by default the data set of the run.
        form: "full", "chunk", "rnn" or "all".
        chunk_size: Tokens per chunk, or per step of the rnn form, or several numbers; 64 by default.
        split: "val" or "test"; by default "test", or "val" without a test split.
        checkpoint: "best" (on the validation split) or "last"; of a `LoadedRun` its own.
        ema: Whether to load the averaged weights; of a `LoadedRun` its own.
        eager: Whether not to compile, even if the recipe does.

    Returns:
        One row per form: `form`, `chunk_size`, `value` and `values` of the metrics, `samples_per_second`, `peak_bytes`
        (of one batch, without the weights), `deviation` (of the outputs from those of the first form), and the
        conditions of the measurement.

    Raises:
        ConfigError: There is no such run, split or form, or the data are not those of the run.

    Example:
        >>> run = lion.train("quickstart", trainer={"steps": 2, "epochs": None, "compile": False})
        quickstart: lion_s, ...
        >>> for row in lion.evaluate("quickstart", split="val"):
        ...     print(row["form"], row["chunk_size"], row["value"] > 0, row["deviation"] < 1e-4)
        full None True True
        chunk 64 True True
        rnn 1 True True
        rnn 64 True True
    """
    return assembled("tools.evaluate").measure_forms(
        run, form, chunk_size, splits=splits, split=split, checkpoint=checkpoint, ema=ema, eager=eager
    )


def assembled(name: str) -> ModuleType:
    """Import a module of `tools`, which puts recipes and their data together.

    Raises:
        ImportError: The program has a module of its own called `data` or `tools`.
    """
    folder = clone_folder()
    for room in ("data", "tools"):
        held = getattr(sys.modules.get(room), "__file__", None)
        if held is not None and not Path(held).resolve().is_relative_to(folder):
            raise ImportError(f"lion: the module {room!r} of this program, {held}, hides that of lion; rename it")
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))  # first, and for the processes that load data
    return importlib.import_module(name)
