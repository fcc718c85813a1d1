"""Image folders: `data.root/{train,val,test}/<class>/*`, or `data.root/<class>/*` with `data.val_split`.

One of `val` and `test` is enough. Files are pictures by their content, whatever their suffix.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from PIL import Image

from data.base import is_hidden, say_once, walk
from data.folders import PLACED, find_root
from data.splits import split_named
from data.vision.images import PictureConfig, Pictures, build_pictures, open_picture
from data.vision.sources import is_picture
from lion.config import ConfigError, nearest
from lion.samples.base import Splits

log = logging.getLogger("lion")


@dataclass
class FolderConfig(PictureConfig):
    name: str = "imagefolder"


class ImageFolder(Pictures):
    """An image folder; the names of its folders are the classes."""

    Config = FolderConfig

    def build(self) -> Splits:
        return build_folders(self.config, find_root("imagefolder", self.config.root), PLACED["imagefolder"])


def build_folders(
    config: PictureConfig, root: Path, how: str, names: Mapping[str, str | None] = MappingProxyType({})
) -> Splits:
    """Build the splits of the folders of `train`, `val` and `test`; without such folders, all of `root` is train.

    The name of a folder of a split contains a word for the split (`Training`, `seg_test`), see `data.splits`. A folder
    of test images without classes, as in ImageNet, is left out.

    Args:
        config: The settings.
        root: The folder of the data set.
        how: The end of an error message, with the expected folders.
        names: Folders of splits that the user has named.
    """
    folders = split_folders(root, names)
    if "train" not in folders:
        return build_classes(config, root, folders, how)
    held = {split: inner(path) for split, path in folders.items()}
    val, test = held.get("validation"), held.get("test")
    if (val or config.val_split) and test is not None and has_images_alone(test):
        log.warning("%s is left out, its images have no class folders", test)
        test = None
    if val is None and test is None and config.val_split is None:
        raise ConfigError(f"data set '{config.name}': no folder {root / 'val'}; {how}")
    others = [path.name for path in subfolders(root) if path not in folders.values()]
    if others:
        say_once(f"{root}: folders that name no split are left out: {', '.join(others)}")
    sources = {}
    for split, path in (("train", held["train"]), ("val", val), ("test", test)):
        if path is not None:
            sources[split] = open_folder(path, config, how)
    return build_pictures(config, sources)


def build_classes(config: PictureConfig, root: Path, folders: Mapping[str, Path], how: str) -> Splits:
    """Build the splits of a folder of classes, of which a part is held out.

    Raises:
        ConfigError: No part is held out, or folders of splits are among the classes.
    """
    if config.val_split is None:
        above = ""
        if (root.parent / "train").is_dir():
            above = f"did you mean {root.parent}? "
        raise ConfigError(f"data set '{config.name}': no folder {root / 'train'}; {above}{how}")
    if folders:
        named = ", ".join(path.name for path in folders.values())
        raise ConfigError(f"{root}: {named}: a split or a class? Beside a split, expected train; rename a class")
    for path in subfolders(root):
        for below in subfolders(path):
            if split_named(below.name) is not None:
                raise ConfigError(f"{below}: a folder of a split in that of a class; expected ROOT/train/CLASS/*.jpg")
    return build_pictures(config, {"train": open_folder(root, config, how)})


def split_folders(root: Path, names: Mapping[str, str | None]) -> dict[str, Path]:
    """Return the folders of splits in `root`; a folder `train` without folders in it, among classes, is one of them.

    Raises:
        ConfigError: Two folders are of one split, or one in `names` does not exist.
    """
    found: dict[str, Path] = {}
    below = subfolders(root)
    classes = any(split_named(path.name) is None for path in below)
    for path in below:
        split = split_named(path.name)
        if split is None or (split == "train" and classes and not subfolders(path)):
            continue
        if split in found:
            both = f"{found[split].name} and {path.name}"
            raise ConfigError(f"{root}: {both} both name the split {split}; rename one, or move it away")
        found[split] = path
    for split, name in names.items():
        if name is not None and not (root / name).is_dir():
            present = [path.name for path in subfolders(root)]
            raise ConfigError(f"{root} has no folder {name!r} of a split, {nearest(name, present)}")
        if name is not None:
            found[split] = root / name
    return found


def subfolders(path: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones and those of a file server."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def inner(path: Path) -> Path:
    """Return the folder of a split; archives often repeat its name, `seg_train/seg_train`."""
    below = subfolders(path)
    while len(below) == 1 and below[0].name == path.name:
        path = below[0]
        below = subfolders(path)
    return path


def has_images_alone(path: Path) -> bool:
    """Return whether a folder holds images, and no folders."""
    return not subfolders(path) and any(is_picture(str(file)) for file in path.iterdir() if not is_hidden(file.name))


def open_folder(path: Path, config: PictureConfig, how: str) -> ClassFolders:
    """Open the folder of a split.

    Raises:
        ConfigError: There are no class folders, or a class has no images; the message ends with `how`.
    """
    source = ClassFolders(path)
    empty = sorted(set(source.classes) - {source.classes[label] for _, label in source.samples})
    if not source.classes or empty:
        what = "no class folders"
        if empty:
            what = f"no images of class {', '.join(empty)}"
        raise ConfigError(f"data set '{config.name}': {path}: {what}; {how}")
    if source.left_out:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in source.left_out.most_common(5))
        say_once(f"{path}: {source.left_out.total():,} files are left out: {kinds}")
    return source


class ClassFolders:
    """A source of the images in and below `root/<class>/`, in the order of torchvision's ImageFolder.

    `left_out` counts the other files by their suffixes, and images outside of the folders of classes.
    """

    def __init__(self, root: Path) -> None:
        self.classes: list[str] = []
        self.samples: list[tuple[str, int]] = []
        self.left_out: Counter[str] = Counter()
        folders = []
        for folder, names in walk(root):
            name = os.path.relpath(folder, root).split(os.sep)[0]
            folders.append((name, folder, names))
        for name, folder, names in sorted(folders):
            if folder == str(root):
                self.left_out["without a class"] = sum(is_picture(os.path.join(folder, file)) for file in names)
                continue
            if name not in self.classes[-1:]:
                self.classes.append(name)
            for file in names:
                path = os.path.join(folder, file)
                if is_picture(path):
                    self.samples.append((path, len(self.classes) - 1))
                else:
                    self.left_out[Path(file).suffix or file] += 1
        self.left_out = +self.left_out

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return open_picture(path), label
