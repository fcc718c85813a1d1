"""Logging of a run, on rank 0 only: progress bar, `metrics.jsonl`, TensorBoard and its histograms."""

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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm

from lion.files import save_text
from lion.progress import progress
from lion.trainer.faults import full_disk

log = logging.getLogger("lion")
PLACE = ("epoch", "samples", "seconds")  # keys of a line that give its place in the run, beside the step


class RunLog:
    """The log of one run, from step `start` on.

    Lines that an earlier process wrote after step `start` are removed. Evaluation lines of step `start` itself are
    removed too if that evaluation will be repeated (`evaluated` is False). The progress bar counts `total` in `unit`s,
    from `done` on. `selecting` is the name of the metric that selects the best weights.

    A full disk is reported once and does not stop the run: metrics lines wait in memory, and TensorBoard output is
    lost until the next process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: float,
        selecting: str = "",
        done: float = 0,
        unit: str = "step",
        evaluated: bool = True,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.selecting = selecting
        path = folder / "metrics.jsonl"
        kept = cut_metrics(path, lambda line: line["step"] < start + (evaluated or line["kind"] == "train"))
        self.file = open(path, "ab", buffering=0)
        self.pending = b""  # lines that a full disk has not accepted yet
        self.full = False
        self.board = SummaryWriter(str(folder), purge_step=start + evaluated)  # TensorBoard names it after its folder
        look = None
        if unit == "s":  # a rate in seconds per second would say nothing
            look = "{l_bar}{bar}| {n_fmt}/{total_fmt} s [{remaining} left{postfix}]"
        self.name = folder.name
        self.started = False
        self.bar = progress(
            total=round(total), initial=round(done), desc=folder.name, unit=unit, leave=True, delay=0, bar_format=look
        )
        self.redirect = logging_redirect_tqdm()
        self.redirect.__enter__()
        self.hook = threading.excepthook
        threading.excepthook = self.thread_failed
        if evaluated:
            return
        for line in kept:
            if line["step"] == start:  # TensorBoard has purged the whole step
                values = {k: v for k, v in line.items() if k not in ("step", "kind", *PLACE) and v is not None}
                self.scalars(start, line["kind"], values)

    def progress(self, at: float, **shown: str) -> None:
        """Move the progress bar to the place `at` of `total` and show the values `shown`."""
        if shown:
            self.bar.set_postfix(shown, refresh=False)
        place = min(round(at), self.bar.total)
        if self.started:
            self.bar.update(place - self.bar.n)
            return
        self.started = True
        self.bar.n = place
        self.bar.restart_clock()  # before the bar shows a rate, because the first step includes compilation
        self.bar.refresh()

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """Show the name of work between steps, and exclude its time from the rate of steps."""
        self.bar.set_description(f"{self.name}, {what}", refresh=sys.stderr.isatty())
        with self.bar.paused():
            yield
        self.bar.set_description(self.name, refresh=False)

    def write(self, step: int, kind: str, values: dict[str, float], **more: Any) -> None:
        """Write one line to `metrics.jsonl` and one TensorBoard point per value."""
        line = {"step": step, "kind": kind, **more}
        for name, value in values.items():
            line[name] = value if math.isfinite(value) else None  # JSON has no NaN
        self.pending += (json.dumps(line) + "\n").encode()
        self.drain()
        self.scalars(step, kind, values)

    def drain(self) -> None:
        """Write the pending lines, as far as the disk has space."""
        with self.space():
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]

    def scalars(self, step: int, kind: str, values: dict[str, float]) -> None:
        with self.space():
            for name, value in values.items():
                self.board.add_scalar(tag(kind, name, self.selecting), value, step)

    def histograms(self, step: int, values: dict[str, Histogram]) -> None:
        """Write histograms of decays to TensorBoard, which sorts them after every metric, because of the name "λ"."""
        with self.space():
            for name, value in values.items():
                self.board.add_histogram_raw(f"λ/{name}", global_step=step, **value._asdict())

    def show(self, step: int, values: dict[str, Tensor | str]) -> None:
        """Write images (channels, height, width) and texts to TensorBoard."""
        with self.space():
            for name, value in values.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, step)
                else:
                    self.board.add_image(name, value, step)

    def flush(self) -> None:
        """Flush everything to disk, so that no checkpoint is newer than its metrics."""
        self.drain()
        with self.space():
            os.fsync(self.file.fileno())
            self.board.flush()

    @contextlib.contextmanager
    def space(self) -> Iterator[None]:
        """Report a full disk once instead of raising its error."""
        try:
            yield
        except OSError as error:
            if not full_disk(error):
                raise
            if not self.full:
                log.warning("metrics cannot be written: %s", error)
            self.full = True

    def thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """Handle an uncaught error of a thread, except a full disk.

        TensorBoard writes in a thread. Its next call raises the same error again, and `space` reports a full disk.
        """
        if args.exc_value is None or not full_disk(args.exc_value):
            self.hook(args)

    def close(self) -> None:
        self.bar.close()
        self.redirect.__exit__(None, None, None)
        with self.space():
            self.board.close()
        self.drain()
        self.file.close()
        threading.excepthook = self.hook


def tag(kind: str, name: str, selecting: str = "") -> str:
    """Return the name of a value in TensorBoard, which shows groups in alphabetical order.

    The group `best` has the metric that selects the best weights, then follow `loss` and `rate`, then all others by
    kind.
    """
    if name == selecting and kind != "train":
        return f"best/{kind}_{name}"
    if name == "loss":
        return f"loss/{kind}"
    if name == "lr":
        return "rate/lr"
    return f"{kind}/{name}"


def write_results(folder: Path, step: int, result: tuple[str, str, float], settings: dict[str, Any]) -> None:
    """Write the result of a finished run to TensorBoard, as a point and, with the settings, as a row of HPARAMS.

    The table shows settings that differ between runs first. It finds them among the rows, so all runs write all
    settings, and none writes the description of the table (the first part of `hparams`).

    Args:
        folder: Folder of the run.
        step: Step of the evaluated weights.
        result: Split, name and value of the metric that selects the best weights.
        settings: Settings by their columns of the table; all but numbers are written as text.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import
    from torch.utils.tensorboard.summary import hparams

    split, metric, value = result
    name = tag(split, metric, metric)

    columns = {}
    for key, held in settings.items():
        columns[key] = held if type(held) in (int, float) else str(held)
    with contextlib.closing(SummaryWriter(str(folder), filename_suffix=".results")) as board:
        for row in hparams(columns, {name: value})[1:]:
            board._get_file_writer().add_summary(row)
        board.add_scalar(name, value, step)


