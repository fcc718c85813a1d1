"""Common parts of language tasks: metadata, batches, and the loss of a token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.samples.base import Batch
from lion.samples.text import TextInfo
from lion.tasks.base import Task
from lion.tasks.metrics import MetricOfMeans

PERPLEXITY = MetricOfMeans("perplexity", higher_is_better=False, function=math.exp, of=("loss",))


class LanguageTask(Task):
    """Base class of language tasks.

    Batches hold `tokens` (B, L). Where documents are packed or padded they also hold `segments` (B, L), -1 for padding.
    """

    Info = TextInfo
    info: TextInfo
    unit = "sequences"

    def example(self, size: int, device: torch.device | str) -> Batch:
        """Return random rows; every fourth row is half padding, none of fewer than four.

        Real text has padding too, except text in windows, so a measured step should include it.
        """
        tokens = torch.randint(self.info.vocabulary, (size, self.info.length), device=device)
        segments = torch.zeros_like(tokens)
        segments[3::4, -(self.info.length // 2) :] = -1
        return {"tokens": tokens, "segments": segments}


def token_losses(logits: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """Compute the cross-entropy in nats of logits (B, K, vocabulary) and targets (B, K); 0 where not `counted`."""
    if counted is not None:
        targets = targets.masked_fill(~counted, -100)  # includes padding, whose ids are arbitrary
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
