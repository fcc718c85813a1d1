"""Contract between data sets and tasks: splits of samples, and the metadata that models need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lion.config import ConfigError
from lion.samples.order import Order, Shuffled

Batch = dict[str, Tensor]
Collate = Callable[[list[Any]], Batch]  # makes a batch from a list of samples


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the CPU to a device, without waiting for the work that is queued on a GPU."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def are_counts(values: tuple[Any, ...]) -> bool:
    """Return whether all values are whole numbers above 0."""
    return all(isinstance(n, int) and n > 0 for n in values)


class Unreadable(Exception):
    """An unreadable sample of a data set. The message names the file and the reason."""


class Split(Protocol):
    """A split of a data set: samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DeviceDataset(Dataset, ABC):
    """A data set that makes whole batches on the device, without loader workers."""

    @abstractmethod
    def batch(self, indices: list[int], device: torch.device, generator: torch.Generator | None = None) -> Batch:
        """Return these samples as a batch on `device`; without a generator the result is deterministic."""


class Splits(NamedTuple):
    """Splits of a data set. The results on `val` select the best checkpoint.

    Attributes:
        info: Facts about the data that a model must know.
        collate: Function that makes a batch from a list of samples; the first dimension of every tensor is the sample.
        order: Order in which an epoch reads `train`.
        more: Other held-out data by name (MNLI's mismatched genres). They are evaluated whenever `val` is, as
            `val_NAME`, but never select a checkpoint.
        fingerprint: Identifier of the samples, wherever their files lie. For tokens and generated samples it hashes all
            bytes. For image files it hashes class names, counts, and the sizes and labels of some images. None if the
            data have no fingerprint.
    """

    train: Split
    val: Split
    test: Split | None
    info: Info
    collate: Collate = default_collate
    order: Order = Shuffled()
    more: Mapping[str, Split] = MappingProxyType({})
    fingerprint: str | None = None

    @property
    def reported(self) -> str:
        """The name of the split on which results are reported: "test", or "val" without a test split."""
        return "val" if self.test is None else "test"


@dataclass(frozen=True)
class Info(ABC):
    """Metadata of data that models need. Each kind of data has a frozen dataclass, stored in every checkpoint."""

    kind: ClassVar[str]  # noun for the samples in error messages
    size_unit: ClassVar[str] = "tokens"  # unit of `sample_size`

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that `from_dict` accepts."""
        values = asdict(self)
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build the info from the result of `to_dict`.

        Raises:
            LookupError, TypeError, ValueError: `values` is not such a result.
        """
        given = {}
        for field in fields(cls):
            if field.name in values:
                value = values[field.name]
                given[field.name] = tuple(value) if isinstance(value, list) else value
        info = cls(**given)
        info.check()
        return info

    def check(self) -> None:  # noqa: B027 - most kinds check their fields where they are made
        """Check fields that were read from a file.

        Raises:
            LookupError, TypeError, ValueError: They are not those of such data.
        """

    @property
    def sample_size(self) -> int:
        """Size of every sample, in `size_unit`.

        Raises:
            ConfigError: Samples have no single size.
        """
        raise ConfigError(f"no sample size is defined for {self.kind}")

    def resized(self, sample_size: int) -> Self:
        """Return the info of the same data in samples of another size.

        Raises:
            ConfigError: The data exist in one size only.
        """
        raise ConfigError(f"the sample size of {self.kind} cannot be changed")

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        """Check that these data match the data of a trained model.

        Args:
            whose: Subject of the error message, such as the name of a run.
            then: Result of `to_dict` for the data of the trained model.

        Raises:
            ConfigError: The data differ; the message names the difference.
        """
        for name, new in self.to_dict().items():
            found = self.difference(name, then.get(name), new)
            if found is not None:
                what, old, new = found
                raise ConfigError(f"{whose} was trained on other data: {what} was {old!r}, and is {new!r} now")

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:  # noqa: B027
        """Check that weights trained on other data are a useful start for these data.

        A check may fail, for example, because the embeddings belong to another tokenizer's ids. By default there is no
        check: all weights that fit are taken. Arguments are those of `check_same`.

        Raises:
            ConfigError: The data differ; the message names the difference.
        """

    def shares_heads(self, then: dict[str, Any]) -> bool:
        """Return whether the outputs of a model trained on the data `then` have the same meaning for these data."""
        return then == self.to_dict()

    def difference(self, name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
        """Return (name, old value, new value) of a difference; None if a model of the old value fits the new one."""
        if old == new:
            return None
        return name, old, new
