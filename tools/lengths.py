"""Evaluation of a run at lengths other than its training length: metric and memory (the paper's Figures 5b and 9).

    ./run.sh eval RUN --lengths 256,512,1024,2048 [--form ..] [--chunk-size N] [--tokens N] [--out FOLDER]

The held-out text is one row of tokens, with documents side by side. It is cut into windows of each length; the number
of tokens used is a multiple of all lengths. Every length evaluates the same tokens, once each; only the visible context
differs. A causal model predicts every token from the tokens before it in the window (and the token before the window).
For a masked language model, the same tokens are masked at every length. A batch has as many tokens as the longest
window. A model with position embeddings cannot read windows longer than its positions; its results there are `-`.

The deviation is from the full form; with --form, windows of more than 1,024 tokens are compared with chunks.
"""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from data.text.layouts import TokenLayout
from lion.config import ConfigError
from lion.evaluation.forms import Form, form_label, forms_to_measure, measure
from lion.evaluation.lengths import HeldOut, Windows
from lion.layers.mixers.base import forms_of
from lion.recipe_files import find_run
from lion.runs import LoadedRun, open_run
from lion.samples.seeds import derive
from lion.tasks.language import LanguageTask
from lion.trainer.compilation import compile_blocks
from lion.trainer.runtime import Runtime, start_runtime
from tools.cli import choose_form, say
from tools.compose import build_data, check_data, digest, resolve_run
from tools.probe import device_name, stamp
from tools.store import Row, Store, widen
from tools.tables import digits, pipes, table

LATER = ("ema", "data", "fingerprint", "weights")  # fields that rows of earlier versions lack
SETTING = ("run", "checkpoint", "split", "tokens", "batch_tokens", "device", "threads", "precision", "compiled", *LATER)


def evaluate_lengths(args: Namespace, argv: list[str]) -> int:
    """Run the command `./run.sh eval RUN --lengths ..`."""
    recipe = resolve_run(find_run(args.run), args.overrides)
    loaded = open_run(args.run, checkpoint=args.checkpoint, ema=args.ema)
    model = loaded.model
    if not isinstance(loaded.task, LanguageTask):
        raise ConfigError(f"--lengths: {loaded.folder} reads samples of one size, expected a run on text")
    if args.form != "all":
        choose_form(model, args.form)
    forms = forms_to_measure(args.form, args.chunk_size, forms_of(model))
    if 1 not in (args.chunk_size or ()):  # single steps take too long
        forms = [each for each in forms if each != ("rnn", 1)]
    splits = build_data(recipe, loaded.folder)
    check_data(splits.info, loaded.task.info, loaded.folder)
    split = args.split or ("val" if splits.test is None else "test")
    held = getattr(splits, split)
    if not isinstance(held, TokenLayout):
        raise ConfigError(f"--split {split}: data set {recipe.data.name!r} has no such split of text")
    store = None
    if args.out:
        keys = (*SETTING, "length", "form", "chunk_size")
        store = Store(args.out / "extrapolation.json", later=LATER, rows=keys).load()
    ahead = loaded.task.info.length - model.length
    text = HeldOut.of(held.tokens.take(slice(args.tokens + ahead)), args.lengths, args.tokens, ahead)
    runtime = start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul)
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
        **stamp(shlex.join(["./run.sh", "eval", *argv])),
    }
    rows: list[Row] = []
    try:
        for length in args.lengths:
            known = 0 if args.form == "all" else length  # in one form, long text is not compared with the full form
            reference = forms_to_measure("all", args.chunk_size, forms_of(model), known)[0]
            rows += measure_length(loaded, text, length, forms, reference, about, runtime)
    finally:  # keep results measured before Ctrl-C
        if rows:
            print(f"{title(rows[0])}\n{table(*tabled(rows))}")
        if rows and store:
            for row in rows:
                store.add(row)
            with store.alone():
                store.save(markdown(store))
            print(f"\n{store.files_and(draw(store, loaded.folder.name))}")
    return 0


