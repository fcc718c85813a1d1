"""Masked language modelling (1810.04805): predicts masked tokens from the other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lion.config import setting
from lion.models import MODELS
from lion.models.base import Model
from lion.models.bert import Bert
from lion.ops import Part
from lion.samples.base import Batch
from lion.samples.seeds import uniform
from lion.samples.text import TextInfo
from lion.tasks.base import Outcome, Sums, build_or_explain, unwrapped
from lion.tasks.language import PERPLEXITY, LanguageTask, token_losses
from lion.tasks.metrics import LOSS, Mean, Metric

ACCURACY = Mean("accuracy", "MLM accuracy", percent=True)


@dataclass
class MaskedLMConfig:
    """Settings of masked language modelling.

    `rate` (`eval_rate` in evaluation) is the share of tokens that are chosen as targets. Of these, the share `masked`
    becomes the mask token, the share `random` becomes any token, and the others stay unchanged.
    """

    name: str = "masked_lm"
    rate: float = setting(0.30, above=0, max=1)
    eval_rate: float = setting(0.15, above=0, max=1)
    masked: float = setting(0.8, min=0, max=1)
    random: float = setting(0.1, min=0, max=1)

    def __post_init__(self) -> None:
        if self.masked + self.random > 1 + 1e-9:
            raise ValueError(
                f"masked: with random={self.random}, expected at most {1 - self.random:g}, got {self.masked}"
            )


class Masked(NamedTuple):
    """A batch with masked tokens. Every row has K slots for targets, and uses as many as it needs.

    Attributes:
        tokens: Tokens that the model sees, (B, L).
        places: Positions of the chosen tokens, (B, K); meaningless in unused slots.
        targets: Original tokens at these positions, (B, K).
        chosen: Boolean (B, K), True for used slots.
    """

    tokens: Tensor
    places: Tensor
    targets: Tensor
    chosen: Tensor

    def own(self, part: Part | None) -> Masked:
        """Return the slots of the tokens of this process, if rows are split; their places count from its first token.

        There are as many slots as rows have, but at most as many as tokens.
        """
        if part is None:
            return self
        size = part.size(self.tokens.shape[1])
        inside = self.chosen & (self.places // size == part.rank)
        first = (~inside).long().argsort(dim=1, stable=True)[:, :size]
        places = (self.places.gather(1, first) - part.rank * size).clamp(0, size - 1)
        targets = self.targets.gather(1, first)
        return self._replace(places=places, targets=targets, chosen=inside.gather(1, first))


class MaskedLM(LanguageTask):
    """Task of masked language modelling.

    Batches hold `tokens` (B, L), and `segments` (B, L) where documents are packed or padded. Evaluation batches also
    hold `mask` and `key` (B,).

    Masking happens here, on the device. Training draws from PyTorch's generator. Evaluation masks as a function of the
    sample's `key`, so that all models, forms and batch sizes predict the same tokens; see `mask_by_key`.
    """

    fills_masks = True
    title = "Masked language modelling"
    Config = MaskedLMConfig
    Model = Bert
    default_model = "bert"
    speed_unit = "tokens"

    def __init__(self, config: MaskedLMConfig, info: TextInfo) -> None:
        super().__init__(config, info)
        self.mask_id = info.id("mask")

    @property
    def pieces(self) -> int:
        return self.info.length

    @staticmethod
    def metrics_of(config: MaskedLMConfig) -> tuple[Metric, ...]:
        return ACCURACY, LOSS, PERPLEXITY

    def build_model(self, config: Any) -> Bert:
        return build_or_explain(MODELS[config.name], config, vocabulary=self.info.vocabulary, length=self.info.length)

    def mask_tokens(self, batch: Batch, rate: float, draws: Tensor) -> Masked:
        """Choose `rate` of each row's tokens, at least one, but no special tokens and no padding, and mask them.

        For each token `draws` (B, L, 3) in [0, 1) determine the order of choice, the kind of replacement, and the
        random token. So the amount of padding does not matter. As in the original BERT a row has a fixed number of
        slots, so that shapes are the same in every step.
        """
        tokens = batch["tokens"]
        order, action, other = draws.unbind(-1)
        usable = torch.ones_like(tokens, dtype=torch.bool)
        segments = batch.get("segments")
        if segments is not None:
            usable = segments >= 0
        for special in self.info.special.values():
            usable &= tokens != special
        slots = max(1, round(rate * tokens.shape[1]))
        count = usable.sum(1, keepdim=True)
        wanted = (rate * count).round().clamp(1, slots).minimum(count)  # (B, 1)
        places = order.masked_fill(~usable, 2).argsort(dim=1, stable=True)[:, :slots]
        chosen = torch.arange(slots, device=tokens.device) < wanted
        replaced = torch.where(action < self.config.masked, self.mask_id, (other * self.info.vocabulary).long())
        replaced = torch.where(action < self.config.masked + self.config.random, replaced, tokens)
        hidden = torch.zeros_like(usable).scatter(1, places, chosen)
        return Masked(torch.where(hidden, replaced, tokens), places, tokens.gather(1, places), chosen)

    def mask_by_key(self, batch: Batch) -> Masked:
        """Mask a batch for evaluation, as a function of its keys.

        With a `key` (B, n) each of the n parts of a row is masked like a row. So the same tokens of a text are masked,
        whatever the length of the rows.
        """
        key = batch["key"]
        size = len(batch["tokens"])
        parts = key.numel() // size
        rows: Batch = {}
        for name in ("tokens", "segments"):
            if name in batch:
                rows[name] = batch[name].view(size * parts, -1)
        length = rows["tokens"].shape[1]
        draws = uniform(key.flatten(), 3 * length).unflatten(1, (length, 3))
        masked = self.mask_tokens(rows, self.config.eval_rate, draws)
        starts = length * torch.arange(parts, device=key.device)[:, None]
        places = masked.places.view(size, parts, -1) + starts
        return Masked(
            tokens=masked.tokens.view(size, -1),
            places=places.flatten(1),
            targets=masked.targets.view(size, -1),
            chosen=masked.chosen.view(size, -1),
        )

    def logits(self, model: nn.Module, batch: Batch, masked: Masked) -> Tensor:
        """Return the logits (B, K, vocabulary) of the chosen tokens."""
        return model(masked.tokens, batch.get("segments"), places=masked.places).float()

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        tokens = batch["tokens"]
        draws = torch.rand((*tokens.shape, 3), device=tokens.device)
        masked = self.mask_tokens(batch, self.config.rate, draws)
        masked = masked.own(unwrapped(model, Model).part)
        loss = token_losses(self.logits(model, batch, masked), masked.targets, masked.chosen)
        return Sums(loss.sum(), masked.chosen.sum().to(loss.dtype))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        masked = self.mask_by_key(batch).own(unwrapped(model, Model).part)
        logits = self.logits(model, batch, masked)
        counted = masked.chosen & batch["mask"][:, None]
        right = (logits.argmax(-1) == masked.targets) & counted
        loss = token_losses(logits, masked.targets, masked.chosen) * counted
        weight = counted.sum()
        return Outcome({"accuracy": (right.sum(), weight), "loss": (loss.sum(), weight)}, logits)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits (B, L, vocabulary) for unmasked tokens."""
        return model(batch["tokens"], batch.get("segments")).float()
