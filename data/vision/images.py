"""Settings, DeiT's transforms and the building of splits, shared by all image data sets."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import v2

from data.base import DataConfig, DataSet
from data.vision.augment import RandAugment
from data.vision.resident import ResidentImages
from data.vision.sources import Decoded, Images, drawn, read_sample, split_indices
from lion.config import ConfigError, setting
from lion.samples.base import Splits, Unreadable
from lion.samples.images import ImageInfo, evaluation_crop, numbered
from lion.samples.order import Shuffled

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PHOTO_SIZE = (224, 224)  # for images without a common size
LONGEST = 16  # sides of a picture that is scaled, in those of the part that is kept
PROBES = 64  # images of each split that are opened before a run starts


@dataclass
class PictureConfig(DataConfig):
    """Settings of every image data set. Null means: determined by the data.

    image_size: (height, width) of the model's input; null: the size of the images, 224 x 224 if their sizes differ.
    channels: 1 or 3; null: 1 if all images are grey, else 3. For both, 64 images of each split are opened.
    mean, std: mean and standard deviation of the pixels for each channel; null: those of the data set, else ImageNet's.
    random_scale: range of the share of an image's area that a random training crop keeps; the crop is then resized
        (bicubic).
    pad: pixels added around the resized image before a random training crop of `image_size`, in place of
        `random_scale` (CIFAR; DeiT up to 32 px); 0: off.
    flip: probability that a training image is mirrored.
    crop: without `pad`, evaluation takes the center of an image whose shorter side is resized to `image_size / crop`.
    rand_augment: RandAugment in timm's notation, "rand-m9-mstd0.5-inc1"; null: off.
    repeats: repeated augmentation: how often each image drawn for an epoch occurs in the epoch.
    val_split: share of the training images held out as `val`, for data without validation images; null: the test
        images are used.
    limit: maximum number of training images, drawn once.
    cache: decode the images of train and val once, into `memory` or onto the `device`. On the device, whole batches are
        cropped and flipped, which needs `pad` and excludes `rand_augment`.
    """

    image_size: tuple[int, int] | None = None
    channels: int | None = setting(None, choices=(1, 3))
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    random_scale: tuple[float, float] = (0.08, 1.0)
    pad: int = setting(0, min=0, max=1024)
    flip: float = setting(0.5, min=0, max=1)
    rand_augment: str | None = None
    crop: float = setting(0.875, min=0.1, max=1)
    repeats: int = setting(1, min=1)
    val_split: float | None = setting(None, min=0.001, max=0.9)
    limit: int | None = setting(None, min=1)
    cache: str | None = setting(None, choices=("memory", "device"))

    def __post_init__(self) -> None:
        low, high = self.random_scale
        if self.image_size and not all(1 <= side <= 16_384 for side in self.image_size):
            raise ValueError(f"image_size: expected sides of 1 to 16384 pixels, got {self.image_size}")
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"random_scale: expected two shares of an image's area, the smaller first, got {(low, high)}"
            )
        for name in ("mean", "std"):
            if getattr(self, name) is not None and len(getattr(self, name)) not in (1, 3):
                raise ValueError(f"{name}: expected 1 or 3 numbers, one per channel, got {getattr(self, name)}")
        if self.std is not None and min(self.std, default=0) <= 0:
            raise ValueError(f"std: expected more than 0, got {self.std}")
        if self.cache == "device" and (self.rand_augment or not self.pad):
            raise ValueError(
                "cache: on the device whole batches are cropped and flipped: set data.pad=4 data.rand_augment=null"
            )
        if self.rand_augment is not None:
            try:
                RandAugment.from_string(self.rand_augment)
            except ValueError as error:
                raise ValueError(f"rand_augment: {error}") from None

    def uncached(self) -> Self:
        return replace(self, cache=None)

    def describe(self) -> str:
        described = super().describe()
        if self.limit:
            described += f", {self.limit:,} training images"
        return described

    def resized(self, sample_size: int) -> Self:
        return replace(self, image_size=(sample_size, sample_size))


class Pictures(DataSet):
    """An image data set."""

    Info = ImageInfo

    def load(self, path: str, info: ImageInfo) -> dict[str, Tensor]:
        """Load an image file as {image}: uint8 (channels, height, width)."""
        return {"image": test_transform(self.config, info)(open_or_explain(path))}


def build_pictures(config: PictureConfig, sources: dict[str, Any]) -> Splits:
    """Build splits from the available sources of `train`, `val` and `test`.

    Without a `val` source, `val` is the share `val_split` of the training images, else the `test` source.

    Raises:
        ConfigError: The sources are invalid (see `describe`), or `val` or `train` would be empty or ambiguous.
    """
    info, fingerprint = describe(config, sources)
    train, val, test = sources["train"], sources.get("val"), sources.get("test")
    kept, held = range(len(train)), None
    if val is not None and config.val_split:
        raise ConfigError(f"data.val_split: data set '{config.name}' already has validation images, leave it null")
    if val is None and config.val_split:
        kept, held = split_indices(len(train), (config.val_split,))
        if not held or not kept:
            empty, one = "val", f"one image is {1 / len(train):.2g}"
            if held:
                empty = "train"
            raise ConfigError(f"data.val_split: {config.val_split} of {len(train)} images leaves {empty} empty, {one}")
    elif val is None:
        if test is None:
            raise ConfigError(f"data set '{config.name}' has one split: data.val_split=0.1 holds out a tenth of it")
        val, test = test, None
    if config.limit is not None and config.limit < len(kept):
        kept = drawn(kept, config.limit)
    plain = test_transform(config, info)

    def split(source: Any, transform: Any, indices: list[int] | None = None) -> Images | ResidentImages:
        if config.cache == "device":
            if transform is plain:
                return ResidentImages(source, plain, indices)
            return ResidentImages(source, plain, indices, pad=config.pad, flip=config.flip)
        if config.cache == "memory":
            source, indices = Decoded(source, indices), None
        return Images(source, transform, indices)

    trained = split(train, training_transform(config, info), kept)
    if held:
        validated = split(train, plain, held)
    else:
        validated = split(val, plain)
    if test is not None:
        test = Images(test, plain)  # not cached: read only once
    return Splits(trained, validated, test, info, order=Shuffled(config.repeats), fingerprint=fingerprint)


def published_info(
    config: PictureConfig, *, size: tuple[int, int], channels: int, classes: int, samples: int
) -> tuple[ImageInfo, int]:
    """Return the info and the number of training samples of a published data set, without its files."""
    channels = config.channels or channels
    mean, std = normalisation(config, channels)
    info = ImageInfo(tuple(config.image_size or size), channels, numbered(classes), mean, std)
    kept = samples - round((config.val_split or 0) * samples)
    return info, min(kept, config.limit or kept)


def describe(config: PictureConfig, sources: dict[str, Any]) -> tuple[ImageInfo, str]:
    """Return the info for the model and a fingerprint, from the settings and from `PROBES` images of each source.

    The fingerprint covers the classes, the number of images, and the sizes and labels of the probed images, but no
    pixels, because decoders differ.

    Raises:
        ConfigError: There are fewer than two classes, or the splits have different classes. A probed file is not an
            image, or no probed file of a split can be read.
    """
    classes, whose = tuple(sources["train"].classes), f"data set '{config.name}'"
    if len(classes) < 2:
        raise ConfigError(f"{whose}: only one class ({', '.join(map(str, classes)) or 'none'}), expected at least two")
    for name, source in sources.items():
        there, here = set(map(str, source.classes)), set(map(str, classes))
        odd = []
        if there - here:
            odd.append(f"only {name} has class {min(there - here)!r}")
        if here - there:
            odd.append(f"only train has class {min(here - there)!r}")
        if odd:
            raise ConfigError(f"{whose}: train and {name} have different classes: {', '.join(odd)}")
    sizes, modes, looked = set(), set(), hashlib.sha256(repr(sorted(map(str, classes))).encode())
    for name, source in sources.items():
        if not len(source):
            raise ConfigError(f"{whose}: no images in {name}")
        found = 0
        looked.update(f"{name} {len(source)}".encode())
        for index in torch.linspace(0, len(source) - 1, min(PROBES, len(source))).long().tolist():
            try:
                picture, label = read_sample(source, index)
                sizes.add((picture.height, picture.width))
                modes.add(picture.mode)
                found += 1
                looked.update(f"{index} {picture.size} {label}".encode())
            except Unreadable as error:
                if isinstance(error.__cause__, UnidentifiedImageError):
                    raise ConfigError(f"{whose}: not an image: {error}") from None
                damaged = error  # single damaged files are counted by the trainer
        if not found:
            raise ConfigError(f"{whose}: no image of {name} can be read, e.g. {damaged}")
    size, channels = PHOTO_SIZE, 3
    if len(sizes) == 1:
        size = sizes.pop()
    if modes <= {"L", "1"}:
        channels = 1
    size, channels = config.image_size or size, config.channels or channels
    mean, std = normalisation(config, channels)
    return ImageInfo(tuple(size), channels, classes, mean, std), looked.hexdigest()[:12]


def normalisation(config: PictureConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, for pixels in [0, 1]."""
    found = []
    for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
        if channels == 1:
            usual = (round(sum(usual) / 3, 3),)
        values = getattr(config, name) or usual
        if len(values) == 1:  # one value for all channels
            values = values * channels
        if len(values) != channels:
            raise ConfigError(f"data.{name}: expected one number per channel ({channels}), got {list(values)}")
        found.append(tuple(values))
    return found[0], found[1]


