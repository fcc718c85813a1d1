"""MNIST: 60,000 + 10,000 grey digits of 28 x 28, as torchvision reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torchvision.datasets import MNIST

from data.common import DataSplits
from data.pictures import TorchvisionConfig, build_torchvision, load_picture, published_info
from lion.config import setting
from lion.tasks.data import ImageInfo


@dataclass
class Config(TorchvisionConfig):
    name: str = "mnist"
    mean: tuple[float, ...] | None = (0.1307,)
    std: tuple[float, ...] | None = (0.3081,)
    pad: int = setting(2, min=0, max=1024)
    flip: float = setting(0.0, min=0, max=1)  # a mirrored digit is another, or none


def build(config: Config) -> DataSplits:
    return build_torchvision(config, MNIST)


def published(config: Config) -> tuple[ImageInfo, int]:
    """What the data set is known to hold: its info and the number of training pictures."""
    return published_info(config, size=(28, 28), channels=1, classes=10), 60_000


__all__ = ["Config", "build", "load_picture", "published"]
