"""The data of a run, as batches for this process."""

from __future__ import annotations

from functools import partial
from typing import Any

from lion.samples.base import Splits
from lion.trainer.loader import Batches, StepSampler, eval_batches, train_batches
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime


class RunData:
    """The training split and the held-out splits in batches; `workers` is the number of loader processes."""

    def __init__(self, splits: Splits, plan: Plan, runtime: Runtime, *, workers: int = 0) -> None:
        self.splits, self.plan = splits, plan
        self.place = {"rank": runtime.batch_rank, "world": runtime.batch_world}
        self.loading: dict[str, Any] = {
            "collate": splits.collate,
            "workers": workers,
            "pin": runtime.device.type == "cuda",
            "faults": plan.trainer.faults,
            "device": runtime.device,
        }

    def sampler(self, start: int) -> StepSampler:
        """Return the sampler of this process's micro-batches, from sample `start` of the run on."""
        plan = self.plan
        return StepSampler(
            len(self.splits.train),
            batch=plan.trainer.batch_size,
            micro=plan.micro,
            seed=plan.seed,
            start=start,
            end=plan.samples,
            order=self.splits.order,
            **self.place,
        )

    def train(self, start: int) -> Batches:
        """Return the training batches from sample `start` of the run on, across epochs."""
        return train_batches(self.splits.train, self.sampler(start), **self.loading)

    def held_out(self) -> dict[str, Batches]:
        """Return the held-out splits: first `val`, which selects the best checkpoint, then `more` as `val_NAME`."""
        more = {f"val_{name}": dataset for name, dataset in self.splits.more.items()}
        batches = partial(eval_batches, batch=self.plan.micro, seed=self.plan.seed, **self.place, **self.loading)
        return {name: batches(each, split=name) for name, each in {"val": self.splits.val, **more}.items()}
