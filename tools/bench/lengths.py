"""The plot `lengths.png` of `bench ops`: time and memory by sequence length; in `reports`, it is the README's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
PASSES = {"both": "Training", "forward": "Inference"}


def draw(report: Report) -> Path | None:
    """Draw `lengths.png` beside the report, for the widest setting; return the file, or None without matplotlib."""
    path = report.path.with_name("lengths.png")
    return report.draw(path, (9, 5), lambda fig: picture(fig, report.widest()))


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


def picture(fig: Any, rows: list[Row]) -> None:
    lengths = sorted({r["length"] for r in rows})
    for axes, which in zip(fig.subplots(2, 2, sharex=True), PASSES):
        for ax, (title, lines) in zip(axes, panels(rows, which).items()):
            for line, x, y in lines:
                (label, colour), (dashes, marker) = LINES[line], STYLES.get(line[1], ("-", ""))
                ax.plot(x, y, label=label, color=colour, linestyle=dashes, marker=marker, markersize=4)
            ax.set(xscale="log", yscale="log" if lines else "linear")
            ax.set_title(title, fontsize=10)
            ax.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45, fontsize=8)
            ax.minorticks_off()
            ax.yaxis.set_major_formatter("{x:,g}")
            ax.grid(True, color="0.88", linewidth=0.7)
            ax.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("tokens", fontsize=10)
    fig.suptitle("Linear attention beside softmax attention (PyTorch's SDPA)", fontsize=11)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, handlelength=3.2)
