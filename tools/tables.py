"""Tables of results: rows and columns as text and as Markdown, and the format of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = Callable[[Any], str | None]  # the cell of a row in one column, None if the row has no such value
Table = tuple[list[str], list[list[str]]]  # header and cells


def fill(columns: Mapping[str, Cell], rows: Sequence[Any]) -> Table:
    """Return the table of rows, with "-" for a missing value, and without columns that no row has."""
    header = []
    cells: list[list[str]] = [[] for _ in rows]
    for heading, cell in columns.items():
        values = [cell(row) for row in rows]
        if rows and values.count(None) == len(rows):
            continue
        header.append(heading)
        for line, value in zip(cells, values):
            line.append("-" if value is None else value)
    return header, cells


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a plain text table: the first column is left-aligned, the others are right-aligned."""
    columns = list(zip(header, *rows))
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    lines = []
    for first, *others in [header, rule, *rows]:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:]):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def pipes(header: list[str], rows: list[list[str]], text: Sequence[str] = ("mixer", "form")) -> str:
    """Format a Markdown table: the columns named in `text` are left-aligned, the others right-aligned."""
    rule = ["---" if heading in text else "--:" for heading in header]
    lines = [f"|{'|'.join(header)}|", f"|{'|'.join(rule)}|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def digits(x: float) -> str:
    """Format a number with about three significant digits."""
    if x >= 100:
        return f"{x:,.0f}"
    if x >= 10:
        return f"{x:.1f}"
    if x >= 0.1:
        return f"{x:.2f}"
    return f"{x:.3f}"


def hundredths(value: float | None) -> str:
    """Return a number with two decimals, "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}"


def mebibytes(size: int | None) -> str:
    """Return a number of bytes in MiB, "-" if there is none."""
    if size is None:
        return "-"
    return digits(size / 2**20)


def spread(values: Sequence[float], number: Callable[[float], str]) -> str:
    """Format the mean and the sample standard deviation of values with `number`; "-" if there are no values."""
    if not values:
        return "-"
    mean = number(statistics.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {number(statistics.stdev(values))}"
