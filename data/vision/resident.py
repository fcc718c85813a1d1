"""Images of one size that stay on the device, where batches are gathered, cropped and flipped."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.vision.sources import decode
from lion.samples.base import DeviceDataset, moved


class ResidentImages(DeviceDataset):
    """Samples {image, label} in memory, from which whole batches are built at once.

    Args:
        source: A source of (image, label).
        transform: A function from an image to uint8 (C, H, W), with one size for all images.
        indices: The samples of the source to use; None: all.
        pad: Pixels added around an image before a random crop of its original size, as in `v2.RandomCrop`.
        flip: Share of images that are mirrored.
    """

    def __init__(
        self, source: Any, transform: Any, indices: list[int] | None = None, *, pad: int = 0, flip: float = 0.0
    ) -> None:
        pixels, labels = [], []
        for picture, label in decode(source, indices):
            pixels.append(transform(picture))
            labels.append(label)
        self.pixels, self.labels = torch.stack(pixels), torch.tensor(labels)  # (N, C, H, W), (N,)
        self.pad, self.flip = pad, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.pixels[index], "label": int(self.labels[index])}

    def batch(
        self, indices: list[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Return image (B, C, H, W) and label (B,) on `device`; without a generator there is no augmentation."""
        if self.pixels.device != torch.device(device):
            self.pixels, self.labels = self.pixels.to(device), self.labels.to(device)
        chosen = moved(torch.tensor(indices), device)
        images = self.pixels[chosen]
        if generator is not None:
            images = crop(images, self.pad, generator)
            mirrored = torch.rand(len(images), generator=generator, device=device) < self.flip
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        return {"image": images, "label": self.labels[chosen]}


def crop(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Crop each image of (B, C, H, W) at an independent random place, after padding with `pad` black pixels."""
    if not pad:
        return images
    batch, _, height, width = images.shape
    top, left = torch.randint(2 * pad + 1, (2, batch), generator=generator, device=images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = left[:, None] + torch.arange(width, device=images.device)
    each = torch.arange(batch, device=images.device)[:, None, None]
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    return padded[each, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
