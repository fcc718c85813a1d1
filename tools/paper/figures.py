"""Plots of tables: end values with intervals beside the papers' values, and values by size of the samples."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from lion.layers.mixers import make_mixer
from lion.recipe import Recipe
from tools.claims import NOT_RUN
from tools.colours import colour_of
from tools.paper import drawings, measured
from tools.paper.page import bounds
from tools.paper.parts import Part, parts_of
from tools.paper.tables import Table
from tools.plots import number_ticks, tidy
from tools.store import Store

DECAYS = "decays"  # name of the plot of the decays of Lion-D
SPEED, SPEED_OF = "accuracy-by-speed", "lion-2"  # name of that plot, and its table
MASKS, SCANS = "masks", "scans"  # names of drawings
INFERENCE = "inference"  # name of the plot of time and memory by resolution
LENGTHS = "-lengths"  # suffix of the names of plots by length
MARKERS = "os^DvP*X"  # of the rows of one mixer
DASHES = ("-", "--", ":", "-.")


def draw(tables: Mapping[str, Table], store: Store) -> dict[str, str]:
    """Draw a plot for every table at scale `mini` whose rows have runs, at least two and half of them.

    Returns:
        The file name of each plot by table, relative to the page; no plots without matplotlib.
    """
    reports = store.path.parent
    parts = parts_of(tables, store)
    plots: dict[str, Plot] = {}
    for part in parts:
        plots |= plots_of(part, reports)
    kinds = decays_of(parts)
    if kinds:
        plots[DECAYS] = Plot((max(9, 1.6 * len(kinds)), 3.2), partial(decays, kinds=kinds))
    rows = measured.rows_of(reports / "inference.json")
    if rows:
        plots[INFERENCE] = Plot((10, 4), partial(measured.inference, rows=rows))
    if plots:
        plots[MASKS] = Plot((9, 3), drawings.masks)
        plots[SCANS] = Plot((7, 2.6), drawings.scans)
    folder = reports / "paper"
    found = {}
    for name, plot in plots.items():
        if store.draw(folder / f"{name}.png", plot.size, plot.draw):
            found[name] = f"paper/{name}.png"
    ours = [SPEED, DECAYS, INFERENCE, MASKS, SCANS]
    for name in tables:
        ours += [name, f"{name}{LENGTHS}"]
    for name in ours:  # of tables that have other runs now; other pictures may be the user's
        if name not in plots:
            (folder / f"{name}.png").unlink(missing_ok=True)
    return found


class Plot(NamedTuple):
    """A plot: its size in inches, and the function that draws it on a figure."""

    size: tuple[float, float]
    draw: Callable[[Any], None]


def plots_of(part: Part, reports: Path) -> dict[str, Plot]:
    """Return the plots of a table by name; none if it has few runs."""
    rows = len(part.table.rows)
    made = sum(map(bool, part.results.values.values()))
    if part.scale != "mini" or made < max(2, rows / 2):
        return {}
    shapes = part.names_in("more")
    plots = {}
    if part.table.state:
        plots[part.name] = Plot((7, 4), partial(states, part=part))
    elif part.table.more and shapes and all("x" in name for name in shapes):
        plots[part.name] = Plot((9, 4.6), partial(sizes, part=part))
    else:
        plots[part.name] = Plot((9, 1.4 + 0.28 * rows), partial(ends, part=part))
    if part.table.lengths and shapes:
        plots[f"{part.name}{LENGTHS}"] = Plot((8, 4), partial(lengths, part=part))
    if part.name == SPEED_OF:
        times = measured.step_times(reports)
        plots[SPEED] = Plot((10, 4), partial(measured.speed, part=part, times=times))
    return plots


def decays_of(parts: Sequence[Part]) -> dict[str, list[list[list[float]]]]:
    """Return the decays of all Lion-D models by the first table and row that have them: model, layer, head."""
    kinds: dict[str, tuple[str, list[list[list[float]]]]] = {}
    for part in parts:
        depths = {cell.row: cell.recipe.model.depth for cell in part.cells}
        for name, runs in part.results.runs.items():
            found = [run for run in runs.values() if run["decays"]]
            if found:
                depth = depths[name]
                models = [by_layer(run["decays"], depth) for run in found]
                kinds.setdefault(found[0]["key"], (f"{part.name}\n{name}", models))
    return dict(kinds.values())


def by_layer(decays: Sequence[Sequence[float]], depth: int) -> list[list[float]]:
    """Return the decays of a model by layer, those of all scans of a layer together."""
    scans = len(decays) // depth
    layers: list[list[float]] = []
    for first in range(0, len(decays), scans):
        layers.append(list(itertools.chain(*decays[first : first + scans])))
    return layers


def decays(fig: Any, kinds: Mapping[str, list[list[list[float]]]]) -> None:
    """Plot the decays of Lion-D by layer, a panel for each kind of model."""
    axes = fig.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for ax, (kind, models) in zip(axes, kinds.items()):
        depth = len(models[0])
        for model in models:
            for layer, heads in enumerate(model, 1):
                ax.plot([layer] * len(heads), heads, "o", color=colour_of("lion_d"), alpha=0.4, markersize=5)
        ax.set(xlabel="layer", ylim=(0, 1), xlim=(0.5, depth + 0.5))
        ax.set_title(f"{kind}\n{len(models)} seeds", fontsize=8)
        ax.set_xticks(range(1, 1 + depth))
        tidy(ax, "y")
    axes[0].set_ylabel("lambda")
    fig.suptitle("Decays of the heads of Lion-D", fontsize=10)


def lengths(fig: Any, part: Part) -> None:
    """Plot mean and 95 % interval of each row on windows of held-out text, by the number of tokens."""
    ax = fig.subplots()
    windows = {name: int(name.split()[0]) for name in part.names_in("more")}
    count: dict[str, int] = {}
    for place, row in enumerate(part.table.rows):
        points: dict[int, list[float]] = {}
        for name, tokens in windows.items():
            values = part.held_out(row, name)
            if values:
                points[tokens] = values
        if points:
            look = style(count, row) | {"marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none"}
            means, errors = intervals(part, points.values())
            ax.errorbar(list(points), means, errors, capsize=3, label=row, **look)
    ax.set(xlabel="tokens of a window", ylabel=part.metric.heading)
    number_ticks(ax, sorted(windows.values()))
    tidy(ax)
    finish(fig, f"{part.table.title}, by length")


def finish(fig: Any, title: str, *rows: Any) -> None:
    """Write the title of a figure, and a legend: of these handles and labels, or of all that are drawn."""
    fig.legend(*rows, loc="outside right center", frameon=False)
    fig.suptitle(title, fontsize=10)


def states(fig: Any, part: Part) -> None:
    """Plot mean and 95 % interval of each row by the size of its state, a line for each mixer."""
    ax = fig.subplots()
    recipes = {cell.row: cell.recipe for cell in part.cells}
    lines: dict[str, list[tuple[int, list[float]]]] = {}  # size and values of each row, by mixer
    for row, values in part.results.values.items():
        if values:
            size = state_numbers(recipes[row])
            lines.setdefault(mixer_of(row), []).append((size, list(values.values())))
    ticks: set[int] = set()
    for marker, (mixer, found) in zip(MARKERS, lines.items()):
        x, y = zip(*sorted(found))
        means, errors = intervals(part, y)
        look = {"fmt": f"{marker}-", "capsize": 3, "color": colour_of(mixer), "markerfacecolor": "none"}
        ax.errorbar(x, means, errors, label=mixer, **look)
        ticks.update(x)
    ax.set(xlabel="numbers of the state of a layer and direction", ylabel=part.metric.heading)
    number_ticks(ax, sorted(ticks), rotation=45, fontsize=7)
    tidy(ax)
    finish(fig, part.table.title)


def mixer_of(row: str) -> str:
    """Return the mixer of a row, the first word of its name."""
    return row.split()[0].rstrip(",")


def intervals(part: Part, found: Iterable[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return means, and their distances from the ends of their intervals, below and above; 0 for one or two runs."""
    means = []
    below = []
    above = []
    for values in found:
        low = mean = high = statistics.mean(values)
        if len(values) > 2:  # two runs have an interval that hides the others
            low, high = bounds(part.metric, values)
        means.append(mean)
        below.append(mean - low)
        above.append(high - mean)
    return means, [below, above]


