"""Plots of the papers' figures from other reports: accuracy by speed, time and memory by resolution."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.colours import SOFTMAX, colour_of
from tools.store import Row, tidy

FORM = {"chunk": ("-", "o"), "rnn": ("--", "s"), "full": (":", "^")}


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a report; an empty list if there is no such report."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def on_gpu(row: Row) -> bool:
    """Return whether a row was measured on a GPU."""
    return (row["device"] or "").startswith("NVIDIA")


def step_times(reports: Path) -> dict[str, float]:
    """Return the time of a training step on a CPU, at DeiT-S's width and 224 px, relative to DeiT-S, by mixer."""
    found = {}
    for row in sorted(rows_of(reports / "train.json"), key=lambda row: row["date"]):
        if on_gpu(row):
            continue
        if (row["model"], row["size"]) == ("vit", 224) and row["shape"].startswith("dim 384"):
            beside = row.get("against")
            if beside is None or row["mixer"] != "softmax":
                found[row["mixer"].removesuffix(" with positions")] = beside["ratio"] if beside else row["ratio"]
    return found


def speed(
    fig: Any, published: Mapping[str, Row], values: Mapping[str, list[float]], times: Mapping[str, float]
) -> None:
    """Plot accuracy by the time of a training step relative to softmax: the paper's (Table 2, right), and ours.

    Args:
        fig: The figure.
        published: The paper's values by row: `top-1 small`, `time small`, and those of `base`.
        values: Accuracies of our runs by row.
        times: Our times by row.
    """
    left, right = fig.subplots(1, 2)
    for row, cells in published.items():
        for size, marker in (("small", "o"), ("base", "s")):
            x, y = (number(cells.get(f"{name} {size}")) for name in ("time", "top-1"))
            if x is not None and y is not None:
                point(left, row, x, y, marker)
    for row, found in values.items():
        if found and row in times:
            point(right, row, times[row], statistics.mean(found), "o")
    left.set_title("paper: ImageNet-1k, GPU; small (o), base (squares)", fontsize=9)
    right.set_title("here: accuracy of small runs, times of DeiT-S's width on 2 CPU cores", fontsize=9)
    left.set(xscale="log")
    left.set_xticks([0.7, 1, 2, 5, 10], ["0.7", "1", "2", "5", "10"])
    left.minorticks_off()
    for ax in (left, right):
        ax.set(xlabel="time of a training step / softmax", ylabel="top-1 %")
        tidy(ax)


def inference(fig: Any, rows: list[Row]) -> None:
    """Plot memory and time of inference by resolution, relative to softmax in the same shape (Figures 3 and 10)."""
    axes, drawn = fig.subplots(1, 2), set[int]()
    for run in dict.fromkeys(row["run"] for row in rows if "random_weights" in row["run"]):
        own = [row for row in rows if row["run"] == run and row["batch"] == 1 and row["unit"] == "px"]
        for form, (dashes, marker) in FORM.items():
            made = {row["size"]: row for row in own if row["form"] == form and row["chunk_size"] in (None, 64)}
            if len(made) < 2:
                continue
            mixer = next(iter(made.values()))["mixer"]
            how = {"linestyle": dashes, "marker": marker, "color": colour_of(mixer), "markersize": 4}
            softmax = {(r["size"], r["compiled"]): r for r in own if r["form"] == "softmax"}
            sizes = [size for size in sorted(made) if (size, made[size]["compiled"]) in softmax]
            drawn.update(sizes)
            beside = [softmax[size, made[size]["compiled"]]["peak_bytes"] for size in sizes]
            axes[0].plot(sizes, [made[s]["peak_bytes"] / b for s, b in zip(sizes, beside)], **how)
            axes[1].plot(sizes, [made[s]["ratio"] for s in sizes], label=f"{mixer}, {form}", **how)
    for ax, title in zip(axes, ("peak memory", "time")):
        ax.axhline(1, color=SOFTMAX, linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="px", title=f"{title} / softmax of the same shape")
        ax.set_xticks(sorted(drawn), [str(size) for size in sorted(drawn)], fontsize=7, rotation=45)
        ax.set_yticks([0.3, 0.5, 1, 2, 5, 10, 20], ["0.3", "0.5", "1", "2", "5", "10", "20"])
        ax.minorticks_off()
        tidy(ax)
    fig.legend(loc="outside right center", frameon=False, fontsize=8)


def point(ax: Any, row: str, x: float, y: float, marker: str) -> None:
    ax.plot(x, y, marker, color=colour_of(row), markerfacecolor="white" if "multiscan" in row else None)
    ax.annotate(row, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)


def number(text: str | None) -> float | None:
    found = re.search(r"\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None
