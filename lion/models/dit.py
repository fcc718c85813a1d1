"""Diffusion transformer (DiT, 2212.09748), with any mixer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.adaln import Modulation, modulated, plain_norm
from lion.layers.blocks.base import MLPS
from lion.layers.constants import Constants
from lion.layers.layout import Layout, grid_layout
from lion.models.base import Model
from lion.models.encoder import Encoder
from lion.models.init import INITS
from lion.models.patches import PatchedConfig, grid_of

FREQUENCIES = 128  # frequencies of a time embedding, each with cosine and sine
LONGEST = 10_000  # ratio of the longest period to the shortest, about


@dataclass
class DiTConfig(PatchedConfig):
    """Settings of a DiT. None in `position_embedding` selects the convention of the mixer.

    By convention, the position embedding (fixed sines and cosines of row and column) is on if the mixer does not know
    the order of tokens.

    With block `adaln_zero`, time and class modulate every block. With any other block, time and class are two tokens
    before the patches (the paper's in-context conditioning), which costs no parameters.
    """

    name: str = "dit"
    block: str = setting("adaln_zero", choices=BLOCKS)
    mlp: str = setting("mlp_tanh", choices=MLPS)
    init: str = setting("xavier", choices=INITS)
    patch_size: tuple[int, int] | int = 2

    conditions: ClassVar[bool] = True
    token_outputs: ClassVar[bool] = True

    def resolved(self) -> Self:
        c = super().resolved()
        if c.position_embedding and c.dim % 4:
            raise ValueError(f"dim: the embedding of rows and columns needs a multiple of 4, got {c.dim}")
        return c

    @property
    def modulates(self) -> bool:
        """Return whether time and class modulate the blocks, instead of being tokens."""
        return BLOCKS[self.block].conditional

    def label(self) -> str:
        """Return the label with the patch size, because the papers also compare patch sizes."""
        height, width = self.patch_shape()
        if height == width:
            return f"{super().label()} patch {height}"
        return f"{super().label()} patch {height} x {width}"

    def shape(self) -> str:
        shape = super().shape()
        if not self.modulates:
            shape += ", time and class as tokens"
        return shape


class DiT(Model, Constants):
    """A diffusion transformer, which predicts the noise added to an image.

    The parts are patches, an encoder, and a linear head back to the pixels of each patch.

    Args:
        config: Settings of the model.
        image_size: (height, width) in pixels, multiples of the patch size.
        channels: Number of image channels.
        classes: Class names in the order of the labels; the label after the last class means no class.

    Raises:
        ValueError: The patch size does not divide the image, or the norm cannot be modulated.
    """

    Config = DiTConfig
    heads = ("labels.",)
    coords: Tensor
    orders: Tensor | None
    position: Tensor | None
    is_special: Tensor | None

    def __init__(
        self, config: DiTConfig, *, image_size: tuple[int, int], channels: int, classes: Sequence[str]
    ) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.image_shape = (channels, *image_size)
        self.classes = tuple(classes)
        self.grid = grid_of(image_size, c.patch_shape())
        height, width = self.grid
        self.special = 0 if c.modulates else 2  # tokens before the patches
        self.length = self.special + height * width
        self.patch = nn.Conv2d(channels, c.dim, c.patch_size, c.patch_size)
        self.times = Times(c.dim)
        self.labels = nn.Embedding(len(classes) + 1, c.dim)
        self.encoder = Encoder(c, self.grid)
        self.final_norm = None
        self.final_modulation = None
        if c.modulates:
            self.final_norm = plain_norm(c.norm, c.dim, c.norm_eps)
            self.final_modulation = Modulation(c.dim, 2)
        self.head = nn.Linear(c.dim, channels * math.prod(c.patch_shape()))
        dim = c.dim if c.position_embedding else None
        self.hold(partial(constants_of_tokens, height, width, c.attention.scans, self.special, dim))

        INITS[c.init](self, c.init_std)
        for layer in (self.times.fc1, self.times.fc2, self.labels):
            nn.init.normal_(layer.weight, std=c.init_std)
        for module in self.modules():
            if isinstance(module, Modulation):
                module.start()
        nn.init.zeros_(self.head.weight)

    @property
    def none(self) -> int:
        """The label that means no class."""
        return len(self.classes)

    @property
    def layout(self) -> Layout:
        """The layout of the tokens of every image."""
        return Layout(coords=self.coords, special=self.is_special, orders=self.orders)

    def units(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predict the noise (B, channels, height, width) in images x of the same shape.

        Args:
            x: Noisy images, with a standard deviation of about 1 at every time.
            times: Diffusion times (B,), from 0; later times have more noise.
            labels: Class labels (B,), or `none`.

        Raises:
            ValueError: Images of the wrong size or number of channels.
        """
        if x.shape[1:] != self.image_shape:
            shape = ", ".join(map(str, self.image_shape))
            raise ValueError(f"x: expected (B, {shape}), got {tuple(x.shape)}")
        tokens = self.patch(x.to(self.patch.weight.dtype)).flatten(2).mT  # (B, H W, dim)
        if self.position is not None:
            tokens = tokens + self.position
        time = self.times(times)  # (B, dim)
        label = self.labels(labels)  # (B, dim)
        if self.final_norm is not None and self.final_modulation is not None:
            context = F.silu(time + label)
            tokens = self.encoder(tokens, self.layout, context)
            tokens = self.final_norm(tokens)
            shift, scale = self.final_modulation.vectors(context)
            tokens = modulated(tokens, shift, scale)
        else:
            tokens = torch.cat([time[:, None], label[:, None], tokens], 1)
            tokens = self.encoder(tokens, self.layout)
        return self.unpatched(self.head(tokens[:, self.special :]))

    def unpatched(self, x: Tensor) -> Tensor:
        """Return patches (B, H W, channels * pixels) as images (B, channels, height, width)."""
        channels, height, width = self.image_shape
        rows, columns = self.config.patch_shape()
        x = x.unflatten(-1, (channels, rows, columns))
        x = x.unflatten(1, self.grid)
        x = x.permute(0, 3, 1, 4, 2, 5)  # (B, channels, H, rows of a patch, W, columns of a patch)
        return x.reshape(x.shape[0], channels, height, width)


class Times(nn.Module):
    """An embedding of times (B,) as vectors (B, dim): cosines and sines of geometric frequencies, then an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * FREQUENCIES, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, times: Tensor) -> Tensor:
        angles = times[:, None].float() * frequencies(FREQUENCIES, times.device)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        waves = waves.to(self.fc1.weight.dtype)
        return self.fc2(F.silu(self.fc1(waves)))


def frequencies(count: int, device: torch.device | None = None) -> Tensor:
    """Return `count` frequencies that decrease geometrically from 1."""
    return LONGEST ** (-torch.arange(count, device=device) / count)


def constants_of_tokens(
    height: int, width: int, scans: Sequence[str], special: int, dim: int | None
) -> dict[str, Tensor | None]:
    """Return coordinates, scan orders, the mask of `special` tokens, and the position embedding of width `dim`."""
    layout = grid_layout(height, width, scans, special=special)
    constants = {"coords": layout.coords, "orders": layout.orders, "is_special": None, "position": None}
    if special:
        constants["is_special"] = layout.special
    if dim is not None:
        constants["position"] = position_embedding(height, width, dim)
    return constants


def position_embedding(height: int, width: int, dim: int) -> Tensor:
    """Return sines and cosines (H W, dim), as in DiT: of the column in the first half, of the row in the second."""
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    rows, columns = places.view(-1, 2).mT.float()
    waves = []
    for place in (columns, rows):
        angles = place[:, None] * frequencies(dim // 4, place.device)
        waves += [angles.sin(), angles.cos()]
    return torch.cat(waves, -1)
