"""Rows that jobs measure, each in a process of its own, gathered into a report."""

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
    """Run `measure` on the jobs, by what is said of each, one after the other; write the report, and print what is new.

    Args:
        report: Where rows go; `markdown` and `draw` make the rest of it.
        measure: Sends messages of `kind` row (`line` says it) or note (`text` is said).
        title, tabled: Of the new rows, to be printed.

    Returns 1 where a job failed, or nothing was measured.
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
    finally:  # also what was measured before Ctrl-C
        if report.new:
            report.save(markdown(report))
            rows = [row for key, row in report.rows.items() if key in report.new]
            print(f"{title(rows[0])}\n{table(*tabled(rows))}\n\n{report.files_and(draw(report))}")
    return 1 if failed or not report.new else 0
