"""Long Range Arena: classification of long sequences of ids or pixels, or of pairs of documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.models import MODELS
from lion.models.lra import LRA
from lion.samples.base import Batch
from lion.samples.sequences import PIXELS, SequenceInfo
from lion.tasks.base import Outcome, Sums, Task, build_or_explain, sums_where, top_answers
from lion.tasks.metrics import ABOVE_CHANCE, ACCURACY, LOSS, Metric, chance_remark


class SequenceTask(Task):
    """Base class of tasks on long sequences.

    Batches hold `pixels` (B, L), or `tokens` and `segments`, both (B, L), or (B, 2, L) for pairs; see `SequenceInfo`.
    """

    Info = SequenceInfo
    info: SequenceInfo
    unit = "sequences"

    def sizes(self) -> dict[str, Any]:
        """Return the arguments that every model of long sequences needs."""
        info = self.info
        return {"length": info.length, "vocabulary": info.vocabulary, "mean": info.mean, "std": info.std}

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return ids or pixels, and their segments."""
        if self.info.vocabulary is None:
            return batch["pixels"], batch.get("segments")
        return batch["tokens"], batch.get("segments")

    def example(self, size: int, device: torch.device | str) -> Batch:
        info = self.info
        label = torch.zeros(size, dtype=torch.long, device=device)
        if info.vocabulary is None:
            pixels = torch.randint(PIXELS, (size, info.length), dtype=torch.uint8, device=device)
            return {"pixels": pixels, "label": label}
        shape = [size, info.length]
        if info.parts == 2:
            shape = [size, 2, info.length]
        tokens = torch.randint(info.vocabulary, shape, device=device)
        return {"tokens": tokens, "segments": torch.zeros_like(tokens), "label": label}

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """Return the first inputs as images, if they are pixels of square images."""
        side = math.isqrt(self.info.length)
        if self.info.vocabulary is not None or side * side != self.info.length:
            return {}
        from torchvision.utils import make_grid

        return {"inputs": make_grid(batch["pixels"][:32].view(-1, 1, side, side), nrow=8)}


@dataclass
class LRATaskConfig:
    """Settings of LRA tasks. `label_smoothing` is the share of each label that is spread over all classes."""

    name: str = "lra"
    label_smoothing: float = setting(0.0, min=0, max=0.99)


class LRATask(SequenceTask):
    """Task of the Long Range Arena. Batches also hold `label` (B,); evaluation batches also hold `mask` (B,)."""

    title = "Long Range Arena"
    Config = LRATaskConfig
    Model = LRA
    default_model = "lra"

    @staticmethod
    def metrics_of(config: LRATaskConfig) -> tuple[Metric, ...]:
        return ACCURACY, LOSS, ABOVE_CHANCE

    @staticmethod
    def remark(values: dict[str, float]) -> str | None:
        return chance_remark(values, ACCURACY)

    def build_model(self, config: Any) -> LRA:
        info = self.info
        return build_or_explain(MODELS[config.name], config, classes=info.classes, parts=info.parts, **self.sizes())

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        logits = self.outputs(model, batch)
        smoothing = self.config.label_smoothing
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=smoothing, reduction="sum")
        return Sums(loss, loss.new_full((), len(logits)))

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = self.outputs(model, batch)
        prediction = logits.argmax(-1)
        label = batch["label"]
        values = {"accuracy": prediction == label, "loss": F.cross_entropy(logits, label, reduction="none")}
        rows = {"prediction": prediction, "label": label}
        return Outcome(sums_where(values, batch["mask"]), logits, rows)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits (B, classes)."""
        inputs, segments = self.inputs(batch)
        return model(inputs, segments).float()

    def describe(self, outputs: Tensor, count: int) -> list[list[str]]:
        """Describe the most likely classes and their probabilities, most likely first."""
        names = [f"class {c}" for c in range(self.info.classes)]
        return top_answers(outputs, names, count)
