"""Token classification: predicts the classes of the labelled tokens of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.models import MODELS
from lion.models.token_classifier import TokenClassifier
from lion.samples.base import Batch
from lion.samples.labels import UNLABELLED, TokenLabelsInfo
from lion.tasks.base import Outcome, Sums, Task, build_or_explain, own_tokens, sums_where
from lion.tasks.metrics import ACCURACY, LOSS, Metric


@dataclass
class TokenClassificationConfig:
    name: str = "token_classification"


class TokenClassification(Task):
    """Task of token classification, with the cross-entropy and the accuracy of labelled tokens.

    Batches hold `tokens` (B, L, ids) and `labels` (B, L); a label is a class, or `UNLABELLED`. Evaluation batches also
    hold `mask` (B,).
    """

    title = "Token classification"
    Config = TokenClassificationConfig
    Model = TokenClassifier
    default_model = "token_classifier"
    Info = TokenLabelsInfo
    info: TokenLabelsInfo
    unit = "sequences"

    @staticmethod
    def metrics_of(config: TokenClassificationConfig) -> tuple[Metric, ...]:
        return ACCURACY, LOSS

    def build_model(self, config: Any) -> TokenClassifier:
        info = self.info
        return build_or_explain(
            MODELS[config.name], config, classes=info.classes, length=info.longest, vocabulary=info.vocabulary
        )

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy (B, L) of logits (B, L, classes), 0 for tokens without a label."""
        return F.cross_entropy(logits.mT, labels, ignore_index=UNLABELLED, reduction="none")

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        labels = own_tokens(model, batch["labels"], fill=UNLABELLED)
        losses = self.losses(self.outputs(model, batch), labels)
        return Sums(losses.sum(), (labels != UNLABELLED).sum().to(losses.dtype))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = self.outputs(model, batch)
        labels = own_tokens(model, batch["labels"], fill=UNLABELLED)
        counted = (labels != UNLABELLED) & batch["mask"][:, None]
        values = {"accuracy": logits.argmax(-1) == labels, "loss": self.losses(logits, labels)}
        return Outcome(sums_where(values, counted), logits)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits (B, L, classes)."""
        return model(batch["tokens"]).float()

    def example(self, size: int, device: torch.device | str) -> Batch:
        info = self.info
        tokens = torch.randint(info.vocabulary, (size, info.length, info.ids), device=device)
        labels = torch.randint(info.classes, (size, info.length), device=device)
        return {"tokens": tokens, "labels": labels}
