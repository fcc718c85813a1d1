"""What a data set hands to a task: splits of samples, and what a model must know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
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
    more: other data by name (MNLI's mismatched genres), measured wherever `val` is, as `val_NAME`; they choose nothing.
    fingerprint: the same for the same samples, wherever their files lie; of tokens and generated samples by all bytes,
        of pictures by a look at some. None where there is none.
    """

    train: Dataset
    val: Dataset
    test: Dataset | None
    info: Info
    collate: Callable[[list[Any]], Batch] = default_collate
    order: Order = Shuffled()
    more: Mapping[str, Dataset] = MappingProxyType({})
    fingerprint: str | None = None


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

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:  # noqa: B027
        """Refuse to start from a model of other data, where its weights mean nothing for these (embeddings of another
        tokenizer's ids); `then` as in `check_same`. By default nothing is asked: what fits is taken.

        Raises:
            ConfigError: What differs, and whose it is.
        """

    def shares_heads(self, then: dict[str, Any]) -> bool:
        """Whether the outputs of a model that was trained on other data mean the same with these."""
        return then == self.to_dict()

    def difference(self, name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
        """What differs, as it was and as it is; None where a model of the old value serves the new one."""
        return None if old == new else (name, old, new)
