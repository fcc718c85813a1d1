"""Converter of GPT-2 of `transformers`, and of checkpoints of nanoGPT (only from)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.models.gpt import GPT
from lion.recipe import Recipe
from lion.samples.text import TextInfo
from tools.convert.files import CheckpointContents
from tools.convert.language import PLAIN, Format, LanguageConverter, with_biases

FIRST = "transformer.h.0.attn.c_attn.weight"
TURNED = re.compile(r"transformer\.h\.\d+\.\w+\.c_\w+\.weight")  # weights of Conv1D are (inputs, outputs)


class GPTConverter(LanguageConverter):
    format = Format(
        kind="gpt2",
        architecture="GPT2LMHeadModel",
        whose="a GPT-2 (GPT2LMHeadModel, nanoGPT)",
        plain={**PLAIN, "block": "pre_norm"},
        keys={
            "rows": "vocab_size",
            "dim": "n_embd",
            "depth": "n_layer",
            "heads": "n_head",
            "hidden": "n_inner",
            "positions": "n_positions",
            "eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "std": "initializer_range",
            "dropout": "resid_pdrop",
            "score_dropout": "attn_pdrop",
        },
        assumed={"heads": 12, "eps": 1e-5},
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
            "pruned_heads": {},
        },
        activations={"gelu_new": "mlp_tanh", "gelu_pytorch_tanh": "mlp_tanh", "gelu": "mlp"},
        tied={"transformer.wte.weight": "lm_head.weight"},
        unused=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # causal masks
        outer={
            "tokens.weight": "transformer.wte.weight",
            "positions.weight": "transformer.wpe.weight",
            "encoder.norm.weight": "transformer.ln_f.weight",
            "encoder.norm.bias": "transformer.ln_f.bias",
        },
        inner=with_biases(
            {
                "norm1": ("ln_1",),
                "attention.qkv": ("attn.c_attn",),
                "attention.proj": ("attn.c_proj",),
                "norm2": ("ln_2",),
                "mlp.fc1": ("mlp.c_fc",),
                "mlp.fc2": ("mlp.c_proj",),
            }
        ),
        blocks="transformer.h",
    )

    def cleaned(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return their weights under full names, in the layout of PyTorch.

        Files of a model without its head omit the prefix `transformer.`.
        """
        whole = FIRST in theirs
        named = {n if whole or n == "lm_head.weight" else f"transformer.{n}": value for n, value in theirs.items()}
        if conv1d(named):
            named |= {n: w.mT for n, w in named.items() if TURNED.fullmatch(n) and torch.is_tensor(w) and w.dim() == 2}
        return named

    def optional(self, name: str, theirs: dict[str, Any]) -> bool:
        """Return whether a weight may be missing: biases, if there are none at all, as in some models of nanoGPT."""
        return name.endswith("bias") and "transformer.ln_f.bias" not in theirs

    def metadata(self, held: CheckpointContents) -> dict[str, Any]:
        """Return the metadata, with the activation that the layout of the weights implies.

        Weights that are not of Conv1D come from nanoGPT, whose GELU is exact.
        """
        return {
            self.format.keys["activation"]: "gelu_new" if conv1d(held.weights) else "gelu",
            **super().metadata(held),
        }

    def more(self, ours: dict[str, Tensor]) -> dict[str, Any]:
        return {"bias": "encoder.norm.bias" in ours}

    def adopted(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe) -> dict[str, Any]:
        """Return the settings, with a sample length of all positions and one more token, which is predicted."""
        return {**super().adopted(held, ours, recipe), "data.length": len(ours["positions.weight"]) + 1}

    def fit(self, held: CheckpointContents, ours: dict[str, Tensor], recipe: Recipe, info: TextInfo) -> TextInfo:
        """Fit as in the base class; for shorter samples, the last position embeddings are dropped."""
        positions = ours["positions.weight"]
        if info.length - 1 > len(positions):
            raise ConfigError(
                f"data.length: {info.length} tokens, but {held.path} has embeddings of {len(positions)} positions: "
                f"at most {len(positions) + 1}"
            )
        ours["positions.weight"] = positions[: info.length - 1]
        return super().fit(held, ours, recipe, info)

    def restored(self, model: GPT) -> dict[str, Tensor]:
        return {n: w.mT if TURNED.fullmatch(n) else w for n, w in super().restored(model).items()}

    def config(self, model: GPT, tokenizer: Any) -> dict[str, Any]:
        end, dropout = tokenizer.special.get("end"), model.config.dropout
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": tokenizer.special.get("pad")}
        return {**super().config(model, tokenizer), "embd_pdrop": dropout, **ids}


def conv1d(theirs: dict[str, Any]) -> bool:
    """Return whether the linear layers are Conv1D, judged by the shape of a weight that is not square."""
    first = theirs.get(FIRST, theirs.get(FIRST.removeprefix("transformer.")))
    return torch.is_tensor(first) and first.dim() == 2 and first.shape[0] < first.shape[1]
