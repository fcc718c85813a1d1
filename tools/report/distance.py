"""What `./run.sh distance` has found of runs that make pictures: RUN/distance.json, where it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lion.config import ConfigError
from lion.tasks.metrics import Mean, Metric
from tools.distance import FIGURES, SHARES
from tools.report.paper import Paper
from tools.report.runs import Run
from tools.report.tables import ASKED, CLAIMED, Groups, Table, Values, comparison
from tools.store import spread

ALIKE = ("reference", "features", "steps", "guidance", "samples")  # what makes distances comparable


def distance_table(groups: Groups) -> Table:
    """A row for each row of runs: every figure's mean and deviation over seeds; below, the real pictures'."""
    found = {
        name: [read(run.folder) for run in runs if (run.folder / FIGURES).is_file()] for name, runs in groups.items()
    }
    found = {name: some for name, some in found.items() if some}
    if not found:
        return [], []
    first = next(iter(found.values()))[0]
    names = list(first["figures"])
    rows = []
    for name, some in found.items():
        for one in some:
            check_same(name, one, first)
        cells = (cell(n, [one["figures"][n] for one in some]) for n in names)
        rows.append([name, f"{first['samples']:,}", *cells, str(len(some))])
    real = first["real"]
    cells = (cell(n, [real["figures"][n][0]]) for n in names)
    rows.append([real["name"], f"{real['samples']:,}", *cells, "1"])
    return ["model", "samples", *(f"{n} %" if n in SHARES else n for n in names), "n"], rows


def cell(name: str, values: list[float]) -> str:
    return spread(values, lambda value: f"{value * (100 if name in SHARES else 1):.2f}")


def distance_claims(groups: Groups, paper: Paper) -> Table:
    """What the paper claims, by the Frechet distance."""
    return judged(groups, paper.better, paper, "the paper: ", CLAIMED)


def distance_asked(groups: Groups, paper: Paper) -> Table:
    """What it leaves open, by the same."""
    return judged(groups, paper.asked, paper, "asked: ", ASKED)


def judged(groups: Groups, pairs: Any, paper: Paper, title: str, words: tuple[str, str]) -> Table:
    if not any((run.folder / FIGURES).is_file() for runs in groups.values() for run in runs):
        return [], []
    return comparison(groups, pairs, paper.alike, title, words, frechet)


def frechet(runs: list[Run]) -> tuple[Metric, str, Values]:
    found = {run.folder: read(run.folder)["figures"] for run in runs if (run.folder / FIGURES).is_file()}
    name = next((n for figures in found.values() for n in figures if n.startswith("FD-")), "FD")
    return Mean(name, higher_is_better=False), "samples", {folder: figures[name] for folder, figures in found.items()}


def read(folder: Path) -> dict[str, Any]:
    """Of a run: the figures of what it makes, of how many, and those of real pictures.

    Raises:
        ConfigError: It is none of `./run.sh distance`'s.
    """
    path = folder / FIGURES
    try:
        held = json.loads(path.read_text())
        made, real = held["rows"]
        how = {name: held[name] for name in ALIKE if name != "samples"}
        figures = {name: float(value) for name, (value, _) in made["figures"].items()}
        return {**how, "samples": made["samples"], "figures": figures, "real": real, "path": path}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not what ./run.sh distance writes ({type(error).__name__}: {error})") from None


def check_same(name: str, one: dict[str, Any], first: dict[str, Any]) -> None:
    """Raises ConfigError: Distances of other features, pictures or settings do not compare."""
    for key in ALIKE:
        if one[key] != first[key]:
            raise ConfigError(f"{one['path']}: {name} has {key} {one[key]!r}, {first['path']} has {first[key]!r}")
