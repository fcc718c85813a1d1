"""Collection of measured rows into a report; every job runs in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.cli import say, table
from tools.processes import Send, in_a_process
from tools.store import Row, Store


def collect(
    report: Store,
    jobs: Mapping[str, Any],
    measure: Callable[[Any, Send], None],
    *,
    line: Callable[[Row], str],
    title: Callable[[Row], str],
    tabled: Callable[[list[Row]], tuple[list[str], list[list[str]]]],
    markdown: Callable[[Store], str],
    draw: Callable[[Store], Path | None],
) -> int:
    """Run `measure` on one job after the other, then write the report and print the new rows.

    Args:
        report: Store of the rows.
        jobs: Jobs by name; each name is printed before its job runs.
        measure: Function that measures a job. It sends messages whose `kind` is "row" or "note"; a note has a `text`.
        line: Function that returns the progress line of a row.
        title: Function that returns the title of the printed table.
        tabled: Function that returns the header and the cells of the printed table.
        markdown: Function that returns the Markdown text of the report.
        draw: Function that draws the plot of the report and returns its path, or None without matplotlib.

    Returns:
        The exit status: 1 if a job failed or nothing was measured, else 0.
    """
    failed = False

    def receive(message: Row) -> None:
        kind = message.pop("kind")
        say(f"  {message['text'] if kind == 'note' else line(message)}")
        if kind == "row":
            report.add(message)

    try:
        for name, job in jobs.items():
            say(name)
            if problem := in_a_process(measure, job, receive):
                say(f"  {problem}")
                failed = True
    finally:  # after Ctrl-C, rows measured so far are still written
        if report.new:
            with report.alone():
                report.save(markdown(report))
            rows = [row for key, row in report.rows.items() if key in report.new]
            print(f"{title(rows[0])}\n{table(*tabled(rows))}\n\n{report.files_and(draw(report))}")
    return 1 if failed or not report.new else 0
