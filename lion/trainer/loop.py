"""The training loop, which is the same for every task."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from lion.models.base import Model
from lion.progress import announced
from lion.samples.base import Batch, Splits
from lion.samples.seeds import derive
from lion.tasks.base import Task, to_device
from lion.trainer.checkpointer import Checkpointer
from lion.trainer.compilation import compile_blocks, load_compiled, save_compiled
from lion.trainer.diagnostics import Monitor, all_finite, decay_histograms, nonfinite_steps, progress_of
from lion.trainer.evaluate import StoppableBatches, Stopped, evaluate
from lion.trainer.faults import RunError, advised_error, divergence_advice
from lion.trainer.log import NoLog, RunLog
from lion.trainer.optim import Average, Buffers, make_optimizer
from lion.trainer.parallel import TrainedModels, full, local, replicate, shard, synchronise
from lion.trainer.plan import Plan
from lion.trainer.runtime import Runtime, catch_signals, random_state, restore_random_state
from lion.trainer.state import RunData, RunState, SaveTimer, StoppedTime, TrainingClock

log = logging.getLogger("lion")


class Trainer:
    """A trainer of `model` on `task`, which resumes from the newest usable checkpoint of the run folder.

    Args:
        plan: Settings, and the lengths that follow from the settings.
        task, model, splits: Task, model and data; `splits.val` selects the best checkpoint.
        folder: Run folder; checkpoints go to `folder/checkpoints`.
        runtime: Device, rank and number of processes.
        workers: Number of data-loader processes.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        model: Model,
        splits: Splits,
        folder: Path,
        runtime: Runtime,
        *,
        workers: int = 0,
    ) -> None:
        self.plan = plan
        self.config = plan.trainer
        self.task = task
        self.folder = folder
        self.runtime = runtime
        self.model = model.to(runtime.device)
        if runtime.part is not None:
            self.model.check_split(runtime.part.count)
            self.model.part = runtime.part
        self.models = [self.model]
        self.average = None
        self.ema = None
        if self.config.ema is not None:
            self.average = Average(self.model, self.config.ema)
            self.ema = self.average.model
            self.models.append(self.ema)
        self.buffers = Buffers(self.model)
        if self.config.parallel == "fsdp" and runtime.world > 1:
            for part in self.models:
                shard(part, runtime)
        self.optimizer, self.lr_factors = make_optimizer(self.model, plan.optim)
        self.forward = replicate(self.model, runtime)
        self.data = RunData(splits, plan, runtime, workers=workers)
        self.state = RunState(folder, plan, task, self.data, runtime)
        learner = TrainedModels(self.model, self.ema, self.optimizer)
        self.checkpoints = Checkpointer(folder, learner, runtime, keep=self.config.keep_last)
        self.stopping = False  # set by a signal
        self.trained = 0.0  # seconds of the steps of this process
        self.waited: set[str] = set()  # first steps and evaluations that this process has begun
        self.stopped_time: StoppedTime | None = None  # of a run that is limited by time
        self.out: RunLog | NoLog = NoLog()

    def fit(self, started: Callable[[RunState], None] | None = None) -> bool:
        """Train to the end; return False if a signal stopped the run earlier (the state is saved).

        `started` is called before the first step, once the checkpoints of the run folder are found to fit.

        Raises:
            RunError: Training cannot continue, or the last step cannot be saved.
            ConfigError: A setting does not fit the machine or the contents of the run folder.
        """
        state = self.state
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.with_advice())
            self.prepare()
            if started is not None:
                started(state)
            resumed = state.step
            stack.enter_context(catch_signals(self))
            if self.plan.seconds is not None:
                self.stopped_time = stack.enter_context(StoppedTime())
            self.out = stack.enter_context(contextlib.closing(self.open_log()))
            loader = self.data.train(state.samples)
            batches = stack.enter_context(contextlib.closing(iter(loader)))
            try:
                complete = self.train(batches, Monitor(state, loader, self.out))
            except TorchDynamoException:  # a signal to the whole process group also stops the compiler
                if not self.stopping or self.runtime.world > 1:
                    raise
                complete = False
                if state.step:
                    self.save()
        if state.step and self.checkpoints.saved != state.step:
            raise RunError(f"step {state.step} could not be saved: {self.checkpoints.kept}")
        if state.compiled and self.runtime.main:
            save_compiled(self.config.compiled_code)
        if complete and state.step == resumed:
            log.info("the run is complete, at step %d: nothing to train; --fresh (fresh=True) starts anew", state.step)
        elif complete:
            done = state.step - resumed
            log.info("trained %d steps in %.0f s, beside compilation, evaluation and saving", done, self.trained)
        return complete

    def prepare(self) -> None:
        """Compile the models and restore the newest usable checkpoint."""
        if self.config.compile:
            load_compiled(self.config.compiled_code)
            self.state.compiled = all(
                compile_blocks(model, memory_budget=self.config.memory_budget, autotune=self.config.autotune)
                for model in self.models
            )
        kept = self.checkpoints.resume(self.state.restore)
        best = self.checkpoints.best(resumed=kept is not None)
        if best is not None:  # may be newer than the checkpoint that the run resumes from
            self.state.best = best
        if kept is not None:
            self.state.log_resume(kept)

    def open_log(self) -> RunLog | NoLog:
        state = self.state
        if not self.runtime.main:
            return NoLog()
        return RunLog(
            self.folder,
            start=state.step,
            total=self.plan.length,
            selecting=self.task.metric.name,
            done=state.at,
            unit="step" if self.plan.seconds is None else "s",
            evaluated=not state.evaluation_due,
        )

    def train(self, batches: Iterator[Batch], monitor: Monitor) -> bool:
        """Run the training loop; return False if a signal stopped the loop."""
        state = self.state
        timer = SaveTimer(self.plan.save_seconds)
        save_due = False
        complete = self.evaluate_if_due()  # a signal may have interrupted the last evaluation
        clock = TrainingClock(compiles=state.compiled, stopped=self.stopped_time)
        while complete and not state.finished:
            lr = self.set_learning_rate()
            with self.undone_without_compiler():
                loss, norm = self.train_step(batches, monitor)
            lap = clock.lap()
            self.trained += lap
            state.advance(lap)
            monitor.samples += state.taken
            self.out.progress(state.at)
            if (what := nonfinite_steps(state)) is not None:
                self.diverged(what)
            if state.due(self.config.log_every):
                monitor.report(loss, lr, norm)
            if state.due(self.plan.eval_every):
                complete = self.evaluate_if_due()
                monitor.restart()
                clock.restart()
            stop, timer_due = self.runtime.any(self.stopping, timer.due)
            last = stop or not complete or state.finished
            save_due = save_due or timer_due or state.due(self.plan.save_every)
            if last or (save_due and not state.guard.read()[1]):
                begun = time.perf_counter()
                with self.out.pause("saving"):
                    # a periodic save waits while steps are being skipped
                    self.save(beside=self.config.save_async and not last)
                monitor.saving += time.perf_counter() - begun
                timer.restart()
                clock.restart()
                save_due = False
            if stop and not state.finished:
                complete = False
        return complete

    @contextlib.contextmanager
    def undone_without_compiler(self) -> Iterator[None]:
        """Undo a step in which the compiler is stopped, so that the run can be saved as it was before the step."""
        if not self.state.compiled or self.runtime.world > 1:
            yield
            return
        before = random_state()
        try:
            yield
        except TorchDynamoException:  # in the forward or backward pass: the weights have not changed
            restore_random_state(before)
            self.buffers.put_back(torch.ones((), device=self.runtime.device))
            raise

    def set_learning_rate(self) -> float:
        """Set the learning rate of this step in every parameter group, times the factor of the group."""
        lr = self.state.learning_rate()
        for group, factor in zip(self.optimizer.param_groups, self.lr_factors):
            group["lr"] = lr * factor
        return lr

    def train_step(self, batches: Iterator[Batch], monitor: Monitor) -> tuple[Tensor, Tensor]:
        """Take one optimizer step on the global batch; return its mean loss and gradient norm.

        If loss or gradient is not finite, weights, persistent buffers and optimizer state do not change.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.buffers.keep()
        sums = self.accumulate(batches, monitor)
        if self.runtime.world > 1:
            torch.distributed.all_reduce(sums)
        loss = sums[0] / sums[1]
        # so far, gradients of the loss summed over samples and averaged over processes
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(local(gradients), (self.runtime.world / sums[1]).float())
        norm = full(nn.utils.get_total_norm(gradients))
        if self.config.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip_grad, norm)
        skipped = self.state.guard.skip(loss, norm)
        setattr(self.optimizer, "found_inf", skipped)  # noqa: B010 - read by the fused step
        self.optimizer.step()
        self.buffers.put_back(skipped)
        if self.average is not None:
            self.average.update()
        return loss, norm

    def accumulate(self, batches: Iterator[Batch], monitor: Monitor) -> Tensor:
        """Accumulate the gradients of this process's micro-batches; return the sums of loss and weight."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        passes = self.plan.passes(self.state.at)
        for micro in range(passes):
            asked = time.perf_counter()
            with self.waiting("reading the first batch"):
                batch = to_device(next(batches), self.runtime.device)
            monitor.waited += time.perf_counter() - asked
            if self.state.step == 0 and micro == 0:
                self.out.show(0, self.task.preview(self.model, batch))
            first = "compiling the first step" if self.state.compiled else "the first step"
            with synchronise(self.forward, micro == passes - 1), self.waiting(first):
                with self.runtime.autocast(self.config.precision):
                    loss, weight = self.task.loss(self.forward, batch)
                loss.backward()
            sums += torch.stack((loss.detach(), weight)).double()
        return sums

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that says what this process waits for, the first time, if it waits long."""
        if what in self.waited:
            return contextlib.nullcontext()
        self.waited.add(what)
        return announced(what)

    def evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due at this step; return False if a signal interrupted the evaluation."""
        state = self.state
        if not state.evaluation_due:
            return True
        with self.out.pause("evaluating"), self.waiting("the first evaluation"):
            return self.measure()

    def measure(self) -> bool:
        """Evaluate on the held-out splits and save the best weights; return False if a signal interrupted."""
        state = self.state
        splits = {}
        for split, batches in self.data.held_out().items():
            splits[split] = StoppableBatches(batches, lambda: self.runtime.any(self.stopping)[0])
        compute = partial(evaluate, task=self.task, runtime=self.runtime, precision=self.config.precision)
        results: dict[str, dict[str, float]] = {}
        try:
            for split, stoppable in splits.items():
                seed = derive(self.plan.seed, split)
                for kind, model in zip((split, f"{split}_ema"), self.models):
                    results[kind] = compute(model, stoppable, seed=seed)
        except Stopped:
            return False
        for kind, values in results.items():
            self.out.write(state.step, kind, values, **state.place())
        first = to_device(splits["val"].first, self.runtime.device)
        with self.runtime.seeded(derive(self.plan.seed, "val")):
            self.out.histograms(state.step, decay_histograms(self.model, first, self.task))
            self.out.show(state.step, progress_of(self.models[-1], first, self.task))
        state.evaluated = state.step
        names = [metric.name for metric in self.task.metrics if not metric.partial]
        chosen_by = [results["val"][name] for name in names]
        if "val_ema" in results:
            chosen_by += [results["val_ema"][name] for name in names]
        weights = local(list(self.model.parameters()))
        if self.runtime.any(not all_finite(chosen_by, weights))[0]:
            what = f"step {state.step}: weights, or outputs on val, are not finite"
            if state.finished:
                self.diverged(what)
            log.warning("%s: no best checkpoint", what)
        else:
            self.keep_if_best(results["val"][self.task.metric.name])
        if state.finished and (remark := self.task.remark(results["val"])) is not None:
            log.warning("val: %s", remark)
        return True

    def keep_if_best(self, value: float) -> None:
        """Save the weights if no earlier weights were better on `val`; equal later weights replace earlier weights."""
        state = self.state
        best = {"value": value, "step": state.step}
        if not self.task.metric.as_good(value, state.best["value"]) or best == state.best:
            return
        if self.checkpoints.save_best(state.step, {"step": state.step, "best": best, **state.about()}):
            state.best = best

    def save(self, *, beside: bool = False) -> None:
        """Save a checkpoint to resume from; a full disk is reported and leaves the previous checkpoint in place.

        With `beside`, training continues while the checkpoint is written.
        """
        self.out.flush()
        self.checkpoints.save_last(self.state.step, self.state.to_dict(), beside=beside)

    def diverged(self, what: str) -> NoReturn:
        if not self.runtime.main:  # every process sees the divergence, the first reports it
            sys.exit(1)
        best = self.folder if self.state.best["step"] else None
        raise RunError(f"{what}; {self.checkpoints.kept}. {divergence_advice(best)}")

    @contextlib.contextmanager
    def with_advice(self) -> Iterator[None]:
        """Replace known errors (out of memory, full disk ..) by errors with advice and the kept checkpoint."""
        try:
            yield
        except Exception as error:
            better = advised_error(error, step=self.state.step, micro=self.plan.micro, kept=self.checkpoints.kept)
            if better is None:
                raise
            raise better from error
