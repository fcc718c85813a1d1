"""Runs on disk: loading the model of a run, and locking its folder."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from lion.config import ConfigError
from lion.models import Model
from lion.recipe import Recipe, load_recipe
from lion.recipe_files import RECIPE, find_run, read_layers
from lion.samples.base import Info
from lion.tasks import TASKS, Task
from lion.trainer.checkpoint_files import Checkpoint, UnusableCheckpoint, load_state, newest, steps_of
from lion.trainer.compilation import compile_blocks

log = logging.getLogger("lion")

ENVIRONMENT = "environment.json"
LOCK = ".lock"
POSITIONS = "positions.weight"  # of models of tokens


class LoadedRun(NamedTuple):
    """The recipe, task and model of a run, and its checkpoint without the weights; `ema`: they are averaged."""

    folder: Path
    recipe: Recipe
    task: Task
    model: Model
    checkpoint: dict[str, Any]
    ema: bool = False


def stored_recipe(folder: Path) -> dict[str, Any]:
    """Return the stored recipe of a run, as the user wrote it, as plain data."""
    return read_layers(folder / RECIPE)[-1][1]


def open_run(run: str | Path, *, checkpoint: str = "best", ema: bool = False) -> LoadedRun:
    """Load a run: build its model with the weights of checkpoint `best` or `last`, in evaluation mode on the CPU."""
    folder = find_run(run)
    return open_folder(folder, load_recipe(folder / RECIPE), checkpoint=checkpoint, ema=ema)


def open_folder(folder: Path, recipe: Recipe, *, checkpoint: str = "best", ema: bool = False) -> LoadedRun:
    """Load the run in a folder, whose recipe is loaded."""
    task, state = read_run(folder, recipe, checkpoint)
    weights = state["model"]
    kind = "weights"
    if ema:
        weights = state.get("ema")
        kind = "EMA weights"
    if not weights:
        raise ConfigError(f"{folder}: its {checkpoint!r} checkpoint holds no {kind}")
    model = task.build_model(recipe.model)
    check_weights(model, weights, f"{folder}: its {checkpoint!r} checkpoint")
    model.load_state_dict(weights)
    rest = {k: v for k, v in state.items() if k not in ("model", "ema", "optimizer", "random")}
    return LoadedRun(folder, recipe, task, model.eval(), rest, ema)


def read_run(folder: Path, recipe: Recipe, checkpoint: str) -> tuple[Task, dict[str, Any]]:
    """Load a checkpoint of a run, and the task for its data."""
    state = read_checkpoint(folder, checkpoint)
    kind = TASKS[recipe.task.name]
    try:
        info = kind.Info.from_dict(state["info"])
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: its {checkpoint!r} checkpoint has no valid description of its data") from error
    return kind(recipe.task, info), state


def read_checkpoint(folder: Path, kind: str) -> dict[str, Any]:
    """Load the newest usable checkpoint of a kind.

    Raises:
        ConfigError: There is no usable checkpoint, or the checkpoint is sharded.
    """

    def read(found: Checkpoint) -> dict[str, Any]:
        if found.sharded:
            raise ConfigError(f"{found.path} is sharded: ./run.sh consolidate {folder} makes one file of it")
        state = load_state(found.state)
        for name, held in (("step", int), ("info", dict), ("model", dict)):
            if not isinstance(state.get(name), held):
                raise UnusableCheckpoint(f"{found.state}: not a checkpoint of a run, it has no valid {name!r}")
        return state

    state = newest(folder, kind, read=read)
    if state is None:
        others = [other for other in ("best", "last") if steps_of(folder, other)]
        why = "the run has not saved one yet"
        if others:
            why = f"it has {others[0]!r}"
        raise ConfigError(f"{folder}: no {kind!r} checkpoint, {why}")
    return state


def check_weights(model: nn.Module, weights: Any, whose: str, recipe: str = f"its {RECIPE}") -> None:
    """Check that the names and shapes of weights match a model.

    `whose` and `recipe` name the sources of weights and model in the message.

    Raises:
        UnusableCheckpoint: A tensor is missing, has another shape, or does not belong to the model.
    """
    own = model.state_dict()
    if not isinstance(weights, dict):
        weights = {}
    for name in [*own, *(weights.keys() - own.keys())]:
        here = shape_of(own.get(name))
        there = shape_of(weights.get(name))
        if here != there:
            raise UnusableCheckpoint(f"{whose} does not match {recipe}: {name} is {there} there, {here} by the recipe")


def shape_of(value: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor, and "none" for any other value."""
    if torch.is_tensor(value):
        return tuple(value.shape)
    return "none"