def open_picture(file: Any) -> Image.Image:
    """Decode an image file (a path, or an open file).

    Of pixels with 16 bits, the upper 8 bits are kept; Pillow would clip them at 255.

    Raises:
        ValueError: Pixels of 32 bits.
        OSError: Not a readable image.
    """
    with Image.open(file) as picture:
        picture.load()
        if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
            raise ValueError("pixels of 32 bits, whose range is unknown; expected 8 or 16 bits")
        if picture.mode.startswith("I"):
            return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
        if picture.mode == "P" and isinstance(picture.info.get("transparency"), bytes):
            return picture.convert("RGBA")  # without this, each later conversion warns
        if picture.mode == "LAB":  # has no conversion to grey
            return picture.convert("RGB")
        return picture


def open_or_explain(path: str) -> Image.Image:
    """Decode an image file named by the user.

    Raises:
        ConfigError: The file does not exist, or is not an image.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return open_picture(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except Exception as error:  # readers raise errors of any type for a broken file
        raise ConfigError(f"{path}: not a readable image ({type(error).__name__})") from None


def training_transform(config: PictureConfig, info: ImageInfo) -> v2.Transform:
    """Return the training transform, from a PIL image to uint8 (channels, height, width).

    Transforms of whole batches (such as mixup) belong to the task.
    """
    steps = [Channels(info.channels)]
    if config.pad:
        steps.append(Resized(info.size))
        steps.append(v2.RandomCrop(info.size, padding=config.pad))
    else:
        steps.append(v2.RandomResizedCrop(info.size, scale=config.random_scale, interpolation=BICUBIC))
    steps.append(v2.RandomHorizontalFlip(config.flip))
    if config.rand_augment:
        fill = tuple(min(255, round(255 * m)) for m in info.mean)
        steps.append(RandAugment.from_string(config.rand_augment, fill=fill))
    return v2.Compose([*steps, TO_TENSOR])


def test_transform(config: PictureConfig, info: ImageInfo) -> v2.Transform:
    """Return the deterministic transform for evaluation: with `pad` the whole image, else its center."""
    crop = evaluation_crop(vars(config))
    if crop is None:
        return v2.Compose([Channels(info.channels), Resized(info.size), TO_TENSOR])
    return v2.Compose([Channels(info.channels), Covering(info.size, crop), v2.CenterCrop(info.size), TO_TENSOR])


class Channels(v2.Transform):
    """Conversion of a PIL image to grey or RGB."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mode = "RGB"
        if channels == 1:
            self.mode = "L"

    def forward(self, picture: Image.Image) -> Image.Image:
        if picture.mode == self.mode:
            return picture
        return picture.convert(self.mode)