def state_numbers(recipe: Recipe) -> int:
    """Return the numbers of the state of one layer and direction; of softmax those of a cache for a training sample."""
    c = recipe.model
    config = replace(c.attention, direction="forward")
    state = make_mixer(c.mixer, c.dim, c.num_heads, config).initial_state(1)
    kept = 0
    for part in tree_leaves(state):
        if torch.is_tensor(part) and part.is_floating_point():
            kept += part.numel()
    return kept or 2 * c.dim * recipe.data.length


def style(count: dict[str, int], row: str) -> dict[str, Any]:
    """Return the colour of a row by its mixer, and dashes and a marker that set it apart from others of that mixer."""
    mixer = mixer_of(row)
    number = count.get(mixer, 0)
    count[mixer] = number + 1
    return {
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "color": colour_of(row),
        "markersize": 4,
    }


def ends(fig: Any, part: Part) -> None:
    """Plot the value of each run, and mean and interval of each row, beside the first column of the paper."""
    rows = list(part.table.rows)
    published = {}
    for column in part.table.columns[:1]:
        for name in rows:
            published[name] = part.table.printed(name, column)
    panels = 1
    if any(published.values()):
        panels = 2
    axes = fig.subplots(1, panels, sharey=True, squeeze=False)[0]
    for place, name in enumerate(rows):
        values = list(part.results.values[name].values())
        colour = colour_of(name)
        number = published.get(name)
        if number:
            value, half = number
            axes[1].errorbar(value, place, xerr=half, fmt="D", color=colour, markerfacecolor="white", capsize=3)
        if values:
            axes[0].plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4)
            means, errors = intervals(part, [values])
            axes[0].errorbar(means, place, xerr=errors, fmt="D", color=colour, capsize=3)
        else:
            axes[0].annotate(NOT_RUN, (0.01, place), xycoords=("axes fraction", "data"), color="0.5", va="center")
    axes[0].set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    better = "lower"
    if part.metric.higher_is_better:
        better = "higher"
    data = part.table.mini.note.partition(", ")[0]
    heading = f"{part.results.split} {part.metric.heading}, {better} is better"
    if panels == 2:
        heading = f"here: {data}\n{heading}"
        axes[1].set_title(f"paper: {part.table.columns[0]}", fontsize=9)
    axes[0].set_title(heading, fontsize=9)
    for ax in axes:
        tidy(ax, "x")
    fig.suptitle(f"{part.table.title} ({part.scale})", fontsize=10)


