"""Helpers of tests of tasks: batches, their parts, and training on small data sets."""

import torch

from lion.trainer.evaluate import evaluate
from lion.trainer.loop import Trainer
from lion.trainer.plan import make_plan
from lion.trainer.runtime import Runtime
from tests.trainer.toys import settings

CPU = Runtime(torch.device("cpu"))


def stacked(samples):
    """Return a batch of samples."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def rows_of(batch, rows):
    """Return some samples of a batch."""
    return {name: value[rows] for name, value in batch.items()}


def measured(task, model, *batches):
    return evaluate(model, batches, task, CPU)


def fit(task, model, splits, folder, **changes):
    """Train a model to the end; return the trainer."""
    plan = make_plan(settings(**changes), samples=len(splits.train), world=1)
    trainer = Trainer(plan, task, model, splits, folder, CPU)
    assert trainer.fit()
    return trainer
