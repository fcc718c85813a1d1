"""Latents of images, precomputed elsewhere by an autoencoder and read from a folder."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from data.base import DataConfig, DataSet
from data.folders import PLACED, find_root
from lion.config import ConfigError, setting
from lion.files import read_json
from lion.samples.base import Splits
from lion.samples.images import ImageInfo, numbered

MANIFEST = "latents.json"
PROBES = 64  # latents of a split whose values are part of the fingerprint


@dataclass
class LatentsConfig(DataConfig):
    """Settings of latents.

    flip: Share of training samples taken from `train_flipped.npy`, the latents of the mirrored images, if the file
        exists. Latents themselves cannot be mirrored.
    """

    name: str = "latents"
    flip: float = setting(0.5, min=0, max=1)


class Latents(DataSet):
    """Latents of ImageNet (1,281,167 of 4 x 32 x 32 in 1,000 classes) or of other images; files are memory-mapped."""

    Config, Info = LatentsConfig, ImageInfo

    def build(self) -> Splits:
        root = find_root("latents", self.config.root)
        try:
            held = read_json(root / MANIFEST)
            scale, classes = float(held["scale"]), tuple(map(str, held["classes"]))
            if not 0 < scale < math.inf or not isinstance(held["classes"], list):
                raise ValueError("no scale above 0, or no list of classes")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{root / MANIFEST}: not a manifest of latents ({type(error).__name__}); {PLACED['latents']}"
            ) from None
        latents, labels = read(root, "train", classes)
        held_latents, held_labels = read(root, "val", classes)
        parts, flipped = [(latents, labels), (held_latents, held_labels)], None
        if self.config.flip:
            flipped = read_flipped(root, latents)
        if flipped is not None:
            parts.append((flipped, labels))
        shape, held_shape = latents.shape[1:], held_latents.shape[1:]
        if held_shape != shape:
            raise ConfigError(f"{root}: latents of train have shape {shape}, of val {held_shape}")
        return Splits(
            LatentPictures(latents, labels, scale, flipped, self.config.flip),
            LatentPictures(held_latents, held_labels, scale),
            None,
            info=info_of(shape, classes),
            fingerprint=fingerprint((scale, classes), parts),
        )

    def published(self) -> tuple[ImageInfo, int]:
        """Return the figures of ImageNet, as in the paper."""
        return info_of((4, 32, 32), numbered(1000)), 1_281_167


class LatentPictures(Dataset):
    """Samples {image, label} of latents (N, C, H, W) times `scale`; a random `share` comes from `flipped`."""

    def __init__(
        self, latents: np.ndarray, labels: np.ndarray, scale: float, flipped: np.ndarray | None = None, share: float = 0
    ) -> None:
        self.latents, self.labels, self.scale, self.flipped, self.share = latents, labels, scale, flipped, share

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        latents = self.latents
        if self.flipped is not None and torch.rand(()).item() < self.share:
            latents = self.flipped
        image = torch.from_numpy(latents[index].astype(np.float32)) * self.scale
        return {"image": image, "label": int(self.labels[index])}


def fingerprint(manifest: tuple[float, tuple[str, ...]], splits: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """Return the fingerprint of the manifest, all labels, and `PROBES` latents of each split."""
    digest = hashlib.sha256(repr(manifest).encode())
    for latents, labels in splits:
        probed = np.linspace(0, len(labels) - 1, min(PROBES, len(labels))).astype(int)
        digest.update(found(latents).encode())
        digest.update(labels.astype(np.int64).tobytes() + latents[probed].tobytes())
    return digest.hexdigest()[:12]


def info_of(shape: tuple[int, ...], classes: tuple[str, ...]) -> ImageInfo:
    channels, *size = shape
    return ImageInfo(tuple(size), channels, classes, (0.0,) * channels, (1.0,) * channels)


def read(root: Path, split: str, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Open the latents (N, C, H, W) and labels (N,) of a split.

    Raises:
        ConfigError: A file is missing, or its type, shape or values are wrong.
    """
    latents, labels = opened(root / f"{split}.npy"), opened(root / f"{split}_labels.npy")
    if latents.ndim != 4 or not np.issubdtype(latents.dtype, np.floating):
        raise ConfigError(f"{root / split}.npy: expected floating point (N, C, H, W), got {found(latents)}")
    if latents.shape[1] in (1, 3):
        raise ConfigError(
            f"{root / split}.npy: {latents.shape[1]} channels are those of images, use data.name=imagefolder"
        )
    if labels.shape != latents.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise ConfigError(f"{root / split}_labels.npy: expected {len(latents)} integers, got {found(labels)}")
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise ConfigError(
            f"{root / split}_labels.npy: labels {labels.min()} to {labels.max()} for {len(classes)} classes"
        )
    return latents, labels


def read_flipped(root: Path, latents: np.ndarray) -> np.ndarray | None:
    """Open the latents of the mirrored training images; None if there is no such file."""
    path = root / "train_flipped.npy"
    if not path.exists():
        return None
    flipped = opened(path)
    if flipped.shape != latents.shape or flipped.dtype != latents.dtype:
        raise ConfigError(f"{path}: expected {found(latents)} as in train.npy, got {found(flipped)}")
    return flipped


def opened(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")
        if not isinstance(array, np.ndarray):
            raise ValueError("an archive of arrays")
        return array
    except (OSError, ValueError, EOFError) as error:
        why = "not a NumPy array"
        if isinstance(error, FileNotFoundError):
            why = "no such file"
        raise ConfigError(f"{path}: {why}; {PLACED['latents']}") from None


def found(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape}"
