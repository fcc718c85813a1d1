"""Combination of `data` and `lion`: recipes resolved with their data sets."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data
from data.base import DataSet, locked
from data.folders import data_root
from data.text.tokenizers import NoTokenizer, Tokenizer
from lion.config import ConfigError
from lion.progress import announced
from lion.recipe import Recipe, free_keys, load_recipe
from lion.recipe_files import RECIPE, find_run
from lion.runs import LoadedRun, open_folder, stored_recipe
from lion.samples.base import Info, Splits
from lion.samples.text import OtherVocabulary, TextInfo
from lion.tasks import TASKS, Task
from lion.tasks.image_classification import ImageClassificationConfig
from lion.tasks.metrics import Metric
from lion.teachers import open_teacher
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime, start_runtime
from lion.trainer.state import time_text
from tools.listing import complete_recipe

FEWEST, FEWEST_FROM_TRAINED = 500, 50  # updates with which a run can be expected to learn
LATEST = 0.25  # share of a run in which the learning rate may rise
LOWEST = 2e-5  # peak of the learning rate
MIXED = 50  # epochs below which mixed pictures hinder: 32 of 3,000 pictures did, 190 of 500 helped (recipes/README.md)


def resolve(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe and check it, including its `data` section, against its data set.

    Args:
        path: A file, or the name of a recipe in `recipes/`.
        overrides: Items `key=value`.

    Raises:
        ConfigError: There is no such file, or the recipe is invalid.
    """
    return load_recipe(complete_recipe(path), overrides, data_config=data_config)


def data_config(name: str, task: str) -> type:
    """Return the dataclass of the `data` section.

    Raises:
        ConfigError: There is no such data set, or it is not for this task.
    """
    source, needed = data.dataset(name), TASKS[task].Info
    if not issubclass(source.Info, needed):
        fits = [other for other in TASKS if issubclass(source.Info, TASKS[other].Info)]
        raise ConfigError(
            f"data.name: {name!r} holds {source.Info.kind}, but task {task!r} needs {needed.kind}; tasks that take "
            f"{source.Info.kind}: {', '.join(fits)}"
        )
    return source.Config


def recipe_unless_run(name: str) -> Recipe | None:
    """Return the recipe of this name, or None if there is a run of the name.

    Raises:
        ConfigError: There is neither a run nor a recipe.
    """
    try:
        find_run(name)
    except ConfigError as no_run:
        try:
            return resolve(name)
        except ConfigError as no_recipe:
            raise ConfigError(f"{no_run}; no recipe of that name either: {no_recipe}") from None
    return None