def load(run: str | Path, *, checkpoint: str = "best", ema: bool = False, compile: bool = True) -> Model:
    """Load the trained model of a run, in evaluation mode on the CPU.

    Args:
        run: Run folder, or the name of one under `runs/`.
        checkpoint: "best" (on the validation split) or "last".
        ema: Load the averaged weights instead of the raw weights.
        compile: Compile the blocks at the first call (`torch.compile`); without a compiler the model stays eager. Use
            `compile=False` for a few images only, and for `torch.export`.

    An image classifier takes raw images, uint8 (B, channels, height, width), and returns logits (B, classes). Class
    names are in `model.classes`. `lion.set_form(model, "rnn")` changes the form in which the model runs.

    Example:
        >>> run = lion.train("quickstart", trainer={"steps": 2, "epochs": None, "compile": False})
        quickstart: lion_s, ...
        >>> model = lion.load("quickstart", compile=False)
        >>> lion.set_form(model, "rnn")
        >>> model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 10])
    """
    model = open_run(run, checkpoint=checkpoint, ema=ema).model
    if compile:
        compile_blocks(model, dynamic=None)
    return model


def init_from(model: Model, run: str | Path, info: Info) -> None:
    """Initialise a model from the best weights of a run.

    Tensors that do not fit, and the head if the data differ, keep their new initialisation.

    Raises:
        ConfigError: There is no such run, its data do not allow transfer, or fewer than half of the tensors fit.
    """
    folder = find_run(run)
    recipe = load_recipe(folder / RECIPE)
    task, state = read_run(folder, recipe, "best")
    if not isinstance(info, type(task.info)) and not isinstance(task.info, type(info)):
        kinds = f"a run of task {recipe.task.name!r} on {task.info.kind}, here are {info.kind}"
        raise ConfigError(f"init_from: {run} is {kinds}")
    info.check_transfer(f"init_from: {run}", state["info"])
    source = build_on_meta(task, recipe.model)
    stored = state["model"]
    weights = stored
    if type(source) is type(model):  # tensors of another model class are not adapted: they fit or they do not
        weights = model.adapt(weights, source)
    own = model.state_dict()
    same_heads = info.shares_heads(state["info"])
    fits = {}
    for name, value in weights.items():
        if name not in own or not torch.is_tensor(value):
            continue
        if name == POSITIONS:
            value = extended(value, own[name])
        if own[name].shape != value.shape:
            continue
        if same_heads or not name.startswith(model.heads):
            fits[name] = value
    left = sorted(own.keys() - fits.keys())
    unused = sorted(stored.keys() - fits.keys())
    if len(left) > len(own) // 2:
        place = next((name for name in left if name in stored), left[0])
        here = tuple(own[place].shape)
        there = shape_of(stored.get(place))
        example = f"{place} is {here} here and {there} there"
        other = other_shape(recipe.model, getattr(model, "config", None))
        if other:
            example = f"{example}; {other}"
        raise ConfigError(f"init_from: {run}: {len(left)} of {len(own)} tensors do not fit, e.g. {example}")
    model.load_state_dict({**own, **fits})
    parts = [f"new: {', '.join(left) or 'nothing'}", f"not used: {', '.join(unused) or 'nothing'}"]
    for name, value in fits.items():
        there = shape_of(stored.get(name))
        if there != shape_of(value):
            parts.append(f"adapted: {name} {there} -> {shape_of(value)}")
    log.info("initialised from %s; %s", run, "; ".join(parts))


def extended(positions: Tensor, own: Tensor) -> Tensor:
    """Return position embeddings (N, dim), followed by a model's own for the places beyond N."""
    if positions.shape[1:] != own.shape[1:]:
        return positions
    return torch.cat([positions.to(own), own[len(positions) :]])


def other_shape(then: Any, now: Any) -> str:
    """Return the settings of a model `then` that determine the shapes of tensors and differ from those `now`."""
    names = ("mixer", "dim", "depth", "num_heads", "mlp", "mlp_ratio", "patch_size")
    found = []
    for name in names:
        old = getattr(then, name, None)
        new = getattr(now, name, None)
        if old is not None and new is not None and old != new:
            found.append(f"model.{name}={old}")
    if not found:
        return ""
    return f"the run has {' '.join(found)}"


def lock_run(folder: Path) -> IO[str]:
    """Lock a run folder for this process, until the process ends or closes the returned file.

    Raises:
        ConfigError: Another process trains in the folder, or the folder cannot be written.
    """
    return _claim(folder, owner=str(os.getpid()))


def check_unlocked(folder: Path) -> None:
    """Check that no other process trains in a run folder, without writing there.

    Raises:
        ConfigError: Another process trains in the folder.
    """
    if (folder / LOCK).exists() and os.access(folder / LOCK, os.W_OK):
        _claim(folder).close()


def _claim(folder: Path, owner: str = "") -> IO[str]:
    """Lock the lock file of a run and return it; `owner` is written into the file."""
    try:
        file = open(folder / LOCK, "a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by loader workers
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip()
            raise ConfigError(f"{folder}: process {other} trains there now; wait, or use run.name=NAME") from None
        except OSError as error:
            log.warning("%s: cannot be locked (%s); do not train there twice at once", folder, error.strerror)
        if owner:
            file.truncate(0)
            file.write(owner)
            file.flush()
    except OSError as error:
        raise ConfigError(f"{folder / LOCK}: cannot be written ({error.strerror})") from None
    return file


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build_on_meta(task: Task, config: Any) -> Model:
    """Build the model on the meta device, without memory or initialisation, to count and check parameters."""
    with torch.device("meta"):
        return task.build_model(config)
