"""Metadata of image data: size, channels, classes, and the statistics of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.samples.base import Info, are_counts


@dataclass(frozen=True)
class ImageInfo(Info):
    """Metadata of image data that models need.

    Attributes:
        size: (height, width).
        channels: Number of channels.
        classes: Names of the classes, in the order of the labels.
        mean, std: Mean and standard deviation of each channel, of pixels in [0, 1].
    """

    kind = "images"
    size_unit = "px"

    size: tuple[int, int]
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def check(self) -> None:
        counts = (*self.size, self.channels)
        colours = (*self.mean, *self.std)
        if len(self.size) != 2 or not are_counts(counts):
            raise ValueError(f"expected height, width and channels above 0, got {counts}")
        each = len(self.mean) == len(self.std) == self.channels
        if not each or not all(isinstance(x, (int, float)) for x in colours):
            raise ValueError(f"expected mean and deviation of {self.channels} channels, got {colours}")
        if not isinstance(self.classes, tuple):
            raise ValueError(f"expected names of classes, got {self.classes}")

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return same_names(then.get("classes"), list(self.classes))

    @property
    def sample_size(self) -> int:
        """Side of the images, which must be square."""
        height, width = self.size
        if height != width:
            raise ConfigError(f"the images are {height} x {width}, expected squares")
        return height

    def resized(self, sample_size: int) -> Self:
        return replace(self, size=(sample_size, sample_size))

    def difference(self, name: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
        """Compare the names of classes in the order of the labels, and other fields by value."""
        if name != "classes":
            return super().difference(name, old, new)
        if same_names(old, new):
            return None
        old = old or ()
        for i, (then, now) in enumerate(zip(old, new)):
            if then != now:
                return f"class {i}", then, now
        return "number of classes", len(old), len(new)


def evaluation_crop(data: Mapping[str, Any]) -> float | None:
    """Return `crop` of a run's `data` settings, or None if its evaluation resizes images and cuts nothing."""
    if data.get("pad"):
        return None
    return data.get("crop")


def numbered(count: int) -> tuple[str, ...]:
    """Return names for classes without names."""
    return tuple(f"class {i}" for i in range(count))


def same_names(old: Any, new: Any) -> bool:
    """Return whether two lists of classes are the same; a converted checkpoint may only number its classes."""
    if old == new:
        return True
    unnamed = list(numbered(len(old or ())))
    return old == unnamed and len(old) == len(new or ())
