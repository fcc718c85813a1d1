"""Converter of BERT of `transformers` with its masked-LM head; pooler and next-sentence head are dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lion.models.bert import Bert
from tools.convert.language import PLAIN, Format, LanguageConverter

OWN = {"position_kind": "learned", "bias": True, "head_transform": True}


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
        inner={
            "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.proj": ("attention.output.dense",),
            "norm1": ("attention.output.LayerNorm",),
            "mlp.fc1": ("intermediate.dense",),
            "mlp.fc2": ("output.dense",),
            "norm2": ("output.LayerNorm",),
        },
        blocks="bert.encoder.layer",
    )

    def cleaned(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return their weights with current names; early checkpoints call the weights of norms gamma and beta."""
        ends = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
        cleaned = {}
        for name, value in theirs.items():
            old = next((end for end in ends if name.endswith(end)), "")
            cleaned[name.removesuffix(old) + ends.get(old, "")] = value
        return cleaned

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
