"""The table of data sets: each `data.name` of a recipe with the import path of its `DataSet`, imported on demand."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lion.config import ConfigError, nearest

if TYPE_CHECKING:  # the table is read before PyTorch is loaded
    from data.base import DataSet

DATASETS = {
    "aan": "data.lra.documents.Aan",
    "c4": "data.text.sets.C4",
    "cifar10": "data.vision.torchvision_sets.Cifar10",
    "cifar100": "data.vision.torchvision_sets.Cifar100",
    "cifar10_pixels": "data.lra.cifar.CifarPixels",
    "digits": "data.vision.digits.Digits",
    "fashion_mnist": "data.vision.torchvision_sets.FashionMnist",
    "glue": "data.text.glue.Glue",
    "hf": "data.vision.hf.HubPictures",
    "imagefolder": "data.vision.imagefolder.ImageFolder",
    "imagenet": "data.vision.imagenet.ImageNet",
    "imdb": "data.lra.documents.Imdb",
    "labelled_text": "data.text.labelled.LabelledText",
    "latents": "data.vision.latents.Latents",
    "listops": "data.lra.listops.ListOps",
    "mnist": "data.vision.torchvision_sets.Mnist",
    "openwebtext": "data.text.sets.OpenWebText",
    "pathfinder": "data.lra.pathfinder.Pathfinder",
    "pathx": "data.lra.pathfinder.PathX",
    "pile": "data.text.sets.Pile",
    "python_source": "data.text.sets.PythonSource",
    "recall": "data.synthetic.recall.Recall",
    "selective_copy": "data.synthetic.selective_copy.SelectiveCopy",
    "text": "data.text.text.Text",
    "tiny_shakespeare": "data.text.shakespeare.TinyShakespeare",
    "wikitext103": "data.text.sets.WikiText103",
}


def dataset(name: str) -> type[DataSet]:
    """Return the data set class of this name; only modules in the table are imported."""
    if name not in list(DATASETS):
        raise ConfigError(f"data.name: unknown data set {name!r}, {nearest(name, DATASETS)}")
    module, _, kind = DATASETS[name].rpartition(".")
    return getattr(importlib.import_module(module), kind)
