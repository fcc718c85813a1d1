"""What the command must know of one kind of checkpoint, to make a run of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from lion.tasks.data import Info
from tools.compose import describe_data
from tools.convert.files import Held


class Setting(NamedTuple):
    """A setting that a checkpoint shows: the recipe's key, the value there, the recipe's, and where it was seen."""

    key: str
    there: Any
    here: Any
    seen: str


class Converter(ABC):
    """Checkpoints of others for one model of ours. A new one is one file and its line in `CONVERTERS`.

    The command calls its methods in this order. `held` is the checkpoint, `ours` its weights as our model has them.
    """

    trusted: ClassVar[tuple[str, ...]]  # settings that a file need not show

    @abstractmethod
    def rename(self, held: Held) -> dict[str, Tensor]:
        """Their weights as ours, in float32.

        Raises:
            ConfigError: A weight that every such model has is missing, we have no place for one, or one is not finite.
        """

    def adopted(self, held: Held, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        """Settings by key in which the recipe follows the checkpoint, unless the command line gives them.

        Raises:
            ConfigError: Ours is no such model.
        """
        return {}

    def info(self, recipe: Recipe) -> Info:
        """What the recipe's data tells the model."""
        return describe_data(recipe, look=False)[0]

    @abstractmethod
    def settings(self, held: Held, ours: dict[str, Tensor], recipe: Recipe, info: Info) -> Iterator[Setting]:
        """What shapes, names, and what stands beside the weights show; each is asked for only if those before it agree
        with the recipe."""

    @abstractmethod
    def fit(self, held: Held, ours: dict[str, Tensor], recipe: Recipe, info: Info) -> Info:
        """Set in the recipe what the file alone decides, and cut or fill weights to what the recipe decides; the info
        of its data.

        Raises:
            ConfigError: They do not go together.
        """

    def keep(self, held: Held, recipe: Recipe) -> dict[str, str]:
        """Texts by file name that the run holds for itself; the recipe is told where."""
        return {}

    @abstractmethod
    def describe(self, held: Held, recipe: Recipe, info: Info) -> str:
        """What was found, beside mixer and parameters."""


def checked(name: str, value: Any, path: Path) -> Tensor:
    """A weight in float32.

    Raises:
        ConfigError: It is no weight, or not finite.
    """
    if not torch.is_tensor(value) or not value.dim() or not value.is_floating_point():
        raise no_place(name, path)
    if not value.isfinite().all():
        raise ConfigError(f"{path}: {name} holds NaN or infinity: no trained model")
    return value.float()


def no_place(name: str, path: Path) -> ConfigError:
    return ConfigError(f"{path}: our model has no place for {name}: distilled, or of another architecture?")
