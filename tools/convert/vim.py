"""Converter of the published checkpoints of Vim (hustvl/Vim)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from lion.samples.images import ImageInfo
from tools.convert.base import Setting
from tools.convert.files import CheckpointContents
from tools.convert.images import CLS, NAMES, PATCH, POSITION, ImageConverter

LAYER, BLOCK = r"layers\.(\d+)\.", r"encoder.blocks.\1."
PARTS = {  # of a direction; their names end with "_b" in the backward direction
    r"conv1d{}\.(\w+)": r"convolution.\2",
    r"x_proj{}\.weight": "select.weight",
    r"dt_proj{}\.weight": "step.weight",
    r"dt_proj{}\.bias": "step_bias",
    r"A{}_log": "a",
    r"D{}": "skip",
}
DIRECTIONS = {
    rf"{LAYER}mixer\.{theirs.format(end)}": f"{BLOCK}attention.sides.{side}.{ours}"
    for side, end in enumerate(("", "_b"))
    for theirs, ours in PARTS.items()
}
FIRST = "layers.0.mixer."
A, CONVOLUTION = f"{FIRST}A_log", f"{FIRST}conv1d.weight"
WIDTHS = {192: "tiny", 384: "small", 768: "base"}


class VimConverter(ImageConverter):
    """A converter of Vim with two directions ("bimambav2") and its cls token in the middle.

    No shape shows that the sum of both directions is halved ("div2") and where cls stands; the published models of the
    paper agree in both.
    """

    trusted = ("model.cls_place", "data.mean", "data.std")
    names: ClassVar[dict[str, str]] = {
        **NAMES,
        rf"{LAYER}norm\.weight": rf"{BLOCK}norm1.weight",
        rf"{LAYER}mixer\.in_proj\.weight": rf"{BLOCK}attention.inputs.weight",
        rf"{LAYER}mixer\.out_proj\.weight": rf"{BLOCK}attention.proj.weight",
        r"norm_f\.weight": "encoder.norm.weight",
        **DIRECTIONS,
    }
    needed: ClassVar[dict[str, int]] = {
        PATCH: 4,
        CLS: 3,
        POSITION: 3,
        "norm_f.weight": 1,
        "head.weight": 2,
        A: 2,
        f"{FIRST}A_b_log": 2,
        CONVOLUTION: 3,
        f"{FIRST}in_proj.weight": 2,
    }
    whose = "a classifier of Vim with two directions"
    blocks = "layers"

    def turned(self, name: str, value: Tensor) -> Tensor:
        """Return a convolution (E, 1, width) as (width, E), in the order of our offsets."""
        if name.endswith("conv1d.weight"):
            return value[:, 0].mT
        if name.endswith("conv1d_b.weight"):
            return value[:, 0].mT.flip(0)
        return value

    def settings(
        self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo
    ) -> Iterator[Setting]:
        theirs = held.weights
        c = recipe.model.resolved()
        dim = len(theirs[PATCH])
        depth, _ = self.last_block(theirs)
        if (dim, depth) != (c.dim, c.depth):
            size = ""
            if dim in WIDTHS and depth == 24:
                size = f"; try vim_{WIDTHS[dim]}"
            raise ConfigError(
                f"{held.path}: another size of Vim: width {dim}, {depth} blocks, the recipe has width {c.dim}, "
                f"{c.depth} blocks{size}"
            )
        yield Setting("model.attention.expand", len(theirs[A]) // dim, c.attention.expand, A)
        yield Setting("model.attention.state", theirs[A].shape[1], c.attention.state, A)
        yield Setting("model.attention.conv_width", theirs[CONVOLUTION].shape[2], c.attention.conv_width, CONVOLUTION)
        yield from self.sizes(theirs, recipe, info)

    def describe(self, held: CheckpointContents, recipe: Recipe, info: ImageInfo) -> str:
        c = recipe.model.resolved()
        return f"{len(info.classes)} classes, {c.depth} blocks of width {c.dim}"
