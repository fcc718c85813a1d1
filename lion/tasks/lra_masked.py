"""Self-pretraining (2310.02980): hidden inputs of a task are told from those around them; `init_from` starts there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.models import MODELS
from lion.models.lra import LRAMasked
from lion.tasks.base import Outcome, Sums, build_or_explain, unwrapped
from lion.tasks.data import Batch
from lion.tasks.lra import SequenceTask
from lion.tasks.metrics import LOSS, Metric
from lion.tasks.seeds import uniform


@dataclass
class LRAMaskedTaskConfig:
    """`rate` is the share of inputs that are hidden, each by itself; in evaluation the same ones at every time."""

    name: str = "lra_masked"
    rate: float = setting(0.15, above=0, max=1)


class LRAMaskedTask(SequenceTask):
    """Cross-entropy of hidden ids in nats, absolute error of hidden pixels (normalised); labels are not read.

    Evaluation batches also hold `mask` and `key` (B,). The documents of a pair are sequences of their own.
    """

    Config = LRAMaskedTaskConfig
    Model = LRAMasked
    default_model = "lra_masked"

    @staticmethod
    def metrics_of(config: LRAMaskedTaskConfig) -> tuple[Metric, ...]:
        return (LOSS,)

    def build_model(self, config: Any) -> LRAMasked:
        return build_or_explain(MODELS[config.name], config, **self.sizes())

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Inputs and segments (B, L), or (2 B, L) of pairs."""
        inputs, segments = self.inputs(batch)
        return inputs.flatten(0, -2), None if segments is None else segments.flatten(0, -2)

    def losses(self, model: nn.Module, batch: Batch, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each input (rows, L), 0 where it was not hidden; which were, and the outputs (rows, L, ..).

        `draws` (rows, L) in [0, 1) say which.
        """
        inputs, segments = self.rows(batch)
        hidden = draws < self.config.rate
        if segments is not None:
            hidden &= segments >= 0
        outputs = model(inputs, segments, hidden).float()
        if self.info.vocabulary is None:
            losses = (outputs[..., 0] - unwrapped(model).normalised(inputs)).abs()
        else:
            losses = F.cross_entropy(outputs.mT, inputs, reduction="none")
        return losses * hidden, hidden, outputs

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        inputs = self.rows(batch)[0]
        losses, hidden, _ = self.losses(model, batch, torch.rand(inputs.shape, device=inputs.device))
        return Sums(losses.sum(), hidden.sum().to(losses.dtype))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        inputs = self.rows(batch)[0]
        each = inputs.shape[0] // len(batch["key"])  # rows of a sample
        draws = uniform(batch["key"], each * inputs.shape[1]).view(inputs.shape)
        losses, hidden, outputs = self.losses(model, batch, draws)
        counted = batch["mask"].repeat_interleave(each)[:, None] & hidden
        outputs = outputs.unflatten(0, (-1, each)).flatten(1, 2)  # (B, L or 2 L, ..)
        return Outcome({"loss": ((losses * counted).sum(), counted.sum())}, outputs)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of inputs as they stand, (rows, L, ..)."""
        return model(*self.rows(batch)).float()
