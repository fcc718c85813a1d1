"""Converter of vision transformers: the authors' vision code (LIONS-EPFL/LION), DeiT, timm's ViT, `lion.timm`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from lion.layers.layout import ROW_MAJOR
from lion.layers.mixers import SOFTMAX
from lion.recipe import Recipe
from lion.samples.images import ImageInfo
from tools.convert.base import Setting
from tools.convert.files import CheckpointContents
from tools.convert.images import CLS, NAMES, PATCH, ImageConverter

# parts that only models of `lion.timm` have
PARTS = (
    r"skip|conv_skip|bonus|(?:decays|rotation|token_shift|conv|kv_shift|qk_norm|head_norm|out_norm|out_gate)\.[\w.]+"
)
BLOCK = r"encoder.blocks.\1."
GATE = r"blocks\.\d+\.attn\.a2?_i\.\w+"  # their selective decay is 1 - sigmoid(W x + b), ours is sigmoid(W x + b)
OWN = "vit_lion_"  # the names of its models
ATTENTION = ("direction", "feature_map", "normalize", "decay_convention", "decay_temperature", "rotation")
ORDER_S = ("row_snake", "column_snake")  # scans of a_i and a2_i
MASKS = {"Lit": "lion_lit", "Decay": "lion_d", "Selective": "lion_s"}  # the authors' --mask_type
HEADS = {"tiny": 3, "small": 6, "base": 12}  # by the size in the names of their models and of DeiT's models


class ViTConverter(ImageConverter):
    """A converter of vision transformers.

    The checkpoint also determines whether the model has position embeddings. Neither shapes nor names distinguish
    softmax from Lion-lit, show the number of heads (unless there is a decay per head), or show the readout (`cls` if
    the authors' code ran with --cls_tok).
    """

    trusted = ("model.mixer", "model.num_heads", "model.readout", "data.mean", "data.std")
    of_own = ("model.mlp", "model.norm_eps", *(f"model.attention.{name}" for name in ATTENTION))  # of `lion.timm`
    names: ClassVar[dict[str, str]] = {
        **NAMES,
        r"blocks\.(\d+)\.((norm1|norm2|mlp\.fc1|mlp\.fc2)\.\w+)": rf"{BLOCK}\2",
        r"blocks\.(\d+)\.attn\.((qkv|proj)\.\w+)": rf"{BLOCK}attention.\2",
        r"blocks\.(\d+)\.attn\.a_i": rf"{BLOCK}attention.decays.0.a",
        r"blocks\.(\d+)\.attn\.a2_i": rf"{BLOCK}attention.decays.1.a",
        r"blocks\.(\d+)\.attn\.a_i\.(\w+)": rf"{BLOCK}attention.decays.0.gate.\2",
        r"blocks\.(\d+)\.attn\.a2_i\.(\w+)": rf"{BLOCK}attention.decays.1.gate.\2",
        rf"blocks\.(\d+)\.attn\.({PARTS})": rf"{BLOCK}attention.\2",
        r"tpe\.(\w+)": r"encoder.tpe.\1",
        r"norm\.(\w+)": r"encoder.norm.\1",
    }
    needed: ClassVar[dict[str, int]] = {PATCH: 4, CLS: 3, "blocks.0.norm1.weight": 1, "head.weight": 2}
    optional = (CLS,)
    whose = "a classifier of LION, DeiT, timm's ViT or lion.timm"
    blocks = "blocks"

    def turned(self, name: str, value: Tensor) -> Tensor:
        if re.fullmatch(GATE, name):
            return -value
        return value

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        """Select the preset of the authors' code: it differs from their paper, and the weights were trained with it.

        A file of plain Lion-lit weights may also come from `lion.timm`; it then needs `model.preset=paper`.
        """
        if not is_own(held):
            return {"model.preset": "released"}
        self.trusted = (*self.trusted, *self.of_own)
        return {}

    def settings(
        self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo
    ) -> Iterator[Setting]:
        theirs = held.weights
        c = recipe.model.resolved()
        a = [name for name in theirs if name.startswith("blocks.0.attn.a_i")]
        a2 = [name for name in theirs if name.startswith("blocks.0.attn.a2_i")]
        cls = CLS in theirs
        own = is_own(held)
        if a:
            mixer = "lion_s"
            if a == ["blocks.0.attn.a_i"]:
                mixer = "lion_d"
            yield Setting("model.mixer", mixer, c.mixer, a[0])
        elif not own and c.mixer not in (SOFTMAX, "lion_lit"):  # their weights have the same names
            yield Setting("model.mixer", f"{SOFTMAX} or lion_lit", c.mixer, "there is no blocks.0.attn.a_i")
        if not own:
            seen = "there is no blocks.0.attn.a2_i"
            if a2:
                seen = a2[0]
            yield Setting("model.attention.scans", ORDER_S if a2 else ROW_MAJOR, c.attention.scans, seen)
        yield Setting("model.cls", cls, c.cls, CLS if cls else f"there is no {CLS}")
        yield Setting("model.dim", len(theirs[PATCH]), c.dim, PATCH)
        if a:
            yield Setting("model.num_heads", len(theirs[a[0]]), c.num_heads, a[0])
        yield from self.sizes(theirs, recipe, info)
        yield from self.arguments(held.said, recipe)

    def arguments(self, said: dict[str, Any], recipe: Recipe) -> Iterator[Setting]:
        """Yield the settings shown by the arguments of the training, which some checkpoints store with the weights."""
        c = recipe.model.resolved()
        name = str(said.get("model"))
        mask = str(said.get("mask_type"))
        if mask in MASKS:
            cls = bool(said.get("cls_tok"))
            readout = "mean"
            if cls:
                readout = "cls"
            yield Setting("model.mixer", MASKS[mask], c.mixer, f"its args have mask_type {mask}")
            yield Setting("model.readout", readout, c.readout, f"its args have cls_tok {cls}")
        elif name.startswith("deit_"):
            yield Setting("model.mixer", SOFTMAX, c.mixer, f"its args have model {name}")
            yield Setting("model.readout", "cls", c.readout, f"its args have model {name}")
        size = re.match(rf"(?:deit|lion)_({'|'.join(HEADS)})_", name)
        if size:
            yield Setting("model.num_heads", HEADS[size[1]], c.num_heads, f"its args have model {name}")

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: ImageInfo) -> ImageInfo:
        recipe.model.position_embedding = "position" in ours
        return super().fit(held, ours, recipe, info)

    def describe(self, held: CheckpointContents, recipe: Recipe, info: ImageInfo) -> str:
        c = recipe.model.resolved()
        embedding = "without"
        if c.position_embedding:
            embedding = "with"
        text = f"{len(info.classes)} classes, {embedding} position embedding, {c.num_heads} heads, readout {c.readout}"
        if c.mixer in c.released:
            text += f", preset {c.preset}"
        return text


def is_own(held: CheckpointContents) -> bool:
    """Return whether a checkpoint shows that it holds a model of `lion.timm`, by its names or its arguments."""
    parts = rf"tpe\..*|blocks\.0\.attn\.({PARTS})"
    return str(held.said.get("model")).startswith(OWN) or any(re.fullmatch(parts, name) for name in held.weights)
