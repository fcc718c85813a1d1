"""Causal language modelling: predicts each token from the tokens before it.

The metric is perplexity, the exponential of the loss per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lion.config import ConfigError
from lion.models import MODELS
from lion.models.base import Model
from lion.models.gpt import GPT
from lion.samples.base import Batch
from lion.tasks.base import Outcome, Sums, build_or_explain, own_tokens, unwrapped
from lion.tasks.language import PERPLEXITY, LanguageTask, token_losses
from lion.tasks.metrics import LOSS, Metric


@dataclass
class CausalLMConfig:
    name: str = "causal_lm"


class CausalLM(LanguageTask):
    """Task of causal language modelling.

    Batches hold `tokens` (B, L). Where documents share a row they also hold `segments` (B, L), -1 for padding.
    Evaluation batches also hold `mask` (B,).

    The model reads all tokens but the last, and predicts all tokens but the first, within a segment. A window of 65
    tokens gives 64 tokens of context, nanoGPT's `block_size`.
    """

    title = "Causal language modelling"
    Config = CausalLMConfig
    Model = GPT
    default_model = "gpt"
    speed_unit = "tokens"

    @property
    def pieces(self) -> int:
        return self.info.length - 1

    @staticmethod
    def metrics_of(config: CausalLMConfig) -> tuple[Metric, ...]:
        return PERPLEXITY, LOSS

    def build_model(self, config: Any) -> GPT:
        if self.info.length < 2:
            raise ConfigError(
                f"data: sequences of {self.info.length} token leave nothing to predict, expected at least 2"
            )
        length = self.info.length - 1
        return build_or_explain(MODELS[config.name], config, vocabulary=self.info.vocabulary, length=length)

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        losses, counted = self.losses(self.outputs(model, batch), model, batch)
        return Sums(losses.sum(), counted.sum().to(losses.dtype))

    def losses(self, logits: Tensor, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses (B, L) of the targets of this process, 0 where not counted, and which count."""
        counted = own_tokens(model, target_mask_of(batch), fill=False)
        targets = own_tokens(model, batch["tokens"][:, 1:])
        if "segments" not in batch and unwrapped(model, Model).part is None:  # all count
            return token_losses(logits, targets, None), counted
        return token_losses(logits, targets, counted), counted

    def check_prediction(self) -> None:
        raise ConfigError("a causal language model only generates text, use ./run.sh generate RUN --prompt TEXT")

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = self.outputs(model, batch)
        real = batch["mask"][:, None]
        losses, counted = self.losses(logits, model, batch)
        total = (losses * real).sum(dtype=torch.float64)
        return Outcome({"loss": (total, (counted & real).sum())}, logits)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits (B, L - 1, vocabulary) for every token but the first."""
        segments = batch.get("segments")
        if segments is not None:
            segments = segments[:, :-1]
        return model(batch["tokens"][:, :-1], segments).float()

    def example(self, size: int, device: torch.device | str) -> Batch:
        """Return windows of tokens without segments: windows ignore the borders of documents."""
        return {"tokens": super().example(size, device)["tokens"]}


def target_mask_of(batch: Batch) -> Tensor:
    """Return a mask (B, L - 1) of the tokens after the first: True where a token follows one of its own segment."""
    segments = batch.get("segments")
    if segments is None:
        return torch.ones_like(batch["tokens"][:, 1:], dtype=torch.bool)
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
