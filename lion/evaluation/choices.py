"""Zero-shot multiple choice: selects the continuation of a text that a causal model finds most likely."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.models.gpt import GPT
from lion.samples.base import Batch
from lion.tasks.base import Outcome, unwrapped
from lion.tasks.causal_lm import CausalLM, CausalLMConfig
from lion.tasks.metrics import Metric, MetricOfRows

QUANTILE = 1.959964  # of the normal distribution, for 95 %


def accuracy_of_choices(score: Tensor, size: Tensor, question: Tensor, choice: Tensor, right: Tensor) -> float:
    """Compute the share of questions whose best choice is the right one.

    All arguments are (rows,), and a row is one choice of a `question`. The best choice has the greatest `score / size`;
    among equals it is the first `choice`.
    """
    ranked = score.double() / size
    order = np.lexsort((choice, -ranked, question))  # by question, then by rank, then by choice
    _, first = np.unique(question[order], return_index=True)
    return right[order][first].double().mean().item()


def accuracy(name: str, label: str, size: str) -> MetricOfRows:
    columns = ("score", size, "question", "choice", "right")
    return MetricOfRows(name, label, percent=True, function=accuracy_of_choices, of=columns)


# ranks by log-likelihood: of the choice, per byte and per token
PLAIN = accuracy("acc", "acc", "one")
PER_BYTE = accuracy("acc_norm", "acc_norm", "bytes")
PER_TOKEN = accuracy("acc_token", "acc per token", "tokens_of_choice")


class MultipleChoice(CausalLM):
    """Task of multiple choice. A sample is one choice after its text; batches may split the choices of a question.

    Batches hold `tokens` and `segments` (B, L), -1 for padding. The choice is the last `tokens_of_choice` (B,) tokens
    of a row, whose log-likelihood is computed. `bytes`, `question`, `choice`, `right` and `mask` (B,) describe the row.
    """

    @staticmethod
    def metrics_of(config: CausalLMConfig) -> tuple[Metric, ...]:
        return PLAIN, PER_BYTE, PER_TOKEN

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        score = log_likelihoods(unwrapped(model, GPT), batch)
        rows = {name: batch[name] for name in ("bytes", "tokens_of_choice", "question", "choice", "right")}
        return Outcome({}, score, {"score": score, "one": torch.ones_like(score), **rows})


def log_likelihoods(model: GPT, batch: Batch) -> Tensor:
    """Compute log-likelihoods in nats (B,), float64, of the choice at the end of each row, conditioned on its text."""
    tokens = batch["tokens"]
    segments = batch["segments"]
    last = (segments >= 0).sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(1, tokens.shape[1], device=tokens.device)  # of the predicted token
    first = last - batch["tokens_of_choice"][:, None]
    judged = (place < last) & (place >= first)  # (B, L - 1)
    x = model.encode(tokens[:, :-1], segments[:, :-1])
    logits = model.logits(x[judged]).float()
    losses = F.cross_entropy(logits, tokens[:, 1:][judged], reduction="none")
    found = torch.zeros(judged.shape, dtype=torch.float64, device=tokens.device)
    return found.masked_scatter(judged, -losses.double()).sum(1)


def interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share observed in `count` draws."""
    more = QUANTILE**2 / count
    middle = (share + more / 2) / (1 + more)
    half = QUANTILE / (1 + more) * math.sqrt(share * (1 - share) / count + more / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
