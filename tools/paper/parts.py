"""Tables at one scale with the results of their runs, and the comparisons of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lion.tasks.metrics import Metric
from tools.claims import CLAIM, QUESTION, Comparison, compare, not_judged
from tools.options import SCALES
from tools.paper.results import Results, results_of
from tools.paper.tables import Cell, Table, cells
from tools.statistics import Values
from tools.store import Row, Store


class Part(NamedTuple):
    """A table at one scale, with its results."""

    name: str
    table: Table
    scale: str
    cells: list[Cell]
    metric: Metric
    results: Results

    @property
    def has_runs(self) -> bool:
        return any(self.results.values.values())

    @property
    def seeds(self) -> int:
        """Return the number of runs of a complete row."""
        return 1 + max(cell.seed for cell in self.cells)

    @property
    def frame(self) -> tuple[Any, ...]:
        """Return the scale, recipe, budget, metric and data; the noise of runs with the same frame is alike."""
        first = self.cells[0].recipe
        recipe = self.table.mini and self.table.mini.recipe
        settings = self.scale, recipe, first.trainer, first.data, self.metric.name
        return settings, self.results.data, self.results.split

    @property
    def keys(self) -> dict[str, str]:
        """Return the keys of the settings by row."""
        return {cell.row: cell.key for cell in self.cells}

    @property
    def rows(self) -> list[Row]:
        """Return the raw rows of all runs."""
        found = []
        for own in self.results.runs.values():
            found += own.values()
        return found

    def names_in(self, field: str) -> list[str]:
        """Return the names in a field of the raw rows, each once, such as further held-out sets in `more`."""
        names: dict[str, None] = {}
        for row in self.rows:
            names.update(dict.fromkeys(row[field]))
        return list(names)

    def held_out(self, row: str, name: str) -> list[float]:
        """Return the values of a row's runs on a further held-out set, as shown."""
        found = []
        for run in self.results.runs[row].values():
            if name in run["more"]:
                found.append(self.metric.scaled(run["more"][name]))
        return found

    def runs_of(self, each: Comparison) -> tuple[Any, ...]:
        """Return a mark that is equal for comparisons of the same runs, in any table and order."""
        keys = self.keys
        pair = frozenset(keys.get(row, (self.name, row)) for row in each.pair)
        return self.metric.name, self.table.noise, pair


def parts_of(tables: Mapping[str, Table], store: Store) -> list[Part]:
    """Return all tables: at scale `mini`, and at scale `published` if they have such runs or no others."""
    found = []
    for name, table in tables.items():
        for scale in SCALES:
            own = cells(name, table, scale)
            if not own:
                continue
            part = Part(name, table, scale, own, table.metric(own), results_of(table, own, store))
            if scale == "mini" or table.mini is None or part.has_runs:
                found.append(part)
    return found


def comparisons(part: Part, parts: Sequence[Part]) -> list[Comparison]:
    """Compare the rows of all claims and questions of a table.

    The noise of unpaired differences is estimated by the runs of all tables with the frame of this one.
    A row with a remarked run, such as one that is stuck at chance, is compared as one that lacks a run.
    """
    if part.scale == "published" and not part.table.judged:
        values: Values = {}  # the claims are about another metric than that of the runs
    elif part.table.noise == "frame":
        values = pooled(part, parts)
    else:
        values = part.results.values
    found: list[Comparison] = []
    for kind, pairs in ((CLAIM, part.table.claims), (QUESTION, part.table.open)):
        found += compare(kind, pairs, values, part.metric, noise=part.table.noise, seeds=part.seeds)
    unfit = set()
    for name, own in part.results.runs.items():
        for run in own.values():
            if run["remark"]:
                unfit.add(name)
    return not_judged(found, unfit)


def pooled(part: Part, parts: Sequence[Part]) -> Values:
    """Return the values of a table, and by the keys of their runs those of other tables of its frame."""
    own = set(part.keys.values())
    others: dict[str, dict[int, float]] = {}
    for each in parts:
        if each.frame != part.frame:
            continue
        keys = each.keys
        for row, found in each.results.values.items():
            if found and keys[row] not in own:
                others[keys[row]] = found
    return others | part.results.values
