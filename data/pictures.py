"""Folders of pictures, `root/train/<class>/*` and `root/val/<class>/*`, with DeiT's geometry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from data.common import DataConfig, DataSplits, Images
from lion.config import ConfigError, setting
from lion.tasks.base import ImageInfo

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass
class FolderConfig(DataConfig):
    """Pictures are cropped to `image_size` (height, width): at random in training, and at test from the middle of
    a picture whose shorter side is `image_size / crop`. `random_erasing` is the share of pictures that lose a
    rectangle to noise; `repeats` is DeiT's repeated augmentation: how often a drawn picture stands in an epoch."""

    image_size: tuple[int, int] = (224, 224)
    crop: float = setting(0.875, above=0, max=1)
    random_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = setting(0.5, min=0, max=1)
    random_erasing: float = setting(0.0, min=0, max=1)
    repeats: int = setting(1, min=1)

    def __post_init__(self) -> None:
        low, high = self.random_scale
        if not all(1 <= side <= 65_536 for side in self.image_size):
            raise ValueError(f"image_size: expected sides of 1 to 65536 pixels, got {self.image_size}")
        if not 0 < low <= high <= 1:
            raise ValueError(f"random_scale: expected two shares of a picture, the smaller first, got {(low, high)}")


def training_transform(config: FolderConfig) -> v2.Transform:
    return v2.Compose(
        [
            v2.RandomResizedCrop(
                config.image_size, scale=config.random_scale, interpolation=v2.InterpolationMode.BICUBIC
            ),
            v2.RandomHorizontalFlip(config.flip),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.RandomErasing(config.random_erasing, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random"),
        ]
    )


def test_transform(config: FolderConfig) -> v2.Transform:
    short = int(min(config.image_size) / config.crop)
    return v2.Compose(
        [
            v2.Resize(short, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(config.image_size),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def open_folder(path: Path, config: FolderConfig, how: str) -> ImageFolder:
    """A split's ImageFolder; a missing or empty one is explained."""
    if not path.is_dir():
        raise ConfigError(f"data set '{config.name}': no folder {path}; {how}")
    try:
        return ImageFolder(str(path))
    except FileNotFoundError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"data set '{config.name}': {path}: {first}") from None


def build_folders(config: FolderConfig, root: Path, how: str) -> DataSplits:
    """Splits of `root`: train, val, and test where there is one."""
    train, val = (open_folder(root / split, config, how) for split in ("train", "val"))
    test = open_folder(root / "test", config, how) if (root / "test").is_dir() else None
    for name, split in (("val", val), ("test", test)):
        if split is not None and split.classes != train.classes:
            odd = sorted(set(split.classes) ^ set(train.classes))[0]
            raise ConfigError(f"data set '{config.name}': {root}: train and {name} differ in class folder {odd!r}")
    plain = test_transform(config)
    return DataSplits(
        train=Images(train, training_transform(config)),
        val=Images(val, plain),
        test=None if test is None else Images(test, plain),
        info=ImageInfo(size=tuple(config.image_size), channels=3, classes=tuple(train.classes)),
    )


def load_picture(config: FolderConfig, picture: Any) -> Tensor:
    """A PIL picture as the model's input."""
    return test_transform(config)(picture.convert("RGB"))
