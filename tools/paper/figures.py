"""Plots of tables: end values with intervals beside the papers' values, and values by size of the samples."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
from tools.store import Store, tidy

DECAYS = "decays"  # name of the plot of the decays of Lion-D
SPEED, SPEED_OF = "accuracy-by-speed", "lion-2"  # name of that plot, and its table
MASKS, SCANS = "masks", "scans"  # names of drawings
INFERENCE = "inference"  # name of the plot of time and memory by resolution
LENGTHS = "-lengths"  # suffix of the names of plots by length
MARKERS = "os^DvP*X"  # of the rows of one mixer


def draw(tables: Mapping[str, Table], store: Store) -> dict[str, str]:
    """Draw a plot for every table at scale `mini` whose rows have runs, at least two and half of them.

    Returns:
        The file name of each plot by table, relative to the page; no plots without matplotlib.
    """
    plots: dict[str, tuple[tuple[float, float], Callable[[Any], None]]] = {}
    parts = parts_of(tables, store)
    for part in parts:
        made, rows = sum(map(bool, part.results.values.values())), len(part.table.rows)
        if part.scale != "mini" or made < max(2, rows / 2):
            continue
        if part.table.state:
            plots[part.name] = (7, 4), partial(states, part=part)
        elif part.table.more and (shapes := shapes_of(part)) and all("x" in name for name in shapes):
            plots[part.name] = (9, 4.6), partial(sizes, part=part)
        else:
            plots[part.name] = (9, 1.4 + 0.28 * rows), partial(ends, part=part)
        if part.table.lengths and shapes_of(part):
            plots[f"{part.name}{LENGTHS}"] = (8, 4), partial(lengths, part=part)
        if part.name == SPEED_OF:
            published = {name: row.published for name, row in part.table.rows.items()}
            values = {name: list(found.values()) for name, found in part.results.values.items()}
            times = measured.step_times(store.path.parent)
            plots[SPEED] = (10, 4), partial(measured.speed, published=published, values=values, times=times)
    if kinds := decays_of(parts):
        plots[DECAYS] = (max(9, 1.6 * len(kinds)), 3.2), partial(decays, kinds=kinds)
    if rows := measured.rows_of(store.path.parent / "inference.json"):
        plots[INFERENCE] = (10, 4), partial(measured.inference, rows=rows)
    if plots:
        plots |= {MASKS: ((9, 3), drawings.masks), SCANS: ((7, 2.6), drawings.scans)}
    folder = store.path.parent / "paper"
    found = {name: f"paper/{name}.png" for name, how in plots.items() if store.draw(folder / f"{name}.png", *how)}
    ours = {*tables, *(f"{name}{LENGTHS}" for name in tables), SPEED, DECAYS, INFERENCE, MASKS, SCANS}
    for name in ours - plots.keys():  # of tables that have other runs now; other pictures may be the user's
        (folder / f"{name}.png").unlink(missing_ok=True)
    return found


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
    layers = [decays[first : first + scans] for first in range(0, len(decays), scans)]
    return [[value for heads in layer for value in heads] for layer in layers]


def decays(fig: Any, kinds: Mapping[str, list[list[list[float]]]]) -> None:
    """Plot the decays of Lion-D by layer, a panel for each kind of model."""
    axes = fig.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for ax, (kind, models) in zip(axes, kinds.items()):
        for layer, values in enumerate(zip(*models)):
            heads = [value for each in values for value in each]
            ax.plot([layer + 1] * len(heads), heads, "o", color=colour_of("lion_d"), alpha=0.4, markersize=5)
        ax.set(xlabel="layer", ylim=(0, 1), xlim=(0.5, len(models[0]) + 0.5))
        ax.set_title(f"{kind}\n{len(models)} seeds", fontsize=8)
        ax.set_xticks(range(1, 1 + len(models[0])))
        tidy(ax, "y")
    axes[0].set_ylabel("lambda")
    fig.suptitle("Decays of the heads of Lion-D", fontsize=10)


def lengths(fig: Any, part: Part) -> None:
    """Plot mean and 95 % interval of each row on windows of held-out text, by the number of tokens."""
    ax, windows, count = fig.subplots(), shapes_of(part), dict[str, int]()
    for place, (row, runs) in enumerate(part.results.runs.items()):
        points = {
            int(name.split()[0]): [part.metric.scaled(r["more"][name]) for r in found]
            for name in windows
            if (found := [r for r in runs.values() if name in r["more"]])
        }
        if points:
            line = {**style(count, row), "marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none"}
            half = errors(part, points.values())
            ax.errorbar(list(points), list(map(statistics.mean, points.values())), half, capsize=3, label=row, **line)
    ticks = sorted(int(name.split()[0]) for name in windows)
    ax.set(xscale="log", xlabel="tokens of a window", ylabel=part.metric.heading)
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.minorticks_off()
    tidy(ax)
    fig.legend(loc="outside right center", frameon=False)
    fig.suptitle(f"{part.table.title}, by length", fontsize=10)


def states(fig: Any, part: Part) -> None:
    """Plot mean and 95 % interval of each row by the size of its state, a line for each mixer."""
    ax, points = fig.subplots(), dict[str, list[tuple[int, list[float]]]]()
    recipes = {cell.row: cell.recipe for cell in part.cells}
    for row, values in part.results.values.items():
        if values:
            points.setdefault(row.split()[0].rstrip(","), []).append(
                (state_numbers(recipes[row]), list(values.values()))
            )
    for marker, (mixer, found) in zip(MARKERS, points.items()):
        x, y = zip(*sorted(found))
        line = {"fmt": f"{marker}-", "capsize": 3, "color": colour_of(mixer), "markerfacecolor": "none"}
        ax.errorbar(x, list(map(statistics.mean, y)), errors(part, y), label=mixer, **line)
    ticks = sorted({x for found in points.values() for x, _ in found})
    ax.set(xscale="log", xlabel="numbers of the state of a layer and direction", ylabel=part.metric.heading)
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45, fontsize=7)
    ax.minorticks_off()
    tidy(ax)
    fig.legend(loc="outside right center", frameon=False)
    fig.suptitle(part.table.title, fontsize=10)


def errors(part: Part, found: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return the distances of means from the lower and the upper ends of their intervals; 0 for one or two runs."""
    pairs = []
    for values in found:
        mean = statistics.mean(values)
        low, high = bounds(part.metric, values) if len(values) > 2 else (mean, mean)
        pairs.append((mean - low, high - mean))
    return [*map(list, zip(*pairs))]


