"""Data sets read by torchvision: CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST, VisionDataset

from data.base import locked
from data.folders import DOWNLOADED, HOW_TO_GET, HOW_TO_SET, check_downloaded, root_of
from data.vision.images import PictureConfig, Pictures, build_pictures, published_info
from lion.config import ConfigError, first_line, setting
from lion.samples.base import Splits
from lion.samples.images import ImageInfo


@dataclass
class TorchvisionConfig(PictureConfig):
    """Settings of a data set of torchvision. `download`: download missing files."""

    download: bool = setting(False, free=True)


class TorchvisionSet(Pictures):
    """A data set of torchvision: images of one size in a training and a test split."""

    source: ClassVar[type[VisionDataset]]  # called with (root, train, download)
    size: ClassVar[tuple[int, int]]
    channels: ClassVar[int]
    classes: ClassVar[int]
    samples: ClassVar[int]  # training samples

    def build(self) -> Splits:
        config, source = self.config, self.source
        root = root_of(config.name, config.root)
        alone = contextlib.nullcontext()
        if config.download:
            alone = locked(root.with_name(f".{root.name}.download.lock"))
        else:
            check_downloaded(config.name, config.root)
        try:
            with alone:
                train = source(str(root), train=True, download=config.download)
                test = source(str(root), train=False, download=config.download)
        except (RuntimeError, OSError, EOFError, ValueError, AssertionError) as error:
            reason = (first_line(error) or type(error).__name__).partition(".")[0]
            folder = root / DOWNLOADED[config.name]
            how = HOW_TO_GET
            if config.download:
                how = HOW_TO_SET
            raise ConfigError(f"data set '{config.name}': {reason} in {folder} ({how.format(root=root)})") from None
        return build_pictures(config, {"train": train, "test": test})

    def published(self) -> tuple[ImageInfo, int]:
        return published_info(
            self.config, size=self.size, channels=self.channels, classes=self.classes, samples=self.samples
        )


@dataclass
class Cifar10Config(TorchvisionConfig):
    name: str = "cifar10"


class Cifar10(TorchvisionSet):
    """CIFAR-10: 50,000 training and 10,000 test images."""

    Config = Cifar10Config
    source, size, channels, classes, samples = CIFAR10, (32, 32), 3, 10, 50_000


@dataclass
class Cifar100Config(TorchvisionConfig):
    name: str = "cifar100"


class Cifar100(TorchvisionSet):
    """CIFAR-100: 50,000 training and 10,000 test images."""

    Config = Cifar100Config
    source, size, channels, classes, samples = CIFAR100, (32, 32), 3, 100, 50_000


@dataclass
class MnistConfig(TorchvisionConfig):
    name: str = "mnist"
    mean: tuple[float, ...] | None = (0.1307,)
    std: tuple[float, ...] | None = (0.3081,)
    pad: int = setting(2, min=0, max=1024)
    flip: float = setting(0.0, min=0, max=1)  # a mirrored digit is another digit or no digit


class Mnist(TorchvisionSet):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits."""

    Config = MnistConfig
    source, size, channels, classes, samples = MNIST, (28, 28), 1, 10, 60_000


@dataclass
class FashionMnistConfig(TorchvisionConfig):
    name: str = "fashion_mnist"
    mean: tuple[float, ...] | None = (0.2860,)
    std: tuple[float, ...] | None = (0.3530,)
    pad: int = setting(2, min=0, max=1024)


class FashionMnist(TorchvisionSet):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes."""

    Config = FashionMnistConfig
    source, size, channels, classes, samples = FashionMNIST, (28, 28), 1, 10, 60_000
