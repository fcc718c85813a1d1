"""Self-pretraining (2310.02980): predicts masked inputs of an LRA task from the other inputs.

A run of the task starts from such a run with `init_from`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.models import MODELS
from lion.models.lra import LRAMasked
from lion.samples.base import Batch
from lion.samples.seeds import uniform
from lion.tasks.base import Outcome, Sums, build_or_explain, own_tokens, unwrapped
from lion.tasks.lra import SequenceTask
from lion.tasks.metrics import LOSS, Metric


@dataclass
class LRAMaskedTaskConfig:
    """Settings of self-pretraining.

    `rate` is the share of inputs that are masked, each independently. Every evaluation masks the same inputs.
    """

    name: str = "lra_masked"
    rate: float = setting(0.15, above=0, max=1)


class LRAMaskedTask(SequenceTask):
    """Task of self-pretraining.

    The loss is the cross-entropy of masked ids in nats, or the absolute error of masked, normalised pixels. Labels are
    not used. Evaluation batches also hold `mask` and `key` (B,). The documents of a pair are separate sequences.
    """

    title = "Self-pretraining on the Long Range Arena"
    Config = LRAMaskedTaskConfig
    Model = LRAMasked
    default_model = "lra_masked"

    @staticmethod
    def metrics_of(config: LRAMaskedTaskConfig) -> tuple[Metric, ...]:
        return (LOSS,)

    def build_model(self, config: Any) -> LRAMasked:
        return build_or_explain(MODELS[config.name], config, **self.sizes())

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return inputs and segments, (B, L), or (2 B, L) for pairs."""
        inputs, segments = self.inputs(batch)
        if segments is not None:
            segments = segments.flatten(0, -2)
        return inputs.flatten(0, -2), segments

    def losses(self, model: nn.Module, batch: Batch, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses of inputs (rows, L), 0 where not masked; the mask (rows, L); and the outputs (rows, L, ..).

        An input is masked where `draws` (rows, L), in [0, 1), is below the rate.
        """
        inputs, segments = self.rows(batch)
        hidden = draws < self.config.rate
        if segments is not None:
            hidden &= segments >= 0
        outputs = model(inputs, segments, hidden).float()
        inputs = own_tokens(model, inputs)
        hidden = own_tokens(model, hidden, fill=False)
        if self.info.vocabulary is None:
            losses = (outputs[..., 0] - unwrapped(model, LRAMasked).normalised(inputs)).abs()
        else:
            losses = F.cross_entropy(outputs.mT, inputs, reduction="none")
        return losses * hidden, hidden, outputs

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        inputs = self.rows(batch)[0]
        losses, hidden, _ = self.losses(model, batch, torch.rand(inputs.shape, device=inputs.device))
        return Sums(losses.sum(), hidden.sum().to(losses.dtype))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        inputs = self.rows(batch)[0]
        each = inputs.shape[0] // len(batch["key"])  # rows per sample
        # the draws of rows of full length, so that the padding of a batch changes none
        draws = uniform(batch["key"], each * self.info.length).unflatten(1, (each, -1))
        draws = draws[..., : inputs.shape[1]].flatten(0, 1)
        losses, hidden, outputs = self.losses(model, batch, draws)
        counted = batch["mask"].repeat_interleave(each)[:, None] & hidden
        outputs = outputs.unflatten(0, (-1, each)).flatten(1, 2)  # (B, L or 2 L, ..)
        return Outcome({"loss": ((losses * counted).sum(), counted.sum())}, outputs)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the outputs (rows, L, ..) for unmasked inputs."""
        inputs, segments = self.rows(batch)
        return model(inputs, segments).float()
