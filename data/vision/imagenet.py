"""ImageNet-1k as class folders, `data.root/{train,val}/<wnid>/*.JPEG`, with torchvision's names of the classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from torchvision.models import ResNet18_Weights

from data.folders import PLACED, find_root
from data.vision.imagefolder import build_folders
from data.vision.images import PictureConfig, Pictures, published_info
from lion.samples.base import Splits
from lion.samples.images import ImageInfo

NAMES = tuple(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])  # in the order of the sorted wnids
WNIDS = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"  # SHA-256 of the sorted wnids, one per line


@dataclass
class ImageNetConfig(PictureConfig):
    name: str = "imagenet"
    image_size: tuple[int, int] | None = (224, 224)


class ImageNet(Pictures):
    """ImageNet-1k: 1,281,167 training and 50,000 validation images in 1,000 classes."""

    Config = ImageNetConfig

    def build(self) -> Splits:
        splits = build_folders(self.config, find_root("imagenet", self.config.root), PLACED["imagenet"])
        return splits._replace(info=replace(splits.info, classes=named(splits.info.classes)))

    def published(self) -> tuple[ImageInfo, int]:
        info, samples = published_info(self.config, size=(224, 224), channels=3, classes=len(NAMES), samples=1_281_167)
        return replace(info, classes=NAMES), samples


def named(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names of ImageNet-1k for its 1,000 folders; any other list, also a subset, stays unchanged."""
    if hashlib.sha256("\n".join(folders).encode()).hexdigest() == WNIDS:
        return NAMES
    return folders
