"""CIFAR-10 for the "image" task of LRA: grey images as sequences of pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10

from data.base import files_below
from data.folders import root_of
from data.lra.pixels import PixelConfig, PixelSet, arrays_of, grey
from data.lra.store import Arrays, Part, Source, in_parts
from data.manifest import stamps
from data.vision.hf import HubConfig, HubPictures
from data.vision.images import open_or_explain
from data.vision.sources import Images, read_sample
from data.vision.torchvision_sets import Cifar10, Cifar10Config
from lion.config import ConfigError, setting
from lion.samples.base import Splits, Unreadable
from lion.samples.sequences import SequenceInfo


@dataclass
class CifarPixelsConfig(PixelConfig):
    """Settings of CIFAR-10 as sequences of pixels.

    side: The height and width of an image; larger images are averaged over blocks of pixels, two by two for 16.
    path: The folder of torchvision's files (it holds cifar-10-batches-py), a Hub id, or a folder or file of parquet;
        null: torchvision's files in `cifar10` of the data root.
    download: Whether torchvision downloads its files.
    val_split: Share of the training images used for validation; null: the test images are used.
    """

    name: str = "cifar10_pixels"
    download: bool = setting(False, free=True)
    val_split: float | None = setting(0.1, min=0.001, max=0.9)


class CifarPixels(PixelSet):
    """CIFAR-10 as sequences of pixels: 50,000 training images, of which a tenth is held out, and 10,000 test images."""

    Config = CifarPixelsConfig

    def is_prepared(self) -> bool:
        return self.place.exists() and super().is_prepared()

    def prepare(self) -> None:
        if self.config.download and not self.config.path and not self.place.exists():
            self.stored()  # before the rest, because the folder's name depends on these files
        super().prepare()

    def identity(self) -> Any:
        place = self.place
        if not place.exists():
            return {"path": self.config.path or "cifar10", "side": self.config.side}
        files = [place]
        if not place.is_file():
            files = files_below(place)
        return {"files": stamps(files), "side": self.config.side}

    @property
    def place(self) -> Path:
        """The path of torchvision's files, or of the files of `path`."""
        root = root_of("cifar10", self.config.path)
        batches = root / CIFAR10.base_folder
        if batches.is_dir() or not self.config.path:
            return batches
        return root

    def source(self) -> Source:
        config = self.config
        if self.place.name == CIFAR10.base_folder:
            return Pictures(self.stored(), config)
        size = (config.side, config.side)
        return Pictures(HubPictures(HubConfig(path=config.path, image_size=size, channels=1)).build(), config)

    def stored(self) -> Splits:
        """Return the splits of torchvision's files."""
        root, side = str(self.place.parent), self.config.side
        config = Cifar10Config(root=root, download=self.config.download, image_size=(side, side), channels=1)
        return Cifar10(config).build()

    def load(self, path: str, info: SequenceInfo) -> dict[str, Tensor]:
        return {"pixels": torch.from_numpy(reduced(open_or_explain(path), math.isqrt(info.length), path))}

    def info(self, manifest: dict[str, Any] | None = None) -> SequenceInfo:
        classes = 10
        if manifest is not None:
            classes = manifest["classes"]
        # mean and deviation as in S5
        return SequenceInfo(classes, self.config.side**2, mean=round(122.6 / 255, 4), std=round(61 / 255, 4))

    def published(self) -> tuple[SequenceInfo, int]:
        held = round(50_000 * (self.config.val_split or 0))
        return self.info(), min(50_000 - held, self.config.limit or 50_000)


def reduced(picture: Image.Image, side: int, where: str) -> np.ndarray:
    """Return the grey intensities of an image, (side * side,), averaged over blocks if it is larger."""
    factor = picture.width // side
    if factor > 1 and picture.size == (factor * side, factor * side):
        picture = picture.convert("L").reduce(factor)
    return grey(picture, side, where)


class Pictures(Source):
    """A source of the images of an image data set, in grey."""

    def __init__(self, splits: Splits, config: CifarPixelsConfig) -> None:
        self.config, self.classes = config, len(splits.info.classes)
        if self.classes > 256:
            raise ConfigError(f"data set {config.name!r}: {self.classes} classes, labels of one byte have at most 256")
        test = splits.test or splits.val
        self.splits: dict[str, Images] = {"train": splits.train, "test": test}
        if splits.test is not None:
            self.splits["val"] = splits.val

    def describe(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def parts(self) -> list[Part]:
        return in_parts({split: len(images) for split, images in self.splits.items()}, self.config.part)

    def make(self, part: Part) -> Arrays:
        images, samples = self.splits[part.split], []
        for row in range(part.first, part.first + part.count):
            where = f"{self.config.path or self.config.name}, {part.split} row {row + 1}"
            try:
                picture, label = read_sample(images.source, images.indices[row])
            except Unreadable as error:
                raise ConfigError(f"{where}: {error}") from None
            samples.append((reduced(picture, self.config.side, where), label))
        return arrays_of(samples)
