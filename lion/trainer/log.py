"""What a run leaves to look at: a progress bar, `metrics.jsonl`, TensorBoard. Rank 0 only."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm

from lion.files import write_atomic
from lion.progress import progress
from lion.trainer.faults import full_disk
from lion.trainer.histogram import Histogram

log = logging.getLogger("lion")
PLACE = ("epoch", "samples", "seconds")  # of a line, beside its step


class RunLog:
    """Metrics of one run, from step `start` on: whatever an earlier process wrote past that step is cut off. The
    progress bar counts the `unit`s of `total`, from `done` on.

    An evaluation of `start` itself that will be made again (`evaluated` says it is not done) is cut off, too. A
    full disk is reported once and stops no run: lines of metrics wait in memory, TensorBoard ends with this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: float,
        done: float = 0,
        unit: str = "step",
        evaluated: bool = True,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        path = folder / "metrics.jsonl"
        kept = cut_metrics(path, lambda line: line["step"] < start + (evaluated or line["kind"] == "train"))
        self.file = open(path, "ab", buffering=0)
        self.pending = b""  # what a full disk has refused so far
        self.full = False
        self.board = SummaryWriter(str(folder), purge_step=start + evaluated)  # there, a run has its own name
        shown = dict(desc=folder.name, unit=unit, leave=True, delay=0)
        if unit == "s":  # the rate would be a second a second
            shown["bar_format"] = "{l_bar}{bar}| {n_fmt}/{total_fmt} s [{remaining} left{postfix}]"
        self.name, self.started = folder.name, False
        self.bar = progress(total=round(total), initial=round(done), **shown)
        self.redirect = logging_redirect_tqdm()
        self.redirect.__enter__()
        self.hook, threading.excepthook = threading.excepthook, self.thread_failed
        if not evaluated:
            for line in (x for x in kept if x["step"] == start):  # purged from TensorBoard with the rest of its step
                values = {k: v for k, v in line.items() if k not in ("step", "kind", *PLACE) and v is not None}
                self.scalars(start, line["kind"], values)

    def progress(self, at: float, **shown: str) -> None:
        """The run has come to this place of `total`."""
        if shown:
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update(min(round(at), self.bar.total) - self.bar.n)
        if not self.started:  # the first step compiles
            self.started = True
            self.bar.restart_clock()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Show `what` is done between steps, and leave its time out of the rate of steps."""
        self.bar.set_description(f"{self.name}, {what}", refresh=sys.stderr.isatty())
        with self.bar.paused():
            yield
        self.bar.set_description(self.name, refresh=False)

    def write(self, step: int, kind: str, values: dict[str, float], **more: Any) -> None:
        """One line of `metrics.jsonl` and one TensorBoard point a value."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # JSON has no NaN
        self.pending += (json.dumps({"step": step, "kind": kind, **more, **finite}) + "\n").encode()
        self.drain()
        self.scalars(step, kind, values)

    def drain(self) -> None:
        with self.space():
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]

    def scalars(self, step: int, kind: str, values: dict[str, float]) -> None:
        with self.space():
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def histograms(self, step: int, kind: str, values: dict[str, Histogram]) -> None:
        """Histograms for TensorBoard, which shows kinds in alphabetical order: "λ" stands behind every metric."""
        with self.space():
            for name, value in values.items():
                self.board.add_histogram_raw(f"{kind}/{name}", *value, step)

    def show(self, step: int, values: dict[str, Tensor | str]) -> None:
        """Pictures (channels, height, width) and text."""
        with self.space():
            for name, value in values.items():
                add = self.board.add_text if isinstance(value, str) else self.board.add_image
                add(name, value, step)

    def flush(self) -> None:
        """Everything so far to the disk, so that no checkpoint is ahead of its metrics."""
        self.drain()
        with self.space():
            os.fsync(self.file.fileno())
            self.board.flush()

    @contextlib.contextmanager
    def space(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not full_disk(error):
                raise
            if not self.full:
                log.warning("metrics cannot be written: %s", error)
            self.full = True

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread; what fails there is raised again by the next call, and reported there."""
        if not full_disk(args.exc_value):
            self.hook(args)

    def close(self) -> None:
        self.bar.close()
        self.redirect.__exit__(None, None, None)
        with self.space():
            self.board.close()
        self.drain()
        self.file.close()
        threading.excepthook = self.hook


class NoLog:
    """What every process but the first has in place of a `RunLog`: it writes nothing."""

    def nothing(self, *values: Any, **more: Any) -> None:
        pass

    progress = write = histograms = show = flush = close = nothing

    def pause(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cut_metrics(path: Path, keep: Callable[[dict], bool]) -> list[dict]:
    """Drop the lines that `keep` refuses, and torn ones; returns what is left."""
    kept = []
    if not path.exists():
        return kept
    for line in path.read_text(errors="replace").splitlines():
        try:
            values = json.loads(line)
            if keep(values):
                kept.append(values)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    write_atomic(path, lambda file: file.writelines((json.dumps(v) + "\n").encode() for v in kept))
    return kept
