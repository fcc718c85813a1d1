"""What image data tell a model: size, channels, classes, and how bright the pixels are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.tasks.data import Info


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