def resolve_run(folder: Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load the recipe of a run. Overrides may only change where its data are.

    Raises:
        ConfigError: An override of another key.
    """
    recipe = resolve(folder / RECIPE, overrides)
    free = sorted(free_keys(recipe.data, "data"))
    for item in overrides:
        if item.partition("=")[0] not in free:
            raise ConfigError(f"{item!r}: the recipe of a run is fixed, only {', '.join(free)} may be overridden")
    return recipe


def open_with_data(
    run: str | Path, overrides: Iterable[str] = (), *, checkpoint: str = "best", ema: bool = False
) -> LoadedRun:
    """Load a run as `lion.runs.open_run` does, and check the `data` section of its recipe, see `resolve_run`."""
    folder = find_run(run)
    return open_folder(folder, resolve_run(folder, overrides), checkpoint=checkpoint, ema=ema)


def open_data(recipe: Recipe, run: Path | None = None) -> DataSet:
    """Return the data set of a recipe, without reading it; for a `run`, as that run has read it."""
    source = data.dataset(recipe.data.name)(recipe.data)
    if run is not None and (run / RECIPE).is_file():
        source.restore(run, stored_recipe(run).get("data", {}))
    return source


def open_tokenizer_of(run: LoadedRun, overrides: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer of a run on text; overrides may only change where its data are.

    Raises:
        ConfigError: The tokenizer is not found, or its ids stand for other tokens than those of the run.
    """
    tokenizer = open_data(resolve_run(run.folder, overrides), run.folder).tokenizer
    check_tokenizer(tokenizer, run.task.info, run.folder)
    return tokenizer


def check_tokenizer(tokenizer: Any, info: TextInfo, folder: Path) -> None:
    """Check that a tokenizer is the one that the run in `folder` was trained with.

    Raises:
        ConfigError: The ids of the tokenizer stand for other tokens.
    """
    here = TextInfo(
        length=info.length,
        vocabulary=tokenizer.vocabulary,
        fingerprint=tokenizer.fingerprint,
        tokenizer=tokenizer.name,
    )
    check_data(here, info, folder)


def check_data(info: Info, then: Info, folder: Path) -> None:
    """Check that data with metadata `info` fit the run in `folder`, which was trained on data with metadata `then`.

    Raises:
        ConfigError: The data do not fit.
    """
    with hint_of_tokenizer(folder):
        info.check_same(f"{folder}: its checkpoint", then.to_dict())


def check_finite(outputs: Tensor, folder: Path) -> None:
    """Check that the outputs of the model of a run are finite.

    Raises:
        ConfigError: An output is NaN or infinite.
    """
    if not outputs.isfinite().all():
        raise ConfigError(f"{folder}: the outputs of its model are not finite, the run has diverged: train it again")


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, which identifies files that were made with them."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@contextlib.contextmanager
def hint_of_tokenizer(run: str | Path | None) -> Iterator[None]:
    """Add to errors about a tokenizer how to use that of a run."""
    try:
        yield
    except (NoTokenizer, OtherVocabulary) as error:
        hint = ""
        if run is not None:
            hint = transfer_hint(run)
        raise ConfigError("; ".join(filter(None, (str(error), hint)))) from None


def transfer_hint(run: str | Path) -> str:
    with contextlib.suppress(ConfigError):  # raised if the run or its data are gone
        folder = find_run(run)
        return open_data(resolve_run(folder), folder).transfer_hint()
    return ""


def build_data(recipe: Recipe, run: Path | None = None, *, cached: bool = False) -> Splits:
    """Prepare and build the data of a recipe.

    If several processes need the same data prepared, the first one prepares the data and the others wait. The processes
    may belong to one run, to several runs, or to other commands. Prepared data are only read, without a lock.

    Args:
        recipe: The recipe.
        run: Folder of a run whose data are used as the run has read them, see `open_data`.
        cached: Whether to apply `data.cache`, which pays off if the data are read more than once.
    """
    source = open_data(recipe if cached else replace(recipe, data=recipe.data.uncached()), run)
    with hint_of_tokenizer(recipe.init_from):
        if not source.is_prepared():
            with locked(data_root() / f".{recipe.data.name}.lock"):
                source.prepare()
        with announced(f"reading data set {recipe.data.name!r}"):
            return source.build()


def needs_preparing(source: DataSet) -> bool:
    """Return whether a data set must be prepared before files can be opened; preparation may take hours."""
    return type(source).prepare is not DataSet.prepare


def make_task(recipe: Recipe, info: Info, *, teacher: bool = False) -> Task:
    """Return the task of a recipe.

    If `task.teacher` names a teacher, `teacher` opens it on the CPU. Otherwise a stand-in answers with zeros, for
    measurements of the student alone.
    """
    task = TASKS[recipe.task.name](recipe.task, info)
    if (name := getattr(recipe.task, "teacher", None)) is not None:
        task.teacher = open_teacher(name, info) if teacher else partial(no_teacher, classes=len(info.classes))
    return task


def no_teacher(pixels: Tensor, classes: int) -> Tensor:
    return pixels.new_zeros(len(pixels), classes)


def runtime_of(recipe: Recipe, sequence: int = 1) -> Runtime:
    """Start the runtime that a recipe asks for; `sequence` processes share the tokens of each row."""
    return start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul, sequence=sequence)


