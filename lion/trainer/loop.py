"""The trainer: one loop for every task."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from lion.config import ConfigError
from lion.tasks.base import Task, to_device
from lion.tasks.data import Batch, Splits
from lion.tasks.seeds import derive
from lion.trainer.config import Plan
from lion.trainer.evaluate import all_finite, decay_values, evaluate
from lion.trainer.faults import FiniteGuard, RunError, divergence_advice, explain
from lion.trainer.loader import Batches, StepSampler, eval_batches, train_batches
from lion.trainer.log import RunLog, Window
from lion.trainer.memory import peak_so_far
from lion.trainer.optim import make_optimizer
from lion.trainer.parallel import Learner, local, replicate, shard, synchronise, whole
from lion.trainer.resume import Checkpointer, Clock, promise
from lion.trainer.runtime import (
    Runtime,
    catch_signals,
    circumstances,
    compile_blocks,
    random_state,
    restore_random_state,
    seed_everything,
)
from lion.trainer.schedule import learning_rate

log = logging.getLogger("lion")


class Trainer:
    """Trains `model` on `task` into a run folder, resuming from its newest whole checkpoint.

    Args:
        plan: Settings, and the lengths that follow from them.
        task, model, splits: What is learned; `splits.val` chooses `best`.
        folder: Run folder; checkpoints go to `folder/checkpoints`.
        runtime: Device and processes.
        workers: Loader processes.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        model: nn.Module,
        splits: Splits,
        folder: Path,
        runtime: Runtime,
        *,
        workers: int = 0,
    ) -> None:
        self.plan, self.config = plan, plan.trainer
        self.task, self.splits, self.folder, self.runtime, self.workers = task, splits, folder, runtime, workers
        self.model = model.to(runtime.device)
        self.ema = None
        if self.config.ema is not None:
            self.ema = copy.deepcopy(self.model).requires_grad_(False)
        if self.config.parallel == "fsdp" and runtime.world > 1:
            for part in filter(None, (self.model, self.ema)):
                shard(part, runtime)
        self.optimizer = make_optimizer(self.model, plan.optim)
        learner = Learner(self.model, self.ema, self.optimizer)
        self.checkpoints = Checkpointer(folder, learner, runtime, keep=self.config.keep_last)
        self.guard = FiniteGuard(runtime.device)
        self.peak = plan.optim.peak(self.config.batch_size)
        self.step, self.evaluated, self.best = 0, 0, {"value": float("-inf"), "step": 0}
        self.reported: dict[str, int] = {}
        self.compiled = self.stopping = False

    def fit(self) -> bool:
        """Train to the end; False when a signal asked to stop earlier (the state is saved).

        Raises:
            RunError: Training cannot go on, or its end cannot be saved.
            ConfigError: A setting does not fit the machine or what the run folder holds.
        """
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.explained())
            self.prepare()
            stack.enter_context(catch_signals(self))
            out = stack.enter_context(contextlib.closing(self.open_log()))
            batches = stack.enter_context(contextlib.closing(iter(self.train_batches)))
            try:
                complete = self.train(batches, out)
            except TorchDynamoException:  # a signal to the whole process group ends the compiler, too
                if not self.stopping or self.runtime.world > 1:
                    raise
                complete = False
                if self.evaluation_due:  # cut short by it; a step that was, has changed nothing and is taken again
                    self.save(out)
        if self.step and self.checkpoints.saved != self.step:
            raise RunError(f"step {self.step} could not be saved: {self.checkpoints.kept}")
        if complete:
            log.info("trained %d steps in %.0f s", self.step, time.perf_counter() - started)
        return complete

    def prepare(self) -> None:
        """Compile, resume, and find the place in the data."""
        if self.config.compile:
            self.compiled = all(compile_blocks(model) for model in filter(None, (self.model, self.ema)))
        if self.compiled:
            log.info("compiling: the first steps and the first evaluation take longer")
        self.resume()
        self.forward = replicate(self.model, self.runtime)
        self.train_batches = train_batches(self.splits.train, self.sampler(self.step), **self.loading())

    def open_log(self) -> RunLog:
        evaluated = not self.evaluation_due
        return RunLog(
            self.folder, start=self.step, total=self.plan.total, evaluated=evaluated, active=self.runtime.main
        )

    def train(self, batches: Iterator[Batch], out: RunLog) -> bool:
        """The loop; False when it was asked to stop."""
        window, clock, owed = Window(), Clock(self.plan.save_seconds), False
        complete = self.evaluate_if_due(out)  # a signal may have cut the last one short
        while complete and self.step < self.plan.total:
            lr = self.set_learning_rate()
            loss, norm = self.train_step(batches, window, out)
            self.step += 1
            window.samples += self.config.batch_size
            out.progress()
            self.check_finite()
            if self.due(self.config.log_every):
                self.report(out, window, loss, lr, norm)
                window = Window()
            if self.due(self.plan.eval_every):
                complete = self.evaluate_if_due(out)
                window = Window()
            stop, late = self.runtime.any(self.stopping, clock.late)
            last = stop or not complete or self.step == self.plan.total
            owed = owed or late or self.due(self.plan.save_every)
            if last or (owed and not self.guard.read()[1]):
                self.save(out)  # not while steps are skipped: the last checkpoint is a good one
                clock.start()
                owed = False
            if stop and self.step < self.plan.total:
                complete = False
        return complete

    def train_step(self, batches: Iterator[Batch], window: Window, out: RunLog) -> tuple[Tensor, Tensor]:
        """One optimizer step over the global batch; returns its mean loss and gradient norm.

        Where loss or gradient is not finite, weights and optimizer stay as they are.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = self.accumulate(batches, window, out)
        if self.runtime.world > 1:
            torch.distributed.all_reduce(sums)
        loss = sums[0] / sums[1]
        # the gradients are of the loss summed over samples, averaged over processes
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(local(gradients), (self.runtime.world / sums[1]).float())
        norm = whole(nn.utils.get_total_norm(gradients))
        if self.config.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip_grad, norm)
        self.optimizer.found_inf = self.guard.skip(loss, norm)
        self.optimizer.step()
        if self.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 1 - self.config.ema)
        return loss, norm

    def accumulate(self, batches: Iterator[Batch], window: Window, out: RunLog) -> Tensor:
        """Backward passes of this process's micro-batches; returns the sums of loss and weight."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        for micro in range(self.plan.accumulation):
            waited = time.perf_counter()
            batch = to_device(next(batches), self.runtime.device)
            window.waited += time.perf_counter() - waited
            if self.step == 0 and micro == 0:
                out.images(self.task.preview(self.model, batch))
            with synchronise(self.forward, micro == self.plan.accumulation - 1):
                with self.runtime.autocast(self.config.precision):
                    loss, weight = self.task.loss(self.forward, batch)
                loss.backward()
            sums += torch.stack((loss.detach(), weight)).double()
        return sums

    def learning_rate(self) -> float:
        plan = self.plan
        return learning_rate(self.step, config=plan.schedule, peak=self.peak, warmup=plan.warmup, total=plan.total)

    def set_learning_rate(self) -> float:
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def due(self, every: int | None) -> bool:
        return self.step == self.plan.total or (every is not None and self.step % every == 0)

    @property
    def evaluation_due(self) -> bool:
        """Whether `val` is to be measured at this step and has not been."""
        return self.step > self.evaluated and self.due(self.plan.eval_every)

    def check_finite(self) -> None:
        """Stop the run after too many skipped steps in a row; looks at the device only so often."""
        limit = self.config.faults.nonfinite
        if self.step % limit and self.step < self.plan.total:
            return
        row = self.guard.read()[1]
        if row >= min(limit, self.plan.total):
            where = f"in the {row} steps from {self.step - row} on (trainer.faults.nonfinite)"
            self.diverged(f"no finite loss and gradient {where}, all skipped")

    def diverged(self, what: str) -> NoReturn:
        if not self.runtime.main:  # all see it, one says it
            sys.exit(1)
        advice = divergence_advice(self.folder if self.best["step"] else None)
        raise RunError(f"{what}; {self.checkpoints.kept}. {advice}")

    def report(self, out: RunLog, window: Window, loss: Tensor, lr: float, norm: Tensor) -> None:
        """Write a line of training metrics."""
        seconds = time.perf_counter() - window.started
        rate = window.samples / seconds
        unit = self.task.unit
        out.progress(0, loss=f"{loss.item():.3f}", lr=f"{lr:.1e}", **{f"{unit}/s": f"{rate:.0f}"})
        values = {
            "loss": loss.item(),
            "lr": lr,
            "gradient_norm": norm.item(),
            f"{unit}_per_second": rate,
            "data_wait_share": window.waited / seconds,
            "memory_mib": peak_so_far(self.runtime.device) / 2**20,
            "compiled_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
        faults = self.faults()
        if faults["skipped_steps"] > self.reported.get("skipped_steps", 0):
            log.warning(
                "step %d: %d steps skipped so far, loss or gradient not finite", self.step, faults["skipped_steps"]
            )
        self.reported = faults
        values.update({name: count for name, count in faults.items() if count})
        out.write(self.step, "train", values, epoch=self.step / self.plan.steps_per_epoch)

    def evaluate_if_due(self, out: RunLog) -> bool:
        """Measure `val` where this step's turn has not been taken; False when a signal cut it short."""
        if not self.evaluation_due:
            return True
        loader, first = self.eval_batches("val"), []

        def batches() -> Iterator[Batch]:
            for batch in loader:
                if not first:
                    first.append(batch)
                yield batch

        how = {"precision": self.config.precision, "stop": lambda: self.runtime.any(self.stopping)[0]}
        results = {}
        for kind, model in (("val", self.model), ("val_ema", self.ema)):
            if model is not None:
                results[kind] = evaluate(model, batches(), self.task, self.runtime, **how)
                if results[kind] is None:
                    return False
        for kind, metrics in results.items():
            out.write(self.step, kind, metrics, epoch=self.step / self.plan.steps_per_epoch)
        batch = to_device(first[0], self.runtime.device)
        out.histograms(self.step, "decay", decay_values(self.model, batch, self.task))
        self.evaluated = self.step
        value = results["val"][self.task.metric]
        if self.runtime.any(not all_finite(results, local(list(self.model.parameters()))))[0]:
            what = f"step {self.step}: weights, or outputs on val, are not finite"
            if self.step == self.plan.total:
                self.diverged(what)
            log.warning("%s: no best checkpoint", what)
        elif value >= self.best["value"] and self.step != self.best["step"]:  # of equals, the longer trained
            best = {"value": value, "step": self.step}
            if self.checkpoints.save_best(
                self.step, {"step": self.step, "best": best, "info": self.task.info.to_dict()}
            ):
                self.best = best
        return True

    def eval_batches(self, split: str) -> Batches:
        where = {"rank": self.runtime.rank, "world": self.runtime.world}
        noise = {"seed": self.plan.seed, "split": split}
        return eval_batches(getattr(self.splits, split), batch=self.plan.micro, **noise, **where, **self.loading())

    def loading(self) -> dict[str, Any]:
        how = {"workers": self.workers, "pin": self.pin, "device": self.runtime.device}
        return {**how, "collate": self.splits.collate, "faults": self.config.faults}

    def save(self, out: RunLog) -> None:
        """Write a checkpoint to go on from; a full disk is reported and leaves the previous one."""
        out.flush()
        self.checkpoints.save_last(
            self.step,
            {
                "step": self.step,
                "evaluated": self.evaluated,
                "info": self.task.info.to_dict(),
                "skipped": self.guard.counts.cpu(),
                "random": self.runtime.gather(random_state()),
                "next": self.upcoming(),
                "made": self.circumstances(),
            },
        )

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if there is one, and say what that promises."""
        best, state = self.checkpoints.best(), self.checkpoints.resume(self.take)
        if best is not None:  # a run that lost its last steps may have seen a better one: it is still on the disk
            self.best = best
        if state is None:
            return
        drawn = "" if self.same_world(state) else ", random states drawn anew for another number of processes"
        log.info("resuming at step %d of %d: exact state%s", self.step, self.plan.total, drawn)
        if (upcoming := self.upcoming()) is not None:
            samples = ", ".join(map(str, upcoming["samples"]))
            log.info("next: learning rate %.3g, samples %s ..", upcoming["lr"], samples)
        log.info("%s", promise(state["made"], self.circumstances()))

    def take(self, state: dict[str, Any]) -> None:
        """Go to the place in the run, and in the random numbers, that a checkpoint names.

        Raises:
            ConfigError: The data are others.
        """
        self.task.info.check_same(f"{self.folder}: its checkpoint", state["info"])
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.guard.counts.copy_(state["skipped"])
        if self.same_world(state):
            restore_random_state(state["random"][self.runtime.rank])
        else:
            seed_everything(derive(self.plan.seed, self.step, self.runtime.rank))
        if (upcoming := self.upcoming()) != state["next"] and self.runtime.main:  # the launcher ends the others
            raise ConfigError(
                f"{self.folder}: the training data has changed since step {self.step}: expected the samples "
                f"{state['next']}, found {upcoming}; restore it, or start anew with --fresh"
            )

    def same_world(self, state: dict[str, Any]) -> bool:
        return len(state["random"]) == self.runtime.world

    def upcoming(self) -> dict[str, Any] | None:
        """The learning rate and the first samples of the next step."""
        if self.step == self.plan.total:
            return None
        return {"lr": self.learning_rate(), "samples": self.sampler(self.step).samples(self.step)[:8]}

    def circumstances(self) -> dict[str, Any]:
        """What must be equal for equal bits."""
        return {
            **circumstances(self.runtime),
            "micro_batch": self.plan.micro,
            "parallel": self.config.parallel if self.runtime.world > 1 else "none",
            "compiled": self.compiled,
        }

    def faults(self) -> dict[str, int]:
        """What went wrong and was put up with so far, over all processes; skipped steps are the same in each."""
        own = torch.tensor([len(self.train_batches.unreadable), self.train_batches.died])
        unreadable, died = self.runtime.sum(*own).int().tolist()
        return {"skipped_steps": self.guard.read()[0], "unreadable_samples": unreadable, "dead_workers": died}

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say which setting to change where memory runs out, and what is kept where a disk refuses."""
        try:
            yield
        except Exception as error:
            better = explain(error, step=self.step, micro=self.plan.micro, kept=self.checkpoints.kept)
            if better is None:
                raise
            raise better from error

    def sampler(self, start: int) -> StepSampler:
        plan, where = self.plan, {"rank": self.runtime.rank, "world": self.runtime.world}
        how = {"batch": self.config.batch_size, "micro": plan.micro, "seed": plan.seed, "order": self.splits.order}
        return StepSampler(len(self.splits.train), start=start, total=plan.total, **how, **where)

    @property
    def pin(self) -> bool:
        return self.runtime.device.type == "cuda"
