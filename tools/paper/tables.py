"""Tables and figures of the papers as data: rows with their published values, the runs of each row, and claims.

A table is a file `tools/paper/tables/NAME.yaml`. At scale `published` its runs are the recipes of its rows; at scale
`mini` they are small runs of one recipe, with the settings of each row.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from data.manifest import short_hash
from lion.config import ConfigError, build, changed, nearest, setting
from lion.recipe import Recipe, free_keys
from lion.tasks.metrics import Metric
from lion.yaml_text import parse_yaml
from tools.compose import metric_of, resolve
from tools.glue.plan import check_known, table_names
from tools.statistics import NOISES

TABLES = Path(__file__).parent / "tables"
RUNS = Path("runs") / "paper"
RUN_OF = "run of "  # value of a setting: the run of another row


@dataclass
class Row:
    """A row of a table.

    Args:
        published: The values of the paper by column, as printed.
        recipe: Recipe of the runs at scale `published`; empty: not run at that scale.
        set: Overrides of the runs at scale `mini`, by key; None: not run at that scale. The value `run of ROW` is the
            run of another row with the same seed, which is trained first.
        glue: Fine-tuning recipes of the row in place of those of the table.
        called: Name of the row in the paper, if it says more.
    """

    published: dict = field(default_factory=dict)
    recipe: str = ""
    set: dict | None = field(default_factory=dict)
    glue: tuple[str, ...] = ()
    called: str = ""


@dataclass
class Frame:
    """Runs of a table at scale `mini`: what all rows share.

    Args:
        recipe: The recipe of all rows.
        set: Overrides for all rows, by key.
        seeds: Number of seeds.
        note: The differences from the runs of the paper.
    """

    recipe: str
    set: dict = field(default_factory=dict)
    seeds: int = setting(3, min=1)
    note: str = ""


@dataclass
class Distance:
    """Frechet distance of generated images from real ones (`./run.sh distance`), which the rows of a table compare.

    Args:
        features: Recipe of a classifier, whose features are compared. One run with seed 0 serves all rows.
        set: Overrides of that recipe, by key.
        samples: Number of generated images.
    """

    features: str
    set: dict = field(default_factory=dict)
    samples: int = setting(2000, min=20)

    metric: ClassVar[Metric] = Metric("FD-own", higher_is_better=False)


@dataclass
class FineTuning:
    """Fine-tuning on GLUE (`./run.sh glue`) of the runs of a table.

    Args:
        recipes: Rows of the paper's Table 8 (`tools/glue/tables`): every run at scale `published` is fine-tuned with
            each of them.
        best: Number of rows of which the run with the first seed is fine-tuned at scale `mini`, with the first recipe:
            the rows that are best when all runs of the table are finished.
        mini: Options of `./run.sh glue` at scale `mini`.
    """

    recipes: tuple[str, ...]
    best: int = setting(0, min=0)
    mini: tuple[str, ...] = ()


@dataclass
class Table:
    """A table or figure of a paper, or a question of our own.

    Args:
        title: Title, with the number of the table in its paper.
        order: Place in the queue; smaller numbers run first.
        rows: The rows by name.
        mini: The runs at scale `mini`; None: no such runs.
        columns: Columns of the published values.
        noise: Model of the noise: `frame` (of all tables with the same frame), `pairs` of runs with one seed, or each
            row's `own`; see `tools.statistics`.
        more: Whether to report the values on further held-out sets.
        lengths: Numbers of tokens of windows of held-out text on which every run is evaluated, too.
        state: Whether to plot the values by the size of the state, which the rows vary.
        distance: Images that every run at scale `mini` generates, to compare their distances from real ones in place of
            the metric of the task.
        glue: Fine-tuning of the runs; None: no fine-tuning.
        claims: Pairs of rows (better, worse) that the paper prints in this order on the same data, at all sizes and in
            all tables.
        open: Pairs of rows to compare, of which one is not in the paper, or which it prints in opposite orders.
        notes: What else differs between the rows of a claim, by claim: "better > worse".
        published_seeds: Number of seeds at scale `published`.
        judged: Whether the metric of the runs at scale `published` is that of the claims.
        text: Sentences above the table.
    """

    title: str
    order: int = setting(min=0)
    rows: dict = field(default_factory=dict)
    mini: Frame | None = None
    columns: tuple[str, ...] = ()
    noise: str = setting("frame", choices=tuple(NOISES))
    more: bool = False
    lengths: tuple[int, ...] = ()
    state: bool = False
    distance: Distance | None = None
    glue: FineTuning | None = None
    claims: tuple[tuple[str, str], ...] = ()
    open: tuple[tuple[str, str], ...] = ()
    notes: dict = field(default_factory=dict)
    published_seeds: int = setting(1, min=1)
    judged: bool = True
    text: str = ""

    def metric(self, cells: Sequence[Cell]) -> Metric:
        """Return the metric that the rows compare."""
        if self.distance and cells[0].scale == "mini":
            return self.distance.metric
        return metric_of(cells[0].recipe)

    def printed(self, row: str, column: str) -> tuple[float, float] | None:
        """Return the number of the paper, also of "×1.46", and its interval, "17.42 ± 1.11", or 0; None without one."""
        text = str(self.rows[row].published.get(column, ""))
        found = re.match(r"×?(\d+(?:\.\d+)?)(?: ± (\d+\.\d+))?", text)
        if found is None:
            return None
        return float(found[1]), float(found[2] or 0)


class Cell(NamedTuple):
    """A run that a table asks for: a row at one scale with one seed.

    Attributes:
        table, row, scale, seed: Place of the cell.
        argv: Recipe and overrides, as on the command line.
        recipe: The recipe, with the seed, and without the location of data.
        key: Hash of all settings that are not default, without the seed, and of what is measured beside the metric of
            the task: cells of equal keys share their runs.
        after: The cell whose run this one needs, if any.
    """

    table: str
    row: str
    scale: str
    seed: int
    argv: tuple[str, ...]
    recipe: Recipe
    key: str
    after: Cell | None = None

    @property
    def place(self) -> tuple[str, int]:
        """The place of its raw row in the store."""
        return self.key, self.seed

    @property
    def run(self) -> Path:
        """The folder of the run, the same in all tables that share it."""
        words = re.sub(r"[^A-Za-z0-9]+", "_", self.recipe.model.label()).strip("_")
        return RUNS / f"{words}_{self.key[:6]}_{self.seed}"


def read_tables() -> dict[str, Table]:
    """Read all tables, in the order of the queue.

    Raises:
        ConfigError: A file is invalid.
    """
    tables = {path.stem: read_table(path) for path in sorted(TABLES.glob("*.yaml"))}
    return dict(sorted(tables.items(), key=lambda item: item[1].order))


def read_table(path: Path) -> Table:
    def source(key: str) -> str:
        return str(path)

    table = build(Table, parse_yaml(path.read_text(encoding="utf-8"), source=str(path)), source=source)
    for name, row in table.rows.items():
        made = build(Row, row, source=source, key=f"rows.{name}")
        check_known(made.published, table.columns, f"{path}: rows.{name}: unknown column")
        check_known(made.glue, table_names(), f"{path}: glue: unknown recipe")
        table.rows[name] = made
    if table.glue:
        check_known(table.glue.recipes, table_names(), f"{path}: glue: unknown recipe")
    for kind, pairs in (("claims", table.claims), ("open", table.open)):
        for pair in pairs:
            check_known(pair, table.rows, f"{path}: {kind}: unknown row")
    names = [" > ".join(pair) for pair in table.claims + table.open]
    check_known(table.notes, names, f"{path}: notes: unknown claim")
    return table


def choose(tables: Mapping[str, Table], names: Sequence[str]) -> dict[str, Table]:
    """Return the tables of these names, or all tables without names.

    Raises:
        ConfigError: An unknown name.
    """
    if not names:
        return dict(tables)
    chosen = set()
    for name in names:
        found = tables_called(name, tables)
        if not found:
            raise ConfigError(f"--table: unknown table {name!r}, {nearest(name, tables)}")
        chosen.update(found)
    return {name: table for name, table in tables.items() if name in chosen}


def tables_called(name: str, tables: Mapping[str, Table]) -> list[str]:
    """Return the tables that a person calls `name`: `lion-2`, or as the papers do, "LION, Table 2" or "Table 2".

    Without a paper, a number is that of LION. Several tables can hold one table of a paper, as those of the Long Range
    Arena do.
    """
    if name in tables:
        return [name]
    words = re.findall(r"[a-z]+|\d+", name.lower())
    numbers = [word for word in words if word.isdigit()]
    paper = "lion"
    if "lightnet" in words:
        paper = "lightnet"
    kind = "table"
    if "figure" in words:
        kind = "figure"
    if len(numbers) != 1 or set(words) - {paper, kind, "tables", *numbers}:
        return []
    found = []
    for known, table in tables.items():
        place = table.title.lower().partition(":")[0]
        if place.startswith(f"{paper}, {kind}") and numbers[0] in re.findall(r"\d+", place):
            found.append(known)
    return found


def cells(name: str, table: Table, scale: str) -> list[Cell]:
    """List the runs of a table: all rows with the first seed, then all rows with the next seed.

    Raises:
        ConfigError: A recipe is unknown, or its settings cannot be combined.
    """
    made: dict[tuple[str, int], Cell] = {}
    if scale == "published":
        for seed in range(table.published_seeds):
            for row, each in table.rows.items():
                if each.recipe:
                    made[row, seed] = make_cell(name, row, scale, seed, each.recipe, {})
        return list(made.values())
    if table.mini is None:
        return []
    measured = table.distance
    classifier = None
    if measured:
        classifier = make_cell(name, "features", scale, 0, measured.features, measured.set)
    for seed in range(table.mini.seeds):
        for row, each in table.rows.items():
            if each.set is None:
                continue
            settings = table.mini.set | each.set
            after = classifier
            for value in settings.values():
                if is_run(value):
                    after = made[value.removeprefix(RUN_OF), seed]
            made[row, seed] = make_cell(name, row, scale, seed, table.mini.recipe, settings, after, measured)
    return list(made.values())


def make_cell(
    table: str,
    row: str,
    scale: str,
    seed: int,
    recipe: str,
    settings: Mapping[str, Any],
    after: Cell | None = None,
    measured: Distance | None = None,
) -> Cell:
    overrides = []
    runs = {}  # settings that name a run, as they enter the key, which is the same for all seeds
    for key, value in settings.items():
        text = value
        if is_run(value) and after:
            text = str(after.run)
            runs[key] = f"{RUN_OF}{after.key}"
        elif not isinstance(value, str):
            text = json.dumps(value)
        overrides.append(f"{key}={text}")
    try:
        resolved = resolve_once(recipe, tuple(overrides))
    except ConfigError as error:
        raise ConfigError(f"table {table}, row {row!r}: {error}") from None
    values: Any = settings_of(resolved) | runs
    if measured:
        values = [values, asdict(measured)]
    return Cell(table, row, scale, seed, (recipe, *overrides), resolved, short_hash(values), after)


def is_run(value: Any) -> bool:
    """Return whether the value of a setting names the run of another row."""
    return isinstance(value, str) and value.startswith(RUN_OF)


# the page is written after every run, from the recipes of all tables and seeds
resolve_once = functools.cache(resolve)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that are not default, except the seed and those that do not change the results."""
    free = free_keys(recipe) | {"seed"}
    found = {}
    for key, value in changed(recipe).items():
        if key not in free and not key.startswith("about."):
            found[key] = value
    return found
