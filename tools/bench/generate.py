"""Measure latency per token and memory of generation by the length of the text so far (the paper's Figure 6).

    ./run.sh bench generate RUN [RUN ..] [--lengths 256,1024,8192] [--batch 1 8] [--mode attention kv rnn]

A RUN is a run or a recipe. The results depend on shapes alone, so every model has random initial weights, and a model
with position embeddings has enough of them for the longest text. The first model is also measured with softmax
attention. `ms` is the median time of the model's call for one more token of every sequence, without sampling. The call
is compiled, except with `--eager`. In every round, all lengths and models take turns; mode attention has separate
rounds. `x shortest` is the median over rounds of the time divided by the time at the shortest length; 1 means that the
length does not matter, and - that another call measured the shortest length. `x kv` is the median ratio to softmax with
a KV cache at the same length. `state` is the memory kept from one token to the next, for all sequences. `x less` is the
size of the KV cache of softmax divided by `state`. `peak` is the memory that a call takes beyond weights and state.
`state` and `peak` count the bytes of tensors.

Results are added to `generate.md`, `generate.json` and `generate.png` in runs/bench, or in the folder `--out`.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from lion.recipe_files import find_run
from lion.runs import read_run
from lion.tasks import Task
from lion.trainer.diagnostics import tensor_peak
from tools import options
from tools.bench.collect import collect
from tools.bench.report import by_length
from tools.colours import colour_of
from tools.compose import describe_data, make_task, recipe_unless_run
from tools.generate import compile_mode
from tools.probe import check_compiler, device_name, pick_device, repeat, stamp, time_rounds, warm_up
from tools.processes import Send
from tools.store import Row, Store, digits, pipes

CALLS = 8  # calls of a step per measured time
FREE_SLOTS = 2  # free places in a cache: one for the timed token, and one as in `Continuation.generate`
SETTING = ("device", "threads", "shape", "vocabulary", "compiled")
HEADER = ["batch", "tokens", "mixer", "mode", "ms", "x shortest", "x kv", "state MiB", "x less", "peak MiB"]
STYLES = {"attention": (":", "^"), "kv": ("--", "s"), "rnn": ("-", "o")}


@dataclass(frozen=True)
class Job:
    """Settings of one measuring process, which times all models at all lengths for one batch size."""

    runs: tuple[str, ...]
    lengths: tuple[int, ...]
    modes: tuple[str, ...]
    batch: int
    rounds: int
    seconds: float
    threads: int
    eager: bool
    command: str


def main(argv: list[str]) -> int:
    args = options.bench_generate(argv)
    check_compiler(args.eager)
    models(args.runs)  # refuses bad runs before anything is measured
    report = Store(args.out / "generate.json", rows=(*SETTING, "batch", "mixer", "mode", "length")).load(args.fresh)
    if args.threads:
        torch.set_num_threads(args.threads)
    jobs = {
        f"batch {batch}": Job(
            runs=tuple(args.runs),
            lengths=args.lengths,
            modes=tuple(args.mode),
            batch=batch,
            rounds=args.rounds,
            seconds=args.seconds,
            threads=torch.get_num_threads(),
            eager=args.eager,
            command=shlex.join(["./run.sh", "bench", "generate", *argv]),
        )
        for batch in sorted(set(args.batch))
    }
    return collect(report, jobs, measure, line=line, title=title, tabled=tabled, markdown=markdown, draw=draw)


def open_task(name: str) -> tuple[Task, Any]:
    """Return the task and the `model` section of a run or a recipe.

    Raises:
        ConfigError: No run and no recipe has that name, or its task does not generate text.
    """
    if (recipe := recipe_unless_run(name)) is None:
        recipe, task, _ = read_run(find_run(name), "best")
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


def measure(job: Job, send: Send) -> None:
    """Build all states, time one more token from each state, then time the modes that recompute the whole text."""
    torch.set_num_threads(job.threads)
    device, longest = pick_device(), job.lengths[-1]
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
        for mode in (m for m in ("attention", streaming) if m in job.modes):
            send({"kind": "note", "text": f"{label}, {mode}: {'warming up' if job.eager else 'compiling'}"})
            if not job.eager:
                compile_mode(model, mode)
            states = dict.fromkeys(job.lengths) if mode == "attention" else states_of(model, tokens, job)
            for length, state in states.items():
                variant, text = Variant(label, mode, length), tokens[:, :length].expand(job.batch, -1)
                if mode == "attention":
                    once = anew[variant] = partial(recompute_logits, model, text)
                else:
                    once = streams[variant] = partial(go_on, model, text[:, -1:], state)
                warm_up(once, device)
                kept = [text] if mode == "attention" else tree_leaves(state)
                rows[variant] = about | {"mode": mode, "length": length, "peak_bytes": tensor_peak(once, device)}
                rows[variant]["state_bytes"] = sum(x.numel() * x.itemsize for x in kept)
    send({"kind": "note", "text": "timing"})
    several = {variant: partial(repeat, once, CALLS) for variant, once in streams.items()}
    times = time_rounds(several, job.rounds, job.seconds / 2, device)
    times = {variant: [t / CALLS for t in spent] for variant, spent in times.items()}
    times |= time_rounds(anew, job.rounds, job.seconds / 2, device)
    for variant, row in rows.items():
        own, first = times[variant], times[variant._replace(length=job.lengths[0])]
        cached = times.get(Variant(SOFTMAX, "kv", variant.length))
        row["ms"] = 1e3 * statistics.median(own)
        row["growth"], row["shortest"] = statistics.median(t / s for t, s in zip(own, first)), job.lengths[0]
        row["ratio"] = statistics.median(t / s for t, s in zip(own, cached)) if cached else None
        send({"kind": "row", **row})


class Variant(NamedTuple):
    """A timed case: the label of a model, a mode, and the length of the text so far."""

    label: str
    mode: str
    length: int


def states_of(model: GPT, tokens: Tensor, job: Job) -> dict[int, Any]:
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


def line(row: Row) -> str:
    """Return the progress line of a row."""
    text = f"{row['mixer']} {row['mode']}, {row['length']:,} tokens: {digits(row['ms'])} ms a token"
    return f"{text}, {row['growth']:.2f} x {row['shortest']:,} tokens, state {digits(row['state_bytes'] / 2**20)} MiB"


def title(row: Row) -> str:
    how = "compiled" if row["compiled"] else "eager"
    shape = f"{row['shape']}, vocabulary {row['vocabulary']:,}"
    return f"{shape}: {row['device']}, {row['threads']} threads, float32, {how}"


def order(row: Row) -> tuple:
    return row["batch"], row["length"], row["mixer"] != SOFTMAX, row["mixer"], [*MODES].index(row["mode"])


def cells(row: Row, cache: int | None, shortest: int) -> list[str]:
    """Return the cells of a row; `cache` is the size in bytes of the KV cache of softmax at the same length.

    Rows that were not measured beside the `shortest` length of the table have no ratio to it.
    """
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    growth = f"{row['growth']:.2f}" if row.get("shortest", shortest) == shortest else "-"
    less = "-" if cache is None else digits(cache / row["state_bytes"])
    peak = "-" if row["peak_bytes"] is None else digits(row["peak_bytes"] / 2**20)
    state = digits(row["state_bytes"] / 2**20)
    about = [str(row["batch"]), f"{row['length']:,}", row["mixer"], row["mode"]]
    return [*about, digits(row["ms"]), growth, ratio, state, less, peak]


def tabled(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    caches = {(r["batch"], r["length"]): r["state_bytes"] for r in rows if (r["mixer"], r["mode"]) == (SOFTMAX, "kv")}
    shortest = min(r["length"] for r in rows)
    return HEADER, [cells(r, caches.get((r["batch"], r["length"])), shortest) for r in sorted(rows, key=order)]


def markdown(report: Store) -> str:
    parts = ["# Generation by length", "Written by `./run.sh bench generate`.", "![curves](generate.png)"]
    parts.append(__doc__.split("\n\n")[2])
    for rows in report.groups(SETTING):
        text = pipes(*tabled(rows), text=("mixer", "mode"))
        parts += [f"## {title(rows[0])}", text, report.commands(rows)]
    return "\n\n".join(parts) + "\n"


def draw(report: Store) -> Path | None:
    """Draw `generate.png` for the setting measured last."""
    rows = report.groups(SETTING)[0]
    size = (11, 1 + 3.8 * len({row["batch"] for row in rows}))
    return report.draw(report.path.with_suffix(".png"), size, lambda fig: curves(fig, rows))


def curves(fig: Any, rows: list[Row]) -> None:
    """Plot latency and memory over length, with a row of panels for each batch size."""
    batches = sorted({row["batch"] for row in rows})
    handles = {}
    for axes, batch in zip(fig.subplots(len(batches), 2, squeeze=False), batches):
        for ax, what in zip(axes, ("latency of a token, ms", "memory beyond weights, MiB")):
            for mixer, mode in dict.fromkeys((row["mixer"], row["mode"]) for row in rows):
                own = sorted(
                    (r for r in rows if (r["mixer"], r["mode"], r["batch"]) == (mixer, mode, batch)),
                    key=lambda r: r["length"],
                )
                memory = [(r["state_bytes"] + (r["peak_bytes"] or 0)) / 2**20 for r in own]
                y = [r["ms"] for r in own] if what.startswith("latency") else memory
                (dashes, marker), label = STYLES[mode], f"{mixer}, {mode}"
                look = {"color": colour_of(mixer), "linestyle": dashes, "marker": marker, "markersize": 4}
                handles[label] = ax.plot([r["length"] for r in own], y, **look)[0]
            ticks = sorted({row["length"] for row in rows})
            ax.set(xlabel="tokens so far", title=f"{what} (batch {batch})")
            low, high = (f(y for line in ax.lines for y in line.get_ydata()) for f in (min, max))
            ax.set_ylim(min(low, high / 20) / 1.2, high * 1.2)  # a factor of 20 or more: a flat curve looks flat
            by_length(ax, ticks)
            ax.spines[["top", "right"]].set_visible(False)
    fig.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, handlelength=3.2)
    fig.suptitle(f"{title(rows[0])}, torch {rows[0]['torch']}", fontsize=10)
