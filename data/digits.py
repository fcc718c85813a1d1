"""Handwritten digits: 1,797 real 8x8 grey images that ship inside scikit-learn (UCI optdigits test set)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from data.common import DataConfig, DataSplits, Images, split_indices
from lion.config import ConfigError, setting
from lion.tasks.data import ImageInfo

WORKERS = 0  # everything is in memory
SPLIT_SEED = 0  # `seed` in a recipe does not move it
INFO = ImageInfo((8, 8), 1, tuple(str(d) for d in range(10)), mean=(0.287,), std=(0.354,))


@dataclass
class Config(DataConfig):
    """Shares of the pictures that are held out; the split is the same for every run."""

    name: str = "digits"
    val_split: float = setting(0.15, min=0.001, max=0.4)
    test_split: float = setting(0.25, min=0.001, max=0.4)


def build(config: Config) -> DataSplits:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("data set 'digits' ships inside scikit-learn: pip install scikit-learn") from None
    pictures, labels = load_digits(return_X_y=True)
    tensors = torch.from_numpy((15 * pictures).astype(np.uint8)).view(-1, 1, 8, 8)  # pixels are 0 to 16
    source = list(zip(tensors, labels.tolist()))
    train, val, test = split_indices(len(source), (config.val_split, config.test_split), SPLIT_SEED)
    plain = v2.Identity()
    return DataSplits(*(Images(source, plain, part) for part in (train, val, test)), info=INFO)


def load_picture(config: Config, info: ImageInfo, picture: Any) -> Tensor:
    """A PIL picture as the task's input: grey, 8x8, ink bright on dark paper."""
    return v2.functional.resize(v2.functional.pil_to_tensor(picture.convert("L")), [8, 8], antialias=True)