class Resized(v2.Transform):
    """Resizing of a PIL image to exactly this (height, width)."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, picture: Image.Image) -> Image.Image:
        if (picture.height, picture.width) == self.size:
            return picture
        return v2.functional.resize(picture, list(self.size), interpolation=BICUBIC)


class Covering(v2.Transform):
    """Scaling of a PIL image so that it covers (height, width) / `crop`.

    For a square size, the shorter side is scaled to this size, as in DeiT. Of a very long picture, only the middle is
    scaled.
    """

    def __init__(self, size: tuple[int, int], crop: float) -> None:
        super().__init__()
        self.size, self.crop = size, crop

    def forward(self, picture: Image.Image) -> Image.Image:
        sides = picture.height, picture.width
        short = max(size * min(sides) / side for size, side in zip(self.size, sides))
        target = max(int(short / self.crop), math.ceil(short))
        longest = [math.ceil(LONGEST * size * min(sides) / target) for size in self.size]
        if sides[0] > longest[0] or sides[1] > longest[1]:
            kept = [min(side, most) for side, most in zip(sides, longest)]
            picture = v2.functional.center_crop(picture, kept)
        return v2.functional.resize(picture, [target], interpolation=BICUBIC)


BICUBIC = v2.InterpolationMode.BICUBIC
TO_TENSOR = v2.PILToTensor()
