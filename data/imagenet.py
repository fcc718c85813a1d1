"""ImageNet-1k as class folders, `data.root/{train,val}/<wnid>/*.JPEG`."""

from __future__ import annotations

from dataclasses import dataclass

from data.common import DataSplits, find_root
from data.imagefolder import build_folders
from data.pictures import PictureConfig, load_picture, published_info
from lion.tasks.base import ImageInfo

HOW = (
    "get ILSVRC2012 from https://image-net.org/download, unpack it to ROOT/train/WNID/*.JPEG and sort the "
    "validation pictures into ROOT/val/WNID/*.JPEG"
)


@dataclass
class Config(PictureConfig):
    name: str = "imagenet"
    image_size: tuple[int, int] | None = (224, 224)


def build(config: Config) -> DataSplits:
    return build_folders(config, find_root(config, "imagenet", HOW), HOW)


def published(config: Config) -> tuple[ImageInfo, int]:
    """What the data set is known to hold: its info and the number of training pictures."""
    return published_info(config, size=(224, 224), channels=3, classes=1000), 1_281_167


__all__ = ["Config", "build", "load_picture", "published"]
