"""Plots of tables: end values with intervals beside the papers' values, and values by size of the samples."""

from __future__ import annotations

import re
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
from tools.paper.page import bounds, shapes_of
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
    shapes = shapes_of(part)
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
        published = {name: row.published for name, row in part.table.rows.items()}
        values = {name: list(found.values()) for name, found in part.results.values.items()}
        times = measured.step_times(reports)
        plots[SPEED] = Plot((10, 4), partial(measured.speed, published=published, values=values, times=times))
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
    for layer in range(depth):
        values: list[float] = []
        for heads in decays[layer * scans : (layer + 1) * scans]:
            values += heads
        layers.append(values)
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
    windows = {name: int(name.split()[0]) for name in shapes_of(part)}
    count: dict[str, int] = {}
    for place, (row, runs) in enumerate(part.results.runs.items()):
        points: dict[int, list[float]] = {}
        for name, tokens in windows.items():
            values = [part.metric.scaled(run["more"][name]) for run in runs.values() if name in run["more"]]
            if values:
                points[tokens] = values
        if points:
            look = style(count, row) | {"marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none"}
            means = list(map(statistics.mean, points.values()))
            ax.errorbar(list(points), means, errors(part, points.values()), capsize=3, label=row, **look)
    ticks = sorted(windows.values())
    ax.set(xlabel="tokens of a window", ylabel=part.metric.heading)
    number_ticks(ax, ticks)
    tidy(ax)
    fig.legend(loc="outside right center", frameon=False)
    fig.suptitle(f"{part.table.title}, by length", fontsize=10)


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
        look = {"fmt": f"{marker}-", "capsize": 3, "color": colour_of(mixer), "markerfacecolor": "none"}
        ax.errorbar(x, list(map(statistics.mean, y)), errors(part, y), label=mixer, **look)
        ticks.update(x)
    ax.set(xlabel="numbers of the state of a layer and direction", ylabel=part.metric.heading)
    number_ticks(ax, sorted(ticks), rotation=45, fontsize=7)
    tidy(ax)
    fig.legend(loc="outside right center", frameon=False)
    fig.suptitle(part.table.title, fontsize=10)


def mixer_of(row: str) -> str:
    """Return the mixer of a row, the first word of its name."""
    return row.split()[0].rstrip(",")


def errors(part: Part, found: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return the distances of means from the lower and the upper ends of their intervals; 0 for one or two runs."""
    below = []
    above = []
    for values in found:
        low = mean = high = statistics.mean(values)
        if len(values) > 2:
            low, high = bounds(part.metric, values)
        below.append(mean - low)
        above.append(high - mean)
    return [below, above]


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
    published = {name: number_of(part, name) for name in rows}
    columns = 1 if set(published.values()) == {None} else 2
    axes = fig.subplots(1, columns, sharey=True, squeeze=False)[0]
    for place, name in enumerate(rows):
        values = list(part.results.values[name].values())
        colour = colour_of(name)
        if published[name] is not None:
            value, half = published[name]
            axes[-1].errorbar(value, place, xerr=half, fmt="D", color=colour, markerfacecolor="white", capsize=3)
        if values:  # two runs have an interval that hides the others
            axes[0].plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4)
            mean = statistics.mean(values)
            axes[0].errorbar(mean, place, xerr=errors(part, [values]), fmt="D", color=colour, capsize=3)
        else:
            axes[0].annotate(NOT_RUN, (0.01, place), xycoords=("axes fraction", "data"), color="0.5", va="center")
    axes[0].set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    better = "higher" if part.metric.higher_is_better else "lower"
    data = part.table.mini.note.partition(", ")[0]
    heading = f"{part.results.split} {part.metric.heading}, {better} is better"
    if columns == 1:
        axes[0].set_title(heading, fontsize=9)
    else:
        axes[0].set_title(f"here: {data}\n{heading}", fontsize=9)
        axes[1].set_title(f"paper: {part.table.columns[0]}", fontsize=9)
    for ax in axes:
        tidy(ax, "x")
    fig.suptitle(f"{part.table.title} ({part.scale})", fontsize=10)


def sizes(fig: Any, part: Part) -> None:
    """Plot the values of each row on the further held-out sets, LENGTHxITEMS: a panel for each series of sets."""
    shapes = [HeldOut.of(name) for name in shapes_of(part)]
    length = part.cells[0].recipe.data.length
    items = most_common([each.items for each in shapes])
    left, right = fig.subplots(1, 2, sharey=True)
    by_items = {each.items: each.name for each in shapes if each.length == length}
    by_length = {each.length: each.name for each in shapes if each.items == items}
    count: dict[str, int] = {}
    for row, runs in part.results.runs.items():
        if not runs:
            continue
        look = style(count, row)
        for ax, names in ((left, by_items), (right, by_length)):
            series(ax, part, row, names, look)
    for ax, names, title in (
        (left, by_items, f"items in {length} tokens, the length of training"),
        (right, by_length, f"tokens with {items} items"),
    ):
        ax.set(xlabel=title)
        number_ticks(ax, sorted(names))
        tidy(ax)
    left.set_ylabel(part.metric.heading)
    fig.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(f"{part.table.title}: means over seeds, and each seed", fontsize=10)


def series(ax: Any, part: Part, row: str, names: Mapping[int, str], look: dict[str, Any]) -> None:
    """Plot the values of the runs of a row on held-out sets, by the number that differs between these."""
    runs = list(part.results.runs[row].values())
    x = sorted(names)
    seeds = []
    for run in runs:
        seeds.append([part.metric.scaled(run["more"][names[place]]) for place in x])
    ax.plot(x, list(map(statistics.mean, zip(*seeds))), label=row, **look)
    for y in seeds:
        ax.plot(x, y, color=look["color"], alpha=0.3, linewidth=0.6)


class HeldOut(NamedTuple):
    """A further held-out set: samples of `length` tokens with `items` items."""

    name: str
    length: int
    items: int

    @classmethod
    def of(cls, name: str) -> HeldOut:
        length, items = name.split("x")
        return cls(name, int(length), int(items))


def most_common(counts: Sequence[int]) -> int:
    """Return the number that occurs most often; the smallest of several."""
    return max(sorted(set(counts)), key=counts.count)


def number_of(part: Part, name: str) -> tuple[float, float] | None:
    """Return the number in the first column of the paper for a row, if any, and its interval, "17.42 ± 1.11", or 0."""
    if not part.table.columns:
        return None
    text = str(part.table.rows[name].published.get(part.table.columns[0], ""))
    found = re.match(r"(\d+(?:\.\d+)?)(?: ± (\d+\.\d+))?", text)
    if found is None:
        return None
    return float(found[1]), float(found[2] or 0)
