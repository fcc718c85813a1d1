"""Run the tables of the papers, and write them beside the published values with verdicts on all claims.

    ./run.sh paper [--table lion-16 recall ..] [--scale mini|published] [--jobs N] [--data NAME key=value ..] ..
        [--dry-run [--save]] [--no-runs]

Every row and seed of a table is a run in runs/paper. Finished runs are not repeated; stopped runs are resumed. The raw
results of a run are added to reports/paper.json when it ends, so its folder may be deleted. Masked language models are
fine-tuned on GLUE afterwards, where the paper has its scores. The command ends by writing reports/paper.md and the
figures in reports/paper. `--dry-run` starts and writes no runs, but prepares small data sets; `--dry-run --save` writes
the estimated hours on the page. --data replaces the data set NAME of the recipes by other data, such as `--data cifar10
data.name=hf data.path=FOLDER`; `--data glue data.path=FOLDER` names GLUE's folder.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lion.config import ConfigError
from lion.runs import build_on_meta
from lion.trainer.plan import make_plan
from tools import options
from tools.checks import checkpoint_bytes
from tools.cli import say
from tools.compose import build_data, describe_data, make_task, resolve, runtime_of
from tools.cost import duration_text, time_step
from tools.glue.plan import check_known
from tools.jobs import Job, at_once, work
from tools.paper.figures import draw
from tools.paper.finetune import fine_tune
from tools.paper.measured import on_gpu
from tools.paper.page import markdown
from tools.paper.results import collect, open_store, rows_of
from tools.paper.tables import RUNS, Cell, Table, cells, choose, read_tables
from tools.show import gigabytes
from tools.store import Store
from tools.tables import table as as_text


@dataclass(frozen=True)
class PaperJob(Job):
    """A run of the queue; cells with equal settings share it."""

    cell: Cell


def main(argv: list[str]) -> int:
    args = options.read("paper", argv)
    if args.save and not args.dry_run:
        raise ConfigError("--save: writes the estimates of --dry-run, which is missing")
    tables = read_tables()
    store = open_store(args.out / "paper.json")
    chosen = choose(tables, args.table)
    data = replacements(args.data, tables, args.scale)
    jobs = make_jobs(chosen, args.scale, store, data)
    if args.dry_run:
        print(plan(chosen, args.scale, store, jobs))
        if args.save:
            write(tables, store)
            print(store.files())
        return 0
    code = 0
    if not args.no_runs:
        most = args.jobs or at_once()
        code = run(jobs, tables, store, most)
        if code != 130:
            passed = ["--jobs", str(most), *data.get("glue", [])]
            code = fine_tune(chosen, args.scale, store, passed) or code
    write(tables, store)
    print(store.files())
    return code


def replacements(given: Sequence[Sequence[str]], tables: Mapping[str, Table], scale: str) -> dict[str, list[str]]:
    """Return the overrides of `--data`, by the name of the data set that they replace.

    Raises:
        ConfigError: No run reads this data set.
    """
    found: dict[str, list[str]] = {}
    if not given:
        return found
    used = {"glue"}
    for name, table in tables.items():
        used.update(cell.recipe.data.name for cell in cells(name, table, scale))
    for name, *overrides in given:
        check_known([name], sorted(used), "--data: no run reads data set")
        found.setdefault(name, []).extend(overrides)
    return found


def make_jobs(
    tables: Mapping[str, Table], scale: str, store: Store, data: Mapping[str, Sequence[str]]
) -> list[PaperJob]:
    """List the runs that are missing in the store, each once, in the order of the tables.

    Args:
        tables: The tables.
        scale: Scale of the runs.
        store: The raw results.
        data: By the name of a data set, overrides that replace it.

    Raises:
        ConfigError: Settings cannot be combined.
    """
    jobs: dict[tuple[str, int], PaperJob] = {}

    def job(cell: Cell) -> PaperJob:
        """Return the job of a cell; a run that another one needs is made again if its folder is gone."""
        if cell.place not in jobs:
            after = None
            if cell.after:
                after = job(cell.after)
            recipe, *overrides = cell.argv
            overrides += data.get(cell.recipe.data.name, ())
            overrides += [f"seed={cell.seed}", f"run.name={cell.run.name}", f"run.root={cell.run.parent}"]
            jobs[cell.place] = PaperJob((recipe, *overrides), resolve(recipe, overrides), after, cell)
        return jobs[cell.place]

    for name, table in tables.items():
        for cell in cells(name, table, scale):
            if cell.place not in store.rows:
                job(cell)
    return list(jobs.values())


def run(jobs: Sequence[PaperJob], tables: Mapping[str, Table], store: Store, most: int) -> int:
    """Train all missing runs, and store the raw result of each when it ends; returns the exit code."""

    def keep(job: PaperJob) -> str:
        found = collect(store, job.cell, tables)
        store.save_rows()
        return found.metric.text(found.val if found.test is None else found.test)

    for job in jobs:
        if job.finished:  # by a command that was stopped before it stored the result
            say(f"{job.name}: was finished, {keep(job)}")
    by_data: dict[str, list[PaperJob]] = {}  # by the name that --data takes
    for job in jobs:
        if not job.finished:
            by_data.setdefault(job.cell.recipe.data.name, []).append(job)
    steps: dict[str, int] = {}
    for name, own in by_data.items():
        try:
            samples = samples_of(own[0])
            steps |= {job.name: make_plan(job.recipe, samples=samples, world=1).total or 1 for job in own}
        except ConfigError as error:
            say(f"runs left out: {len(own)}; --data {name} key=value .. names other data: {error}")
    left = [job for job in jobs if job.name in steps]
    if not left:
        return 0
    return work(left, steps, most, title="paper", result=keep)


def samples_of(job: PaperJob) -> int:
    """Return the number of training samples; at scale `mini` the data are prepared for it.

    Raises:
        ConfigError: The data are missing.
    """
    if job.cell.scale == "mini":
        return len(build_data(job.recipe).train)
    _, samples, _ = describe_data(job.recipe)
    return samples


def write(tables: Mapping[str, Table], store: Store) -> None:
    """Write the raw results, the figures and the page, with the rows that other processes have stored meanwhile."""
    with store.alone():
        store.save(markdown(tables, store, draw(tables, store)))


@dataclass
class Missing:
    """Runs of a table that are not finished, with estimates of their time and disk space.

    Attributes:
        table: Name of the table.
        runs: Number of all runs of the table.
        jobs: The runs that are left.
        seconds: Their time on this machine; None if the data are missing.
        bytes: Their weights.
    """

    table: str
    runs: int
    jobs: list[PaperJob]
    seconds: float | None = None
    bytes: int = 0


def plan(tables: Mapping[str, Table], scale: str, store: Store, jobs: Sequence[PaperJob]) -> str:
    """Return a table of the runs that are left, with their time on this machine, disk space, and what is missing."""
    rows = []
    absent: dict[str, list[str]] = {}  # tables by reason
    published: dict[str, list[str]] = {}
    notes = []
    for name, table in tables.items():
        every = cells(name, table, scale)
        if not every:
            continue
        own = [job for job in jobs if job.cell.table == name]
        row = Missing(name, len(every), own)
        rows.append(row)
        try:
            row.seconds, reason = time_left(own, store)
        except ConfigError as error:
            absent.setdefault(str(error), []).append(name)
            continue
        if reason:
            published.setdefault(f"estimated with the published number of samples; {reason}", []).append(name)
        if table.glue and own:
            notes.append(f"{name}: without GLUE, which `./run.sh glue RUN --recipe NAME --dry-run` estimates")
        sizes = {}
        for job in own:
            if job.cell.key not in sizes:
                sizes[job.cell.key] = weights(job)
            row.bytes += sizes[job.cell.key]
    for reason, names in (absent | published).items():
        notes.append(f"{', '.join(names)}: {reason}")
    notes.append("jobs: runs that no earlier table has, and classifiers that measure distances of images")
    header = ["table", "runs", "jobs left", "a job", "all jobs", "weights"]
    return "\n".join([as_text(header, [cells_of(row) for row in rows]), *notes, *costs(rows)])


def time_left(own: Sequence[PaperJob], store: Store) -> tuple[float, str | None]:
    """Return the seconds of runs on this machine, and a note on absent files or None.

    The time of a run is that of finished runs with its settings, or else that of a step of the first new run, which is
    timed now; this estimate is added to the store.

    Raises:
        ConfigError: The files are absent, and no number of samples is published.
    """
    times = [seconds_before(job, store) for job in own]
    if None not in times:
        return sum(times), None
    new = own[times.index(None)]
    here = f"here: --data {new.cell.recipe.data.name} KEY=VALUE"
    try:
        each, note = estimate(new)
    except ConfigError as error:
        raise ConfigError(f"{error}; {here}") from None
    threads = torch.get_num_threads()
    store.add({"table": new.cell.table, "scale": new.cell.scale, "seconds": each, "threads": threads}, "estimates")
    if note:
        note = f"{note}; {here}"
    return sum(seconds or each for seconds in times), note


def costs(rows: Sequence[Missing]) -> list[str]:
    """Return the sentences on the time and the disk space of all runs that are left."""
    without = sum(row.seconds is None for row in rows)
    more = ""
    if without:
        more = f", without {without} table{'s' if without > 1 else ''} whose data are missing"
    total = sum(row.seconds or 0.0 for row in rows)
    if not total:
        if any(row.jobs for row in rows):
            return [f"nothing to estimate{more}"]
        return ["nothing is left to run"]
    place = RUNS.absolute()
    while not place.is_dir():
        place = place.parent
    free = gigabytes(shutil.disk_usage(place).free)
    space = gigabytes(sum(row.bytes for row in rows))
    return [
        f"about {duration_text(total)} one after the other{more}; by finished runs of a row, else by a step of the "
        "table's first new row, timed now (eager, without evaluation)",
        f"{space} of weights, {free} free; a run that is being trained has checkpoints, too",
    ]


def cells_of(row: Missing) -> list[str]:
    """Return the cells of a table in the plan; its estimates are "-" if nothing is left or the data are missing."""
    found = [row.table, str(row.runs), str(len(row.jobs))]
    if not row.jobs or row.seconds is None:
        return [*found, "-", "-", "-"]
    each = duration_text(row.seconds / len(row.jobs))
    return [*found, each, duration_text(row.seconds), gigabytes(row.bytes)]


def seconds_before(job: PaperJob, store: Store) -> float | None:
    """Return the median time of the finished runs with the same settings on a CPU, or None."""
    found = []
    for (key, _), row in rows_of(store).items():
        if key == job.cell.key and not on_gpu(row):
            found.append(row["seconds"])
    if not found:
        return None
    return statistics.median(found)


def weights(job: PaperJob) -> int:
    """Return the bytes of the weights that a finished run keeps; its data are there."""
    task = make_task(job.recipe, describe_data(job.recipe)[0])
    return checkpoint_bytes(build_on_meta(task, job.recipe.model), False)[1]


def estimate(job: PaperJob) -> tuple[float, str | None]:
    """Return the seconds of a run on this machine by a step that is timed now, and a note on absent files or None.

    Without files, the number of samples is the published one.

    Raises:
        ConfigError: The files are absent, and no number is published.
    """
    recipe = job.recipe
    info, samples, note = describe_data(recipe)
    made = make_plan(recipe, samples=samples, world=1)
    runtime = runtime_of(recipe)
    if made.total is None:
        return made.seconds, note
    step = time_step(make_task(recipe, info), recipe, made, runtime)
    return made.samples * step.sample + made.total * step.update, note
