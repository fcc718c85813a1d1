"""Pictures of one size that stay on the device: batches are gathered, cropped and flipped there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.vision.sources import decode
from lion.tasks.data import DeviceDataset


class ResidentImages(DeviceDataset):
    """Samples {image, label}; batches are made as a whole.

    Args:
        source: Of (picture, label).
        transform: Picture -> uint8 (C, H, W), one size for all.
        indices: Which part of the source, or all.
        pad: Pixels around a picture before a crop of its size at a random place, as `v2.RandomCrop`.
        flip: The share of pictures that are mirrored.
    """

    def __init__(
        self, source: Any, transform: Any, indices: list[int] | None = None, *, pad: int = 0, flip: float = 0.0
    ) -> None:
        pixels, labels = zip(*((transform(picture), label) for picture, label in decode(source, indices)))
        self.pixels, self.labels = torch.stack(pixels), torch.tensor(labels)  # (N, C, H, W), (N,)
        self.pad, self.flip = pad, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.pixels[index], "label": int(self.labels[index])}

    def batch(
        self, indices: list[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """image (B, C, H, W) and label (B,) on `device`; without a generator nothing is left to chance."""
        if self.pixels.device != torch.device(device):
            self.pixels, self.labels = self.pixels.to(device), self.labels.to(device)
        chosen = torch.tensor(indices, device=device)
        images = self.pixels[chosen]
        if generator is not None:
            images = crop(images, self.pad, generator)
            mirrored = torch.rand(len(images), generator=generator, device=device) < self.flip
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        return {"image": images, "label": self.labels[chosen]}


def crop(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """A window of its own for each image (B, C, H, W), `pad` black pixels around."""
    if not pad:
        return images
    batch, _, height, width = images.shape
    top, left = torch.randint(2 * pad + 1, (2, batch), generator=generator, device=images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width, device=images.device)
    each = torch.arange(batch, device=images.device)[:, None, None]
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    return padded[each, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
