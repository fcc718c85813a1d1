"""Handwritten digits: 1,797 real 8x8 grey images that ship inside scikit-learn (UCI optdigits test set)."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from data.base import DataConfig, DataSet
from data.vision.images import BICUBIC, open_or_explain
from data.vision.sources import Images, split_indices
from lion.config import ConfigError, setting
from lion.samples.base import Splits
from lion.samples.images import ImageInfo

INFO = ImageInfo((8, 8), 1, tuple(str(d) for d in range(10)), mean=(0.287,), std=(0.354,))


@dataclass
class DigitsConfig(DataConfig):
    """Settings of the digits: the shares of images that are held out; the split is the same for every run."""

    name: str = "digits"
    val_split: float = setting(0.15, min=0.001, max=0.4)
    test_split: float = setting(0.25, min=0.001, max=0.4)


class Digits(DataSet):
    """Handwritten digits, all in memory."""

    Config, Info = DigitsConfig, ImageInfo
    workers = 0

    def build(self) -> Splits:
        rows = read_rows()
        tensors = torch.from_numpy(15 * rows[:, :-1]).view(-1, 1, 8, 8)  # pixel values are 0 to 16
        source = list(zip(tensors, rows[:, -1].tolist()))
        shares = (self.config.val_split, self.config.test_split)
        plain = v2.Identity()
        train, val, test = (Images(source, plain, part) for part in split_indices(len(source), shares))
        fingerprint = hashlib.sha256(tensors.numpy().tobytes()).hexdigest()[:12]
        return Splits(train, val, test, INFO, fingerprint=fingerprint)

    def load(self, path: str, info: ImageInfo) -> dict[str, Tensor]:
        """Load an image file as {image}: grey, 8x8. The file must show bright ink on a dark background."""
        picture = v2.functional.pil_to_tensor(open_or_explain(path).convert("L"))
        return {"image": v2.functional.resize(picture, [8, 8], BICUBIC)}


def read_rows() -> np.ndarray:
    """Read the digits as rows (1797, 65) of 64 pixel values, 0 to 16, and a label, in uint8.

    The file is read without importing scikit-learn, which takes longer than the rest of a short run's start.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ConfigError("data set 'digits' ships inside scikit-learn: pip install scikit-learn")
    return np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",").astype(np.uint8)
