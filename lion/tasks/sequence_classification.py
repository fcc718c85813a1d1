"""Sequence classification and regression: cross-entropy or squared error, and the metrics of GLUE.

scikit-learn and SciPy are imported inside functions, because the table of tasks imports this file for every task.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import ConfigError, nearest
from lion.models import MODELS
from lion.models.bert import BertClassifier
from lion.samples.base import Batch
from lion.samples.text import LabelledTextInfo
from lion.tasks.base import Outcome, Sums, build_or_explain, sums_where, top_answers, unwrapped
from lion.tasks.language import LanguageTask
from lion.tasks.metrics import ABOVE_CHANCE, ACCURACY, LOSS, Metric, MetricOfRows, chance_remark


def f1(prediction: Tensor, label: Tensor) -> float:
    """Compute F1 of class 1."""
    from sklearn.metrics import f1_score

    return f1_score(label, prediction, zero_division=0)


def matthews(prediction: Tensor, label: Tensor) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(label, prediction)


def spearman(prediction: Tensor, label: Tensor) -> float:
    from scipy.stats import spearmanr

    return correlation(spearmanr, prediction, label)


def pearson(prediction: Tensor, label: Tensor) -> float:
    from scipy.stats import pearsonr

    return correlation(pearsonr, prediction, label)


def correlation(measure: Callable[..., Any], prediction: Tensor, label: Tensor) -> float:
    """Compute a correlation; 0 if all predictions or all labels are equal."""
    if prediction.min() == prediction.max() or label.min() == label.max():
        return 0.0
    value = float(measure(prediction.double(), label.double()).statistic)
    if not math.isfinite(value):
        return 0.0
    return value


BOTH = ("prediction", "label")
F1 = MetricOfRows("f1", "F1", function=f1, of=BOTH, percent=True)
MATTHEWS = MetricOfRows("matthews", "Matthews", function=matthews, of=BOTH, percent=True)
SPEARMAN = MetricOfRows("spearman", "Spearman", function=spearman, of=BOTH, percent=True)
PEARSON = MetricOfRows("pearson", "Pearson", function=pearson, of=BOTH, percent=True)
OF_CLASSES: dict[str, Metric] = {m.name: m for m in (ACCURACY, F1, MATTHEWS)}
OF_NUMBERS: dict[str, Metric] = {m.name: m for m in (SPEARMAN, PEARSON)}
METRICS = {**OF_CLASSES, **OF_NUMBERS}


@dataclass
class SequenceClassificationConfig:
    """Settings of sequence classification.

    `metrics` are measured in addition to the loss. Classes: `accuracy`, `f1` (of class 1 of two), `matthews`. Numbers:
    `spearman`, `pearson`. The first metric selects `best`.
    """

    name: str = "sequence_classification"
    metrics: tuple[str, ...] = ("accuracy",)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"metrics: unknown metric {name!r}, {nearest(name, METRICS)}")
        if not self.metrics:
            raise ValueError("metrics: expected at least one")


class SequenceClassification(LanguageTask):
    """Task of sequence classification and regression.

    Batches hold `tokens`, `types` and `segments` (B, L), -1 for padding, and `label` (B,): a class or a number.
    Evaluation batches also hold `mask` (B,). Types are passed only to a model with type embeddings.
    """

    title = "Sequence classification"
    Config = SequenceClassificationConfig
    Model = BertClassifier
    default_model = "bert_classifier"
    Info = LabelledTextInfo
    info: LabelledTextInfo

    def __init__(self, config: SequenceClassificationConfig, info: LabelledTextInfo) -> None:
        super().__init__(config, info)
        fit = OF_CLASSES if info.classes else OF_NUMBERS
        for name in config.metrics:
            if name not in fit:
                what = f"{len(info.classes)} classes" if info.classes else "numbers"
                raise ConfigError(f"task.metrics: {name!r} does not apply to {what}, {nearest(name, fit)}")
        if "f1" in config.metrics and len(info.classes) != 2:
            raise ConfigError(f"task.metrics: 'f1' needs two classes, got {len(info.classes)}: use 'accuracy'")
        if config.metrics != ("accuracy",) and importlib.util.find_spec("sklearn") is None:
            raise ConfigError("task.metrics: all metrics except 'accuracy' need scikit-learn: pip install scikit-learn")

    @staticmethod
    def metrics_of(config: SequenceClassificationConfig) -> tuple[Metric, ...]:
        chosen = [METRICS[name] for name in config.metrics]
        if "accuracy" in config.metrics:
            return (*chosen, LOSS, ABOVE_CHANCE)
        return (*chosen, LOSS)

    @staticmethod
    def remark(values: dict[str, float]) -> str | None:
        return chance_remark(values, ACCURACY)

    def build_model(self, config: Any) -> BertClassifier:
        info = self.info
        return build_or_explain(
            MODELS[config.name],
            config,
            outputs=len(info.classes) or 1,
            vocabulary=info.vocabulary,
            length=info.length,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        losses = self.losses(self.outputs(model, batch), batch["label"])
        return Sums(losses.sum(), losses.new_full((), len(losses)))

    def losses(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""
        if self.info.classes:
            return F.cross_entropy(outputs, label, reduction="none")
        return F.mse_loss(outputs[:, 0], label, reduction="none")

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        outputs = self.outputs(model, batch)
        label = batch["label"]
        values = {"loss": self.losses(outputs, label)}
        prediction = outputs[:, 0]
        if self.info.classes:
            prediction = outputs.argmax(-1)
            values["accuracy"] = prediction == label
        rows = {"prediction": prediction, "label": label}
        return Outcome(sums_where(values, batch["mask"]), outputs, rows)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return logits (B, classes), or numbers (B, 1)."""
        embedded = unwrapped(model, BertClassifier).types
        types = None
        if embedded is not None and embedded.num_embeddings > 1:
            types = batch.get("types")
        return model(batch["tokens"], batch.get("segments"), types).float()

    def describe(self, outputs: Tensor, count: int) -> list[list[str]]:
        """Describe the most likely classes and their probabilities, most likely first; or the number."""
        if not self.info.classes:
            return [[f"{value:.2f}"] for value in outputs[:, 0].tolist()]
        return top_answers(outputs, self.info.classes, count)

    def example(self, size: int, device: torch.device | str) -> Batch:
        batch = super().example(size, device)
        kind = torch.long if self.info.classes else torch.float32
        batch["label"] = torch.zeros(size, dtype=kind, device=device)
        return batch
