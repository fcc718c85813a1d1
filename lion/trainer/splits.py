"""The data of a run, in batches for this process."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import Dataset

from lion.trainer.batches import Batches, StepSampler, eval_batches, train_batches
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime


class Splits(NamedTuple):
    """The data sets of a run; samples are dicts of tensors."""

    train: Dataset
    val: Dataset
    workers: int
    repeats: int = 1


class Loaders:
    """Batches of both splits, as the plan wants them."""

    def __init__(self, splits: Splits, plan: Plan, runtime: Runtime) -> None:
        self.splits, self.plan = splits, plan
        self.place = {"rank": runtime.rank, "world": runtime.world}
        self.loading: dict[str, Any] = {
            "workers": splits.workers,
            "pin": runtime.device.type == "cuda",
            "faults": plan.trainer.faults,
            "device": runtime.device,
        }

    def sampler(self, start: int) -> StepSampler:
        """The micro-batches of this process from step `start` on."""
        plan = self.plan
        return StepSampler(
            len(self.splits.train),
            batch=plan.trainer.batch_size,
            micro=plan.micro,
            seed=plan.seed,
            start=start,
            total=plan.total,
            repeats=self.splits.repeats,
            **self.place,
        )

    def train(self, start: int) -> Batches:
        return train_batches(self.splits.train, self.sampler(start), **self.loading)

    def val(self) -> Batches:
        return eval_batches(self.splits.val, batch=self.plan.micro, **self.place, **self.loading)
