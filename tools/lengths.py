"""Evaluation of a run at lengths other than its training length: metric and memory (the paper's Figures 5b and 9).

    ./run.sh eval RUN --lengths 256,512,1024,2048 [--form ..] [--chunk-size N] [--tokens N] [--out FOLDER]

The deviation is from the full form; with --form, windows of more than 1,024 tokens are compared with chunks.
"""

from __future__ import annotations

import math
from argparse import Namespace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from data.text.layouts import TokenLayout
from lion.config import ConfigError
from lion.evaluation.forms import Form, form_label, forms_to_measure, measure
from lion.evaluation.lengths import HeldOut, Windows
from lion.layers.mixers.base import forms_of
from lion.runs import LoadedRun
from lion.samples.seeds import derive
from lion.tasks.language import LanguageTask
from lion.trainer.compilation import compile_blocks
from lion.trainer.runtime import Runtime
from tools.bench.engine import ReportOfRuns, typed
from tools.cli import choose_form, say
from tools.compose import build_data, check_data, digest, runtime_of
from tools.plots import number_ticks, tidy, widen
from tools.probe import device_name, stamp
from tools.store import Row
from tools.tables import Cell, Table, digits, fill, mebibytes

LATER = ("ema", "data", "fingerprint", "weights")  # fields that rows of earlier versions lack
SETTING = ("run", "checkpoint", "split", "tokens", "batch_tokens", "device", "threads", "precision", "compiled", *LATER)

LEGEND = """\
The held-out text is one row of tokens, with documents side by side. It is cut into windows of each length; the number
of tokens used is a multiple of all lengths. Every length evaluates the same tokens, once each; only the visible context
differs. A causal model predicts every token from the tokens before it in the window (and the token before the window).
For a masked language model, the same tokens are masked at every length. A batch has as many tokens as the longest
window. A model with position embeddings cannot read windows longer than its positions; its results there are `-`."""


class LengthsReport(ReportOfRuns):
    """The results of runs by length."""

    name = "extrapolation"
    heading = "Text of other lengths"
    command = "eval RUN --lengths .."
    legend = LEGEND
    setting = SETTING
    key = (*SETTING, "length", "form", "chunk_size")
    later = LATER
    inches = (10, 4.2)

    def title(self, row: Row) -> str:
        how = f"{row['split']}, {row['tokens']:,} tokens in batches of {row['batch_tokens']:,}, {row['precision']}"
        if row.get("data"):
            how = f"{row['data']} ({row['fingerprint']}), {how}"
            if row["ema"]:
                how += ", averaged weights"
        compiled = "eager"
        if row["compiled"]:
            compiled = "compiled"
        trained = f"trained at {row['trained_at']:,} tokens"
        return f"{row['run']} ({row['label']}, {trained}): {how}, {row['device']}, {compiled}"

    def tabled(self, rows: list[Row]) -> Table:
        """Return the table of rows by length; forms stay in the order in which they were measured."""
        columns: dict[str, Cell] = {
            "tokens": lambda row: f"{row['length']:,}",
            "form": form_of,
            rows[0]["metric"]: lambda row: row["shown"],
            "tokens/s": rate_cell,
            "peak MiB": lambda row: mebibytes(row.get("peak_bytes")),
            "deviation": deviation_cell,
        }
        return fill(columns, sorted(rows, key=itemgetter("length")))

    def plot(self, figure: Any, rows: list[Row]) -> None:
        """Plot the metric and the peak memory of a batch over the length."""
        rows = sorted(rows, key=itemgetter("length"))
        ticks = sorted({row["length"] for row in rows})
        lines: dict[str, list[Row]] = {}
        for row in rows:
            line = lines.setdefault(form_of(row), [])
            if "rate" in row:
                line.append(row)
        panels = {rows[0]["metric"]: lambda row: float(row["shown"]), "peak memory of a batch, MiB": memory}
        for ax, (heading, value) in zip(figure.subplots(1, len(panels)), panels.items()):
            for form, own in lines.items():
                ax.plot([row["length"] for row in own], [value(row) for row in own], "o-", markersize=4, label=form)
            ax.axvline(rows[0]["trained_at"], color="0.4", linestyle=":", label="trained at")
            ax.set(title=heading, xlabel="tokens")
            widen(ax)
            number_ticks(ax, ticks)
            tidy(ax)
        figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.suptitle(self.title(rows[0]), fontsize=8)


