"""Vision transformer in DeiT's shapes, with any mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lion.config import setting
from lion.layers.constants import grid_constants
from lion.layers.layout import ROW_MAJOR, Layout
from lion.layers.mixers import SOFTMAX
from lion.layers.optim_factors import undecayed
from lion.models.base import ImageClassifier, Model
from lion.models.encoder import Encoder
from lion.models.init import INITS
from lion.models.patches import PatchedConfig, grid_of
from lion.models.positions import interpolated


@dataclass
class ViTConfig(PatchedConfig):
    """Settings of a ViT. None in `position_embedding` and `readout` selects the convention of the mixer.

    By convention, position embeddings are on if the mixer alone does not know the order of tokens (softmax, Lion-lit),
    and off for decays (Table 14), rotations and MD-TPE.

    The readout of softmax is cls by convention (DeiT). The readout of linear mixers is the mean of all tokens, cls
    included (released code). It is also the mean if all layers go forward, because cls comes first and then sees no
    other token. `cls: false` removes the cls token.

    `cls_place: middle` puts the cls token after the first half of the patches, as in Vim; it is then read by
    convention, in one direction as well.

    `distilled` adds DeiT's distillation token after cls, and a second head that reads it. A readout by the mean leaves
    this token out. LION does not publish the tokens of its distilled model.
    """

    name: str = "vit"
    cls: bool = True
    cls_place: str = setting("first", choices=("first", "middle"))
    distilled: bool = False
    readout: str | None = setting(None, choices=("cls", "mean"))

    released: ClassVar[dict[str, dict[str, Any]]] = {"lion_lit": {"attention": {"feature_map": "elu1"}}}

    def resolved(self) -> Self:
        c = super().resolved()
        middle = c.cls_place == "middle"
        blind = not middle and all(c.attention.at(layer).direction == "forward" for layer in range(c.depth))
        if c.readout is None:
            by_cls = c.cls and (c.mixer == SOFTMAX or middle) and not blind
            c.readout = "cls" if by_cls else "mean"
        if middle and (not c.cls or c.distilled or c.attention.scans != ROW_MAJOR):
            raise ValueError("cls_place 'middle' needs the cls token, one scan, and no distillation token")
        if c.readout == "cls" and not c.cls:
            raise ValueError("readout 'cls' needs the cls token; use 'mean', or cls: true")
        if c.readout == "cls" and blind:
            raise ValueError("readout 'cls' sees no patch, because cls is first and all layers go forward; use 'mean'")
        if c.distilled and blind:
            raise ValueError("distilled: its token sees no patch, because it is first and all layers go forward")
        return c

    def label(self) -> str:
        label = super().label()
        if self.distilled:
            label += " distilled"
        return label


class ViT(ImageClassifier):
    """An image classifier: normalisation, patches, cls token (if any), encoder, readout, linear head.

    Args:
        config: Settings of the model.
        image_size: (height, width) in pixels, multiples of the patch size.
        num_classes: Number of classes.
        channels, classes, mean, std: See `ImageClassifier`.

    Raises:
        ValueError: The patch size does not divide the image, or `mean` or `std` has the wrong number of channels.
    """

    Config = ViTConfig
    heads = ("head.", "head_distill.")
    coords: Tensor
    special: Tensor
    orders: Tensor | None

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
        super().__init__(image_size=image_size, channels=channels, classes=classes, mean=mean, std=std)
        self.optim_factors = undecayed("cls", "distill", "position")
        self.config = c = config.resolved()
        self.patches = grid_of(image_size, c.patch_shape())
        height, width = self.patches
        special = int(c.cls) + int(c.distilled)
        self.length = special + height * width
        self.before = 0  # patches before the special tokens
        if c.cls_place == "middle":
            self.before = height * width // 2
        self.patch = nn.Conv2d(channels, c.dim, c.patch_size, c.patch_size)
        self.cls = None
        self.distill = None
        self.position = None
        if c.cls:
            self.cls = nn.Parameter(torch.zeros(1, 1, c.dim))
        if c.distilled:
            self.distill = nn.Parameter(torch.zeros(1, 1, c.dim))
        if c.position_embedding:
            self.position = nn.Parameter(torch.zeros(1, self.length, c.dim))
        self.encoder = Encoder(c, self.patches)
        self.head = nn.Linear(c.dim, num_classes)
        self.head_distill = None
        if c.distilled:
            self.head_distill = nn.Linear(c.dim, num_classes)
        self.hold(partial(grid_constants, height, width, scans=c.attention.scans, special=special, before=self.before))

        INITS[c.init](self, c.init_std)
        for parameter in (self.cls, self.distill, self.position):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=c.init_std)

    @property
    def layout(self) -> Layout:
        """The layout of the tokens of every image."""
        return Layout(coords=self.coords, special=self.special, orders=self.orders)

    def scan_orders(self) -> dict[str, Tensor]:
        if self.orders is None:
            return {}
        return {name: self.coords[:, order] for name, order in zip(self.config.attention.scans, self.orders)}

    def units(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, classes) of images (B, channels, height, width), see `ImageClassifier.normalised`.

        In training, a distilled model returns the logits of both heads, as a tuple; otherwise their mean. If rows are
        split, every process embeds all patches, and keeps its part of the tokens.
        """
        images = self.normalised(images, self.patch.weight.dtype)
        x = self.patch(images).flatten(2).mT  # (B, H W, dim)
        special = []
        for token in (self.cls, self.distill):
            if token is not None:
                special.append(token.expand(x.shape[0], -1, -1))
        if special:
            x = torch.cat([x[:, : self.before], *special, x[:, self.before :]], 1)
        if self.position is not None:
            x = x + self.position
        layout = self.layout
        if self.part is not None:
            layout = layout.split(x, self.part)
            x = self.own(x).clone()  # a view would keep the whole rows in memory
        x = layout.clean(self.encoder(x, layout))
        by_cls = self.config.readout == "cls"
        if self.head_distill is None:
            if by_cls:
                return self.head(self.token(x, self.before))
            return self.head(self.total(x) / self.length)
        distilled = self.token(x, int(self.config.cls))
        if by_cls:
            own = self.token(x, 0)
        else:
            own = (self.total(x) - distilled) / (self.length - 1)
        logits = self.head(own)
        distilled_logits = self.head_distill(distilled)
        if self.training:
            return logits, distilled_logits
        return (logits + distilled_logits) / 2

    def check_split(self, count: int) -> None:
        self.encoder.check_split(count)

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Return the weights of `source`, a model for images of another size, adapted to this model.

        Position embeddings are interpolated; a special token that `source` does not have keeps its own.
        """
        assert isinstance(source, ViT)
        if self.position is None or source.position is None:
            return weights
        roles = self.special_tokens()
        theirs = source.special_tokens()
        if (self.patches, self.before, roles) == (source.patches, source.before, theirs):
            return weights
        first, extra, last = source.position_parts(weights["position"])
        known = dict(zip(theirs, extra.split(1, 1)))
        own = self.position_parts(self.position.detach())[1]
        special = [own[:, :0]]
        for i, role in enumerate(roles):
            special.append(known.get(role, own[:, [i]]))
        extra = torch.cat(special, 1)
        patches = torch.cat([first, last], 1)
        places = interpolated(patches, source.patches, self.patches)
        position = torch.cat([places[:, : self.before], extra, places[:, self.before :]], 1)
        return {**weights, "position": position}

    def special_tokens(self) -> list[str]:
        """Return the names of the tokens without a place on the grid, in their order."""
        return [name for name in ("cls", "distill") if getattr(self, name) is not None]

    def position_parts(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split position embeddings (1, L, dim) at the tokens without a place on the grid: before, these, after."""
        count = self.patches[0] * self.patches[1]
        return position.split([self.before, self.length - count, count - self.before], 1)
