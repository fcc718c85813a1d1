"""Where data meets `lion`: recipes resolved against the data sets that they name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data
from data.base import DataSet, data_root, locked
from lion.config import ConfigError, nearest
from lion.recipe import Recipe, free_keys, load_recipe
from lion.runs import RECIPE, stored_recipe
from lion.tasks import TASKS, Task
from lion.tasks.data import Info, Splits
from lion.tasks.metrics import Metric
from lion.tasks.text import TextInfo
from lion.trainer.plan import Plan
from lion.trainer.state import in_time
from tools.listing import RECIPES, recipe_path


def resolve(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe with its `data` section checked by the data set that it names; a bare name is one of ours."""
    path = recipe_path(path)
    if Path(os.path.realpath(path)).parent == RECIPES / "base":
        name = Path(path).name
        raise ConfigError(f"{path}: what recipes share, not a recipe; run one that says 'extends: base/{name}'")
    recipe = load_recipe(path, overrides, data_config=lambda name: data.dataset(name).Config)
    held, task = data.dataset(recipe.data.name).Info, recipe.task.name
    if not issubclass(held, TASKS[task].Info):
        fits = [name for name, other in TASKS.items() if issubclass(held, other.Info)]
        raise ConfigError(
            f"{path}: data.name: {recipe.data.name!r} holds {held.kind}, task {task!r} learns from "
            f"{TASKS[task].Info.kind}, {nearest(task, fits)}"
        )
    return recipe


def resolve_run(folder: Path, overrides: Iterable[str] = ()) -> Recipe:
    """A run's recipe; what may be overridden is where its data are.

    Raises:
        ConfigError: An override of something else.
    """
    recipe = resolve(folder / RECIPE)
    free = sorted(free_keys(recipe.data, "data"))
    for item in overrides:
        if item.partition("=")[0] not in free:
            raise ConfigError(f"{item!r}: a run keeps its recipe, only {', '.join(free)} may be given")
    return resolve(folder / RECIPE, overrides) if overrides else recipe


def open_data(recipe: Recipe, run: Path | None = None) -> DataSet:
    """The recipe's data set, as a `run` in a folder has read it; nothing is read yet."""
    source = data.dataset(recipe.data.name)(recipe.data)
    if run is not None and (run / RECIPE).is_file():
        source.restore(run, stored_recipe(run).get("data", {}))
    return source


def check_tokenizer(tokenizer: Any, info: TextInfo, folder: Path) -> None:
    """Raises ConfigError: In the tokenizer ids mean other tokens than those that the run was trained on."""
    values = {"vocabulary": tokenizer.vocabulary, "fingerprint": tokenizer.fingerprint, "tokenizer": tokenizer.name}
    check_data(TextInfo(length=info.length, **values), info, folder)


def check_data(info: Info, then: Info, folder: Path) -> None:
    """Raises ConfigError: Data of `info` are not for a model of the run, which was trained on those of `then`."""
    try:
        info.check_same(f"{folder}: its checkpoint", then.to_dict())
    except ConfigError as error:
        raise ConfigError("; ".join(filter(None, (str(error), way_out(folder))))) from None


def check_finite(outputs: Tensor, folder: Path) -> None:
    """Raises ConfigError: What the run's model says is no number."""
    if not outputs.isfinite().all():
        raise ConfigError(f"{folder}: its model gives no finite outputs, the run has diverged: train it anew")


def digest(model: nn.Module) -> str:
    """Of all weights: what was made with them goes with no others."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def way_out(folder: Path) -> str:
    with contextlib.suppress(ConfigError):  # of data that are gone
        return open_data(resolve_run(folder), folder).way_out()
    return ""


def build_data(recipe: Recipe, run: Path | None = None, *, cached: bool = False) -> Splits:
    """The recipe's data, prepared, as by `open_data`; `cached` (`data.cache`) pays where they are read more than once.

    Of several processes that need data prepared the first does so, the others wait and find it done: processes of one
    run, of several, and commands beside them.
    """
    source = open_data(recipe if cached else replace(recipe, data=recipe.data.uncached()), run)
    if needs_preparing(source):
        with locked(data_root() / f".{recipe.data.name}.lock"):
            source.prepare()
    return source.build()


def needs_preparing(source: DataSet) -> bool:
    """Whether there is more to do than to open files; it may take hours."""
    return type(source).prepare is not DataSet.prepare


def make_task(recipe: Recipe, info: Info) -> Task:
    return TASKS[recipe.task.name](recipe.task, info)


def metric_of(recipe: Recipe) -> Metric:
    """The one that chooses `best`."""
    return TASKS[recipe.task.name].metrics_of(recipe.task)[0]


def describe_data(recipe: Recipe, *, look: bool = True) -> tuple[Info, int, str | None]:
    """(info, training samples, note) of a recipe's data; published figures where the files are absent.

    With `look=False` the published figures are enough, and no folder is walked. Where there are such figures, nothing
    is prepared, which may take hours, to be told of.
    """
    source = open_data(replace(recipe, data=recipe.data.uncached()))
    known = source.published()
    if not look and known is not None:
        return *known, None
    try:
        splits = build_data(recipe) if known is None else source.build()
    except ConfigError as error:
        if known is None:
            raise
        return *known, str(error)
    return splits.info, len(splits.train), None


def process_count(recipe: Recipe) -> int:
    """Processes to train in: one for each visible GPU, but a divisor of the smallest batch; one without a GPU."""
    if recipe.trainer.device not in ("auto", "cuda"):
        return 1
    visible = max(1, torch.cuda.device_count())
    smallest = recipe.trainer.batch_start or recipe.trainer.batch_size
    return max(n for n in range(1, visible + 1) if smallest % n == 0)


def describe_length(plan: Plan) -> str:
    return f"{plan.trainer.time} of training" if plan.total is None else f"{plan.total:,} steps"


def describe_warmup(plan: Plan) -> str:
    more = ", and the run ends before: the peak is not reached" if plan.warmup >= plan.length else ""
    return f"{f'{plan.warmup:,} steps' if plan.seconds is None else in_time(plan.warmup)} of warm-up{more}"


def loader_workers(recipe: Recipe) -> int:
    """`data.workers`, or what suits: none for data in memory, else a few; no more than there are cores."""
    asked = recipe.data.workers
    if asked is None:
        asked = open_data(recipe).workers
    return min(asked, os.cpu_count() or 1)
