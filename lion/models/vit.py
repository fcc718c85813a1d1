"""Vision transformer in DeiT's shapes, with any mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.marks import Marks
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.layers.scans import Grid, make_grid
from lion.models.encoder import Encoder, EncoderConfig, init_weights


@dataclass
class ViTConfig(EncoderConfig):
    """A ViT. None in `position_embedding` and `readout` stands for the convention of the mixer.

    Position embedding: on where the mixer itself knows no order (softmax, Lion-lit), off for decays (Table 14).
    Readout: cls for softmax (DeiT), the mean of all tokens, cls included, for linear mixers (released code) and where
    cls, which comes first, sees nothing else.
    """

    patch_size: tuple[int, int] | int = 16
    position_embedding: bool | None = None
    readout: str | None = setting(None, choices=("cls", "mean"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.patch_size, int):
            self.patch_size = (self.patch_size, self.patch_size)
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be at least 1, got {self.patch_size}")
        knows_order = self.mixer != SOFTMAX and MIXERS[self.mixer].decay is not None
        if self.position_embedding is None:
            self.position_embedding = not knows_order
        blind = all(self.attention.at(layer).direction == "forward" for layer in range(self.depth))
        if self.readout is None:
            self.readout = "cls" if self.mixer == SOFTMAX and not blind else "mean"
        if self.readout == "cls" and blind:
            raise ValueError("readout 'cls' sees no patch, all layers go forward from it; use 'mean'")


class ViT(nn.Module):
    """Image classifier: normalisation, patches, cls token, encoder, readout, linear head.

    Args:
        config: Shape of the model.
        image_size: (height, width) in pixels, multiples of the patch size.
        channels: Of the images.
        num_classes: Width of the head.
        classes: Their names, in the order of the logits, where they are known.
        mean, std: Of each channel (or one for all), of pixels in [0, 1]; what is known of the data, not learned, and
            so in no checkpoint's weights.

    Raises:
        ValueError: The patch size does not divide the image, or `mean` or `std` is for other channels.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        image_size: tuple[int, int],
        channels: int,
        num_classes: int,
        classes: Sequence[str] = (),
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.marks = {name: Marks(weight_decay=0) for name in ("cls", "position")}
        for side, size, patch in zip(("height", "width"), image_size, config.patch_size):
            if size % patch:
                fits = [p for p in range(1, size + 1) if size % p == 0]
                near = min(fits, key=lambda p: abs(p - patch))
                raise ValueError(f"model.patch_size: {patch} does not divide image {side} {size}, nearest: {near}")
        self.readout, self.classes = config.readout, tuple(classes)
        self.image_shape = (channels, *image_size)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name}: expected one number a channel, {channels}, got {list(values)}")
            each = torch.tensor(values, dtype=torch.float32).expand(channels)[:, None, None]
            self.register_buffer(name, each.clone(), persistent=False)  # (channels, 1, 1)
        self.patches = height, width = tuple(size // patch for size, patch in zip(image_size, config.patch_size))
        self.patch = nn.Conv2d(channels, config.dim, config.patch_size, config.patch_size)
        self.cls = nn.Parameter(torch.zeros(1, 1, config.dim))
        length = 1 + height * width
        self.position = nn.Parameter(torch.zeros(1, length, config.dim)) if config.position_embedding else None
        self.encoder = Encoder(config)
        self.head = nn.Linear(config.dim, num_classes)
        self.scans = config.attention.scans
        for name, places in make_grid(height, width, config.attention.scans)._asdict().items():
            self.register_buffer(name, places, persistent=False)

        init_weights(self, config.init_std)
        for parameter in (self.cls, self.position):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=config.init_std)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (B, channels, height, width) as float32, each channel to mean 0 and deviation 1."""
        return (pixels.float() - 255 * self.mean) / (255 * self.std)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, channels, height, width): uint8 as pictures have it, or floating point
        that went through `normalise` already.

        Raises:
            ValueError: Images of another size, number of channels or type.
        """
        if images.shape[1:] != self.image_shape or not (images.dtype == torch.uint8 or images.is_floating_point()):
            expected = f"(B, {', '.join(map(str, self.image_shape))}), uint8 or normalised floating point"
            raise ValueError(f"images: expected {expected}, got {tuple(images.shape)}, {str(images.dtype)[6:]}")
        if images.dtype == torch.uint8:
            images = self.normalise(images).to(self.patch.weight.dtype)
        x = self.patch(images).flatten(2).mT  # (B, H W, dim)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        if self.position is not None:
            x = x + self.position
        x = self.encoder(x, Grid(self.coords, self.extra, self.orders))
        return self.head(x[:, 0] if self.readout == "cls" else x.mean(1))

    def adapt(self, weights: dict[str, Tensor], source: ViT) -> dict[str, Tensor]:
        """Weights of `source`, a model for images of another size, for this one: positions are interpolated."""
        if self.position is None or source.position is None or self.patches == source.patches:
            return weights
        extra = self.position.shape[1] - self.patches[0] * self.patches[1]
        own, places = weights["position"].split([extra, source.patches[0] * source.patches[1]], 1)
        places = places.mT.unflatten(-1, source.patches)  # (1, dim, H, W)
        places = F.interpolate(places.float(), self.patches, mode="bicubic", antialias=True).flatten(2).mT
        return {**weights, "position": torch.cat([own, places.to(own.dtype)], 1)}