def state_numbers(recipe: Recipe) -> int:
    """Return the numbers of the state of one layer and direction; of softmax those of a cache for a training sample."""
    c = recipe.model
    config = replace(c.attention, direction="forward")
    state = make_mixer(c.mixer, c.dim, c.num_heads, config).initial_state(1)
    kept = sum(part.numel() for part in tree_leaves(state) if torch.is_tensor(part) and part.is_floating_point())
    return kept or 2 * c.dim * recipe.data.length


def style(count: dict[str, int], row: str) -> dict[str, Any]:
    """Return the colour of a row by its mixer, and dashes and a marker that set it apart from others of that mixer."""
    mixer = row.split()[0].rstrip(",")
    count[mixer] = number = count.get(mixer, -1) + 1
    dashes = {"linestyle": ("-", "--", ":", "-.")[number % 4], "marker": MARKERS[number % len(MARKERS)]}
    return {**dashes, "color": colour_of(row), "markersize": 4}


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
            value, half = published[name]
            axes[-1].errorbar(value, place, xerr=half, fmt="D", color=colour, markerfacecolor="white", capsize=3)
        if values:  # two runs have an interval that hides the others
            axes[0].plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4)
            axes[0].errorbar(
                statistics.mean(values), place, xerr=errors(part, [values]), fmt="D", color=colour, capsize=3
            )
        else:
            axes[0].annotate(NOT_RUN, (0.01, place), xycoords=("axes fraction", "data"), color="0.5", va="center")
    axes[0].set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    better = "higher" if part.metric.higher_is_better else "lower"
    data = part.table.mini.note.partition(", ")[0]
    heading = f"{part.results.split} {part.metric.heading}, {better} is better"
    axes[0].set_title(f"here: {data}\n{heading}" if columns == 2 else heading, fontsize=9)
    if columns == 2:
        axes[1].set_title(f"paper: {part.table.columns[0]}", fontsize=9)
    for ax in axes:
        tidy(ax, "x")
    fig.suptitle(f"{part.table.title} ({part.scale})", fontsize=10)


def sizes(fig: Any, part: Part) -> None:
    """Plot the values of each row on the further held-out sets, LENGTHxITEMS: a panel for each series of sets."""
    shapes = {name: tuple(map(int, name.split("x"))) for name in shapes_of(part)}
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
        line = style(count, row)
        for ax, (_, names, axis) in zip(axes, series):
            points = {shapes[name][axis]: [r["more"][name] for r in runs.values()] for name in names}
            x = sorted(points)
            y = [statistics.mean(map(part.metric.scaled, points[i])) for i in x]
            ax.plot(x, y, label=row, **line)
            for seed in zip(*(map(part.metric.scaled, points[i]) for i in x)):
                ax.plot(x, seed, color=line["color"], alpha=0.3, linewidth=0.6)
    for ax, (title, names, axis) in zip(axes, series):
        ticks = sorted({shapes[name][axis] for name in names})
        ax.set(xscale="log", xlabel=title)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
        tidy(ax)
    axes[0].set_ylabel(part.metric.heading)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    fig.suptitle(f"{part.table.title}: means over seeds, and each seed", fontsize=10)


def most_common(counts: Sequence[int]) -> int:
    """Return the number that occurs most often; the smallest of several."""
    return max(sorted(set(counts)), key=counts.count)


def number_of(part: Part, name: str) -> tuple[float, float] | None:
    """Return the number in the first column of the paper for a row, if any, and its interval, "17.42 ± 1.11", or 0."""
    text = str(part.table.rows[name].published.get(part.table.columns[0], "")) if part.table.columns else ""
    found = re.match(r"(\d+(?:\.\d+)?)(?: ± (\d+\.\d+))?", text)
    return (float(found[1]), float(found[2] or 0)) if found else None
