"""Raw results of the runs: a line of `reports/paper.json` for each run.

A row has the key of its settings, which the tables have, and what cannot be computed from them: the measured values,
the fingerprint of the data, and the environment of the run, a row of its own table that many runs share.
"""

from __future__ import annotations

import contextlib
import io
import operator
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.manifest import short_hash
from lion.files import read_json
from lion.layers.mixers.lion import FixedDecay
from lion.recipe_files import RECIPE, SUMMARY
from lion.runs import open_run
from tools import distance, evaluate
from tools.finished import Run, load
from tools.jobs import usual_form
from tools.paper.tables import Cell, Distance, Table, cells
from tools.store import Row, Store

TOKENS = 40_000  # of held-out text, in windows of each length
MADE_BY = ("commit", "changed", "python", "torch", "device", "threads")  # keys of environment.json
# values of the fields that a raw row leaves out
LEFT_OUT: Row = {"test": None, "distance": None, "more": {}, "remark": None, "decays": [], "replaced": [], "glue": {}}


class Results(NamedTuple):
    """Values of a table at one scale, as shown (percent, perplexity, ..), from runs on one data set.

    Attributes:
        values: By row and seed, on `split`.
        split: `test` if all runs were tested, else `val`; empty without runs.
        data: Fingerprint of the data of these runs.
        made: Number of runs that the table asks for and has.
        left_out: Number of runs on other data.
        runs: The rows of `rows_of`, by row and seed.
    """

    values: dict[str, dict[int, float]]
    split: str
    data: str | None
    made: int
    left_out: int
    runs: dict[str, dict[int, Row]]


def open_store(path: Path) -> Store:
    keys = {"rows": ("key", "seed"), "environments": ("environment",), "estimates": ("table", "scale")}
    return Store(path, ordered=True, **keys).load()


def add_row(store: Store, row: Row) -> None:
    """Add a raw row with the fields of its environment, which are stored once for all runs that share them."""
    made_by = {name: row[name] for name in MADE_BY}
    environment = short_hash(made_by)
    store.add({"environment": environment, **made_by}, "environments")
    kept = {}
    for name, value in row.items():
        if name not in MADE_BY and (name not in LEFT_OUT or value != LEFT_OUT[name]):
            kept[name] = value
    store.add({**kept, "environment": environment})


def rows_of(store: Store) -> dict[tuple, Row]:
    """Return the raw rows by key and seed, with the fields of their environments and those that are left out."""
    found = {}
    for place, row in store.rows.items():
        environment = store.tables["environments"][row["environment"],]
        found[place] = {**LEFT_OUT, **environment, **row}
    return found


def raw_row(cell: Cell, run: Run, apart: float | None) -> Row:
    """Return the raw row of a finished run: its data, values and environment; `apart` is the distance of its images."""
    more = {}
    for name, values in run.more.items():
        more[name] = values[run.metric.name]
    return {
        "key": cell.key,
        "seed": cell.seed,
        "data": run.data,
        "replaced": replaced(cell, run.environment.get("command") or ""),
        "val": run.val,
        "test": run.test,
        "distance": apart,
        "more": more,
        "parameters": run.parameters,
        "seconds": seconds(run),
        "remark": run.remark,
        "decays": decays_of(run.folder),
        **{name: run.environment.get(name) for name in MADE_BY},
    }


def replaced(cell: Cell, command: str) -> list[str]:
    """Return the settings of data in the command of a run that its cell does not have."""
    found = []
    for word in shlex.split(command):
        if word.startswith("data.") and word not in cell.argv:
            found.append(word)
    return found


def decays_of(folder: Path) -> list[list[float]]:
    """Return lambda of every head by layer, for models with fixed decays (Lion-D); an empty list for other models."""
    decays = [part for part in open_run(folder).model.modules() if isinstance(part, FixedDecay)]
    return [decay.rates().tolist() for decay in decays]


def seconds(run: Run) -> float:
    """Return the seconds of training at the median of the logged speeds: interruptions and evaluation do not count.

    Without logged speeds, the seconds from the start of the run to its end, by the times of its files.
    """
    if run.seen and run.speed:
        return round(run.seen / run.speed, 1)
    start = (run.folder / RECIPE).stat().st_mtime
    end = (run.folder / SUMMARY).stat().st_mtime
    return round(end - start, 1)


def results_of(table: Table, places: Sequence[Cell], store: Store) -> Results:
    """Select the raw rows of a table, also those of further seeds that another table asks for.

    If the rows have several data sets, the one with the most runs counts.
    """
    keys = {cell.row: cell.key for cell in places}
    every = [row for row in rows_of(store).values() if row["key"] in keys.values()]
    every.sort(key=operator.itemgetter("seed", "key"))
    marks = [row["data"] for row in every]
    data = max(marks, key=marks.count, default=None)
    kept = [row for row in every if row["data"] == data]
    runs: dict[str, dict[int, Row]] = {name: {} for name in table.rows}
    for row in kept:
        for name, key in keys.items():
            if row["key"] == key:
                runs[name][row["seed"]] = row
    split = split_of(kept)
    metric = table.metric(places)
    compared = split
    if metric == Distance.metric:
        compared = "distance"
    values = {}
    for name, own in runs.items():
        values[name] = {seed: metric.scaled(row[compared]) for seed, row in own.items()}
    made = sum(cell.seed in runs[cell.row] for cell in places)
    return Results(values, split, data, made, len(every) - len(kept), runs)


def split_of(rows: Sequence[Row]) -> str:
    """Return the split on which runs are compared: test if all were tested; empty without runs."""
    if not rows:
        return ""
    if None in [row["test"] for row in rows]:
        return "val"
    return "test"


def collect(store: Store, cell: Cell, tables: Mapping[str, Table]) -> Run:
    """Add the raw row of a finished run to the store, with what its tables measure beside the metric of the task."""
    run = load(str(cell.run))
    table = tables[cell.table]
    apart = None
    lengths = lengths_of(cell, tables)
    if lengths:
        run = run._replace(more=run.more | by_length(run, lengths))
    if table.distance and cell.row in table.rows:
        apart = distance_of(run, cell.after.run, table.distance)
    add_row(store, raw_row(cell, run, apart))
    return run


def lengths_of(cell: Cell, tables: Mapping[str, Table]) -> list[int]:
    """Return the lengths at which a run is evaluated: those of all tables that share it."""
    found: set[int] = set()
    for name, table in tables.items():
        if table.lengths and cell.key in [each.key for each in cells(name, table, cell.scale)]:
            found.update(table.lengths)
    return sorted(found)


def by_length(run: Run, lengths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Evaluate a run on windows of these numbers of tokens, without those that exceed its position embeddings."""
    out = run.folder / "lengths"
    options = ["--lengths", ",".join(map(str, lengths)), "--form", usual_form(run.recipe), "--tokens", str(TOKENS)]
    silently(evaluate.main, [str(run.folder), *options, "--eager", "--out", str(out)])
    found = {}
    for row in read_json(out / "extrapolation.json")["rows"]:
        if "value" in row:
            found[f"{row['length']} tokens"] = {run.metric.name: row["value"]}
    return found


def distance_of(run: Run, classifier: Path, measured: Distance) -> float:
    """Generate images with a run, and return their distance from the training images on features of a classifier."""
    out = run.folder / distance.FIGURES
    silently(distance.main, [str(run.folder), "--features", str(classifier), "--samples", str(measured.samples)])
    return read_json(out)["rows"][0]["figures"][measured.metric.name][0]


def silently(command: Callable[[list[str]], int], argv: list[str]) -> None:
    """Run a command without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command(argv)
