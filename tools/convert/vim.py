"""Converter of the published checkpoints of Vim (hustvl/Vim)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from lion.samples.images import ImageInfo, numbered
from tools.convert.base import Converter, Setting, checked, no_place
from tools.convert.files import CheckpointContents

LAYER, BLOCK = r"layers\.(\d+)\.", r"encoder.blocks.\1."
NAMES = {  # their name, our name
    r"patch_embed\.proj\.(\w+)": r"patch.\1",
    r"cls_token": r"cls",
    r"pos_embed": r"position",
    rf"{LAYER}norm\.weight": rf"{BLOCK}norm1.weight",
    rf"{LAYER}mixer\.in_proj\.weight": rf"{BLOCK}attention.inputs.weight",
    rf"{LAYER}mixer\.out_proj\.weight": rf"{BLOCK}attention.proj.weight",
    r"norm_f\.weight": r"encoder.norm.weight",
    r"head\.(\w+)": r"head.\1",
}
PARTS = {  # of a direction; their names end with "_b" in the backward direction
    r"conv1d{}\.(\w+)": r"convolution.\2",
    r"x_proj{}\.weight": "select.weight",
    r"dt_proj{}\.weight": "step.weight",
    r"dt_proj{}\.bias": "step_bias",
    r"A{}_log": "a",
    r"D{}": "skip",
}
NAMES |= {
    rf"{LAYER}mixer\.{theirs.format(end)}": f"{BLOCK}attention.sides.{side}.{ours}"
    for side, end in enumerate(("", "_b"))
    for theirs, ours in PARTS.items()
}
NEEDED = {"patch_embed.proj.weight": 4, "cls_token": 3, "pos_embed": 3, "norm_f.weight": 1, "head.weight": 2}
FIRST = "layers.0.mixer."
NEEDED |= {f"{FIRST}A_log": 2, f"{FIRST}A_b_log": 2, f"{FIRST}conv1d.weight": 3, f"{FIRST}in_proj.weight": 2}
WIDTHS = {192: "tiny", 384: "small", 768: "base"}


class VimConverter(Converter):
    """A converter of Vim with two directions ("bimambav2") and its cls token in the middle.

    The checkpoint determines the number of classes. No shape shows that the sum of both directions is halved ("div2")
    and where cls stands; the published models of the paper agree in both.
    """

    trusted = ("model.cls_place", "data.mean", "data.std")

    def rename(self, held: CheckpointContents) -> dict[str, Tensor]:
        theirs, ours = held.weights, {}
        for name, axes in NEEDED.items():
            if not torch.is_tensor(theirs.get(name)) or theirs[name].dim() != axes:
                raise ConfigError(
                    f"{held.path}: no {name} with {axes} axes: not a classifier of Vim with two directions"
                )
        for name, value in theirs.items():
            match, our = next(((m, our) for p, our in NAMES.items() if (m := re.fullmatch(p, name))), (None, ""))
            if match is None:
                raise no_place(name, held.path)
            value, our = checked(name, value, held.path), match.expand(our)
            if our.endswith("convolution.weight"):  # (E, 1, width) to (width, E), in the order of our offsets
                value = value[:, 0].mT
                value = value.flip(0) if ".sides.1." in our else value
            ours[our] = value.contiguous()
        return ours

    def settings(
        self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo
    ) -> Iterator[Setting]:
        theirs, c, patch = held.weights, recipe.model.resolved(), held.weights["patch_embed.proj.weight"]
        dim, depth = len(patch), 1 + max(int(name.split(".")[1]) for name in theirs if name.startswith("layers."))
        if (dim, depth) != (c.dim, c.depth):
            size = f"; try vim_{WIDTHS[dim]}" if dim in WIDTHS and depth == 24 else ""
            found, asked = (f"width {width}, {blocks} blocks" for width, blocks in ((dim, depth), (c.dim, c.depth)))
            raise ConfigError(f"{held.path}: another size of Vim: {found}, the recipe has {asked}{size}")
        a = f"{FIRST}A_log"
        yield Setting("model.attention.expand", len(theirs[a]) // dim, c.attention.expand, a)
        yield Setting("model.attention.state", theirs[a].shape[1], c.attention.state, a)
        convolution = f"{FIRST}conv1d.weight"
        yield Setting("model.attention.conv_width", theirs[convolution].shape[2], c.attention.conv_width, convolution)
        yield Setting("model.patch_size", tuple(patch.shape[2:]), c.patch_size, "patch_embed.proj.weight")
        yield Setting("data.channels", patch.shape[1], info.channels, "patch_embed.proj.weight")
        places, grid = theirs["pos_embed"].shape[1] - 1, [s // p for s, p in zip(info.size, c.patch_size)]
        side = math.isqrt(max(places, 0))
        if side * side == places != math.prod(grid):
            yield Setting("data.image_size", tuple(side * p for p in c.patch_size), info.size, "pos_embed")

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo) -> ImageInfo:
        classes = len(ours["head.weight"])
        return info if classes == len(info.classes) else dataclasses.replace(info, classes=numbered(classes))

    def describe(self, held: CheckpointContents, recipe: Recipe, info: ImageInfo) -> str:
        c = recipe.model.resolved()
        return f"{len(info.classes)} classes, {c.depth} blocks of width {c.dim}"