def measure_length(
    loaded: LoadedRun, text: HeldOut, length: int, forms: list[Form], reference: Form, about: Row, runtime: Runtime
) -> list[Row]:
    """Measure all forms at one length, and their deviation from the form `reference`.

    Returns a row per form, without values if the model has too few positions.
    """
    longest, metric, found = loaded.model.longest, loaded.task.metric, {}
    if longest is not None and length > longest:
        say(f"{length} tokens: more than the {longest} positions of this model")
    else:
        say(f"{length} tokens")
        batches = Windows(text, length, derive(loaded.recipe.seed, about["split"]))
        wanted = list(dict.fromkeys([reference, *forms]))
        found = measure(
            loaded.model, loaded.task, batches, len(batches), wanted, runtime, loaded.recipe.trainer.precision
        )
    rows = []
    for form, size in forms:
        row = {**about, "length": length, "form": form, "chunk_size": size, "shown": "-"}
        if found:
            own = found[form, size]
            row |= own | {"shown": metric.number(own["value"]), "rate": own["samples_per_second"] * length}
        rows.append(row)
    return rows


def title(row: Row) -> str:
    how = f"{row['split']}, {row['tokens']:,} tokens in batches of {row['batch_tokens']:,}, {row['precision']}"
    if row.get("data"):
        how = f"{row['data']} ({row['fingerprint']}), {how}{', averaged weights' * row['ema']}"
    return f"{row['run']} ({row['label']}, trained at {row['trained_at']:,} tokens): {how}, {row['device']}, " + (
        "compiled" if row["compiled"] else "eager"
    )


def tabled(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    body = []
    for r in sorted(rows, key=lambda r: r["length"]):  # forms stay in the order in which they were measured
        about = [f"{r['length']:,}", form_label(r["form"], r["chunk_size"]), r["shown"]]
        peak = "-" if r.get("peak_bytes") is None else digits(r["peak_bytes"] / 2**20)
        body.append([*about, *([digits(r["rate"]), peak, f"{r['deviation']:.0e}"] if "rate" in r else ["-"] * 3)])
    return ["tokens", "form", rows[0]["metric"], "tokens/s", "peak MiB", "deviation"], body


def markdown(store: Store) -> str:
    parts = ["# Text of other lengths", "Written by `./run.sh eval RUN --lengths ..`.", __doc__.split("\n\n")[2]]
    drawn = set()
    for rows in store.groups(SETTING):  # the last measurement of each run comes first, and is the one that is drawn
        picture = picture_of(store, rows[0]["run"]).name
        parts += [f"## {title(rows[0])}", *([f"![curves]({picture})"] * (picture not in drawn)), pipes(*tabled(rows))]
        parts += [store.commands(rows)]
        drawn.add(picture)
    return "\n\n".join(parts) + "\n"


def picture_of(store: Store, run: str) -> Path:
    return store.path.with_name(f"{store.path.stem}_{run}.png")


def draw(store: Store, run: str) -> Path | None:
    """Draw the results that were measured last; returns the file, or None without matplotlib."""
    rows = store.groups(SETTING)[0]
    return store.draw(picture_of(store, run), (10, 4.2), lambda fig: curves(fig, rows))


def curves(fig: Any, rows: list[Row]) -> None:
    """Plot the metric and the peak memory of a batch over the length."""
    panels = {rows[0]["metric"]: lambda r: float(r["shown"]), "peak memory of a batch, MiB": memory}
    for ax, (heading, value) in zip(fig.subplots(1, len(panels)), panels.items()):
        for form in dict.fromkeys((r["form"], r["chunk_size"]) for r in rows):
            own = [r for r in rows if (r["form"], r["chunk_size"]) == form and "rate" in r]
            own.sort(key=lambda r: r["length"])
            ax.plot([r["length"] for r in own], [value(r) for r in own], "o-", markersize=4, label=form_label(*form))
        ax.axvline(rows[0]["trained_at"], color="0.4", linestyle=":", label="trained at")
        ticks = sorted({r["length"] for r in rows})
        ax.set(xscale="log", title=heading, xlabel="tokens")
        widen(ax)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        ax.grid(True, color="0.9", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(title(rows[0]), fontsize=8)


def memory(row: Row) -> float:
    return math.nan if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
