"""The division of images into patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from lion.config import nearest_divisor
from lion.models.encoder import EncoderConfig


@dataclass
class PatchedConfig(EncoderConfig):
    """Settings of an encoder whose tokens are image patches.

    `patch_size` is (height, width) in pixels, or one number for both.
    """

    patch_size: tuple[int, int] | int = 16

    def resolved(self) -> Self:
        c = super().resolved()
        c.patch_size = c.patch_shape()
        if min(c.patch_size) < 1:
            raise ValueError(f"patch_size must be at least 1, got {c.patch_size}")
        return c

    def patch_shape(self) -> tuple[int, int]:
        """Return the (height, width) of a patch in pixels."""
        if isinstance(self.patch_size, int):
            return self.patch_size, self.patch_size
        height, width = self.patch_size
        return height, width

    def shape(self) -> str:
        height, width = self.patch_shape()
        return f"{super().shape()}, patches of {height} x {width}"


def grid_of(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return the number of patches of an image, (height, width).

    Raises:
        ValueError: The patch size does not divide the image size.
    """
    for side, size, patch in zip(("height", "width"), image_size, patch_size):
        if size % patch:
            near = str(nearest_divisor(patch, math.gcd(*image_size)))
            if image_size[0] != image_size[1]:
                sides = [nearest_divisor(p, n) for p, n in zip(patch_size, image_size)]
                near += f", or {sides} (height, width)"
            raise ValueError(f"model.patch_size: {patch} does not divide image {side} {size}, nearest: {near}")
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]
