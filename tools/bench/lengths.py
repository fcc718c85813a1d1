"""The plot `lengths.png` of `bench ops`: time and memory by sequence length; in `reports`, it is the README's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench import clock
from tools.bench.report import STYLES, Report
from tools.colours import colour_of
from tools.store import Row

LINES = {  # (mixer, form): label in the plot, and colour
    ("sdpa", "sdpa"): ("softmax (SDPA)", colour_of("sdpa")),
    ("lion_lit", "full"): ("Lion-lit, full", colour_of("lion_lit")),
    ("lion_s", "full"): ("Lion-S, full", colour_of("lion_s")),
    ("lion_s", "chunk"): ("Lion-S, chunk", colour_of("lion_s")),
    ("lion_s", "rnn"): ("Lion-S, rnn", colour_of("lion_s")),
}
ON_GPUS = {"lion_lit": "Lion-lit, GPUs", "lion_s": "Lion-S, GPUs"}  # label in the plot; the faster form at each length
PASSES = {"both": "Training", "forward": "Inference"}


def draw(report: Report) -> Path | None:
    """Draw `lengths.png` beside the report, for the widest setting; return the file, or None without matplotlib.

    Points of GPUs are those that `bench clock` has stored in the same folder.
    """
    path = report.path.with_name("lengths.png")
    clocked = list(clock.Report(report.path.parent).load().rows.values())
    return report.draw(path, (9, 5.2), lambda fig: picture(fig, report.widest(), clocked))


def panels(rows: list[Row], which: str) -> dict[str, list[tuple[tuple[str, str], list[int], list[float]]]]:
    """Return the lines of each panel, by the title of the panel: (mixer, form), lengths and values.

    A line without measurements is left out. Of several chunk sizes, the one with the most lengths is drawn.
    """
    found = {f"{PASSES[which]}: time over softmax's": [], f"{PASSES[which]}: memory, KiB a token": []}
    for line in LINES:
        own = [r for r in rows if (r["mixer"], r["form"]) == line and r["pass"] == which]
        sizes = [r["chunk_size"] for r in own]
        own = [r for r in own if r["chunk_size"] == max(sizes, key=sizes.count)]
        ratios = [(r["length"], r["ratio"]) for r in own]
        memory = [(r["length"], r["peak_bytes"] / 2**10 / (r["batch"] * r["length"])) for r in own if r["peak_bytes"]]
        for lines, points in zip(found.values(), (ratios, memory)):
            if points:
                lines.append((line, *map(list, zip(*points))))
    return found


def fastest_on_gpus(clocked: list[Row], mixer: str) -> dict[int, float]:
    """Return the time of training over softmax's by length, of the fastest form on any GPU, as `bench clock` has it."""
    found: dict[int, float] = {}
    for row in clocked:
        if row["name"] == mixer and not row.get("autotune"):
            ratio = row["graph"]["ratio"]
            found[row["length"]] = min(ratio, found.get(row["length"], ratio))
    return dict(sorted(found.items()))


def picture(fig: Any, rows: list[Row], clocked: list[Row]) -> None:
    lengths = sorted({r["length"] for r in rows})
    labelled = {}
    for axes, which in zip(fig.subplots(2, 2, sharex=True), PASSES):
        for ax, (title, lines) in zip(axes, panels(rows, which).items()):
            for line, x, y in lines:
                label, colour = LINES[line]
                dashes, marker = STYLES.get(line[1], ("-", ""))
                (labelled[label],) = ax.plot(
                    x, y, label=label, color=colour, linestyle=dashes, marker=marker, markersize=4
                )
            ax.set(xscale="log", yscale="log" if lines else "linear")
            ax.set_title(title, fontsize=10)
            ax.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45, fontsize=8)
            ax.minorticks_off()
            ax.yaxis.set_major_formatter("{x:,g}")
            ax.grid(True, color="0.88", linewidth=0.7)
            ax.spines[["top", "right"]].set_visible(False)
        if which == "both":
            for mixer, label in ON_GPUS.items():
                points = fastest_on_gpus(clocked, mixer)
                if points:
                    (labelled[label],) = axes[0].plot(
                        points.keys(), points.values(), color=colour_of(mixer), linestyle="", marker="*", markersize=9
                    )
    fig.supxlabel("tokens", fontsize=10)
    title = f"Linear attention beside softmax attention (PyTorch's SDPA)\n{where(rows[0])}"
    names = sorted({row["device"] for row in clocked if row["name"] in ON_GPUS})
    if names:
        title += f"; stars: {' and '.join(names)}, bfloat16"
    fig.suptitle(title, fontsize=10)
    fig.legend(labelled.values(), labelled.keys(), loc="outside right center", frameon=False, handlelength=3.2)


def where(row: Row) -> str:
    """Return the machine and the dtype of a row."""
    return f"{row['device']}, {row['threads']} threads, {row['dtype']}"