def sizes(fig: Any, part: Part) -> None:
    """Plot the values of each row on the further held-out sets, LENGTHxITEMS: a panel for each series of sets."""
    shapes = {}
    for name in part.names_in("more"):
        tokens, items = name.split("x")
        shapes[int(tokens), int(items)] = name
    length = part.cells[0].recipe.data.length
    common = statistics.mode(sorted(items for _, items in shapes))  # the smallest of several
    by_items = {items: name for (tokens, items), name in shapes.items() if tokens == length}
    by_length = {tokens: name for (tokens, items), name in shapes.items() if items == common}
    left, right = fig.subplots(1, 2, sharey=True)
    for ax, names, title in (
        (left, by_items, f"items in {length} tokens, the length of training"),
        (right, by_length, f"tokens with {common} items"),
    ):
        count: dict[str, int] = {}
        for row, runs in part.results.runs.items():
            if runs:
                series(ax, part, row, names, style(count, row))
        ax.set(xlabel=title)
        number_ticks(ax, sorted(names))
        tidy(ax)
    left.set_ylabel(part.metric.heading)
    finish(fig, f"{part.table.title}: means over seeds, and each seed", *left.get_legend_handles_labels())


def series(ax: Any, part: Part, row: str, names: Mapping[int, str], look: dict[str, Any]) -> None:
    """Plot the values of the runs of a row on held-out sets, by the number that differs between these."""
    x = sorted(names)
    values = [part.held_out(row, names[place]) for place in x]
    ax.plot(x, list(map(statistics.mean, values)), label=row, **look)
    for y in zip(*values):
        ax.plot(x, y, color=look["color"], alpha=0.3, linewidth=0.6)
