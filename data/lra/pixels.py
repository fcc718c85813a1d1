"""Base classes of data sets whose images are sequences of pixels, row after row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.lra.sequences import SequenceConfig, SequenceSet
from data.lra.store import ArrayKind
from data.vision.images import open_or_explain
from lion.config import ConfigError, setting
from lion.samples.sequences import SequenceInfo

PART = 2**21  # pixels


@dataclass
class PixelConfig(SequenceConfig):
    """Settings of images as sequences of pixels. `side` is the height and width of an image."""

    side: int = setting(32, min=4, max=1024)

    def resized(self, sample_size: int) -> Self:
        side = max(1, round(math.sqrt(sample_size)))
        if side * side != sample_size:
            raise ConfigError(f"data set {self.name!r} has square images: {sample_size} pixels, nearest: {side**2}")
        try:
            return replace(self, side=side)
        except ValueError as error:  # the drawing does not fit into this size
            raise ConfigError(f"data set {self.name!r} of {side} x {side} pixels: {error}") from None

    @property
    def part(self) -> int:
        """Number of images in a part."""
        return max(1, PART // self.side**2)


class PixelSet(SequenceSet):
    """A data set whose samples are the intensities of pixels, one byte each."""

    def kinds(self) -> dict[str, ArrayKind]:
        return {"pixels": ArrayKind("uint8", (self.config.side**2,)), "label": ArrayKind("uint8")}

    def load(self, path: str, info: SequenceInfo) -> dict[str, Tensor]:
        """Load an image file, grey or coloured, as {pixels}."""
        return {"pixels": torch.from_numpy(grey(open_or_explain(path), math.isqrt(info.length), path))}


def grey(picture: Image.Image, side: int, where: str) -> np.ndarray:
    """Return the grey intensities of an image, (side * side,), row after row.

    Raises:
        ConfigError: The image has another size.
    """
    if picture.size != (side, side):
        width, height = picture.size
        raise ConfigError(f"{where}: an image of {width} x {height} pixels, expected {side} x {side}")
    return np.array(picture.convert("L")).reshape(-1)


def arrays_of(samples: list[tuple[np.ndarray, int]]) -> dict[str, Any]:
    """Return the arrays of samples (intensities, label)."""
    pixels, labels = zip(*samples)
    return {"pixels": np.stack(pixels), "label": np.array(labels, np.uint8)}
