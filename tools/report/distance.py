"""Tables of the distances that `./run.sh distance` measured for runs that generate images (RUN/distance.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.files import read_json
from lion.tasks.metrics import Mean, Metric
from lion.trainer.checkpoint_files import steps_of
from tools.distance import SHARES
from tools.finished import Run
from tools.options import FIGURES
from tools.report.tables import Groups, Values
from tools.tables import Table, hundredths, spread

ALIKE = ("judge", "reference", "real", "samples", "checkpoint", "raw", "steps", "guidance")  # settings that must agree


def distance_table(groups: Groups) -> Table:
    """Return a table with the mean and deviation of every metric over seeds; the last row is for real images.

    Raises:
        ConfigError: Distances are not comparable, or were measured with other weights than the runs have now.
    """
    first: dict[str, Any] = {}
    body = []
    for name, runs in groups.items():
        some = read_all(runs)
        if not some:
            continue
        first = first or some[0]
        for one in some:
            check_same(one, first)
        body.append(row(name, first["samples"], list(first["figures"]), [one["figures"] for one in some]))
    if not first:
        return [], []
    floor = first["floor"]
    body.append(row(floor["name"], floor["samples"], list(first["figures"]), [floor["figures"]]))
    return ["model", "samples", *first["figures"], "n"], body


def row(name: str, samples: int, figures: list[str], measured: list[dict[str, float]]) -> list[str]:
    """Return the cells of a row: the means of figures over its runs; that of real images may lack some."""
    cells = [name, f"{samples:,}"]
    for figure in figures:
        values = [each[figure] for each in measured if figure in each]
        cells.append(spread(values, hundredths))
    return [*cells, str(len(measured))]


def frechet(runs: list[Run]) -> tuple[Metric, Values]:
    """Return the Fréchet distance as a metric, and its value for each measured run."""
    found: Values = {}
    name = "FD-own"
    for one in read_all(runs):
        name = next(figure for figure in one["figures"] if figure.startswith("FD-"))
        found[one["path"].parent] = one["figures"][name]
    return Mean(name, higher_is_better=False), found


def read_all(runs: list[Run]) -> list[dict[str, Any]]:
    return [read(run.folder) for run in runs if (run.folder / FIGURES).is_file()]


def read(folder: Path) -> dict[str, Any]:
    """Read the distance file of a run.

    Returns:
        The settings in `ALIKE`, the `figures` of the generated images by heading, `floor` (the row of real images), and
        `path`.

    Raises:
        ConfigError: `./run.sh distance` did not write the file, or the run's weights have changed since.
    """
    path = folder / FIGURES
    try:
        held = read_json(path)
        made, floor = held["rows"]
        held |= {"real": made["reference"], "samples": made["samples"]}
        found = {name: held[name] for name in ALIKE}
        found |= {"figures": by_heading(made["figures"]), "path": path}
        found["floor"] = floor | {"figures": by_heading(floor["figures"])}
        step = held["step"]
        there = [step for step, _ in steps_of(folder, held["checkpoint"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh distance ({type(error).__name__}: {error})") from None
    if there and step != there[0]:
        raise ConfigError(f"{path}: measured at step {step:,}, the weights are of step {there[0]:,}: measure again")
    return found


def by_heading(figures: dict[str, list[float]]) -> dict[str, float]:
    """Return the values of figures by their headings; shares are in percent."""
    found = {}
    for name, (value, _) in figures.items():
        if name in SHARES:
            found[f"{name} %"] = 100 * float(value)
        else:
            found[name] = float(value)
    return found


def check_same(one: dict[str, Any], first: dict[str, Any]) -> None:
    """Check that two distances are comparable.

    Raises:
        ConfigError: The judge (classifier), the images or the settings differ.
    """
    for key in ALIKE:
        if one[key] != first[key]:
            raise ConfigError(f"{one['path']}: {key} is {one[key]!r}, in {first['path']} it is {first[key]!r}")
