"""Any folder of pictures: `data.root/{train,val,test}/<class>/*`, one of `val` and `test` being enough, or
`data.root/<class>/*` with `data.val_split`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchvision.datasets import ImageFolder

from data.common import DataSplits, find_root
from data.pictures import PictureConfig, build_pictures, load_picture, open_picture
from lion.config import ConfigError

HOW = (
    "expected ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, or, with data.val_split=0.1, the first alone or "
    "ROOT/CLASS/*.jpg"
)


@dataclass
class Config(PictureConfig):
    name: str = "imagefolder"


def build(config: Config) -> DataSplits:
    return build_folders(config, find_root(config, "imagefolder", HOW), HOW)


def build_folders(config: PictureConfig, root: Path, how: str) -> DataSplits:
    """Splits of `root`: train, and val and test where there are such folders; else all of it is train."""
    if not (root / "train").is_dir():
        if config.val_split is None:
            above = f"did you mean data.root={root.parent}? " if (root.parent / "train").is_dir() else ""
            raise ConfigError(f"data set '{config.name}': no folder {root / 'train'}; {above}{how}")
        return build_pictures(config, open_folder(root, config, how))
    there = [(root / name).is_dir() for name in ("val", "test")]
    if not any(there) and config.val_split is None:
        raise ConfigError(f"data set '{config.name}': no folder {root / 'val'}; {how}")
    train = open_folder(root / "train", config, how)
    others = [open_folder(root / n, config, how) if ok else None for n, ok in zip(("val", "test"), there)]
    return build_pictures(config, train, *others)


def open_folder(path: Path, config: PictureConfig, how: str) -> ImageFolder:
    """A split's ImageFolder; an empty one is explained."""
    try:
        return ImageFolder(str(path), loader=open_picture)
    except FileNotFoundError as error:
        raise ConfigError(f"data set '{config.name}': {path}: {str(error).splitlines()[0]}; {how}") from None


__all__ = ["Config", "build", "load_picture"]
