"""The engine of all benchmarks: jobs run one after the other, and their rows fill a report."""

from __future__ import annotations

import copy
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lion.config import ConfigError
from tools.cli import say
from tools.probe import Variant
from tools.processes import Send, first_line, in_a_process
from tools.store import Row, Store, grouped
from tools.tables import Table, pipes, table

TEXT = ("mixer", "form", "mode", "recipe")  # headings of the columns that hold text


class Report(Store):
    """The rows of a benchmark in one JSON file, and how they are shown. Every benchmark has a subclass.

    Attributes:
        name: Name of the JSON and the Markdown file.
        heading: Title of the Markdown file.
        command: The command that measures.
        legend: Meaning of the columns.
        setting: Fields that are equal in all rows of one table.
        key: Fields that identify a row.
        later: Fields of the key that rows of earlier versions lack.
    """

    name: ClassVar[str]
    heading: ClassVar[str]
    command: ClassVar[str]
    legend: ClassVar[str]
    setting: ClassVar[Sequence[str]]
    key: ClassVar[Sequence[str]]
    later: ClassVar[Sequence[str]] = ()

    def __init__(self, folder: Path, **more: Sequence[str]) -> None:
        super().__init__(folder / f"{self.name}.json", later=self.later, **more, rows=self.key)

    def line(self, row: Row) -> str:
        """Return the progress line of a row."""
        raise NotImplementedError

    def title(self, row: Row) -> str:
        """Return the title of the table of a row."""
        raise NotImplementedError

    def tabled(self, rows: list[Row]) -> Table:
        """Return the header and the cells of the rows of one setting."""
        raise NotImplementedError

    def pictures(self) -> list[Path | None]:
        """Draw the plots of the report; return their files, None without matplotlib."""
        return []

    def missing(self, job: Any, problem: str) -> None:
        """Note that a job was not measured."""

    def intro(self) -> list[str]:
        """Return the paragraphs before the first table."""
        return [f"# {self.heading}", f"Written by `./run.sh {self.command}`.", self.legend]

    def section(self, rows: list[Row]) -> list[str]:
        """Return the paragraphs of one setting."""
        header, cells = self.tabled(rows)
        return [f"## {self.title(rows[0])}", pipes(header, cells, TEXT), self.commands(rows)]

    def markdown(self) -> str:
        parts = self.intro()
        for rows in self.groups(self.setting):
            parts += self.section(rows)
        return "\n\n".join(parts) + "\n"

    def new_rows(self) -> list[Row]:
        """Return the rows of this command, without those that another command with --fresh has removed meanwhile."""
        return [self.rows[key] for key in self.new if key in self.rows]

    def terminal(self) -> str:
        """Return the rows of this command as text."""
        parts = []
        for rows in grouped(self.new_rows(), self.setting):
            header, cells = self.tabled(rows)
            parts.append(f"{self.title(rows[0])}\n{table(header, cells)}")
        return "\n\n".join(parts)

    def write(self) -> None:
        """Write the JSON and the Markdown file."""
        with self.alone():
            self.save(self.markdown())


class ReportOfRuns(Report):
    """A report in which every table belongs to one run, with a plot of the last measurement of each run.

    Attributes:
        inches: Width and height of a plot.
    """

    inches: ClassVar[tuple[float, float]]

    def plot(self, figure: Any, rows: list[Row]) -> None:
        """Draw the rows of one setting."""
        raise NotImplementedError

    def section(self, rows: list[Row]) -> list[str]:
        title, *others = super().section(rows)
        run = rows[0]["run"]
        latest = next(found for found in self.groups(self.setting) if found[0]["run"] == run)
        if rows != latest:
            return [title, *others]
        return [title, f"![curves]({self.picture_of(run).name})", *others]

    def picture_of(self, run: str) -> Path:
        return self.path.with_name(f"{self.name}_{run}.png")

    def pictures(self) -> list[Path | None]:
        rows = self.groups(self.setting)[0]
        return [self.draw(self.picture_of(rows[0]["run"]), self.inches, partial(self.plot, rows=rows))]


def variants_of(forms: Sequence[str], chunk_sizes: Sequence[int]) -> list[Variant]:
    """Return the variants of forms: every form but "full" in every chunk size."""
    found = []
    for form in forms:
        if form == "full":
            found.append(Variant(form))
            continue
        for size in chunk_sizes:
            found.append(Variant(form, size))
    return found


def form_of(row: Row) -> str:
    return str(Variant(row["form"], row["chunk_size"]))


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """Return one value of every row."""
    return [row[name] for row in rows]


def preparation(eager: bool) -> str:
    """Return what happens before a call is timed, for a note."""
    if eager:
        return "warming up"
    return "compiling"


def typed(command: str, argv: Sequence[str]) -> str:
    """Return a command line as a person types it."""
    return shlex.join(["./run.sh", *command.split(), *argv])


def job_of(args: Namespace, **values: Any) -> Namespace:
    """Return the options of a command for one of its jobs, with `values` in place of the lists they are taken from."""
    job = copy.copy(args)
    vars(job).update(values)
    return job


def collect(report: Report, jobs: Mapping[str, Any], measure: Callable[[Any, Send], None], apart: bool = True) -> int:
    """Run `measure` on one job after the other, write the report and print the new rows.

    Args:
        report: The report, which is written after every job.
        jobs: Jobs by name; each name is printed before its job runs.
        measure: Function that measures a job. It sends messages by `kind`: "row" with a `row`; "note" with a `text`;
            "missing" with a `text`, a `row` of the report's table of notes, and whether the job has `failed`; "write",
            to write the report before the job has ended.
        apart: Whether every job has a process of its own.

    Returns:
        The exit status: 1 if a job failed or nothing was measured, else 0.
    """
    failed = False
    begun = 0.0  # of the current job

    def receive(message: Row) -> None:
        nonlocal failed
        kind = message["kind"]
        if kind == "row":
            report.add(message["row"])
            say(f"  {report.line(message['row'])} ({time.perf_counter() - begun:.0f} s)")
        elif kind == "write":
            report.write()
        else:
            say(f"  {message['text']}")
        if kind == "missing":
            failed |= message["failed"]
            report.add(message["row"], "notes")

    run = in_this_process
    if apart:
        run = in_a_process
    try:
        for place, (name, job) in enumerate(jobs.items(), 1):
            begun = time.perf_counter()
            say(f"[{place}/{len(jobs)}] {name}")
            try:
                problem = run(measure, job, receive)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
            if problem:
                say(f"  {problem}")
                report.missing(job, problem)
                failed = True
            if report.new and report.unsaved:
                report.write()
    finally:  # after Ctrl-C, rows measured so far are still written
        if report.new and report.unsaved:
            report.write()
        if report.new:
            print(f"{report.terminal()}\n\n{report.files_and(*report.pictures())}")
    if not report.new:
        say("no measurements were made")
        failed = True
    return int(failed)


def in_this_process(measure: Callable[[Any, Send], None], job: Any, receive: Send) -> str | None:
    """Run `measure(job, receive)`; return a description of an error, or None.

    Raises:
        ConfigError: Of the job, which cannot be measured.
    """
    try:
        measure(job, receive)
    except ConfigError:
        raise
    except Exception as error:  # a compiler can raise any exception
        return f"{type(error).__name__}: {first_line(error)}"
    return None
