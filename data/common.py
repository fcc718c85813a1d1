"""What data sets share: where bytes live, the seeded split, and the checks with clear words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from tqdm import tqdm

from lion.config import ConfigError, setting
from lion.tasks.data import Unreadable


@dataclass
class DataConfig:
    """Settings of every data set. `root` is where its files are (null: its folder under the data root)."""

    name: str = ""
    root: str | None = setting(None, free=True)
    workers: int | None = setting(None, min=0, max=1000, free=True)


class DataSplits(NamedTuple):
    """A data set's splits, and `info`: what the model must know of them."""

    train: Dataset
    val: Dataset
    test: Dataset | None
    info: Any


def data_root() -> Path:
    """`$LION_DATA`, else the user's cache folder."""
    if os.environ.get("LION_DATA"):
        return user_path(os.environ["LION_DATA"])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lion"


def user_path(path: str) -> Path:
    """A path whose `~` is the home folder; one of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def find_root(config: DataConfig, folder: str, how: str) -> Path:
    """The data set's folder; where it is missing, what is missing, where it was looked for, and `how` to get it."""
    root = user_path(config.root) if config.root else data_root() / folder
    if not root.is_dir():
        raise ConfigError(f"data set '{config.name}': no folder {root} (data.root=PATH or $LION_DATA set it); {how}")
    return root


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """`root` and every folder below it, each with the names of its files; links are followed.

    Hidden names (`._1.jpg`, `.ipynb_checkpoints`) and what is no file (pipes, devices) are passed over. A link to
    nothing counts as a file: who reads it says so.

    Raises:
        ConfigError: A folder is reached twice, or lies above itself, or cannot be read.
    """
    top = Path(os.path.realpath(root))
    reached = {str(path): str(path) for path in (top, *top.parents)}
    todo = [str(root)]
    while todo:
        folder, files = todo.pop(), []
        try:
            for entry in sorted(os.scandir(folder), key=lambda e: e.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real in reached:
                        again = f"the same folder as {reached[real]}"
                        raise ConfigError(f"{entry.path}: {again}, its files would count twice; remove the link")
                    reached[real] = entry.path
                    todo.append(entry.path)
                elif entry.is_file() or not os.path.exists(entry.path):
                    files.append(entry.name)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        yield folder, files


def split_indices(size: int, shares: tuple[float, ...], seed: int = 0) -> list[list[int]]:
    """A fixed random partition of `range(size)`: as many parts as `shares`, and the rest first."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    parts, end = [], size
    for share in reversed(shares):
        begin = end - round(share * size)
        parts.insert(0, order[begin:end])
        end = begin
    return [order[:end], *parts]


class Images(Dataset):
    """Samples {image, label} of a source of (picture, label) under a transform; `indices` picks a part of it.

    What the source fails to give is `Unreadable`; an error of the transform is a bug and stays one.
    """

    def __init__(self, source: Any, transform: Any, indices: list[int] | None = None) -> None:
        self.source, self.transform, self.indices = source, transform, indices

    def __len__(self) -> int:
        return len(self.source) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, label = read_sample(self.source, index if self.indices is None else self.indices[index])
        return {"image": self.transform(picture), "label": label}


class Decoded:
    """A source whose pictures were decoded once, into one block of memory that workers share."""

    def __init__(self, source: Any, indices: list[int] | None = None) -> None:
        self.classes = source.classes
        pixels, self.shapes, labels = [], [], []
        for picture, label in decode(source, indices):
            pixels.append(np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB")))
            self.shapes.append(pixels[-1].shape)
            labels.append(label)
        self.starts = np.cumsum([0, *(p.size for p in pixels)])
        self.bytes, self.labels = np.concatenate([p.ravel() for p in pixels]), np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.bytes[self.starts[index] : self.starts[index + 1]].reshape(self.shapes[index])
        return Image.fromarray(pixels), int(self.labels[index])


def decode(source: Any, indices: list[int] | None = None) -> Iterator[tuple[Any, int]]:
    """All of a source, or a part, for `data.cache`, with a progress bar.

    Raises:
        ConfigError: One cannot be read: a cache has no place for the neighbour that would stand in for it.
    """
    indices = range(len(source)) if indices is None else indices
    for index in tqdm(indices, desc="decoding", unit="images", leave=False, disable=None):
        try:
            yield read_sample(source, index)
        except Unreadable as error:
            raise ConfigError(f"data.cache: {error}; without a cache such pictures are passed over") from None


def read_sample(source: Any, index: int) -> tuple[Any, int]:
    """`source[index]`.

    Raises:
        Unreadable: The source cannot give it; the message names its file, where it has one.
    """
    try:
        return source[index]
    except Exception as error:
        files = getattr(source, "samples", None)
        name = files[index][0] if files else f"sample {index}"
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise Unreadable(f"{name} ({type(error).__name__}: {reason})") from error
