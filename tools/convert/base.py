"""What the command must know of one kind of checkpoint, to make a run of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from lion.tasks.data import Info


class Setting(NamedTuple):
    """A setting that a checkpoint shows: the recipe's key, the value there, the recipe's, and where it was seen."""

    key: str
    there: Any
    here: Any
    seen: str


class Converter(ABC):
    """Checkpoints of others for one model of ours. A new one is one file and its line in `CONVERTERS`."""

    whose: ClassVar[str]  # what it takes, in words
    names: ClassVar[tuple[tuple[str, str, int], ...]]  # theirs (a pattern), ours, and the sign of the weights
    needed: ClassVar[dict[str, int]]  # weights that every such file has, and how many axes they have
    trusted: ClassVar[tuple[str, ...]]  # settings that a file need not show

    def rename(self, theirs: dict[str, Any], path: Path) -> dict[str, Tensor]:
        """The same weights under our names, with our signs, in float32.

        Raises:
            ConfigError: A weight that every such model has is missing, we have no place for one, or one is not finite.
        """
        for name, axes in self.needed.items():
            if not torch.is_tensor(theirs.get(name)) or theirs[name].dim() != axes:
                raise ConfigError(f"{path}: no {name} of {axes} axes in it: not {self.whose}")
        ours = {}
        for name, value in theirs.items():
            matches = ((re.fullmatch(pattern, name), our, sign) for pattern, our, sign in self.names)
            match, our, sign = next((m for m in matches if m[0]), (None, "", 1))
            if match is None or not torch.is_tensor(value) or not value.dim() or not value.is_floating_point():
                raise ConfigError(f"{path}: our model has no place for {name}: distilled, or of another architecture?")
            ours[match.expand(our)] = sign * value.float()
            if not ours[match.expand(our)].isfinite().all():
                raise ConfigError(f"{path}: {name} holds NaN or infinity: no trained model")
        return ours

    @abstractmethod
    def settings(self, theirs: dict[str, Tensor], recipe: Recipe, info: Info) -> Iterator[Setting]:
        """What shapes and names show; each is asked for only if those before it agree with the recipe."""

    @abstractmethod
    def arguments(self, said: dict[str, Any], recipe: Recipe) -> Iterator[Setting]:
        """What the arguments of the training show, which some keep beside the weights."""

    @abstractmethod
    def decide(self, ours: dict[str, Tensor], recipe: Recipe, info: Info) -> Info:
        """Set in the recipe what the file alone decides; the info of its data."""

    @abstractmethod
    def describe(self, recipe: Recipe, info: Info) -> str:
        """What was found, beside mixer and parameters."""
