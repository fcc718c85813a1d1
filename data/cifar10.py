"""CIFAR-10: 50,000 + 10,000 RGB pictures of 32 x 32 in 10 classes, as torchvision reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torchvision.datasets import CIFAR10

from data.common import DataSplits
from data.pictures import TorchvisionConfig, build_torchvision, load_picture, published_info
from lion.tasks.data import ImageInfo


@dataclass
class Config(TorchvisionConfig):
    name: str = "cifar10"


def build(config: Config) -> DataSplits:
    return build_torchvision(config, CIFAR10)


def published(config: Config) -> tuple[ImageInfo, int]:
    """What the data set is known to hold: its info and the number of training pictures."""
    return published_info(config, size=(32, 32), channels=3, classes=10), 50_000


__all__ = ["Config", "build", "load_picture", "published"]
