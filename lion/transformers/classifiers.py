"""Classifiers of sequences and of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from lion.config import present
from lion.models.bert import BertClassifier, BertConfig, BertEncoder
from lion.models.gpt import GPT, GPTConfig
from lion.models.init import INITS
from lion.models.lra import LRA
from lion.models.token_classifier import TokenClassifier
from lion.transformers.masks import valid_of
from lion.transformers.text import LionTextModel


class GPTClassifier(GPT):
    """A GPT that maps the last token of a sequence to `outputs` numbers, by a linear layer without bias."""

    heads = ("classifier.",)

    def __init__(self, config: GPTConfig, *, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        self.classifier = nn.Linear(self.config.dim, outputs, bias=False)
        nn.init.normal_(self.classifier.weight, std=self.config.init_std)

    def logits(self, x: Tensor) -> Tensor:
        """Map the last token of each sequence (B, dim), as of `encode`, to logits (B, outputs)."""
        return self.classifier(x)


class BertTokenClassifier(BertEncoder):
    """A BERT that maps every token to `outputs` numbers, by dropout and a linear layer."""

    heads = ("classifier.",)

    def __init__(self, config: BertConfig, *, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        self.classifier = nn.Linear(self.config.dim, outputs)
        INITS[self.config.init](self, self.config.init_std)

    def logits(self, x: Tensor) -> Tensor:
        """Map (B, L, dim), as of `encode`, to logits (B, L, outputs)."""
        return self.classifier(self.dropout(x))


class LionForSequenceClassification(LionTextModel):
    """A classifier of sequences, which reads the first token of a BERT, the last of a GPT, the mean of an LRA model."""

    names: ClassVar[dict[str, str]] = {
        "bert": "bert_classifier",
        "bert_classifier": "bert_classifier",
        "gpt": "gpt",
        "lra": "lra",
        "lra_masked": "lra",
    }
    model: BertClassifier | GPTClassifier | LRA

    def build(self) -> BertClassifier | GPTClassifier | LRA:
        settings = self.settings()
        outputs = present(self.config.num_labels, "num_labels")
        if settings.name == "lra":
            return LRA(settings, classes=outputs, parts=self.config.parts, **self.sequence_sizes)
        kind = {"bert_classifier": BertClassifier, "gpt": GPTClassifier}[settings.name]
        return kind(settings, outputs=outputs, **self.sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Return logits (B, num_labels); `labels` (B,) are classes, or numbers if there is one label.

        Padding may be on either side. In pairs of documents, ids and mask are (B, 2, L). The other arguments are those
        of `encode`.

        Raises:
            ValueError: Inputs of another rank, or not two documents in a pair.
        """
        pair = isinstance(self.model, LRA) and self.model.parts == 2
        for name, x, rank in (("input_ids", input_ids, 2), ("inputs_embeds", inputs_embeds, 3)):
            if x is not None and (x.dim() != rank + pair or (pair and x.shape[1] != 2)):
                shape = "B, 2, L" if pair else "B, L"
                if rank == 3:
                    shape += ", dim"
                raise ValueError(f"{name}: expected ({shape}), got {tuple(x.shape)}")
        if input_ids is not None:
            input_ids = input_ids.flatten(0, -2)
        if inputs_embeds is not None:
            inputs_embeds = inputs_embeds.flatten(0, -3)
        if attention_mask is not None:
            attention_mask = attention_mask.flatten(0, -2)
        found = self.encode(
            input_ids, attention_mask, token_type_ids=token_type_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        x = found.last_hidden_state
        valid = valid_of(attention_mask, tuple(x.shape[:2]))
        pad = self.config.pad_token_id
        if valid is None and isinstance(self.model, GPTClassifier) and input_ids is not None and pad is not None:
            valid = input_ids != pad  # as in the GPT-2 of transformers
        pooled = POOLED[type(self.model)](x, valid)
        logits = self.model.logits(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
            loss = self.share_of_batch(loss, labels, kwargs.get("num_items_in_batch"))
        return SequenceClassifierOutput(loss, logits, found.hidden_states)


class LionForTokenClassification(LionTextModel):
    """A classifier of every token, in both directions."""

    names: ClassVar[dict[str, str]] = {
        "bert": "bert",
        "bert_classifier": "bert",
        "token_classifier": "token_classifier",
    }
    model: BertTokenClassifier | TokenClassifier

    def build(self) -> BertTokenClassifier | TokenClassifier:
        settings = self.settings()
        outputs = present(self.config.num_labels, "num_labels")
        if settings.name == "bert":
            return BertTokenClassifier(settings, outputs=outputs, **self.sizes)
        return TokenClassifier(settings, classes=outputs, **self.sizes)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Return logits (B, L, num_labels); `labels` (B, L) are classes, -100 where there is nothing to predict.

        The ids are (B, L), or (B, L, ids) where the embedding of a token is the sum of several. The other arguments are
        those of `encode`.
        """
        if isinstance(self.model, TokenClassifier) and input_ids is not None and input_ids.dim() == 2:
            input_ids = input_ids[..., None]
        found = self.encode(
            input_ids, attention_mask, token_type_ids=token_type_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        logits = self.model.logits(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss, logits, found.hidden_states)


def first_of(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the first valid token (B, dim) of each row of x (B, L, dim)."""
    if valid is None:
        return x[:, 0]
    return token_at(x, valid.int().argmax(1))


def last_of(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the last valid token (B, dim) of each row of x (B, L, dim)."""
    if valid is None:
        return x[:, -1]
    places = torch.arange(x.shape[1], device=x.device)
    return token_at(x, (valid * places).amax(1))


def mean_of(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean (B, dim) of the valid tokens of x (B, L, dim), which is 0 elsewhere."""
    if valid is None:
        return x.sum(1) / x.shape[1]
    return x.sum(1) / valid.sum(1, keepdim=True).clamp_min(1)


def token_at(x: Tensor, place: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), place]


POOLED: dict[type[nn.Module], Callable[[Tensor, Tensor | None], Tensor]] = {
    BertClassifier: first_of,
    GPTClassifier: last_of,
    LRA: mean_of,
}
