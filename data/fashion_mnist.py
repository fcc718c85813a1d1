"""Fashion-MNIST: 60,000 + 10,000 grey pictures of clothes, 28 x 28, in 10 classes, as torchvision reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torchvision.datasets import FashionMNIST

from data.common import DataSplits
from data.pictures import TorchvisionConfig, build_torchvision, load_picture, published_info
from lion.config import setting
from lion.tasks.data import ImageInfo


@dataclass
class Config(TorchvisionConfig):
    name: str = "fashion_mnist"
    mean: tuple[float, ...] | None = (0.2860,)
    std: tuple[float, ...] | None = (0.3530,)
    pad: int = setting(2, min=0, max=1024)


def build(config: Config) -> DataSplits:
    return build_torchvision(config, FashionMNIST)


def published(config: Config) -> tuple[ImageInfo, int]:
    """What the data set is known to hold: its info and the number of training pictures."""
    return published_info(config, size=(28, 28), channels=1, classes=10), 60_000


__all__ = ["Config", "build", "load_picture", "published"]
