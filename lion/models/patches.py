"""Images as patches."""

from __future__ import annotations


def pair(patch_size: tuple[int, int] | int) -> tuple[int, int]:
    """(height, width) of patches.

    Raises:
        ValueError: There are no such patches.
    """
    sides = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size)
    if min(sides) < 1:
        raise ValueError(f"patch_size must be at least 1, got {sides}")
    return sides


def grid_of(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """How many patches an image has, (height, width).

    Raises:
        ValueError: They do not divide it.
    """
    for side, size, patch in zip(("height", "width"), image_size, patch_size):
        if size % patch:
            fits = [p for p in range(1, size + 1) if size % p == 0]
            near = min(fits, key=lambda p: abs(p - patch))
            raise ValueError(f"model.patch_size: {patch} does not divide image {side} {size}, nearest: {near}")
    return tuple(size // patch for size, patch in zip(image_size, patch_size))
