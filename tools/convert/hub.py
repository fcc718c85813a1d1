"""Converter of folders of `lion.transformers`, the inverse of `./run.sh export`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from data.text.tokenizers import local_files
from lion.config import ConfigError, flatten
from lion.recipe import Recipe
from lion.recipe_files import RECIPE
from lion.samples.base import Info
from lion.tasks import TASKS
from tools.convert.base import Converter, checked, kept_tokenizer
from tools.convert.files import CheckpointContents

KIND = "lion"  # `model_type` in config.json


class HubConverter(Converter):
    """A converter of folders that this package has exported, or that `save_pretrained` of such a model has written.

    The `config.json` determines the model and describes the data; the recipe determines everything else.
    """

    trusted = ()

    def rename(self, held: CheckpointContents) -> dict[str, Tensor]:
        return {name.removeprefix("model."): checked(name, value, held.path) for name, value in held.weights.items()}

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        """Return the settings of the model.

        Raises:
            ConfigError: The folder does not come from a run, or from a run of another task.
        """
        task = (held.said.get("data") or {}).get("task", {}).get("name")
        if task is None:
            raise ConfigError(f"{held.path}: its config.json describes no data of a run, which ./run.sh export writes")
        if task != recipe.task.name:
            raise ConfigError(
                f"{held.path}: exported from a run of task {task!r}, the recipe has {recipe.task.name!r}; "
                f"use {held.path}/{RECIPE}"
            )
        return flatten({"model": held.said["model"]})

    def info(self, held: CheckpointContents, recipe: Recipe) -> Info:
        """Return the facts about the data; the classes are those of `id2label`, which fine-tuning may have changed.

        Raises:
            ConfigError: The embeddings were resized.
        """
        info = TASKS[recipe.task.name].Info.from_dict(held.said["data"]["info"])
        known, now = getattr(info, "vocabulary", None), held.said.get("vocab_size")
        if None not in (known, now) and known != now:
            raise ConfigError(f"{held.path}: its embeddings were resized to {now} ids, its tokenizer has {known}")
        names = {int(i): str(name) for i, name in (held.said.get("id2label") or {}).items()}
        named = getattr(info, "classes", ())  # a number for the Long Range Arena, none where numbers are predicted
        if not named or not names or not isinstance(named, tuple):
            return info
        return replace(info, classes=tuple(names[i] for i in sorted(names)))

    def keep(self, held: CheckpointContents, recipe: Recipe) -> dict[str, str]:
        """Return the tokenizer of the folder, if there is one, so that the folder may be deleted."""
        if local_files(str(held.folder)) is None:
            return {}
        return kept_tokenizer(str(held.folder), recipe)

    def describe(self, held: CheckpointContents, recipe: Recipe, info: Info) -> str:
        return f"{recipe.model.name}, {recipe.model.shape()}"
