"""Sources of images: sequences of (PIL image, label) with the names of their `classes`, and samples from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from lion.config import ConfigError, first_line
from lion.progress import progress
from lion.samples.base import Unreadable

SPLIT_SEED = 0  # the split does not depend on a recipe's `seed`
USUAL = (*IMG_EXTENSIONS, ".gif", ".jfif", ".jpe", ".avif")


class Images(Dataset):
    """Samples {image, label} of a source of (image, label) with a transform; `indices` selects samples of the source.

    An error of the source becomes `Unreadable`; an error of the transform is a bug and is raised unchanged.
    """

    def __init__(self, source: Any, transform: Any, indices: list[int] | None = None) -> None:
        self.source, self.transform, self.indices = source, transform, indices
        if indices is None:
            self.indices = range(len(source))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, label = read_sample(self.source, self.indices[index])
        return {"image": self.transform(picture), "label": label}


class Decoded:
    """A source whose images are decoded once, into one block of memory that workers share."""

    def __init__(self, source: Any, indices: list[int] | None = None) -> None:
        self.classes = source.classes
        pixels, self.shapes, labels = [], [], []
        for picture, label in decode(source, indices):
            if picture.mode not in ("L", "RGB"):
                picture = picture.convert("RGB")
            values = np.asarray(picture)
            pixels.append(values.ravel())
            self.shapes.append(values.shape)
            labels.append(label)
        self.starts = np.cumsum([0, *map(len, pixels)])
        self.bytes, self.labels = np.concatenate(pixels), np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.bytes[self.starts[index] : self.starts[index + 1]].reshape(self.shapes[index])
        return Image.fromarray(pixels), int(self.labels[index])


def decode(source: Any, indices: list[int] | None = None) -> Iterator[tuple[Any, int]]:
    """Yield all samples of a source, or those of `indices`, for `data.cache`, with a progress bar.

    Raises:
        ConfigError: A sample cannot be read. A cache cannot replace it by a neighbour, as the loader does.
    """
    if indices is None:
        indices = range(len(source))
    for index in progress(indices, desc="decoding", unit="images"):
        try:
            yield read_sample(source, index)
        except Unreadable as error:
            raise ConfigError(f"data.cache: {error}; without a cache such images are skipped") from None


def read_sample(source: Any, index: int) -> tuple[Any, int]:
    """Return `source[index]`.

    Raises:
        Unreadable: The sample cannot be read; the message names its file, if it has one.
    """
    try:
        return source[index]
    except Exception as error:
        files = getattr(source, "samples", None)
        name = f"sample {index}"
        if files:
            name = files[index][0]
        reason = first_line(error) or "no reason given"
        raise Unreadable(f"{name} ({type(error).__name__}: {reason})") from error


def is_picture(path: str) -> bool:
    """Return whether a file is a picture; files without a usual suffix are looked into."""
    if path.lower().endswith(USUAL):
        return True
    try:
        with Image.open(path) as picture:
            return not isinstance(picture, ImageFile.StubImageFile)  # a stub is recognised but not decoded
    except Exception:  # the readers of formats raise errors of any type
        return False


def drawn(indices: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of some indices, drawn once for all runs."""
    order = split_indices(len(indices), ())[0]
    return [indices[i] for i in order[:most]]


def split_indices(size: int, shares: tuple[float, ...]) -> list[list[int]]:
    """Return a fixed random partition of `range(size)`: the rest first, then one part for each of the `shares`."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    parts, end = [], size
    for share in reversed(shares):
        begin = end - round(share * size)
        parts.insert(0, order[begin:end])
        end = begin
    return [order[:end], *parts]
