"""Converter of the masked language models of Hydra's authors (goombalab/hydra); classifiers are not released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.recipe import Recipe
from tools.convert.bert import BertConverter
from tools.convert.files import CheckpointContents
from tools.convert.language import LanguageConverter

BLOCK, MIXER = "encoder.blocks.0.attention.", "layer.mixer."
STEPS = "steps"  # suffix of the rows of `in_proj` that make dt, which are a layer of their own here
PARTS = {  # our weights in a block, and theirs
    "norm1.weight": "layer.norm.weight",
    "norm1.bias": "layer.norm.bias",
    "attention.inputs.weight": f"{MIXER}in_proj.weight",
    "attention.steps.weight": f"{MIXER}in_proj.weight.{STEPS}",
    "attention.convolution.weight": f"{MIXER}conv1d.weight",
    "attention.convolution.bias": f"{MIXER}conv1d.bias",
    "attention.step_bias": f"{MIXER}dt_bias",
    "attention.a": f"{MIXER}A_log",
    "attention.diagonal.weight": f"{MIXER}fc_D.weight",
    "attention.skip": f"{MIXER}D",
    "attention.norm.weight": f"{MIXER}norm.weight",
    "attention.proj.weight": f"{MIXER}out_proj.weight",
}
PLAIN = {  # settings with which our model equals theirs
    "block": "post_norm",
    "mlp": "none",
    "norm": "layernorm",
    "position_embedding": False,
    "position_kind": "learned",
    "bias": True,
    "head_transform": True,
    "attention.direction": "both",
}


class HydraConverter(LanguageConverter):
    """A converter of Hydra's BERT, with its masked-LM head; a checkpoint must have the size of the recipe.

    Of each mixer, `in_proj` is split into the projections and the steps dt. The norms of their blocks have an epsilon
    of 1e-5, those of embeddings and head 1e-12; ours have one, `model.norm_eps`, so that logits agree to about 1e-5.
    """

    format = replace(
        BertConverter.format,
        whose="a masked language model of Hydra (hydra/bert), with its head",
        plain=PLAIN,
        only={
            "matrix_mixer_type": "hydra",
            "is_prenorm": False,
            "use_position_embeddings": False,
            "tie_word_embeddings": True,
        },
        outer={ours: theirs for ours, theirs in BertConverter.format.outer.items() if ours != "positions.weight"},
        inner={ours: (theirs,) for ours, theirs in PARTS.items()},
    )
    trusted = ("model.norm_eps", "data.tokenizer")
    matrices = ("tokens.weight", *(f"{BLOCK}{part}.weight" for part in ("inputs", "steps", "convolution", "proj")))

    def check(self, recipe: Recipe) -> None:
        if recipe.model.name != "bert":
            raise ConfigError(
                f"model.name: only Hydra's masked language models are released ('bert', recipe mlm_base_hydra), no "
                f"{recipe.model.name!r}"
            )

    def cleaned(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return their weights without the prefix of Composer; the steps dt apart, and convolutions as (width, C)."""
        plain = {name.removeprefix("model."): value for name, value in theirs.items()}
        named = dict(plain)
        for name, value in plain.items():
            if not torch.is_tensor(value):
                continue
            if name.endswith("in_proj.weight"):
                bias = plain.get(name.replace("in_proj.weight", "dt_bias"))
                rows = len(value) - (2 * len(bias) if torch.is_tensor(bias) and bias.dim() else 0)
                named[name], named[f"{name}.{STEPS}"] = value[:rows], value[rows:]
            elif name.endswith("conv1d.weight") and value.dim() == 3:
                named[name] = value[:, 0].mT.contiguous()
        return named

    def facts(self, held: CheckpointContents, ours: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
        dim = ours["tokens.weight"].shape[1]
        depth = sum(name.endswith("attention.a") for name in ours)
        width, channels = ours[f"{BLOCK}convolution.weight"].shape
        inner = ours[f"{BLOCK}proj.weight"].shape[1]
        found = {
            "dim": dim,
            "depth": depth,
            "num_heads": len(ours[f"{BLOCK}a"]),
            "attention.expand": inner // dim,
            "attention.state": (channels - inner) // 4,
            "attention.conv_width": width,
            "token_types": len(ours["types.weight"]),
        }
        return {f"model.{key}": (value, "its weights") for key, value in (found | PLAIN).items()}

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        return self.own_tokenizer(held)
