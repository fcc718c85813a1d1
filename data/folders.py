"""Folders of data: the data root, and data sets whose files a person puts there. Needs no PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

from lion.config import ConfigError

TEXTS = (".txt", ".text", ".md", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")  # suffixes of files
PLACED = {  # by name, how to get the files
    "imagefolder": (
        "expected ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, or with data.val_split=0.1 only "
        "ROOT/train/CLASS/*.jpg or ROOT/CLASS/*.jpg"
    ),
    "imagenet": (
        "get ILSVRC2012 from https://image-net.org/download, unpack it to ROOT/train/WNID/*.JPEG and sort the "
        "validation images into ROOT/val/WNID/*.JPEG"
    ),
    "latents": (
        'expected train.npy, val.npy (N, C, H, W), *_labels.npy (N,) and latents.json, {"scale": .., "classes": [..]}'
    ),
}

HOW_TO_SET = "set data.root=PATH, now {root}, or $LION_DATA"
HOW_TO_GET = f"{HOW_TO_SET}; data.download=true downloads it"
DOWNLOADED = {  # by name, the folder below the root that torchvision reads
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
}


def data_root() -> Path:
    """Return the data root: `$LION_DATA`, else `lion` in the user's cache folder."""
    if os.environ.get("LION_DATA"):
        return user_path(os.environ["LION_DATA"])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lion"


def user_path(path: str) -> Path:
    """Return a path with `~` expanded to the home folder; `~` of an unknown user stays unchanged."""
    return Path(os.path.expanduser(path))


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be that of a local file or folder; ids of the Hub are `name` or `owner/name`."""
    return name.startswith(("/", "~", ".")) or name.endswith(("/", *TEXTS)) or name.count("/") > 1


def check_path(path: str) -> None:
    """Check that `data.path` exists, unless it may be an id of the Hub.

    Raises:
        ConfigError: There is no such file or folder.
    """
    place = user_path(path)
    if looks_like_path(path) and not place.exists():
        raise ConfigError(f"data.path: no file or folder {place.absolute()}")


def root_of(name: str, root: str | None) -> Path:
    """Return the folder of a data set: `root`, by default the folder `name` under the data root."""
    return user_path(root) if root else data_root() / name


def find_root(name: str, root: str | None) -> Path:
    """Return the folder of a data set of `PLACED`: `root`, by default its folder under the data root.

    Raises:
        ConfigError: The folder is missing. The message names the folder, its settings, and how to get the data.
    """
    folder = root_of(name, root)
    if not folder.is_dir():
        raise ConfigError(f"data set '{name}': no folder {folder} (set data.root=PATH or $LION_DATA); {PLACED[name]}")
    return folder


def check_downloaded(name: str, root: str | None) -> None:
    """Check that the folder of a data set of `DOWNLOADED` exists.

    Raises:
        ConfigError: The folder is missing. The message names it, its settings, and how to get the data.
    """
    above = root_of(name, root)
    folder = above / DOWNLOADED[name]
    if not folder.is_dir():
        raise ConfigError(f"data set '{name}': no folder {folder} ({HOW_TO_GET.format(root=above)})")