def evaluate_lengths(loaded: LoadedRun, args: Namespace, argv: list[str]) -> int:
    """Run the command `./run.sh eval RUN --lengths ..`."""
    recipe = loaded.recipe
    model = loaded.model
    if not isinstance(loaded.task, LanguageTask):
        raise ConfigError(f"--lengths: {loaded.folder} reads samples of one size, expected a run on text")
    choose_form(model, args.form)
    forms = forms_to_measure(args.form, args.chunk_size, forms_of(model))
    if 1 not in (args.chunk_size or ()):  # single steps take too long
        forms = [each for each in forms if each != ("rnn", 1)]
    splits = build_data(recipe, loaded.folder)
    check_data(splits.info, loaded.task.info, loaded.folder)
    split = args.split or splits.reported
    held = getattr(splits, split)
    if not isinstance(held, TokenLayout):
        raise ConfigError(f"--split {split}: data set {recipe.data.name!r} has no such split of text")
    report = LengthsReport(args.out or Path())
    if args.out:
        report.load()
    ahead = loaded.task.info.length - model.length
    text = HeldOut.of(held.tokens.take(slice(args.tokens + ahead)), args.lengths, args.tokens, ahead)
    runtime = runtime_of(recipe)
    model.to(runtime.device)
    compiled = recipe.trainer.compile and not args.eager and compile_blocks(model)
    about = {
        "run": loaded.folder.name,
        "label": recipe.model.label(),
        "metric": loaded.task.metric.heading,
        "trained_at": model.length,
        "checkpoint": args.checkpoint,
        "split": split,
        "tokens": text.count,
        "batch_tokens": args.lengths[-1],
        "ema": args.ema,
        "data": recipe.data.describe(),
        "fingerprint": splits.fingerprint,
        "weights": digest(model),
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "precision": recipe.trainer.precision,
        "compiled": compiled,
        **stamp(typed("eval", argv)),
    }
    try:
        for length in args.lengths:
            known = 0 if args.form == "all" else length  # in one form, long text is not compared with the full form
            reference = forms_to_measure("all", args.chunk_size, forms_of(model), known)[0]
            for row in measure_length(loaded, text, length, forms, reference, about, runtime):
                report.add(row)
    finally:  # keep results measured before Ctrl-C
        if report.new:
            print(report.terminal())
        if report.new and args.out:
            report.write()
            print(f"\n{report.files_and(*report.pictures())}")
    return 0


def measure_length(
    loaded: LoadedRun, text: HeldOut, length: int, forms: list[Form], reference: Form, about: Row, runtime: Runtime
) -> list[Row]:
    """Measure all forms at one length, and their deviation from the form `reference`.

    Returns a row per form, without values if the model has too few positions.
    """
    longest, metric = loaded.model.longest, loaded.task.metric
    found: dict[Form, Any] = {}
    if longest is not None and length > longest:
        say(f"{length} tokens: more than the {longest} positions of this model")
    else:
        say(f"{length} tokens")
        batches = Windows(text, length, derive(loaded.recipe.seed, about["split"]))
        wanted = list(dict.fromkeys([reference, *forms]))
        precision = loaded.recipe.trainer.precision
        found = measure(loaded.model, loaded.task, batches, len(batches), wanted, runtime, precision)
    rows = []
    for form, size in forms:
        row = about | {"length": length, "form": form, "chunk_size": size, "shown": "-"}
        if found:
            own = found[form, size]
            row |= own | {"shown": metric.number(own["value"]), "rate": own["samples_per_second"] * length}
        rows.append(row)
    return rows


def form_of(row: Row) -> str:
    return form_label(row["form"], row["chunk_size"])


def rate_cell(row: Row) -> str:
    if "rate" not in row:
        return "-"
    return digits(row["rate"])


def deviation_cell(row: Row) -> str:
    if "rate" not in row:
        return "-"
    return f"{row['deviation']:.0e}"


def memory(row: Row) -> float:
    if row["peak_bytes"] is None:
        return math.nan
    return row["peak_bytes"] / 2**20
