"""Measure latency per token and memory of generation by the length of the text so far (the paper's Figure 6).

./run.sh bench generate RUN [RUN ..] [--lengths 256,1024,8192] [--batch 1 8] [--mode attention kv rnn]
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lion.config import ConfigError
from lion.inference.text import MODES, PIECE, streaming_mode
from lion.layers.mixers import SOFTMAX
from lion.layers.mixers.softmax import reserve
from lion.models.gpt import GPT
from lion.recipe import load_recipe
from lion.recipe_files import RECIPE, find_run
from lion.runs import read_run
from lion.tasks import Task
from lion.trainer.diagnostics import tensor_peak
from tools import options
from tools.bench.engine import Report, collect, column, job_of, preparation, typed
from tools.colours import colour_of
from tools.compose import describe_data, make_task, recipe_unless_run
from tools.generate import compile_mode
from tools.plots import by_length, open_sides
from tools.probe import (
    check_compiler,
    device_name,
    pick_device,
    ratios,
    repeat,
    stamp,
    time_rounds,
    use_threads,
    warm_up,
)
from tools.processes import Send
from tools.store import Row, grouped
from tools.tables import Table, digits, fill, hundredths, mebibytes

CALLS = 8  # calls of a step per measured time
FREE_SLOTS = 2  # free places in a cache: one for the timed token, and one as in `Continuation.generate`
SETTING = ("device", "threads", "shape", "vocabulary", "compiled")
LEGEND = """\
A RUN is a run or a recipe. The results depend on shapes alone, so every model has random initial weights, and a model
with position embeddings has enough of them for the longest text. The first model is also measured with softmax
attention. `ms` is the median time of the model's call for one more token of every sequence, without sampling. The call
is compiled, except with `--eager`. In every round, all lengths and models take turns; mode attention has separate
rounds. `x shortest` is the median over rounds of the time divided by the time at the shortest length; 1 means that the
length does not matter, and - that another call measured the shortest length. `x kv` is the median ratio to softmax with
a KV cache at the same length. `state` is the memory kept from one token to the next, for all sequences. `x less` is the
size of the KV cache of softmax divided by `state`. `peak` is the memory that a call takes beyond weights and state.
`state` and `peak` count the bytes of tensors."""
STYLES = {"attention": (":", "^"), "kv": ("--", "s"), "rnn": ("-", "o")}


class GenerateReport(Report):
    """Rows of models by mode and length of the text so far."""

    name = "generate"
    heading = "Generation by length"
    command = "bench generate"
    legend = LEGEND
    setting = SETTING
    key = (*SETTING, "batch", "mixer", "mode", "length")

    def line(self, row: Row) -> str:
        text = f"{row['mixer']} {row['mode']}, {row['length']:,} tokens: {digits(row['ms'])} ms a token"
        return f"{text}, {row['growth']:.2f} x {row['shortest']:,} tokens, state {mebibytes(row['state_bytes'])} MiB"

    def title(self, row: Row) -> str:
        how = "eager"
        if row["compiled"]:
            how = "compiled"
        shape = f"{row['shape']}, vocabulary {row['vocabulary']:,}"
        return f"{shape}: {row['device']}, {row['threads']} threads, float32, {how}"

    def tabled(self, rows: list[Row]) -> Table:
        caches = {}
        for row in rows:
            if (row["mixer"], row["mode"]) == (SOFTMAX, "kv"):
                caches[row["batch"], row["length"]] = row["state_bytes"]
        shortest = min(column(rows, "length"))

        def growth(row: Row) -> str:
            if row.get("shortest", shortest) != shortest:
                return "-"
            return f"{row['growth']:.2f}"

        def less(row: Row) -> str:
            cache = caches.get((row["batch"], row["length"]))
            if cache is None:
                return "-"
            return digits(cache / row["state_bytes"])

        columns = {
            "batch": lambda row: str(row["batch"]),
            "tokens": lambda row: f"{row['length']:,}",
            "mixer": lambda row: row["mixer"],
            "mode": lambda row: row["mode"],
            "ms": lambda row: digits(row["ms"]),
            "x shortest": growth,
            "x kv": lambda row: hundredths(row["ratio"]),
            "state MiB": lambda row: mebibytes(row["state_bytes"]),
            "x less": less,
            "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
        }
        return fill(columns, sorted(rows, key=order))

    def intro(self) -> list[str]:
        *heading, legend = super().intro()
        return [*heading, "![curves](generate.png)", legend]

    def pictures(self) -> list[Path | None]:
        """Draw `generate.png` for the setting measured last."""
        rows = self.groups(SETTING)[0]
        batches = set(column(rows, "batch"))
        title = f"{self.title(rows[0])}, torch {rows[0]['torch']}"
        path = self.path.with_suffix(".png")
        return [self.draw(path, (11, 1 + 3.8 * len(batches)), partial(curves, rows=rows, title=title))]


def main(argv: list[str]) -> int:
    args = options.read("bench generate", argv)
    check_compiler(args.eager)
    models(args.runs)  # refuses bad runs before anything is measured
    report = GenerateReport(args.out).load(args.fresh)
    args.threads = use_threads(args.threads)
    args.command = typed("bench generate", argv)
    jobs = {}
    for batch in sorted(set(args.batch)):
        jobs[f"batch {batch}"] = job_of(args, batch=batch)
    return collect(report, jobs, measure)


def open_task(name: str) -> tuple[Task, Any]:
    """Return the task and the `model` section of a run or a recipe.

    Raises:
        ConfigError: No run and no recipe has that name, or its task does not generate text.
    """
    recipe = recipe_unless_run(name)
    if recipe is None:
        folder = find_run(name)
        recipe = load_recipe(folder / RECIPE)
        task, _ = read_run(folder, recipe, "best")
    else:
        task = make_task(recipe, describe_data(recipe, look=False)[0])
    if not issubclass(task.Model, GPT):
        raise ConfigError(f"{name}: task {recipe.task.name!r} does not generate text, expected causal_lm")
    return task, recipe.model


def models(runs: Sequence[str]) -> dict[str, tuple[Task, Any]]:
    """Return the task and the `model` section of each run by label, after those of the first run with softmax.

    Raises:
        ConfigError: The runs differ in shape or vocabulary.
    """
    found, shapes = {}, {}
    for name in runs:
        task, config = open_task(name)
        shapes[name] = f"{config.shape()}, vocabulary {task.info.vocabulary:,}"
        if shapes[name] != shapes[runs[0]]:
            raise ConfigError(f"{name}: expected one shape, got {shapes[name]}; {runs[0]} has {shapes[runs[0]]}")
        if config.label() in found:
            raise ConfigError(f"{name}: a second {config.label()}; omit one")
        found[config.label()] = task, config
    task, config = open_task(runs[0])
    return {SOFTMAX: (task, config.with_mixer(SOFTMAX))} | found


def measure(job: Namespace, send: Send) -> None:
    """Build all states, time one more token from each state, then time the modes that recompute the whole text."""
    torch.set_num_threads(job.threads)
    device = pick_device()
    longest = job.lengths[-1]
    streams: dict[Variant, Callable[[], Tensor]] = {}
    anew: dict[Variant, Callable[[], Tensor]] = {}
    rows: dict[Variant, Row] = {}
    for label, (task, config) in models(job.runs).items():
        task = type(task)(task.config, task.info.resized(longest + 2))  # one more token, and one to predict
        model = task.build_model(config).eval().to(device)
        streaming = streaming_mode(model)
        tokens = torch.randint(model.vocabulary, (1, longest), device=device)
        about = {
            "device": device_name(),
            "threads": job.threads,
            "shape": config.shape(),
            "vocabulary": model.vocabulary,
            "compiled": not job.eager,
            "batch": job.batch,
            "mixer": label,
            **stamp(job.command),
        }
        for mode in ("attention", streaming):
            if mode not in job.mode:
                continue
            send({"kind": "note", "text": f"{label}, {mode}: {preparation(job.eager)}"})
            if not job.eager:
                compile_mode(model, mode)
            states: dict[int, Any] = dict.fromkeys(job.lengths)
            if mode != "attention":
                states = states_of(model, tokens, job)
            for length, state in states.items():
                variant = Variant(label, mode, length)
                text = tokens[:, :length].expand(job.batch, -1)
                if mode == "attention":
                    once = anew[variant] = partial(recompute_logits, model, text)
                    kept = [text]
                else:
                    once = streams[variant] = partial(go_on, model, text[:, -1:], state)
                    kept = tree_leaves(state)
                warm_up(once, device)
                row = {"mode": mode, "length": length, "peak_bytes": tensor_peak(once, device)}
                row["state_bytes"] = sum(x.numel() * x.itemsize for x in kept)
                rows[variant] = about | row
    send({"kind": "note", "text": "timing"})
    several = {variant: partial(repeat, once, CALLS) for variant, once in streams.items()}
    times = time_rounds(several, job.rounds, job.seconds / 2, device)
    times = {variant: [t / CALLS for t in spent] for variant, spent in times.items()}
    times |= time_rounds(anew, job.rounds, job.seconds / 2, device)
    for variant, row in rows.items():
        own = times[variant]
        first = times[variant._replace(length=job.lengths[0])]
        cached = times.get(Variant(SOFTMAX, "kv", variant.length))
        row["ms"] = 1e3 * statistics.median(own)
        row["growth"] = statistics.median(ratios(own, first))
        row["shortest"] = job.lengths[0]
        row["ratio"] = None
        if cached:
            row["ratio"] = statistics.median(ratios(own, cached))
        send({"kind": "row", "row": row})


class Variant(NamedTuple):
    """A timed case: the label of a model, a mode, and the length of the text so far."""

    label: str
    mode: str
    length: int


def states_of(model: GPT, tokens: Tensor, job: Namespace) -> dict[int, Any]:
    """Return the state after each length of a text (1, L), repeated for all sequences of a batch."""
    states, state, done = {}, model.initial_state(1), 0
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for length in job.lengths:
            for piece in tokens[:, done:length].split(PIECE, 1):
                _, state = model.encode_next(piece, state)
            states[length] = reserve(tree_map(lambda x: x.repeat_interleave(job.batch, 0), state), FREE_SLOTS)
            done = length
    return states


@torch.inference_mode()
def recompute_logits(model: GPT, text: Tensor) -> Tensor:
    """Return the logits after texts (B, L), recomputed from the whole text as in mode attention."""
    return model.logits(model.encode(text)[:, -1:])


@torch.inference_mode()
def go_on(model: GPT, token: Tensor, state: Any) -> Tensor:
    """Return the logits after one more token (B, 1); every call writes to the same place of a cache."""
    return model.step(token, state)[0]


def order(row: Row) -> tuple:
    return row["batch"], row["length"], row["mixer"] != SOFTMAX, row["mixer"], [*MODES].index(row["mode"])


def curves(fig: Any, rows: list[Row], title: str) -> None:
    """Plot latency and memory over length, with a row of panels for each batch size."""
    batches = sorted(set(column(rows, "batch")))
    lengths = sorted(set(column(rows, "length")))
    handles = {}
    for (left, right), batch in zip(fig.subplots(len(batches), 2, squeeze=False), batches):
        left.set(title=f"latency of a token, ms (batch {batch})")
        right.set(title=f"memory beyond weights, MiB (batch {batch})")
        for own in grouped(sorted(rows, key=order), ("batch", "mixer", "mode")):
            mixer, mode = own[0]["mixer"], own[0]["mode"]
            if own[0]["batch"] != batch:
                continue
            dashes, marker = STYLES[mode]
            look = {"color": colour_of(mixer), "linestyle": dashes, "marker": marker, "markersize": 4}
            at = column(own, "length")
            memory = [(row["state_bytes"] + (row["peak_bytes"] or 0)) / 2**20 for row in own]
            handles[f"{mixer}, {mode}"] = left.plot(at, column(own, "ms"), **look)[0]
            right.plot(at, memory, **look)
        for ax in (left, right):
            ax.set(xlabel="tokens so far")
            values = [y for line in ax.lines for y in line.get_ydata()]
            low, high = min(values), max(values)
            ax.set_ylim(min(low, high / 20) / 1.2, high * 1.2)  # a factor of 20 or more: a flat curve looks flat
            by_length(ax, lengths)
            open_sides(ax)
    fig.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, handlelength=3.2)
    fig.suptitle(title, fontsize=10)
