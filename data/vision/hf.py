"""Image data sets read by the `datasets` library: a Hub id, a folder or file of parquet, or folders of images."""

from __future__ import annotations

import io
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from data.base import files_below
from data.folders import PLACED, user_path
from data.hub import check_names, configuration, import_datasets, is_saved, load_saved, readable
from data.splits import TEST, VAL, by_split, canonical
from data.vision.imagefolder import build_folders
from data.vision.images import PictureConfig, Pictures, build_pictures, open_picture
from lion.config import ConfigError, nearest, setting
from lion.samples.base import Splits

datasets = import_datasets()
log = logging.getLogger("lion")

OF_DATASETS = (".parquet", "metadata.csv", "metadata.jsonl", ".zip", ".tar", ".gz", ".tgz")  # ends of names


@dataclass
class HubConfig(PictureConfig):
    """Settings of an image data set of the `datasets` library.

    `path` is a Hub id or a local path, `subset` the configuration of a Hub id. Null columns and splits are detected.
    """

    name: str = "hf"
    path: str | None = setting(None, free=True)
    subset: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    train: str = "train"
    val: str | None = None
    test: str | None = None


class HubPictures(Pictures):
    """Images that the `datasets` library reads; splits and columns are set or detected."""

    Config = HubConfig

    def build(self) -> Splits:
        config = self.config
        path = user_path(config.path or "")
        if config.path and is_image_folder(path):
            train = config.train
            if train == "train":
                train = None
            names = {"train": train, "validation": config.val, "test": config.test}
            return build_folders(config, path / (config.subset or ""), PLACED["imagefolder"], names)
        found = load_splits(config)
        names = list(found)
        train, val, test = pick(config, "train", names), pick(config, "val", names), pick(config, "test", names)
        val = val or unused(VAL, names, (train, test))
        test = test or unused(TEST, names, (train, val))
        columns = Columns(config, found[train])
        sources = {}
        for key, name in (("train", train), ("val", val), ("test", test)):
            if name is None:
                continue
            labels = set(found[name].unique(columns.label))
            odd = labels - columns.place.keys()
            if not odd:
                sources[key] = Rows(found[name], columns)
            elif odd == labels and getattr(config, key) is None:  # test sets on the Hub often hide their labels
                log.warning("data.path: split %r is skipped, none of its labels is a class", name)
            else:
                raise ConfigError(
                    f"data.label_column: {min(odd, key=str)!r} in split {name!r} is not a class of {train!r}"
                )
        return build_pictures(config, sources)


def is_image_folder(path: Path) -> bool:
    """Return whether a folder holds images in class folders: neither tables, archives nor a file with labels."""
    if not path.is_dir() or is_saved(path):
        return False
    for _, _, names in os.walk(path):
        for name in names:
            if name.endswith(OF_DATASETS):
                return False
    return True


def load_splits(config: HubConfig) -> Any:
    """Load the splits of the data set, by name.

    Raises:
        ConfigError: The data set does not exist or cannot be read.
    """
    if not config.path:
        raise ConfigError("data.path: missing, expected a Hub id, a local folder or a parquet file")
    path = user_path(config.path)
    check_links(path)
    if config.subset is not None and path.exists() and not (path / config.subset).is_dir():
        raise ConfigError(f"data.subset: {path} has no folder {config.subset!r}, leave it null")
    with readable(config.path, path.exists()):
        if is_saved(path):
            return load_saved(path)
        if path.is_file():
            return datasets.load_dataset("parquet", data_files={config.train: str(path)})
        if path.is_dir() and (files := tables_by_split(path, config.train, config.subset)):
            check_names(file for some in files.values() for file in some)
            return datasets.load_dataset("parquet", data_files=files)
        if path.is_dir():
            return datasets.load_dataset("imagefolder", data_dir=str(path / (config.subset or "")))
        return datasets.load_dataset(config.path, config.subset)


def tables_by_split(root: Path, train: str, subset: str | None = None) -> dict[str, list[str]]:
    """Group the parquet files under `root` by split, as on the Hub; files that name no split are those of `train`.

    Raises:
        ConfigError: There are several configurations, or others than `subset`.
    """
    files = sorted(path.relative_to(root) for path in files_below(root) if path.name.endswith(".parquet"))
    root, files = configuration(root, files, train, subset)
    return {split: list(map(str, group)) for split, group in by_split(root, files, train).items()}


def check_links(root: Path) -> None:
    """Refuse links to folders below `root`.

    `datasets` does not follow links, so their images would be missing without a message.

    Raises:
        ConfigError: A folder below `root` is a link.
    """
    for folder, names, _ in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in names:
            link = os.path.join(folder, name)
            if os.path.islink(link):
                raise ConfigError(f"data.path: {link} is a link to a folder; only data.name=imagefolder follows links")


def pick(config: HubConfig, key: str, names: list[str]) -> str | None:
    """Return the split that the settings name for `key`."""
    name = getattr(config, key)
    if name is not None and name not in names and canonical(name) in names:
        return canonical(name)
    if name is not None and name not in names:
        raise ConfigError(f"data.{key}: {config.path!r} has no split {name!r}, {nearest(name, names)}")
    return name


def unused(words: tuple[str, ...], names: list[str], used: tuple[str | None, ...]) -> str | None:
    """Return the first of some names of splits that exists and is not used yet."""
    for word in words:
        if word in names and word not in used:
            return word
    return None


class Columns:
    """The columns of the image and the label, and the classes in label order."""

    def __init__(self, config: HubConfig, table: Any) -> None:
        features = table.features
        self.image = self.find(config, "image_column", features, is_picture)
        self.label = self.find(config, "label_column", features, is_label)
        if not isinstance(features[self.label], datasets.ClassLabel | datasets.Value):
            raise ConfigError(f"data.label_column: {self.label!r} holds neither numbers nor names")
        names = getattr(features[self.label], "names", None)
        if names:
            values = range(len(names))
        else:
            values = sorted(set(table.unique(self.label)) - {None})
        self.classes = tuple(names or map(str, values))
        self.place = dict(zip(values, itertools.count()))

    @staticmethod
    def find(config: HubConfig, key: str, features: Any, fits: Any) -> str:
        name = getattr(config, key)
        if name is not None:
            if name not in features:
                raise ConfigError(f"data.{key}: no column {name!r}, {nearest(name, list(features))}")
            return name
        found = [n for n, feature in features.items() if fits(n, feature)]
        if len(found) != 1:
            what = "more than one of"
            if not found:
                what = "none of"
            raise ConfigError(f"data.{key}: must be set, {what} {', '.join(found or features)} fits")
        return found[0]


def is_picture(name: str, feature: Any) -> bool:
    """Return whether a column holds images: decoded ones, or the bytes of their files."""
    if isinstance(feature, dict):
        return set(feature) == {"bytes", "path"}
    return isinstance(feature, datasets.Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def is_label(name: str, feature: Any) -> bool:
    return isinstance(feature, datasets.ClassLabel) or name in ("label", "labels", "fine_label")


class Rows:
    """A split as a source of (image, label)."""

    def __init__(self, table: Any, columns: Columns) -> None:
        self.table = table.cast_column(columns.image, datasets.Image(decode=False))
        self.columns, self.classes = columns, columns.classes

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        row, columns = self.table[index], self.columns
        held = row[columns.image]
        file = held["path"]
        if held.get("bytes"):
            file = io.BytesIO(held["bytes"])
        return open_picture(file), columns.place[row[columns.label]]
