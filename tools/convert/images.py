"""Base class of converters of image classifiers; `vit.py` and `vim.py` are the models."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from lion.samples.images import ImageInfo, numbered
from tools.convert.base import Converter, Setting, checked, no_place
from tools.convert.files import CheckpointContents

PATCH, CLS, POSITION = "patch_embed.proj.weight", "cls_token", "pos_embed"
NAMES = {  # our names, by patterns of theirs, of the weights outside of the blocks
    r"patch_embed\.proj\.(\w+)": r"patch.\1",
    CLS: "cls",
    POSITION: "position",
    r"head\.(\w+)": r"head.\1",
}


class ImageConverter(Converter):
    """A converter of image classifiers. The checkpoint determines the number of classes.

    Attributes:
        names: Our name by the pattern of theirs.
        needed: Number of axes of weights that show the architecture, by their name.
        optional: Names in `needed` that a checkpoint may lack.
        whose: Description of the checkpoints, for messages.
        blocks: Their name of the blocks.
    """

    names: ClassVar[dict[str, str]]
    needed: ClassVar[dict[str, int]]
    optional: ClassVar[tuple[str, ...]] = ()
    whose: ClassVar[str]
    blocks: ClassVar[str]

    def rename(self, held: CheckpointContents) -> dict[str, Tensor]:
        theirs = held.weights
        for name, axes in self.needed.items():
            if name in self.optional and name not in theirs:
                continue
            if not torch.is_tensor(theirs.get(name)) or theirs[name].dim() != axes:
                raise ConfigError(f"{held.path}: no {name} with {axes} axes: not {self.whose}")
        ours = {}
        for name, value in theirs.items():
            for pattern, our in self.names.items():
                match = re.fullmatch(pattern, name)
                if match:
                    turned = self.turned(name, checked(name, value, held.path))
                    ours[match.expand(our)] = turned.clone(memory_format=torch.contiguous_format)
                    break
            else:
                raise no_place(name, held.path)
        return ours

    def turned(self, name: str, value: Tensor) -> Tensor:
        """Return the value in our model of a weight, whose name is theirs."""
        return value

    def last_block(self, theirs: dict[str, Tensor]) -> tuple[int, str]:
        """Return the number of blocks, and the name of a weight of the last one."""
        numbers = {}
        for name in theirs:
            if name.startswith(f"{self.blocks}."):
                numbers[name] = int(name.split(".")[1])
        last = max(numbers, key=numbers.get)
        return numbers[last] + 1, last

    def sizes(self, theirs: dict[str, Tensor], recipe: Recipe, info: ImageInfo) -> Iterator[Setting]:
        """Yield the settings shown by the patches, the blocks and the position embeddings of a square image."""
        c = recipe.model.resolved()
        patch = theirs[PATCH]
        yield Setting("model.patch_size", tuple(patch.shape[2:]), c.patch_size, PATCH)
        yield Setting("data.channels", patch.shape[1], info.channels, PATCH)
        depth, last = self.last_block(theirs)
        yield Setting("model.depth", depth, c.depth, last)
        if POSITION in theirs:
            places = theirs[POSITION].numel() // c.dim - (CLS in theirs)
            (height, width), (rows, columns) = info.size, c.patch_size
            side = math.isqrt(max(places, 0))
            if side * side == places != (height // rows) * (width // columns):
                yield Setting("data.image_size", (side * rows, side * columns), info.size, POSITION)

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo) -> ImageInfo:
        classes = len(ours["head.weight"])
        if classes == len(info.classes):
            return info
        return dataclasses.replace(info, classes=numbered(classes))
