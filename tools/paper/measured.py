"""Plots of the papers' figures from other reports: accuracy by speed, time and memory by resolution."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lion.files import read_json
from tools.colours import SOFTMAX, colour_of
from tools.paper.parts import Part
from tools.plots import number_ticks, tidy
from tools.store import Row

RATIOS = (0.3, 0.5, 1, 2, 5, 10, 20)  # ticks
FORM = {"chunk": ("-", "o"), "rnn": ("--", "s"), "full": (":", "^")}


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a report; an empty list if there is no such report."""
    if not path.is_file():
        return []
    return read_json(path)["rows"]


def on_gpu(row: Row) -> bool:
    """Return whether a row was measured on a GPU."""
    return (row["device"] or "").startswith("NVIDIA")


def step_times(reports: Path) -> dict[str, float]:
    """Return the time of a training step on a CPU, at DeiT-S's width and 224 px, relative to DeiT-S, by mixer."""
    found = {}
    for row in sorted(rows_of(reports / "train.json"), key=lambda row: row["date"]):
        if on_gpu(row):
            continue
        if (row["model"], row["size"]) != ("vit", 224) or not row["shape"].startswith("dim 384"):
            continue
        mixer = row["mixer"].removesuffix(" with positions")
        beside = row.get("against")
        if beside is None:
            found[mixer] = row["ratio"]
        elif row["mixer"] != "softmax":
            found[mixer] = beside["ratio"]
    return found


def speed(fig: Any, part: Part, times: Mapping[str, float]) -> None:
    """Plot accuracy by the time of a training step relative to softmax: the paper's (Table 2, right), and ours.

    Args:
        fig: The figure.
        part: The table, with the columns `top-1 small`, `time small`, and those of `base`.
        times: Our times by row.
    """
    left, right = fig.subplots(1, 2)
    for row in part.table.rows:
        for size, marker in (("small", "o"), ("base", "s")):
            x = part.table.printed(row, f"time {size}")
            y = part.table.printed(row, f"top-1 {size}")
            if x and y:
                point(left, row, x[0], y[0], marker)
    for row, found in part.results.values.items():
        if found and row in times:
            point(right, row, times[row], statistics.mean(found.values()), "o")
    left.set_title("paper: ImageNet-1k, GPU; small (o), base (squares)", fontsize=9)
    right.set_title("here: accuracy of small runs, times of DeiT-S's width on 2 CPU cores", fontsize=9)
    number_ticks(left, [0.7, 1, 2, 5, 10])
    for ax in (left, right):
        ax.set(xlabel="time of a training step / softmax", ylabel="top-1 %")
        tidy(ax)


def inference(fig: Any, rows: list[Row]) -> None:
    """Plot memory and time of inference by resolution, relative to softmax in the same shape (Figures 3 and 10)."""
    axes = fig.subplots(1, 2)
    drawn: set[int] = set()
    softmax = {}
    lines: dict[tuple[str, str], dict[int, Row]] = {}  # the rows of a run and a form, by size
    for row in rows:
        if "random_weights" not in row["run"] or row["batch"] != 1 or row["unit"] != "px":
            continue
        if row["form"] == "softmax":
            softmax[row["run"], row["size"], row["compiled"]] = row
        if row["form"] in FORM and row["chunk_size"] in (None, 64):
            lines.setdefault((row["run"], row["form"]), {})[row["size"]] = row
    runs = dict.fromkeys(row["run"] for row in rows)
    for run in runs:
        for form, (dashes, marker) in FORM.items():
            made = lines.get((run, form), {})
            if len(made) < 2:
                continue
            sizes = []
            memory = []
            times = []
            for size, row in sorted(made.items()):
                beside = softmax.get((run, size, row["compiled"]))
                if beside:
                    sizes.append(size)
                    memory.append(row["peak_bytes"] / beside["peak_bytes"])
                    times.append(row["ratio"])
            drawn.update(sizes)
            mixer = row["mixer"]
            look = {"linestyle": dashes, "marker": marker, "color": colour_of(mixer), "markersize": 4}
            axes[0].plot(sizes, memory, **look)
            axes[1].plot(sizes, times, label=f"{mixer}, {form}", **look)
    for ax, title in zip(axes, ("peak memory", "time")):
        ax.axhline(1, color=SOFTMAX, linewidth=0.8)
        ax.set(yscale="log", xlabel="px", title=f"{title} / softmax of the same shape")
        ax.set_yticks(RATIOS, list(map(str, RATIOS)))
        number_ticks(ax, sorted(drawn), fontsize=7, rotation=45)
        tidy(ax)
    fig.legend(loc="outside right center", frameon=False, fontsize=8)


def point(ax: Any, row: str, x: float, y: float, marker: str) -> None:
    filling = None
    if "multiscan" in row:
        filling = "white"
    ax.plot(x, y, marker, color=colour_of(row), markerfacecolor=filling)
    ax.annotate(row, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
