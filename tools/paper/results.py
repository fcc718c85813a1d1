"""Raw results of the runs: one row of `reports/paper.json` for each run, with all that made it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.manifest import short_hash
from lion.layers.mixers.lion import FixedDecay
from lion.runs import SUMMARY, open_run
from lion.tasks.metrics import Metric
from tools import distance, evaluate
from tools.finished import Run, load
from tools.jobs import usual_form
from tools.paper.tables import Cell, Distance, Table, cells, settings_of
from tools.store import Row, Store

TOKENS = 40_000  # of held-out text, in windows of each length
MADE_BY = ("commit", "changed", "python", "torch", "device", "threads", "command")  # keys of environment.json


class Results(NamedTuple):
    """Values of a table at one scale, as shown (percent, perplexity, ..), from runs on one data set.

    Attributes:
        values: By row and seed, on `split`.
        split: `test` if all runs were tested, else `val`; empty without runs.
        data: Fingerprint of the data of these runs.
        made: Number of runs that the table asks for and has.
        left_out: Number of runs on other data.
        runs: The raw rows, by row and seed.
    """

    values: dict[str, dict[int, float]]
    split: str
    data: str | None
    made: int
    left_out: int
    runs: dict[str, dict[int, Row]]


def open_store(path: Path) -> Store:
    return Store(path, rows=("key", "seed"), estimates=("table", "scale")).load()


def raw_row(key: str, seed: int, run: Run) -> Row:
    """Return the raw row of a finished run: its settings, data, values and environment."""
    settings = settings_of(run.recipe)
    last = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        "key": key,
        "seed": seed,
        "settings": settings,
        "data": run.data,
        "made": hash_of(settings, run.data),
        "metric": run.metric.name,
        "val": run.val,
        "test": run.test,
        "beside": {metric.name: value for metric, value in run.beside},
        "more": run.more,
        "curve": run.curve,
        "parameters": run.parameters,
        "step": last["step"],
        "seconds": seconds(run),
        "remark": run.remark,
        "decays": decays_of(run.folder),
        **{name: run.environment.get(name) for name in MADE_BY},
    }


def decays_of(folder: Path) -> list[list[float]]:
    """Return lambda of every head by layer, for models with fixed decays (Lion-D); an empty list for other models."""
    decays = [part for part in open_run(folder).model.modules() if isinstance(part, FixedDecay)]
    return [decay.rates().tolist() for decay in decays]


def hash_of(settings: Mapping[str, object], data: str | None) -> str:
    """Return the hash that binds a raw row to its settings and its data."""
    return short_hash([settings, data])


def seconds(run: Run) -> float:
    """Return the seconds of training at the median of the logged speeds: interruptions and evaluation do not count.

    Without logged speeds, the seconds from the start of the run to its end, by the times of its files.
    """
    if run.seen and run.speed:
        return round(run.seen / run.speed, 1)
    start, end = ((run.folder / name).stat().st_mtime for name in ("recipe.yaml", SUMMARY))
    return round(end - start, 1)


def results_of(table: Table, places: Sequence[Cell], store: Store) -> Results:
    """Select the raw rows of a table, also those of further seeds that another table asks for.

    If the rows have several data sets, the one with the most runs counts.
    """
    keys = {cell.row: cell.key for cell in places}
    found = [(name, seed, row) for name, key in keys.items() for (own, seed), row in store.rows.items() if own == key]
    marks = [row["data"] for *_, row in found]
    data = max(marks, key=marks.count, default=None)
    chosen = [each for each in found if each[-1]["data"] == data]
    split = ("test" if all(row["test"] is not None for *_, row in chosen) else "val") if chosen else ""
    metric = table.metric(places) if places else None
    runs: dict[str, dict[int, Row]] = {name: {} for name in table.rows}
    for name, seed, row in sorted(chosen, key=lambda each: each[1]):
        runs[name][seed] = row
    made = sum(cell.seed in runs[cell.row] for cell in places)
    values = {
        name: {seed: metric.scaled(row["beside"].get(metric.name, row[split])) for seed, row in own.items()}
        for name, own in runs.items()
    }
    return Results(values, split, data, made, len(found) - len(chosen), runs)


def collect(store: Store, cell: Cell, tables: Mapping[str, Table]) -> Run:
    """Add the raw row of a finished run to the store, with what its tables measure beside the metric of the task."""
    run, table = load(str(cell.run)), tables[cell.table]
    if lengths := lengths_of(cell, tables):
        run = run._replace(more=run.more | by_length(run, lengths))
    if table.distance and cell.row in table.rows:
        run = run._replace(beside=[*run.beside, distance_of(run, cell.after.run, table.distance)])
    store.add(raw_row(cell.key, cell.seed, run))
    return run


def lengths_of(cell: Cell, tables: Mapping[str, Table]) -> list[int]:
    """Return the lengths at which a run is evaluated: those of all tables that share it."""
    found = {
        length
        for name, table in tables.items()
        if table.lengths and any(each.key == cell.key for each in cells(name, table, cell.scale))
        for length in table.lengths
    }
    return sorted(found)


def by_length(run: Run, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Evaluate a run on windows of these numbers of tokens, without those that exceed its position embeddings."""
    out = run.folder / "lengths"
    options = ["--lengths", ",".join(map(str, lengths)), "--form", usual_form(run.recipe), "--tokens", str(TOKENS)]
    silently(evaluate.main, [str(run.folder), *options, "--eager", "--out", str(out)])
    rows = json.loads((out / "extrapolation.json").read_text())["rows"]
    return {f"{row['length']} tokens": {run.metric.name: row["value"]} for row in rows if "value" in row}


def distance_of(run: Run, classifier: Path, measured: Distance) -> tuple[Metric, float]:
    """Generate images with a run, and return their distance from the training images on features of a classifier."""
    out = run.folder / distance.FIGURES
    silently(distance.main, [str(run.folder), "--features", str(classifier), "--samples", str(measured.samples)])
    return measured.metric, json.loads(out.read_text())["rows"][0]["figures"][measured.metric.name][0]


def silently(command: Callable[[list[str]], int], argv: list[str]) -> None:
    """Run a command without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command(argv)
