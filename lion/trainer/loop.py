"""The trainer: one loop for every task."""

from __future__ import annotations

import contextlib
import copy
import logging
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lion.tasks.base import Batch, Task, to_device
from lion.trainer.batches import StepSampler, derive, eval_loader, train_loader
from lion.trainer.checkpoint import load_checkpoint, save_checkpoint
from lion.trainer.config import Plan
from lion.trainer.evaluate import decay_values, evaluate
from lion.trainer.log import RunLog
from lion.trainer.optim import make_optimizer
from lion.trainer.runtime import Runtime, compile_blocks, random_state, restore_random_state, seed_everything
from lion.trainer.schedule import learning_rate

log = logging.getLogger("lion")


class Splits(NamedTuple):
    """The data sets of a run; samples are dicts of tensors."""

    train: Dataset
    val: Dataset
    workers: int
    repeats: int = 1


class Trainer:
    """Trains `model` on `task` into a run folder, resuming from its `last` checkpoint.

    Args:
        plan: Settings, and the lengths that follow from them.
        task, model, splits: What is learned; `splits.val` chooses `best`.
        folder: Run folder; `last.pt` and `best.pt` are written there.
        runtime: Device and processes.
    """

    def __init__(
        self, plan: Plan, task: Task, model: nn.Module, splits: Splits, folder: Path, runtime: Runtime
    ) -> None:
        self.plan, self.config = plan, plan.trainer
        self.task, self.splits, self.folder, self.runtime = task, splits, folder, runtime
        self.model = model.to(runtime.device)
        self.ema = None
        if self.config.ema is not None:
            self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = make_optimizer(self.model, plan.optim)
        self.peak = plan.optim.peak(self.config.batch_size)
        self.step, self.evaluated, self.best = 0, 0, {"value": float("-inf"), "step": 0}
        self.stopping = False

    def fit(self) -> bool:
        """Train to the end; False when a signal asked to stop earlier (the state is saved)."""
        self.resume()
        if self.config.compile:
            for model in filter(None, (self.model, self.ema)):
                if not compile_blocks(model):
                    break
        self.forward = DistributedDataParallel(self.model) if self.runtime.world > 1 else self.model
        batches = iter(self.train_batches())
        started = time.perf_counter()
        with (
            catch_signals(self),
            contextlib.closing(
                RunLog(self.folder, start=self.step, total=self.plan.total, active=self.runtime.main)
            ) as out,
        ):
            window = Window()
            complete = self.evaluate_if_due(out)  # a signal may have cut the last one short
            while complete and self.step < self.plan.total:
                lr = self.set_learning_rate()
                loss, norm = self.train_step(batches, window, out)
                self.step += 1
                window.samples += self.config.batch_size
                out.progress()
                if self.due(self.config.log_every):
                    self.report(out, window, loss, lr, norm)
                    window = Window()
                if self.due(self.plan.eval_every):
                    complete = self.evaluate_if_due(out)
                    window = Window()
                stop = self.runtime.any(self.stopping)
                if stop or not complete or self.due(self.plan.save_every):
                    self.save("last")
                if stop and self.step < self.plan.total:
                    complete = False
        if not complete:
            return False
        log.info("trained %d steps in %.0f s", self.step, time.perf_counter() - started)
        return True

    def train_step(self, batches: Iterator, window: Window, out: RunLog) -> tuple[Tensor, Tensor | None]:
        """One optimizer step over the global batch; returns its mean loss (this process's share) and gradient norm."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses, weights = [], []
        for micro in range(self.plan.accumulation):
            waited = time.perf_counter()
            batch = to_device(next(batches), self.runtime.device)
            window.waited += time.perf_counter() - waited
            if self.step == 0 and micro == 0:
                out.images(self.task.preview(batch))
            last = micro == self.plan.accumulation - 1
            with contextlib.nullcontext() if last or self.runtime.world == 1 else self.forward.no_sync():
                with self.runtime.autocast(self.config.precision):
                    loss, weight = self.task.loss(self.forward, batch)
                loss.backward()
            losses.append(loss.detach())
            weights.append(weight)
        total = torch.stack(weights).sum()
        share = total.clone()
        if self.runtime.world > 1:
            torch.distributed.all_reduce(total)
        # the gradients are of the loss summed over samples, averaged over processes by DDP
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, self.runtime.world / total)
        norm = None
        if self.config.clip_grad is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        elif (self.step + 1) % self.config.log_every == 0:
            norm = nn.utils.get_total_norm(gradients)
        self.optimizer.step()
        if self.ema is not None:
            torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 1 - self.config.ema)
        return torch.stack(losses).sum() / share, norm

    def set_learning_rate(self) -> float:
        plan = self.plan
        lr = learning_rate(self.step, config=plan.schedule, peak=self.peak, warmup=plan.warmup, total=plan.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.plan.total

    def report(self, out: RunLog, window: Window, loss: Tensor, lr: float, norm: Tensor | None) -> None:
        """Write a line of training metrics."""
        loss = self.runtime.sum(loss)[0].item() / self.runtime.world
        seconds = time.perf_counter() - window.started
        rate = window.samples / seconds
        unit = self.task.unit
        out.progress(0, loss=f"{loss:.3f}", lr=f"{lr:.1e}", **{f"{unit}/s": f"{rate:.0f}"})
        values = {
            "loss": loss,
            "lr": lr,
            f"{unit}_per_second": rate,
            "data_wait_share": window.waited / seconds,
            "memory_mib": peak_memory(self.runtime.device) / 2**20,
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
        if norm is not None:
            values["gradient_norm"] = norm.item()
        out.write(self.step, "train", values, epoch=self.step / self.plan.steps_per_epoch)

    def evaluate_if_due(self, out: RunLog) -> bool:
        """Measure `val` where this step's turn has not been taken; False when a signal cut it short."""
        if self.step == self.evaluated or not self.step or not self.due(self.plan.eval_every):
            return True
        loader, first = self.eval_batches(self.splits.val), []

        def batches() -> Iterator[Batch]:
            for batch in loader:
                if not first:
                    first.append(batch)
                yield batch

        results = {}
        for kind, model in (("val", self.model), ("val_ema", self.ema)):
            if model is not None:
                results[kind] = evaluate(
                    model,
                    batches(),
                    self.task,
                    self.runtime,
                    precision=self.config.precision,
                    stop=lambda: self.runtime.any(self.stopping),
                )
                if results[kind] is None:
                    return False
        for kind, metrics in results.items():
            out.write(self.step, kind, metrics, epoch=self.step / self.plan.steps_per_epoch)
        if self.runtime.main:
            batch = to_device(first[0], self.runtime.device)
            out.histograms(self.step, "decay", decay_values(self.model, batch, self.task))
        self.evaluated = self.step
        value = results["val"][self.task.metric]
        if value >= self.best["value"]:  # of equals, the longer trained
            self.best = {"value": value, "step": self.step}
            self.save("best")
        return True

    def state(self, name: str) -> dict[str, Any]:
        """What `last` (everything) or `best` (weights) holds."""
        state = {
            "step": self.step,
            "best": self.best,
            "info": self.task.info.to_dict(),
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }
        if name == "last":
            state["evaluated"] = self.evaluated
            state["optimizer"] = self.optimizer.state_dict()
            state["random"] = self.runtime.gather(random_state())
        return state

    def save(self, name: str) -> None:
        """Write a checkpoint; every process takes part, the first one writes."""
        state = self.state(name)
        if self.runtime.main:
            save_checkpoint(self.folder / f"{name}.pt", state)

    def resume(self) -> None:
        """Continue from `last`, if there is one."""
        path = self.folder / "last.pt"
        if not path.exists():
            return
        state = load_checkpoint(path)
        self.step, self.best, self.evaluated = state["step"], state["best"], state["evaluated"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        if len(state["random"]) == self.runtime.world:
            restore_random_state(state["random"][self.runtime.rank])
        else:
            seed_everything(derive(self.plan.seed, self.step, self.runtime.rank))
        log.info("resuming at step %d of %d", self.step, self.plan.total)

    def train_batches(self) -> DataLoader:
        sampler = StepSampler(
            len(self.splits.train),
            batch=self.config.batch_size,
            micro=self.plan.micro,
            seed=self.plan.seed,
            start=self.step,
            total=self.plan.total,
            rank=self.runtime.rank,
            world=self.runtime.world,
            repeats=self.splits.repeats,
        )
        return train_loader(self.splits.train, sampler, workers=self.splits.workers, pin=self.pin)

    def eval_batches(self, split: Dataset) -> DataLoader:
        runtime = self.runtime
        return eval_loader(
            split,
            batch=self.plan.micro,
            rank=runtime.rank,
            world=runtime.world,
            workers=self.splits.workers,
            pin=self.pin,
        )

    @property
    def pin(self) -> bool:
        return self.runtime.device.type == "cuda"


class Window:
    """What happened since the last line of metrics."""

    def __init__(self) -> None:
        self.started, self.waited, self.samples = time.perf_counter(), 0.0, 0


def peak_memory(device: torch.device) -> int:
    """Most bytes ever held: on CUDA by tensors, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def catch_signals(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM ask the loop to stop after its step; a second one stops at once."""

    def ask(number: int, frame: Any) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = True
        log.warning("%s: saving after this step; once more to stop at once", signal.Signals(number).name)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
