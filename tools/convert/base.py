"""Base class of converters, each of which makes runs from one kind of checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from data.text.store import TOKENIZER
from data.text.tokenizers import open_tokenizer
from lion.config import ConfigError
from lion.recipe import Recipe
from lion.samples.base import Info
from tools.compose import describe_data
from tools.convert.files import CheckpointContents


class Setting(NamedTuple):
    """A setting that a checkpoint shows.

    Attributes:
        key: Key of the recipe.
        there: Value in the checkpoint.
        here: Value in the recipe.
        seen: Place in the checkpoint that shows the value.
    """

    key: str
    there: Any
    here: Any
    seen: str


class Converter(ABC):
    """A converter of checkpoints for one model of this package. A new converter is one file and a line in `CONVERTERS`.

    The command calls the methods in the order below. In all methods, `held` is the checkpoint, and `ours` are its
    weights under the names of our model.

    Attributes:
        trusted: Keys of settings that a checkpoint may not show, and that are then taken from the recipe.
    """

    trusted: ClassVar[tuple[str, ...]]

    def check(self, recipe: Recipe) -> None:  # noqa: B027, most checkpoints show it by their weights
        """Check, before any weight is read, that checkpoints of this kind hold the model of the recipe.

        Raises:
            ConfigError: They do not.
        """

    @abstractmethod
    def rename(self, held: CheckpointContents) -> dict[str, Tensor]:
        """Return the weights of the checkpoint under the names of our model, in float32.

        Raises:
            ConfigError: A required weight is missing, our model has no place for a weight, or a weight is not finite.
        """

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        """Return settings of the checkpoint that override the recipe, unless the command line sets them.

        Raises:
            ConfigError: Our model cannot have the weights of the checkpoint.
        """
        return {}

    def info(self, held: CheckpointContents, recipe: Recipe) -> Info:
        """Return the metadata of the data of the recipe."""
        return describe_data(recipe, look=False)[0]

    def settings(
        self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: Info
    ) -> Iterable[Setting]:
        """Return the settings shown by shapes, names, and metadata stored with the weights.

        A setting is computed only if all settings before it agree with the recipe.
        """
        return ()

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: Info) -> Info:
        """Fit the recipe and the weights to each other, in place.

        Settings that only the checkpoint determines are set in the recipe. Weights whose size the recipe determines are
        cut or padded.

        Returns:
            The metadata of the data, changed where the checkpoint requires it.

        Raises:
            ConfigError: Recipe and weights cannot be fitted to each other.
        """
        return info

    def keep(self, held: CheckpointContents, recipe: Recipe) -> dict[str, str]:
        """Return text files to store in the run folder, by name; their paths are set in the recipe."""
        return {}

    @abstractmethod
    def describe(self, held: CheckpointContents, recipe: Recipe, info: Info) -> str:
        """Describe the converted model, except mixer and number of parameters."""


def kept_tokenizer(name: str, recipe: Recipe) -> dict[str, str]:
    """Return the files of a tokenizer in the run folder, by name, and set its path in the recipe."""
    found = open_tokenizer(name)
    recipe.data.tokenizer = str(recipe.folder.absolute() / f"{found.name}.json")
    return dict.fromkeys((f"{found.name}.json", TOKENIZER), found.inner.to_str(pretty=True))


def checked(name: str, value: Any, path: Path) -> Tensor:
    """Return a weight in float32.

    Raises:
        ConfigError: The value is not a weight, or not finite.
    """
    if not torch.is_tensor(value) or not value.dim() or not value.is_floating_point():
        raise no_place(name, path)
    if not value.isfinite().all():
        raise ConfigError(f"{path}: {name} holds NaN or infinity: not a trained model")
    return value.float()


def no_place(name: str, path: Path) -> ConfigError:
    return ConfigError(f"{path}: our model has no place for {name}: distilled, or of another architecture?")
