"""Check of image labels: a small convolutional network is trained on each half of the training images.

In a copy of Pathfinder-128 that circulates, the labels of one half cannot be learned. Accuracy at chance level on that
copy says nothing about a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import ConfigError
from lion.progress import progress
from lion.samples.base import Info, Splits
from tools.probe import pick_device

BATCH = 64
SEEN = 2000  # most images for measuring an accuracy
APART = 10.0  # percentage points above chance, or between the two networks


def check_pixels(info: Info) -> None:
    if getattr(info, "vocabulary", 0) is not None:
        raise ConfigError("--check-labels: the data of the recipe are not images that are read pixel by pixel")


def check_labels(splits: Splits, steps: int) -> str:
    """Train on each half of the images, in the order of the files, and describe the accuracies.

    Raises:
        ConfigError: The data are not images that are read pixel by pixel.
    """
    check_pixels(splits.info)
    found: list[tuple[float, float]] = []
    lines = []
    for number, half in enumerate(np.array_split(np.argsort(splits.train.indices), 2), 1):  # in the order of the files
        model = learn(splits, half, steps, f"half {number}")
        own = accuracy(model, splits.train, half[:SEEN])
        val = accuracy(model, splits.val, np.arange(len(splits.val))[:SEEN])
        found.append((own, val))
        lines.append(
            f"network trained on half {number}: accuracy {own:.1f} % on this half, {val:.1f} % on the validation split"
        )
    lines.append(verdict(found, 100 / splits.info.classes, steps))
    return "\n".join(lines)


def verdict(found: list[tuple[float, float]], chance: float, steps: int) -> str:
    """Compare two networks by their accuracies, each (on its own half, on the validation split).

    A network may memorize its own half.
    """
    (own, val), (other_own, other_val) = found
    apart = max(abs(own - other_own), abs(val - other_val))
    if apart >= APART:
        return f"the accuracies differ by {apart:.1f} points: the labels of one half cannot be learned"
    if max(val, other_val) < chance + APART:
        return (
            f"the validation accuracy is at chance after {steps} steps, which proves nothing yet: train for more steps"
        )
    return "the two networks agree: the labels can be learned"


def network(classes: int) -> nn.Module:
    """Build a convolutional network for images (B, 1, H, W) of at least 16 x 16 pixels."""

    def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.BatchNorm2d(outputs), nn.ReLU())

    body = [convolution(1, 16, 5, 2), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 32)]
    body += [convolution(32, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveMaxPool2d(4), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, classes))


def batch_of(data: torch.utils.data.Dataset, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return images (B, 1, H, W) and labels (B,)."""
    batch = data.batch(rows, pick_device())
    side = math.isqrt(batch["pixels"].shape[1])
    return batch["pixels"].view(-1, 1, side, side).float() / 255, batch["label"]


def learn(splits: Splits, rows: np.ndarray, steps: int, what: str) -> nn.Module:
    """Train a network on these rows, with images flipped along both axes."""
    torch.manual_seed(0)
    model = network(splits.info.classes).to(pick_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for step in progress(range(steps), desc=what, unit="step"):
        images, labels = batch_of(splits.train, rows[torch.randint(len(rows), (BATCH,)).numpy()])
        if step % 2:
            images = images.flip(-1)
        if step // 2 % 2:
            images = images.flip(-2)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: torch.utils.data.Dataset, rows: np.ndarray) -> float:
    """Return the accuracy in percent."""
    right = 0
    for some in np.array_split(rows, -(-len(rows) // 250)):
        images, labels = batch_of(data, some)
        right += int((model(images).argmax(1) == labels).sum())
    return 100 * right / len(rows)