class NoLog:
    """A replacement of `RunLog` in every process but the first, which writes nothing."""

    def nothing(self, *values: Any, **more: Any) -> None:
        pass

    progress = write = histograms = show = flush = close = nothing

    def pause(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cut_metrics(path: Path, keep: Callable[[dict], bool]) -> list[dict]:
    """Remove lines that `keep` rejects and lines that are not valid JSON; return the remaining lines."""
    kept: list[dict] = []
    if not path.exists():
        return kept
    for line in path.read_text(errors="replace").splitlines():
        try:
            values = json.loads(line)
            if keep(values):
                kept.append(values)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    text = "".join(json.dumps(values) + "\n" for values in kept)
    save_text(path, text)
    return kept


def bin_edges() -> list[float]:
    """Return the bin edges of TensorBoard: 0, and `1e-12 * 1.1**n` with both signs."""
    positive = [1e-12]
    while positive[-1] * 1.1 < 1e20:
        positive.append(positive[-1] * 1.1)
    negative = [-edge for edge in reversed(positive)]
    return [*negative, 0.0, *positive]


EDGES = bin_edges()


class Histogram(NamedTuple):
    """The arguments of `SummaryWriter.add_histogram_raw`."""

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[float]


def histogram(values: Tensor) -> Histogram | None:
    """Compute the histogram that `SummaryWriter.add_histogram` would make of values of any shape.

    Sums are in float64. Only the counts and statistics are copied from the device. The result is None if no value
    can be counted, for example because all values are NaN.
    """
    values = values.detach().double().flatten()
    edges = torch.tensor(EDGES, dtype=torch.float64, device=values.device)
    counts = torch.bincount(torch.bucketize(values, edges, out_int32=True, right=True), minlength=len(EDGES) + 1)
    stats = torch.stack([values.min(), values.max(), values.sum(), values.square().sum()])
    found = torch.cat([stats, counts.double()]).tolist()
    low, high, total, squares = found[:4]
    counted = found[4:-1]  # the last count is beyond all edges; counted[i] lies below EDGES[i]
    filled = [i for i, count in enumerate(counted) if count and i]
    if not filled:
        return None
    shown = slice(max(filled[0] - 1, 0), filled[-1] + 1)  # an empty bucket first, which supplies the lower limit
    return Histogram(low, high, len(values), total, squares, EDGES[shown], counted[shown])
