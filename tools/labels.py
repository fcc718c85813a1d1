"""Whether the labels of pictures can be learned: a small convolutional network on each half of the training pictures.

In a Pathfinder-128 that goes round those of one half cannot; a model that stays at chance there says nothing of itself.
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
from lion.tasks.data import Splits
from tools.bench.probe import pick_device

BATCH = 64
SEEN = 2000  # pictures at most, of which accuracies are
APART = 10.0  # points, from chance or from each other


def check_labels(splits: Splits, steps: int) -> str:
    """Train on each half, in the order of the files; the accuracies in words.

    Raises:
        ConfigError: They are no pictures.
    """
    if getattr(splits.info, "vocabulary", 0) is not None:
        raise ConfigError("--check-labels: the recipe's data are no pictures that are read pixel by pixel")
    found: list[tuple[float, float]] = []
    for number, half in enumerate(np.array_split(np.argsort(splits.train.indices), 2), 1):  # in the files' order
        model = learn(splits, half, steps, f"half {number}")
        held_out = np.arange(len(splits.val))
        own, val = (accuracy(model, data, rows[:SEEN]) for data, rows in ((splits.train, half), (splits.val, held_out)))
        found.append((own, val))
    lines = [
        f"a network that saw half {number}: {own:.1f} % right of it, {val:.1f} % of what validates"
        for number, (own, val) in enumerate(found, 1)
    ]
    return "\n".join([*lines, verdict(found, 100 / splits.info.classes, steps)])


def verdict(found: list[tuple[float, float]], chance: float, steps: int) -> str:
    """Of two networks: accuracy on their own half, and on what validates; a network remembers its own half."""
    (own, val), (other_own, other_val) = found
    apart = max(abs(own - other_own), abs(val - other_val))
    if apart >= APART:
        return f"they are {apart:.1f} points apart: the labels of one half cannot be learned"
    if max(val, other_val) < chance + APART:
        return f"what validates is not learned in {steps} steps, which says nothing yet: take more"
    return "they agree"


def network(classes: int) -> nn.Module:
    """Of pictures (B, 1, H, W) of 16 x 16 pixels and more."""

    def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.BatchNorm2d(outputs), nn.ReLU())

    body = [convolution(1, 16, 5, 2), convolution(16, 32), nn.MaxPool2d(2), convolution(32, 32)]
    body += [convolution(32, 32), nn.MaxPool2d(2), convolution(32, 64), nn.AdaptiveMaxPool2d(4), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, classes))


def batch_of(data: torch.utils.data.Dataset, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pictures (B, 1, H, W) and labels (B,)."""
    batch = data.batch(rows, pick_device())
    side = math.isqrt(batch["pixels"].shape[1])
    return batch["pixels"].view(-1, 1, side, side).float() / 255, batch["label"]


def learn(splits: Splits, rows: np.ndarray, steps: int, what: str) -> nn.Module:
    """A network that is trained on these rows, flipped in every way."""
    torch.manual_seed(0)
    model = network(splits.info.classes).to(pick_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for step in progress(range(steps), desc=what, unit="step"):
        images, labels = batch_of(splits.train, rows[torch.randint(len(rows), (BATCH,)).numpy()])
        shown = images.flip([axis for axis, odd in ((-1, step % 2), (-2, step // 2 % 2)) if odd])
        optimizer.zero_grad()
        F.cross_entropy(model(shown), labels).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, data: torch.utils.data.Dataset, rows: np.ndarray) -> float:
    """Percent."""
    right = 0
    for some in np.array_split(rows, -(-len(rows) // 250)):
        images, labels = batch_of(data, some)
        right += int((model(images).argmax(1) == labels).sum())
    return 100 * right / len(rows)
