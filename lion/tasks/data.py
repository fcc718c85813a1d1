"""What a data set hands to a task: splits of samples, and what a model must know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lion.config import ConfigError
from lion.tasks.order import Order, Shuffled

Batch = dict[str, Tensor]


class Unreadable(Exception):
    """A data set's sample cannot be read; the message names its file and the reason."""


class DeviceDataset(Dataset, ABC):
    """A data set that makes whole batches on the device: no loader's work."""

    @abstractmethod
    def batch(self, indices: list[int], device: torch.device, generator: torch.Generator | None = None) -> Batch:
        """These samples on `device`; without a generator nothing is left to chance."""


class Splits(NamedTuple):
    """The parts of a data set; of `val`, the best checkpoint is chosen.

    info: what a model must know of them.
    collate: a batch of a list of samples; a tensor's first dimension are the samples.
    order: in which an epoch reads `train`.
    """

    train: Dataset
    val: Dataset
    test: Dataset | None
    info: Info
    collate: Callable[[list[Any]], Batch] = default_collate
    order: Order = Shuffled()


@dataclass(frozen=True)
class Info(ABC):
    """What the data tells a model. A kind of data is a frozen dataclass of its own, stored with every checkpoint."""

    kind: ClassVar[str]  # what the samples are, as an error says it
    size_unit: ClassVar[str] = "tokens"  # in what the size of a sample is counted

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which `from_dict` reads back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    @abstractmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Of what `to_dict` gave.

        Raises:
            LookupError, TypeError, ValueError: Of something else.
        """

    @property
    def sample_size(self) -> int:
        """Of every sample, in `size_unit`.

        Raises:
            ConfigError: There is no such number.
        """
        raise ConfigError(f"{self.kind} have no size")

    def resized(self, sample_size: int) -> Self:
        """The same data in samples of another size.

        Raises:
            ConfigError: There are none.
        """
        raise ConfigError(f"{self.kind} have no other size")

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        """Refuse these data for what was trained on others; `then` is what `to_dict` gave there.

        Raises:
            ConfigError: What differs, and whose it is.
        """
        for name, new in self.to_dict().items():
            found = self.difference(name, then.get(name), new)
            if found is not None:
                what, old, new = found
                raise ConfigError(f"{whose} is of other data: {what} was {old!r}, and is {new!r} now")

    def shares_heads(self, then: dict[str, Any]) -> bool:
        """Whether the outputs of a model that was trained on other data mean the same with these."""
        return then == self.to_dict()

    def difference(self, name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
        """What differs, as it was and as it is; None where a model of the old value serves the new one."""
        return None if old == new else (name, old, new)


@dataclass(frozen=True)
class ImageInfo(Info):
    """What a model must know of image data: (height, width), channels, the classes' names in label order, and the
    mean and deviation of each channel of pixels in [0, 1]."""

    kind = "images"
    size_unit = "px"

    size: tuple[int, int]
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        size, classes, mean, std = (tuple(values[name]) for name in ("size", "classes", "mean", "std"))
        counts, colours, channels = (*size, values["channels"]), (*mean, *std), values["channels"]
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in counts):
            raise ValueError(f"no height, width and channels: {counts}")
        if not len(mean) == len(std) == channels or not all(isinstance(x, (int, float)) for x in colours):
            raise ValueError(f"no mean and deviation of {channels} channels: {colours}")
        return cls(size, channels, classes, mean, std)

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return same_names(then.get("classes"), list(self.classes))

    @property
    def sample_size(self) -> int:
        """The side of its squares."""
        height, width = self.size
        if height != width:
            raise ConfigError(f"the images are {height} x {width}, no squares of one size")
        return height

    def resized(self, sample_size: int) -> Self:
        return replace(self, size=(sample_size, sample_size))

    def difference(self, name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
        """Labels mean their classes: another name in the same place is other data."""
        if name != "classes":
            return super().difference(name, old, new)
        if same_names(old, new):
            return None
        odd = next((i for i, (a, b) in enumerate(zip(old or (), new)) if a != b), None)
        return ("number of classes", len(old or ()), len(new)) if odd is None else (f"class {odd}", old[odd], new[odd])


def numbered(count: int) -> tuple[str, ...]:
    """Names of classes that nothing names."""
    return tuple(f"class {i}" for i in range(count))


def same_names(old: Any, new: Any) -> bool:
    """Whether two lists of classes are the same; those of a converted checkpoint may be only numbered."""
    return old == new or (old == list(numbered(len(old or ()))) and len(old) == len(new or ()))
