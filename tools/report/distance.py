"""Tables of the distances that `./run.sh distance` measured for runs that generate images (RUN/distance.json)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.tasks.metrics import Mean, Metric
from lion.trainer.checkpoint_files import steps_of
from tools.distance import SHARES
from tools.finished import Run
from tools.options import FIGURES
from tools.report.tables import Groups, Values
from tools.tables import Cell, Table, fill, spread

ALIKE = ("judge", "reference", "real", "samples", "checkpoint", "raw", "steps", "guidance")  # settings that must agree


def distance_table(groups: Groups) -> Table:
    """Return a table with the mean and deviation of every metric over seeds; the last row is for real images.

    Raises:
        ConfigError: Distances are not comparable, or were measured with other weights than the runs have now.
    """
    rows = []
    first: dict[str, Any] = {}
    for name, runs in groups.items():
        some = read_all(runs)
        if not some:
            continue
        first = first or some[0]
        for one in some:
            check_same(one, first)
        rows.append({"name": name, "samples": first["samples"], "measured": [one["figures"] for one in some]})
    if not rows:
        return [], []
    floor = first["floor"]
    real = {figure: value for figure, (value, _) in floor["figures"].items()}
    rows.append({"name": floor["name"], "samples": floor["samples"], "measured": [real]})
    columns: dict[str, Cell] = {"model": lambda row: row["name"], "samples": lambda row: f"{row['samples']:,}"}
    for figure in first["figures"]:
        heading = f"{figure} %" if figure in SHARES else figure
        columns[heading] = partial(figure_cell, figure=figure)
    columns["n"] = lambda row: str(len(row["measured"]))
    return fill(columns, rows)


def figure_cell(row: dict[str, Any], figure: str) -> str:
    """Return the mean of a figure over the runs of a row; the row of real images may lack it."""
    scale = 100 if figure in SHARES else 1
    values = [figures[figure] for figures in row["measured"] if figure in figures]
    return spread(values, lambda value: f"{value * scale:.2f}")


def frechet(runs: list[Run]) -> tuple[Metric, str, Values]:
    """Return the Fréchet distance as a metric, what it was measured on, and its value for each measured run."""
    found: Values = {}
    name = "FD-own"
    for run in runs:
        for one in read_all([run]):
            name = next(figure for figure in one["figures"] if figure.startswith("FD-"))
            found[run.folder] = one["figures"][name]
    return Mean(name, higher_is_better=False), "samples", found


def read_all(runs: list[Run]) -> list[dict[str, Any]]:
    return [read(run.folder) for run in runs if (run.folder / FIGURES).is_file()]


def read(folder: Path) -> dict[str, Any]:
    """Read the distance file of a run.

    Returns:
        The settings in `ALIKE`, the `figures` of the generated images, `floor` (the row of real images), and `path`.

    Raises:
        ConfigError: `./run.sh distance` did not write the file, or the run's weights have changed since.
    """
    path = folder / FIGURES
    try:
        held = json.loads(path.read_text())
        made, floor = held["rows"]
        held |= {"real": made["reference"], "samples": made["samples"]}
        found = {name: held[name] for name in ALIKE}
        found["figures"] = {name: float(value) for name, (value, _) in made["figures"].items()}
        found |= {"floor": floor, "path": path}
        step = held["step"]
        there = [step for step, _ in steps_of(folder, held["checkpoint"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh distance ({type(error).__name__}: {error})") from None
    if there and step != there[0]:
        raise ConfigError(f"{path}: measured at step {step:,}, the weights are of step {there[0]:,}: measure again")
    return found


def check_same(one: dict[str, Any], first: dict[str, Any]) -> None:
    """Check that two distances are comparable.

    Raises:
        ConfigError: The judge (classifier), the images or the settings differ.
    """
    for key in ALIKE:
        if one[key] != first[key]:
            raise ConfigError(f"{one['path']}: {key} is {one[key]!r}, in {first['path']} it is {first[key]!r}")
