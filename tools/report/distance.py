"""Tables of the distances that `./run.sh distance` measured for runs that generate images (RUN/distance.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.tasks.metrics import Mean, Metric
from lion.trainer.checkpoint_files import steps_of
from tools.distance import SHARES
from tools.finished import Run
from tools.options import FIGURES
from tools.report.tables import Groups, Table, Values
from tools.tables import spread

ALIKE = ("judge", "reference", "real", "samples", "checkpoint", "raw", "steps", "guidance")  # settings that must agree


def distance_table(groups: Groups) -> Table:
    """Return a table with the mean and deviation of every metric over seeds; the last row is for real images.

    Raises:
        ConfigError: Distances are not comparable, or were measured with other weights than the runs have now.
    """
    found = {name: read_all(runs) for name, runs in groups.items()}
    found = {name: some for name, some in found.items() if some}
    if not found:
        return [], []
    first = next(iter(found.values()))[0]
    names, rows = list(first["figures"]), []
    for name, some in found.items():
        for one in some:
            check_same(one, first)
        cells = (cell(figure, [one["figures"][figure] for one in some]) for figure in names)
        rows.append([name, f"{first['samples']:,}", *cells, str(len(some))])
    floor = first["floor"]
    cells = (cell(figure, [floor["figures"][figure][0]] if figure in floor["figures"] else []) for figure in names)
    rows.append([floor["name"], f"{floor['samples']:,}", *cells, "1"])
    return ["model", "samples", *(f"{figure} %" if figure in SHARES else figure for figure in names), "n"], rows


def cell(figure: str, values: list[float]) -> str:
    return spread(values, lambda value: f"{value * (100 if figure in SHARES else 1):.2f}")


def frechet(runs: list[Run]) -> tuple[Metric, str, Values]:
    """Return the Fréchet distance as a metric, what it was measured on, and its value for each measured run."""
    found = {run.folder: one["figures"] for run in runs for one in read_all([run])}
    name = next((n for figures in found.values() for n in figures if n.startswith("FD-")), "FD-own")
    return Mean(name, higher_is_better=False), "samples", {folder: figures[name] for folder, figures in found.items()}


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
        figures = {name: float(value) for name, (value, _) in made["figures"].items()}
        found = {**{name: held[name] for name in ALIKE}, "figures": figures, "floor": floor, "path": path}
        step, there = held["step"], [step for step, _ in steps_of(folder, held["checkpoint"])]
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
