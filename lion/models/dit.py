"""Diffusion transformer (DiT, 2212.09748), with any mixer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.adaln import Modulation, modulated, plain_norm
from lion.layers.block import MLPS
from lion.layers.blocks import BLOCKS
from lion.layers.layout import Layout, grid_layout
from lion.models.base import Model
from lion.models.encoder import Encoder
from lion.models.init import INITS
from lion.models.patches import PatchedConfig, grid_of

FREQUENCIES = 128  # of a time, each as cosine and sine
LONGEST = 10_000  # the period of the slowest, in units of its own


@dataclass
class DiTConfig(PatchedConfig):
    """A DiT. None in `position_embedding` (fixed sines and cosines of row and column) stands for the convention of the
    mixer: on where it knows no order.

    With block `adaln_zero` time and class modulate every block; with any other they are two tokens in front of the
    patches (the paper's in-context conditioning), which costs no parameters.
    """

    name: str = "dit"
    block: str = setting("adaln_zero", choices=BLOCKS)
    mlp: str = setting("mlp_tanh", choices=MLPS)
    init: str = setting("xavier", choices=INITS)
    patch_size: tuple[int, int] | int = 2

    conditions: ClassVar[bool] = True

    def resolved(self) -> Self:
        c = super().resolved()
        if c.position_embedding and c.dim % 4:
            raise ValueError(f"dim: the embedding of rows and columns needs a multiple of 4, got {c.dim}")
        return c

    @property
    def modulates(self) -> bool:
        """Whether time and class reach the blocks by themselves, and not as tokens."""
        return BLOCKS[self.block].conditional

    def label(self) -> str:
        """The papers compare sizes of patches, too."""
        height, width = self.resolved().patch_size
        return f"{super().label()} patch {height if height == width else f'{height} x {width}'}"

    def shape(self) -> str:
        return super().shape() + ("" if self.modulates else ", time and class as tokens")


class DiT(Model):
    """Tells the noise in pictures: patches, encoder, and a linear head back to the pixels of each patch.

    Args:
        config: Shape of the model.
        image_size: (height, width) in pixels, multiples of the patch size.
        channels: Of the pictures.
        classes: Their names, in the order of the labels; the label after the last stands for none of them.

    Raises:
        ValueError: The patch size does not divide the image, or the norm cannot be modulated.
    """

    Config = DiTConfig
    heads = ("labels.",)

    def __init__(
        self, config: DiTConfig, *, image_size: tuple[int, int], channels: int, classes: Sequence[str]
    ) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.image_shape, self.classes = (channels, *image_size), tuple(classes)
        self.grid = height, width = grid_of(image_size, c.patch_size)
        self.special = 0 if c.modulates else 2  # tokens in front
        self.length = self.special + height * width
        self.patch = nn.Conv2d(channels, c.dim, c.patch_size, c.patch_size)
        self.times, self.labels = Times(c.dim), nn.Embedding(len(classes) + 1, c.dim)
        self.encoder = Encoder(c, self.grid)
        self.final_norm = plain_norm(c.norm, c.dim, c.norm_eps) if c.modulates else None
        self.final_modulation = Modulation(c.dim, 2) if c.modulates else None
        self.head = nn.Linear(c.dim, channels * math.prod(c.patch_size))
        layout = grid_layout(height, width, c.attention.scans, special=self.special)
        position = position_embedding(height, width, c.dim) if c.position_embedding else None
        held = {"coords": layout.coords, "orders": layout.orders, "position": position}
        held["is_special"] = layout.special if self.special else None
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)

        INITS[c.init](self, c.init_std)
        for layer in (self.times.fc1, self.times.fc2, self.labels):
            nn.init.normal_(layer.weight, std=c.init_std)
        for module in self.modules():
            if isinstance(module, Modulation):
                module.start()
        nn.init.zeros_(self.head.weight)

    @property
    def none(self) -> int:
        """The label that stands for no class."""
        return len(self.classes)

    @property
    def layout(self) -> Layout:
        """Where the tokens of every picture stand."""
        return Layout(coords=self.coords, special=self.is_special, orders=self.orders)

    def units(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """The noise (B, channels, height, width) in pictures x of the same shape.

        Args:
            x: With noise, of about deviation 1 at every time.
            times: How far the noise has come, 0 on, (B,).
            labels: Their classes, or `none`, (B,).

        Raises:
            ValueError: Pictures of another size or number of channels.
        """
        if x.shape[1:] != self.image_shape:
            raise ValueError(f"x: expected (B, {', '.join(map(str, self.image_shape))}), got {tuple(x.shape)}")
        tokens = self.patch(x.to(self.patch.weight.dtype)).flatten(2).mT  # (B, H W, dim)
        if self.position is not None:
            tokens = tokens + self.position
        time, label = self.times(times), self.labels(labels)  # (B, dim)
        if self.config.modulates:
            context = F.silu(time + label)
            tokens = self.encoder(tokens, self.layout, context)
            tokens = modulated(self.final_norm(tokens), *self.final_modulation(context))
        else:
            tokens = self.encoder(torch.cat([time[:, None], label[:, None], tokens], 1), self.layout)
        return self.unpatched(self.head(tokens[:, self.special :]))

    def unpatched(self, x: Tensor) -> Tensor:
        """Patches (B, H W, channels * pixels) as pictures (B, channels, height, width)."""
        x = x.unflatten(-1, (self.image_shape[0], *self.config.patch_size)).unflatten(1, self.grid)
        x = x.permute(0, 3, 1, 4, 2, 5)  # (B, channels, H, rows of a patch, W, columns of a patch)
        return x.reshape(len(x), *self.image_shape)


class Times(nn.Module):
    """Times (B,) as vectors (B, dim): cosines and sines of geometric frequencies, and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2 * FREQUENCIES, dim), nn.Linear(dim, dim)

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None].float() * frequencies(FREQUENCIES, times.device)
        return self.fc2(F.silu(self.fc1(torch.cat([angles.cos(), angles.sin()], -1).to(self.fc1.weight.dtype))))


def frequencies(count: int, device: torch.device | None = None) -> Tensor:
    """From 1 down, geometric."""
    return LONGEST ** (-torch.arange(count, device=device) / count)


def position_embedding(height: int, width: int, dim: int) -> Tensor:
    """Sines and cosines of the column in the first half of (H W, dim), of the row in the second, as DiT has them."""
    rows, columns = torch.cartesian_prod(torch.arange(height), torch.arange(width)).view(-1, 2).mT.float()
    angles = [place[:, None] * frequencies(dim // 4, place.device) for place in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], -1)
