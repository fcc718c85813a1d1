"""Image folders: `data.root/{train,val,test}/<class>/*`, or `data.root/<class>/*` with `data.val_split`.

One of `val` and `test` is enough.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from data.base import find_root, walk
from data.hub import TEST, VAL
from data.vision.images import PictureConfig, Pictures, build_pictures, open_picture
from lion.config import ConfigError
from lion.samples.base import Splits

log = logging.getLogger("lion")
HOW = (
    "expected ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, or with data.val_split=0.1 only ROOT/train/CLASS/*.jpg "
    "or ROOT/CLASS/*.jpg"
)


@dataclass
class FolderConfig(PictureConfig):
    name: str = "imagefolder"


class ImageFolder(Pictures):
    """An image folder; the names of its folders are the classes."""

    Config = FolderConfig

    def build(self) -> Splits:
        return build_folders(self.config, find_root(self.config, "imagefolder", HOW), HOW)


def build_folders(config: PictureConfig, root: Path, how: str) -> Splits:
    """Build the splits of the folders `train`, `val` and `test`; without a folder `train`, all of `root` is train.

    `val` may have another name of `data.hub.VAL`. A folder `test` without classes, as in ImageNet, is left out.
    """
    if not (root / "train").is_dir():
        if config.val_split is None:
            above = f"did you mean data.root={root.parent}? " if (root.parent / "train").is_dir() else ""
            raise ConfigError(f"data set '{config.name}': no folder {root / 'train'}; {above}{how}")
        source = open_folder(root, config, how)
        if named := [name for name in source.classes if name.lower() in ("train", *VAL, *TEST)]:
            raise ConfigError(f"{root}: {', '.join(named)} are not classes; folders of splits are train, val and test")
        return build_pictures(config, source)
    val = next((root / name for name in VAL if (root / name).is_dir()), None)
    test = root / "test" if (root / "test").is_dir() else None
    if (val or config.val_split) and test is not None and has_images_alone(test):
        log.warning("%s is left out, its images have no class folders", test)
        test = None
    if val is None and test is None and config.val_split is None:
        raise ConfigError(f"data set '{config.name}': no folder {root / 'val'}; {how}")
    train = open_folder(root / "train", config, how)
    others = [None if path is None else open_folder(path, config, how) for path in (val, test)]
    return build_pictures(config, train, *others)


def has_images_alone(path: Path) -> bool:
    """Return whether a folder holds images, and no folders."""
    found = [f for f in path.iterdir() if not f.name.startswith(".")]
    return not any(f.is_dir() for f in found) and any(f.suffix.lower() in IMG_EXTENSIONS for f in found)


def open_folder(path: Path, config: PictureConfig, how: str) -> ClassFolders:
    """Open the folder of a split.

    Raises:
        ConfigError: There are no class folders, or a class has no images; the message ends with `how`.
    """
    source = ClassFolders(path)
    empty = sorted(set(source.classes) - {source.classes[label] for _, label in source.samples})
    if not source.classes or empty:
        what = f"no images of class {', '.join(empty)}" if empty else "no class folders"
        raise ConfigError(f"data set '{config.name}': {path}: {what}; {how}")
    return source


class ClassFolders:
    """A source of the images in and below `root/<class>/`, in the order of torchvision's ImageFolder."""

    def __init__(self, root: Path) -> None:
        folders = sorted(
            (os.path.relpath(folder, root).split(os.sep)[0], folder, names)
            for folder, names in walk(root)
            if folder != str(root)
        )
        self.classes = list(dict.fromkeys(name for name, *_ in folders))
        label = {name: i for i, name in enumerate(self.classes)}
        self.samples = [
            (os.path.join(folder, file), label[name])
            for name, folder, files in folders
            for file in files
            if file.lower().endswith(IMG_EXTENSIONS)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return open_picture(path), label
