"""Helpers: data sets as recipes open them, and manifests that were edited."""

import json
from pathlib import Path

import data
from lion.config import build
from lion.files import read_json

GONE = object()


def opened(name, **settings):
    """Return the data set that a recipe with these settings opens; paths become text, as in a recipe."""
    kind = data.dataset(name)
    for key, value in settings.items():
        settings[key] = str(value) if isinstance(value, Path) else value
    return kind(build(kind.Config, {"name": name, **settings}, source=lambda key: "recipe", key="data"))


def counts(splits):
    """Return the numbers of samples for training, validation and test; None: there is no such split."""
    return [None if part is None else len(part) for part in splits[:3]]


def samples_of(split):
    return [split[i] for i in range(len(split))]


def tokens_of(split):
    return [sample["tokens"].tolist() for sample in samples_of(split)]


def edit_manifest(folder, place, value):
    """Set an entry of a manifest, such as `samples/train`, or remove it (GONE)."""
    path = folder / "manifest.json"
    held = read_json(path)
    *above, last = place.split("/")
    part = held
    for name in above:
        part = part[name]
    part[last] = value
    if value is GONE:
        del part[last]
    path.write_text(json.dumps(held))
