"""The plot `lengths.png` of `bench ops`: time and memory by sequence length; in `reports`, it is the README's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench import clock
from tools.bench.engine import column
from tools.colours import colour_of
from tools.plots import number_ticks, open_sides
from tools.store import Row

LINES = {  # (mixer, form): label in the plot
    ("sdpa", "sdpa"): "softmax (SDPA)",
    ("lion_lit", "full"): "Lion-lit, full",
    ("lion_s", "full"): "Lion-S, full",
    ("lion_s", "chunk"): "Lion-S, chunk",
    ("lion_s", "rnn"): "Lion-S, rnn",
}
ON_GPUS = {"lion_lit": "Lion-lit, GPUs", "lion_s": "Lion-S, GPUs"}  # label in the plot; the faster form at each length
PASSES = {"both": "Training", "forward": "Inference"}
STYLES = {"full": ("-", "o"), "chunk": ((0, (5, 2)), "s"), "rnn": (":", "^")}  # dashes and marker of each form


class Line(NamedTuple):
    """A line of a panel: its mixer and form, the lengths, and the values."""

    mixer: str
    form: str
    lengths: list[int]
    values: list[float]


def panels(rows: list[Row], which: str) -> dict[str, list[Line]]:
    """Return the lines of the panels of a pass, by the title of the panel.

    A line without measurements is left out. Of several chunk sizes, the one with the most lengths is drawn.
    """
    times: list[Line] = []
    memory: list[Line] = []
    for mixer, form in LINES:
        own = [row for row in rows if (row["mixer"], row["form"], row["pass"]) == (mixer, form, which)]
        if not own:
            continue
        sizes = column(own, "chunk_size")
        most = max(sizes, key=sizes.count)
        own = [row for row in own if row["chunk_size"] == most]
        times.append(Line(mixer, form, column(own, "length"), column(own, "ratio")))
        own = [row for row in own if row["peak_bytes"]]
        if own:
            values = [row["peak_bytes"] / 2**10 / (row["batch"] * row["length"]) for row in own]
            memory.append(Line(mixer, form, column(own, "length"), values))
    return {f"{PASSES[which]}: time over softmax's": times, f"{PASSES[which]}: memory, KiB a token": memory}


def fastest_on_gpus(clocked: Iterable[Row], mixer: str) -> dict[int, float]:
    """Return the time of training over softmax's by length, of the fastest form on any GPU, as `bench gpu` timed it."""
    found: dict[int, float] = {}
    for row in clocked:
        if row["name"] == mixer and not row.get("autotune"):
            ratio = row["graph"]["ratio"]
            found[row["length"]] = min(ratio, found.get(row["length"], ratio))
    return dict(sorted(found.items()))


def picture(fig: Any, rows: list[Row], folder: Path) -> None:
    """Plot time and memory over length, with the points of GPUs that `bench gpu --clock` has stored in the folder."""
    clocked = list(clock.ClockReport(folder).load().rows.values())
    lengths = sorted(set(column(rows, "length")))
    labelled = {}
    for axes, which in zip(fig.subplots(2, 2, sharex=True), PASSES):
        for ax, (title, lines) in zip(axes, panels(rows, which).items()):
            for line in lines:
                label = LINES[line.mixer, line.form]
                dashes, marker = STYLES.get(line.form, ("-", ""))
                look = {"color": colour_of(line.mixer), "linestyle": dashes, "marker": marker, "markersize": 4}
                labelled[label] = ax.plot(line.lengths, line.values, label=label, **look)[0]
            if lines:
                ax.set_yscale("log")
            ax.set_title(title, fontsize=10)
            number_ticks(ax, lengths, rotation=45, fontsize=8)
            ax.yaxis.set_major_formatter("{x:,g}")
            ax.grid(True, color="0.88", linewidth=0.7)
            open_sides(ax)
        if which == "both":
            for mixer, label in ON_GPUS.items():
                points = fastest_on_gpus(clocked, mixer)
                if points:
                    look = {"color": colour_of(mixer), "linestyle": "", "marker": "*", "markersize": 9}
                    labelled[label] = axes[0].plot(points.keys(), points.values(), **look)[0]
    fig.supxlabel("tokens", fontsize=10)
    title = "Linear attention beside softmax attention (PyTorch's SDPA)\n"
    title += f"{rows[0]['device']}, {rows[0]['threads']} threads, {rows[0]['dtype']}"
    names = sorted({row["device"] for row in clocked if row["name"] in ON_GPUS})
    if names:
        title += f"; stars: {' and '.join(names)}, bfloat16"
    fig.suptitle(title, fontsize=10)
    fig.legend(labelled.values(), labelled.keys(), loc="outside right center", frameon=False, handlelength=3.2)
