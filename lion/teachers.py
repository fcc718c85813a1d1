"""Teachers for distillation: a trained run, or a model of timm."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lion.config import ConfigError
from lion.models.base import ImageClassifier
from lion.runs import open_run
from lion.samples.images import ImageInfo
from lion.tasks.image_classification import ImageClassification

TIMM = "timm:"  # a teacher `timm:NAME` is a pre-trained model of timm, `timm:NAME:FILE` has the weights of a file


class Teacher(nn.Module):
    """A frozen classifier of images, with its own normalisation.

    Args:
        model: A model from normalised images (B, channels, height, width) to logits (B, classes).
        mean, std: Mean and standard deviation of each channel, for pixels in [0, 1].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32)[:, None, None], persistent=False)
        self.eval()

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """Return float32 logits (B, classes) of pixels in [0, 1], (B, channels, height, width)."""
        return self.model((pixels - self.mean) / self.std).float()


def open_teacher(name: str, info: ImageInfo) -> Teacher:
    """Open the teacher that `task.teacher` names: a run, `timm:NAME`, or `timm:NAME:FILE`.

    Raises:
        ConfigError: There is no such teacher, or it was trained on other classes or images of another size.
    """
    if name.startswith(TIMM):
        return open_timm(name, info)
    return open_run_as_teacher(name, info)


def open_run_as_teacher(name: str, info: ImageInfo) -> Teacher:
    loaded = open_run(name)
    if not isinstance(loaded.task, ImageClassification):
        raise ConfigError(
            f"task.teacher: {name} is a run of {loaded.recipe.task.name!r}, expected image_classification"
        )
    model = loaded.model
    assert isinstance(model, ImageClassifier)  # as every model of this task
    if model.classes != info.classes:
        raise ConfigError(f"task.teacher: {name} was trained on {len(model.classes)} other classes")
    shape = (info.channels, *info.size)
    if model.image_shape != shape:
        raise ConfigError(f"task.teacher: {name} has images {model.image_shape}, expected {shape}")
    return Teacher(model, model.mean.flatten().tolist(), model.std.flatten().tolist())


def open_timm(name: str, info: ImageInfo) -> Teacher:
    kind, _, file = name.removeprefix(TIMM).partition(":")
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise ConfigError(f"task.teacher: {name!r} needs timm: pip install timm") from None
    classes = len(info.classes)
    weights: dict[str, Any] = {"pretrained": True}
    if file:
        weights = {"checkpoint_path": file, "num_classes": classes}
    try:
        model = timm.create_model(kind, in_chans=info.channels, **weights)
    except Exception as error:  # timm and its hub client have many: unknown names, no network, damaged files
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"task.teacher: {name!r} cannot be loaded ({why})") from None
    if model.num_classes != classes:
        raise ConfigError(f"task.teacher: {name!r} has {model.num_classes} classes, the data have {classes}")
    shape = (info.channels, *info.size)
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    except Exception as error:  # each model checks the size of images in its own way
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"task.teacher: {name!r} does not take images {shape} ({why})") from None
    mean = model.pretrained_cfg["mean"]
    std = model.pretrained_cfg["std"]
    if len(mean) != info.channels:  # timm sums the input weights of such a model
        mean = [sum(mean) / len(mean)]
        std = [sum(std) / len(std)]
    return Teacher(model, mean, std)
