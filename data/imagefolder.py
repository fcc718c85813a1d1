"""Any folder of pictures: `data.root/{train,val[,test]}/<class>/*`."""

from __future__ import annotations

from dataclasses import dataclass

from data.common import DataSplits, find_root
from data.pictures import FolderConfig, build_folders, load_picture

HOW = "expected ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg"


@dataclass
class Config(FolderConfig):
    name: str = "imagefolder"


def build(config: Config) -> DataSplits:
    return build_folders(config, find_root(config, "imagefolder", HOW), HOW)


__all__ = ["Config", "build", "load_picture"]
