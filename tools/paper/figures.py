"""Plots of tables: end values with intervals beside the papers' values, and values by size of the samples."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tools.claims import NOT_RUN
from tools.colours import colour_of
from tools.paper.page import Part, parts_of, shapes_of
from tools.paper.tables import Table
from tools.statistics import interval
from tools.store import Row, Store

DECAYS = "decays"  # name of the plot of the decays of Lion-D
MARKERS = "os^DvP*X"  # of the rows of one mixer


def draw(tables: Mapping[str, Table], store: Store) -> dict[str, str]:
    """Draw a plot for every table with at least two rows of runs at scale `mini`.

    Returns:
        The file name of each plot by table, relative to the page; no plots without matplotlib.
    """
    found = {}
    for part in parts_of(tables, store):
        if part.scale != "mini" or sum(map(bool, part.results.values.values())) < 2:
            continue
        path = store.path.parent / "paper" / f"{part.name}.png"
        by_size = part.table.more and all("x" in name for name in shapes_of(part.results))
        size = (9, 4.6) if by_size else (9, 1.4 + 0.28 * len(part.table.rows))
        if store.draw(path, size, partial(sizes if by_size else ends, part=part)):
            found[part.name] = f"paper/{path.name}"
    with_decays = [row for row in store.rows.values() if row.get("decays")]
    path = store.path.parent / "paper" / f"{DECAYS}.png"
    if with_decays and store.draw(path, (7, 3), partial(decays, rows=with_decays)):
        found[DECAYS] = f"paper/{path.name}"
    return found


def decays(fig: Any, rows: Sequence[Row]) -> None:
    """Plot the decays of the heads of all Lion-D models by layer."""
    ax = fig.subplots()
    for layer, values in enumerate(zip(*(row["decays"] for row in rows))):
        heads = [value for each in values for value in each]
        ax.plot([layer + 1] * len(heads), heads, "o", color=colour_of("lion_d"), alpha=0.4, markersize=5)
    ax.set(xlabel="layer", ylabel="lambda", ylim=(0, 1), title=f"Decays of the heads of {len(rows)} Lion-D models")
    ax.set_xticks(range(1, 1 + max(len(row["decays"]) for row in rows)))
    ax.grid(True, axis="y", color="0.9")
    ax.spines[["top", "right"]].set_visible(False)


def ends(fig: Any, part: Part) -> None:
    """Plot the value of each run, and mean and interval of each row, beside the first column of the paper."""
    rows = list(part.table.rows)
    published = {name: number_of(part, name) for name in rows}
    columns = 2 if any(value is not None for value in published.values()) else 1
    axes = fig.subplots(1, columns, sharey=True, squeeze=False)[0]
    for place, name in enumerate(rows):
        values = list(part.results.values[name].values())
        colour = colour_of(name)
        if published[name] is not None:
            axes[-1].plot(published[name], place, "D", color=colour, markerfacecolor="white")
        if values:
            half = interval(values)
            axes[0].plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4)
            axes[0].errorbar(
                statistics.mean(values),
                place,
                xerr=None if math.isinf(half) else half,
                fmt="D",
                color=colour,
                capsize=3,
            )
        else:
            axes[0].annotate(NOT_RUN, (0.01, place), xycoords=("axes fraction", "data"), color="0.5", va="center")
    axes[0].set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    axes[0].set_title(f"here: {part.results.split} {part.metric.heading}, 95 % intervals", fontsize=9)
    if columns == 2:
        axes[1].set_title(f"paper: {part.table.columns[0]}", fontsize=9)
    for ax in axes:
        ax.grid(True, axis="x", color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(f"{part.table.title} ({part.scale})", fontsize=10)


def sizes(fig: Any, part: Part) -> None:
    """Plot the values of each row on the further held-out sets, LENGTHxITEMS: a panel for each series of sets."""
    shapes = {name: tuple(map(int, name.split("x"))) for name in shapes_of(part.results)}
    axes = fig.subplots(1, 2, sharey=True)
    own, common = part.cells[0].recipe.data.length, most_common([items for _, items in shapes.values()])
    series = (
        (f"items in {own} tokens, the length of training", [n for n, s in shapes.items() if s[0] == own], 1),
        (f"tokens with {common} items", [n for n, s in shapes.items() if s[1] == common], 0),
    )
    count: dict[str, int] = {}
    for row, runs in part.results.runs.items():
        if not runs:
            continue
        mixer = row.split()[0]
        count[mixer] = count.get(mixer, -1) + 1
        for ax, (_, names, axis) in zip(axes, series):
            points = {shapes[name][axis]: [r["more"][name][part.metric.name] for r in runs.values()] for name in names}
            x = sorted(points)
            y = [statistics.mean(map(part.metric.scaled, points[i])) for i in x]
            dashes = ("-", "--", ":", "-.")[count[mixer] % 4]
            ax.plot(x, y, dashes, marker=MARKERS[count[mixer] % 8], color=colour_of(row), markersize=4, label=row)
    for ax, (title, names, axis) in zip(axes, series):
        ticks = sorted({shapes[name][axis] for name in names})
        ax.set(xscale="log", xlabel=title)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        ax.grid(True, color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(part.metric.heading)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(f"{part.table.title}: means over seeds", fontsize=10)


def most_common(counts: Sequence[int]) -> int:
    """Return the number that occurs most often; the smallest of several."""
    return max(sorted(set(counts)), key=counts.count)


def number_of(part: Part, name: str) -> float | None:
    """Return the first number in the first column of the paper for a row, if any."""
    text = str(part.table.rows[name].published.get(part.table.columns[0], "")) if part.table.columns else ""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else None
