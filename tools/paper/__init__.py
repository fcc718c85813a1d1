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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lion.config import ConfigError, nearest
from lion.runs import build_on_meta
from lion.trainer.plan import make_plan
from lion.trainer.runtime import start_runtime
from tools import options
from tools.checks import checkpoint_bytes
from tools.cli import say
from tools.compose import build_data, describe_data, make_task, resolve
from tools.cost import duration_text, time_step
from tools.jobs import Job, at_once, work
from tools.paper.figures import draw
from tools.paper.finetune import fine_tune
from tools.paper.measured import on_gpu
from tools.paper.page import markdown
from tools.paper.results import collect, open_store, rows_of
from tools.paper.tables import RUNS, Cell, Table, cells, choose, read_tables
from tools.show import gigabytes
from tools.store import Store
from tools.tables import table as columns


@dataclass(frozen=True)
class PaperJob(Job):
    """A run of the queue; cells with equal settings share it."""

    cell: Cell


def main(argv: list[str]) -> int:
    args = options.paper(argv)
    if args.save and not args.dry_run:
        raise ConfigError("--save: writes the estimates of --dry-run, which is missing")
    tables, store = read_tables(), open_store(args.out / "paper.json")
    chosen = choose(tables, args.table)
    data = replacements(args.data, tables, args.scale) if args.data else {}  # resolves the runs of all tables
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
            passed = "--jobs", str(most), *data.get("glue", ())
            code = fine_tune(chosen, args.scale, store, passed) or code
    write(tables, store)
    print(store.files())
    return code


def replacements(given: Sequence[Sequence[str]], tables: Mapping[str, Table], scale: str) -> dict[str, list[str]]:
    """Return the overrides of `--data`, by the name of the data set that they replace.

    Raises:
        ConfigError: No run reads this data set.
    """
    used = {cell.recipe.data.name for name, table in tables.items() for cell in cells(name, table, scale)} | {"glue"}
    found: dict[str, list[str]] = {}
    for name, *overrides in given:
        if name not in used:
            raise ConfigError(f"--data: no run reads data set {name!r}, {nearest(name, sorted(used))}")
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
        place = cell.key, cell.seed
        if place not in jobs:
            after = job(cell.after) if cell.after else None
            own = f"seed={cell.seed}", f"run.name={cell.run.name}", f"run.root={cell.run.parent}"
            argv = (*cell.argv, *data.get(cell.recipe.data.name, ()), *own)
            jobs[place] = PaperJob(argv, resolve(argv[0], argv[1:]), after, cell)
        return jobs[place]

    for name, table in tables.items():
        for cell in cells(name, table, scale):
            if (cell.key, cell.seed) not in store.rows:
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
    left, steps = [job for job in jobs if not job.finished], dict[str, int]()
    for name in dict.fromkeys(job.cell.recipe.data.name for job in left):  # the name that --data takes
        own = [job for job in left if job.cell.recipe.data.name == name]
        try:
            samples = samples_of(own[0])
            steps |= {job.name: make_plan(job.recipe, samples=samples, world=1).total or 1 for job in own}
        except ConfigError as error:
            say(f"runs left out: {len(own)}; --data {name} key=value .. names other data: {error}")
            left = [job for job in left if job not in own]
    return work(left, steps, most, title="paper", result=keep) if left else 0


def samples_of(job: PaperJob) -> int:
    """Return the number of training samples; at scale `mini` the data are prepared for it.

    Raises:
        ConfigError: The data are missing.
    """
    return len(build_data(job.recipe).train) if job.cell.scale == "mini" else describe_data(job.recipe)[1]


def write(tables: Mapping[str, Table], store: Store) -> None:
    """Write the raw results, the figures and the page, with the rows that other processes have stored meanwhile."""
    with store.alone():
        store.save(markdown(tables, store, draw(tables, store)))


def plan(tables: Mapping[str, Table], scale: str, store: Store, jobs: Sequence[PaperJob]) -> str:
    """Return a table of the runs that are left, with their time on this machine, disk space, and what is missing."""
    rows, notes, total, space = [], [], 0.0, 0
    absent, published = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name, table in tables.items():
        own = [job for job in jobs if job.cell.table == name]
        if not (every := cells(name, table, scale)):
            continue
        times = {job.cell.key: known for job in own if (known := seconds_before(job, store))}
        new = next((job for job in own if job.cell.key not in times), None)
        row = [name, str(len(every)), str(len(own))]
        each = 0.0
        if new:
            here = f"here: --data {new.cell.recipe.data.name} KEY=VALUE"
            try:
                each, note = estimate(new)
            except ConfigError as error:
                absent[f"{error}; {here}"].append(name)
                rows.append([*row, "-", "-", "-"])
                continue
            if note is not None:
                published[f"estimated with the published number of samples; {note}; {here}"].append(name)
            store.add({"table": name, "scale": scale, "seconds": each, "threads": torch.get_num_threads()}, "estimates")
        if table.glue and own:
            notes.append(f"{name}: without GLUE, which `./run.sh glue RUN --recipe NAME --dry-run` estimates")
        sizes = {key: weights(job) for key, job in {job.cell.key: job for job in own}.items()}
        disk = sum(sizes[job.cell.key] for job in own)
        left = sum(times.get(job.cell.key, each) for job in own)
        space, total = space + disk, total + left
        known = [duration_text(left / len(own)), duration_text(left), gigabytes(disk)] if own else ["-"] * 3
        rows.append([*row, *known])
    header = ["table", "runs", "jobs left", "a job", "all jobs", "weights"]
    left_out = sum(map(len, absent.values()))
    without = f", without {left_out} table{'s' * (left_out > 1)} whose data are missing" if left_out else ""
    for reason, names in (*absent.items(), *published.items()):
        notes.append(f"{', '.join(names)}: {reason}")
    notes.append("jobs: runs that no earlier table has, and classifiers that measure distances of images")
    free = shutil.disk_usage(next(p for p in (RUNS.absolute(), *RUNS.absolute().parents) if p.is_dir())).free
    costs = (
        f"about {duration_text(total)} one after the other{without}; by finished runs of a row, else by a step of the "
        "table's first new row, timed now (eager, without evaluation)",
        f"{gigabytes(space)} of weights, {gigabytes(free)} free; a run that is being trained has checkpoints, too",
    )
    nothing = f"nothing to estimate{without}" if jobs else "nothing is left to run"
    return "\n".join([columns(header, rows), *notes, *(costs if total else [nothing])])


def seconds_before(job: PaperJob, store: Store) -> float | None:
    """Return the median time of the finished runs with the same settings on a CPU, or None."""
    found = [row["seconds"] for (key, _), row in rows_of(store).items() if key == job.cell.key and not on_gpu(row)]
    return statistics.median(found) if found else None


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
    runtime = start_runtime(recipe.trainer.device, matmul=recipe.trainer.matmul)
    if made.total is None:
        return made.seconds, note
    step = time_step(make_task(recipe, info), recipe, made, runtime)
    return made.samples * step.sample + made.total * step.update, note