def metric_of(recipe: Recipe) -> Metric:
    """Return the metric that selects the `best` checkpoint."""
    return TASKS[recipe.task.name].metrics_of(recipe.task)[0]


def describe_data(recipe: Recipe, *, look: bool = True) -> tuple[Info, int, str | None]:
    """Describe the data of a recipe, with published numbers if the files are absent.

    Data sets with published numbers are not prepared here, because preparation may take hours. `data.download` is
    ignored.

    Args:
        recipe: The recipe.
        look: Whether to look at the files; otherwise published numbers are enough, and no folder is searched.

    Returns:
        Metadata of the data, number of training samples, and a note on absent files, or None.
    """
    data = recipe.data.uncached()
    if getattr(data, "download", False):
        data = replace(data, download=False)
    source = open_data(replace(recipe, data=data))
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


def process_count(recipe: Recipe, machines: int = 1) -> int:
    """Return the number of training processes of each machine: at most one per visible GPU; they divide the batch.

    Processes that share rows count once.
    """
    if recipe.trainer.device not in ("auto", "cuda"):
        return 1
    visible = max(1, torch.cuda.device_count())
    smallest = recipe.trainer.batch_start or recipe.trainer.batch_size

    def fits(here: int) -> bool:
        count = here * machines
        shared = recipe.trainer.processes_of_a_row(count)
        return count % shared == 0 and smallest % (count // shared) == 0

    return max((n for n in range(1, visible + 1) if fits(n)), default=1)


def describe_length(plan: Plan) -> str:
    if plan.total is None:
        return f"{plan.trainer.time} of training"
    return f"{plan.total:,} steps"


def describe_warmup(plan: Plan) -> str:
    text = f"{plan.warmup:,} steps" if plan.seconds is None else time_text(plan.warmup)
    text += " of warm-up"
    if plan.warmup >= plan.length:
        text += ", but the run ends earlier: the peak is not reached"
    return text


def doubts(recipe: Recipe, plan: Plan) -> list[str]:
    """Return reasons, with remedies, why a run will hardly learn.

    They are few updates, a late or a low peak of the learning rate, and few epochs of mixed pictures.
    """
    found = []
    new = recipe.init_from is None
    fewest = FEWEST_FROM_TRAINED
    if new:
        fewest = FEWEST
    if plan.total is not None and plan.total < fewest:
        size = recipe.trainer.batch_size
        count = f"{plan.total:,} update{'s' * (plan.total > 1)}"
        found.append(f"only {count}: set more trainer.epochs, or trainer.batch_size below {size:,}")
    if plan.length > plan.warmup > LATEST * plan.length:
        share = f"{plan.warmup / plan.length:.0%}"
        found.append(f"the learning rate reaches its peak after {share} of the run: set schedule.warmup=5%")
    peak = recipe.optim.peak(recipe.trainer.batch_size)
    if new and peak < LOWEST:
        found.append(f"a peak of the learning rate of {peak:.1g} is too low to start from nothing: raise optim.lr")
    mixed = isinstance(recipe.task, ImageClassificationConfig) and (recipe.task.mixup or recipe.task.cutmix)
    if new and mixed and plan.total is not None and plan.total < MIXED * plan.steps_per_epoch:
        epochs = f"{plan.total / plan.steps_per_epoch:.2g} epochs of mixed pictures are few"
        found.append(f"{epochs}: set task.mixup=0 task.cutmix=0, as recipe pictures_many, or more trainer.epochs")
    return found


def loader_workers(recipe: Recipe) -> int:
    """Return the number of loader workers: `data.workers` or the default of the data set, at most one per core.

    The default is 0 for data in memory, and a few otherwise.
    """
    asked = recipe.data.workers
    if asked is None:
        asked = open_data(recipe).workers
    return min(asked, len(os.sched_getaffinity(0)))
