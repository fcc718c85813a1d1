"""Rows of CSV, TSV and JSON files.

All cells of tables are text: what a column holds is decided by its reader, for all rows at once.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lion.config import ConfigError

# keyword arguments of `csv.reader` by file suffix; in TSV files, quotes are characters like others
DIALECTS = {".csv": {"strict": True}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
LONGEST = 100  # characters of a number
MISSING = ("", "nan", "na", "n/a", "null", "none", "?")  # cells without a value, in lower case
KINDS = {list: "a list", dict: "an object", type(None): "nothing", bool: "true or false", str: "text"}
NUMBER = re.compile(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def table_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows below the header of a CSV or TSV file, by column; blank lines are no rows.

    Raises:
        ConfigError: The file is not such a table.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, **DIALECTS[path.suffix.lower()])
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise ConfigError(f"{path}: two columns have one name in the header: {', '.join(header)}")
            commas = path.suffix.lower() == ".csv"
            if commas and len(header) == 1 and (other := re.search("[;\t]", header[0])):
                raise ConfigError(f"{path}: columns are separated by {other[0]!r}, expected commas (in a .tsv: tabs)")
            for cells in reader:
                if cells and len(cells) != len(header):
                    quotes = ""
                    if commas:
                        quotes = "; a text with commas needs quotes"
                    found = f"expected {len(header)} columns as in the header, got {len(cells)}{quotes}"
                    raise ConfigError(f"{path}, line {reader.line_num}: {found}")
                if cells:
                    yield dict(zip(header, cells))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a table of text in UTF-8 ({error})") from None


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, or of one array of objects; text stays text, also that of a date.

    Raises:
        ConfigError: The file holds something else.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            first = file.read(1)
            while first.isspace():
                first = file.read(1)
            file.seek(0)
            unit = "line"
            rows = json_lines(path, file)
            if first == "[":
                unit = "row"
                rows = enumerate(json.load(file), 1)
            for number, row in rows:
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}, {unit} {number}: expected a JSON object, got {str(row)[:40]!r}")
                yield row
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON lines in UTF-8 with one object per line ({error})") from None


def json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not empty.

    Raises:
        ConfigError: A line is not JSON.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or str(error)
            raise ConfigError(f"{path}, line {number}: not JSON, {line[:40].strip()!r} ({reason})") from None


def kinds_of(row: dict[str, Any]) -> str:
    """Return the columns of a row with the kinds of their values, for a message."""
    if not row:
        return "the first row is empty"
    return ", ".join(f"{name} holds {KINDS.get(type(value), type(value).__name__)}" for name, value in row.items())


def number_in(text: str) -> int | float | None:
    """Return the number that a cell holds; None for other text, such as 007, which would be the number 7."""
    text = text.strip()
    if len(text) > LONGEST or NUMBER.fullmatch(text) is None:
        return None
    if text.lstrip("+-").isdecimal():
        return int(text)
    return float(text)
