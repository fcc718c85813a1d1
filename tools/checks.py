"""Checks of a recipe before training: its plan, its processes, and the disk space and weights of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lion.config import ConfigError
from lion.layers.mixers.base import mixers_of
from lion.models.base import Model
from lion.recipe import Recipe
from lion.runs import build_on_meta, check_weights
from lion.samples.base import Info
from lion.tasks import Task
from lion.trainer.checkpoint_files import Checkpoint, check_space, load_state, newest
from lion.trainer.plan import Plan, check_rows, make_plan
from tools.cli import of_an_option
from tools.compose import make_task


def check_settings(
    recipe: Recipe, info: Info, samples: int, world: int, *, room: bool, model: Model | None = None
) -> tuple[Plan, Task]:
    """Return the plan and the task of a recipe on data of `samples` training samples.

    `model` takes the place of the recipe's model.

    Raises:
        ConfigError: Settings contradict each other or the data; or, if `room` is set, the disk has too little space for
            the checkpoints.
    """
    plan, task = make_plan(recipe, samples=samples, world=world), make_task(recipe, info, teacher=True)
    task.check_micro_batch(plan.micro)
    if (views := getattr(recipe.data, "repeats", 1)) > recipe.trainer.batch_size:
        raise ConfigError(f"data.repeats: {views} views of an image, more than a batch of {recipe.trainer.batch_size}")
    if model is None:
        model = build_on_meta(task, recipe.model)
        check_sharing(recipe, model, world)
    if room:
        check_space(recipe.folder, *checkpoint_bytes(model, recipe.trainer.ema is not None), recipe.trainer.keep_last)
    return plan, task


def check_form(model: Model, form: str | None) -> None:
    """Check that a model can be evaluated in a form, "all" or None.

    Raises:
        ConfigError: A mixer does not have this form.
    """
    if form in (None, "all"):
        return
    for mixer in mixers_of(model):
        with of_an_option():
            mixer.check_form(form)


def check_sharing(recipe: Recipe, model: Model, world: int) -> int:
    """Return how many of `world` processes share a row of the model.

    Raises:
        ConfigError: The model does not split its rows, or has fewer tokens than processes.
    """
    count = recipe.trainer.sharing(world)
    if count > 1:
        check_rows(model, count)
    return count


def checkpoint_bytes(model: nn.Module, ema: bool) -> tuple[int, int]:
    """Return the bytes of a checkpoint to resume from (weights, two moments, average), and of a `best` checkpoint."""
    weights = sum(t.nbytes for t in model.state_dict().values())
    return weights * (4 if ema else 3), weights * (2 if ema else 1)


def check_checkpoint(folder: Path, model: nn.Module, info: Info) -> None:
    """Check that the newest checkpoint fits the data and the model, before anything is written to the folder.

    Raises:
        ConfigError: The checkpoint is one of other data, or its weights do not fit.
    """

    def read(found: Checkpoint) -> None:
        if not found.sharded:
            state = load_state(found.state, mapped=True)
            if isinstance(then := state.get("info"), dict):
                info.check_same(f"{folder}: its checkpoint", then)
            check_weights(model, state.get("model"), str(found.state))

    newest(folder, "last", read=read, quiet=True)
