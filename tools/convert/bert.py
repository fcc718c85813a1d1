"""Converter of BERT of `transformers`, with or without its masked-LM head; pooler and next-sentence head are dropped.

A `BertModel` has no head. The head of our model is then new, so that the run is one to start from (`init_from`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lion.models.bert import Bert
from lion.recipe import Recipe
from lion.samples.text import TextInfo
from tools.convert.files import CheckpointContents
from tools.convert.language import PLAIN, Format, LanguageConverter, with_biases

OWN = {"position_kind": "learned", "bias": True, "head_transform": True}


HEADLESS = "embeddings.word_embeddings.weight"  # a name that only a BERT without head has


def new_head(embeddings: Tensor) -> dict[str, Tensor]:
    """Return the weights of a masked-LM head, initialised as in BERT, for embeddings (rows, dim)."""
    rows, dim = embeddings.shape
    dense = 0.02 * torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
    transform = "cls.predictions.transform"
    return {
        f"{transform}.dense.weight": dense,
        f"{transform}.dense.bias": torch.zeros(dim),
        f"{transform}.LayerNorm.weight": torch.ones(dim),
        f"{transform}.LayerNorm.bias": torch.zeros(dim),
        "cls.predictions.bias": torch.zeros(rows),
    }


class BertConverter(LanguageConverter):
    format = Format(
        kind="bert",
        architecture="BertForMaskedLM",
        whose="a BERT with its masked-LM head (BertForMaskedLM, BertForPreTraining)",
        plain={**PLAIN, **OWN, "block": "post_norm", "attention.direction": "both"},
        keys={
            "rows": "vocab_size",
            "dim": "hidden_size",
            "depth": "num_hidden_layers",
            "heads": "num_attention_heads",
            "hidden": "intermediate_size",
            "positions": "max_position_embeddings",
            "types": "type_vocab_size",
            "eps": "layer_norm_eps",
            "activation": "hidden_act",
            "std": "initializer_range",
            "dropout": "hidden_dropout_prob",
            "score_dropout": "attention_probs_dropout_prob",
        },
        assumed={"heads": 12, "eps": 1e-12, "activation": "gelu"},
        only={
            "is_decoder": False,
            "add_cross_attention": False,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
            "pruned_heads": {},
        },
        activations={"gelu": "mlp"},  # also that of the head
        tied={
            "bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        },
        unused=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\.seq_relationship\..*",
        outer={
            "tokens.weight": "bert.embeddings.word_embeddings.weight",
            "positions.weight": "bert.embeddings.position_embeddings.weight",
            "types.weight": "bert.embeddings.token_type_embeddings.weight",
            "norm.weight": "bert.embeddings.LayerNorm.weight",
            "norm.bias": "bert.embeddings.LayerNorm.bias",
            "head.transform.weight": "cls.predictions.transform.dense.weight",
            "head.transform.bias": "cls.predictions.transform.dense.bias",
            "head.norm.weight": "cls.predictions.transform.LayerNorm.weight",
            "head.norm.bias": "cls.predictions.transform.LayerNorm.bias",
            "head.bias": "cls.predictions.bias",
        },
        inner=with_biases(
            {
                "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
                "attention.proj": ("attention.output.dense",),
                "norm1": ("attention.output.LayerNorm",),
                "mlp.fc1": ("intermediate.dense",),
                "mlp.fc2": ("output.dense",),
                "norm2": ("output.LayerNorm",),
            }
        ),
        blocks="bert.encoder.layer",
    )

    def cleaned(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return their weights with current names; early checkpoints call the weights of norms gamma and beta."""
        cleaned = {}
        for name, value in theirs.items():
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            cleaned[re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)] = value
        embeddings = cleaned.get(HEADLESS)
        if not torch.is_tensor(embeddings) or embeddings.dim() != 2:
            return cleaned
        return {f"bert.{name}": value for name, value in cleaned.items()} | new_head(embeddings)

    def describe(self, held: CheckpointContents, recipe: Recipe, info: TextInfo) -> str:
        described = super().describe(held, recipe, info)
        if HEADLESS in held.weights:
            described += "; without a masked-LM head: ours is new, train it, or start from this run with init_from"
        return described

    def sizes(self, ours: dict[str, Tensor]) -> dict[str, int]:
        return {**super().sizes(ours), "types": len(ours["types.weight"])}

    def more(self, ours: dict[str, Tensor]) -> dict[str, Any]:
        return {"max_positions": len(ours["positions.weight"]), "token_types": len(ours["types.weight"])}

    def config(self, model: Bert, tokenizer: Any) -> dict[str, Any]:
        pad = tokenizer.special.get("pad")
        return {
            **super().config(model, tokenizer),
            "type_vocab_size": max(1, model.config.token_types),
            "pad_token_id": pad,
        }
