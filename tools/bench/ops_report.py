"""The report of `bench ops`: its tables, crossovers with SDPA, and the plot `ops.png`."""

from __future__ import annotations

import importlib
import itertools
import math
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench import lengths
from tools.bench.engine import Report, column, form_of
from tools.bench.operators import OPERATORS, rank
from tools.colours import colour_of
from tools.plots import by_length, open_sides
from tools.probe import Variant, device_name
from tools.store import Row, grouped
from tools.tables import Table, digits, fill, mebibytes, pipes, table

FORMS = ("full", "chunk", "rnn")
PASSES = {"forward": "Forward", "both": "Forward and backward"}
SETTING = ("device", "threads", "dtype", "heads", "dim", "tokens", "eager")
KEY = (*SETTING, "mixer", "form", "chunk_size", "length", "pass")
LINE = ("mixer", "form", "chunk_size", "pass")  # fields of a line in a plot over length
LEGEND = """\
`x SDPA` is the median over rounds of the time divided by the time of `scaled_dot_product_attention` in the same round
(no mask, no dropout, same dtype, contiguous). Rows of SDPA are from the last process that timed it, so `x SDPA` is
comparable between commands and `ms` is not. `arithmetic` and `bytes` are lower bounds of the time: the matrix products
that the form needs, each counted once, and the inputs, output and gradients, each moved once. They assume the rates
that the process of that row measured (the rates above are from the last process). `x floor` is the time divided by the
larger bound. `peak` is memory beyond the inputs. `error` is the largest error of the form in float32 against the
definition in float64, at 130 tokens, divided by the largest value. The number after a form is its tokens per chunk; `*`
marks forms timed without torch.compile."""
CROSSOVER = (
    "The length, in tokens, at which the time of a form crosses the time of SDPA, interpolated linearly in logarithms "
    "between the two nearest measured lengths."
)
FILLINGS = ("full", "none", "left", "right", "top", "bottom")  # of markers, by chunk size


class OpsReport(Report):
    """Rows, notes on omitted measurements, and the machine's rates."""

    name = "ops"
    heading = "Operators against SDPA"
    command = "bench ops"
    legend = "![times](ops.png)"
    setting = SETTING
    key = KEY

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, rates=SETTING, notes=KEY)

    @property
    def notes(self) -> dict[tuple, Row]:
        return self.tables["notes"]

    def add(self, row: Row, table: str = "rows") -> None:
        """Add a row; one of the main table removes the notes that said why it was missing."""
        super().add(row, table)
        if table != "rows":
            return
        for unnamed in ((), ("length", "pass"), ("form", "chunk_size", "length", "pass")):
            self.notes.pop(self.key_of({**row, **dict.fromkeys(unnamed)}), None)

    def missing(self, job: Namespace, problem: str) -> None:
        self.add(note(job, problem, failed=True)["row"], "notes")

    def write(self) -> None:
        with self.alone():
            self.tables["rows"] = dict(sorted(self.rows.items(), key=lambda item: order(item[1])))
            crossings = []
            for rows in self.groups(SETTING):
                for crossed in crossovers(rows):
                    crossings.append(setting(rows[0]) | crossed)
            self.save(self.markdown(), crossovers=crossings)

    def section(self, rows: list[Row]) -> list[str]:
        rows = sorted(rows, key=order)
        parts = [f"## {title(rows[0])}", self.rates_line(rows[0]), self.commands(rows)]
        parts.append(LEGEND.replace("\n", " "))
        for text, (header, cells) in tables_of(rows).items():
            parts += [f"### {text}", pipes(header, cells)]
        crossed = crossovers(rows)
        if crossed:
            header, cells = crossing_table(crossed)
            parts += ["### Crossover", CROSSOVER, pipes(header, cells)]
        notes = [f"- {note['text']}" for note in self.notes.values() if setting(note) == setting(rows[0])]
        if notes:
            parts += ["### Left out", "\n".join(notes)]
        return parts

    def terminal(self) -> str:
        """Return the rows of this command and their crossovers as text."""
        rows = sorted(self.new_rows(), key=order)
        parts = [f"{title(rows[0])}, torch {rows[0]['torch']}", self.rates_line(rows[0])]
        for text, (header, cells) in tables_of(rows).items():
            parts.append(f"{text}\n{table(header, cells)}")
        crossed = crossovers(rows)
        if crossed:
            header, cells = crossing_table(crossed)
            parts.append(f"Crossover with SDPA, tokens\n{table(header, cells)}")
        return "\n\n".join(parts)

    def rates_line(self, about: Row) -> str:
        rates = self.tables["rates"].get(self.key_of(about, "rates"))
        if rates is None:
            return "machine rates not measured"
        product, copy = f"{rates['flops'] / 1e9:,.0f} GFLOP/s", f"{rates['bytes'] / 1e9:,.1f} GB/s"
        return f"This machine: {product} in a large product, {copy} in a large copy."

    def line(self, row: Row) -> str:
        text = f"{name_of(row)}, {row['length']:,} tokens, {PASSES[row['pass']].lower()}: {row['ms']:.1f} ms"
        return f"{text}, {row['ratio']:.2f} x SDPA, {row['ms'] / row['floor_ms']:.1f} x floor"

    def widest(self) -> list[Row]:
        """Return the rows of the setting that has the most, on the machine that measured last."""
        settings = self.groups(SETTING)
        last = settings[0][0]["device"]
        widest = max((rows for rows in settings if rows[0]["device"] == last), key=len)
        return sorted(widest, key=order)

    def pictures(self) -> list[Path | None]:
        """Draw `ops.png` and `lengths.png` for the widest setting."""
        rows = self.widest()
        size = (5 * len(panels_of(rows)) + 2, 5.2)
        folder = self.path.parent
        return [
            self.draw(folder / "ops.png", size, partial(picture, rows=rows)),
            self.draw(folder / "lengths.png", (9, 5.2), partial(lengths.picture, rows=rows, folder=folder)),
        ]


def setting_of(job: Namespace) -> Row:
    """Return the settings of a job that two measurements must share to appear in one table."""
    found = {"device": device_name()}
    for name in SETTING[1:]:
        found[name] = getattr(job, name)
    return found


def note(job: Namespace, text: str, failed: bool, variant: Variant | None = None, **where: Any) -> Row:
    """Return the message that a measurement was not made, with the reason `text`."""
    what = job.mixer
    row = dict.fromkeys(KEY) | setting_of(job) | {"mixer": job.mixer, **where}
    if variant is not None:
        what += f" {variant}"
        row |= variant._asdict()
    if "length" in where:
        what += f", {where['length']:,} tokens"
    row["text"] = f"{what}: {text}"
    return {"kind": "missing", "row": row, "text": row["text"], "failed": failed}


def setting(row: Row) -> Row:
    return {name: row[name] for name in SETTING}


def of_pass(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row["pass"] == name]


def order(row: Row) -> tuple:
    """Return the place of a row in its table."""
    return row["length"], by_line(row)


def by_line(row: Row) -> tuple:
    return rank(OPERATORS, row["mixer"]), row["mixer"], by_form(row)


def by_form(row: Row) -> tuple[int, int]:
    return rank(FORMS, row["form"]), row["chunk_size"] or 0


def is_sdpa(row: Row) -> bool:
    return row["mixer"] == row["form"]


def title(row: Row) -> str:
    threads = f"{row['threads']} threads"
    if row["threads"] == 1:
        threads = "1 thread"
    text = f"{row['device']}, {threads}, {row['dtype']}, {row['heads']} heads of {row['dim']}, "
    text += f"about {row['tokens']:,} tokens a batch, or one sequence"
    if row["eager"]:
        text += ", without torch.compile"
    return text


def name_of(row: Row) -> str:
    if is_sdpa(row):
        return row["mixer"]
    return f"{row['mixer']} {form_of(row)}"


def form_cell(row: Row) -> str:
    if is_sdpa(row):
        return ""
    if row["compiled"]:
        return form_of(row)
    return f"{form_of(row)}*"


def ratio_cell(row: Row) -> str:
    if row["ratio"] >= 0.1:
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.3f}"


def error_cell(row: Row) -> str:
    if row["error"] is None:
        return ""
    return f"{row['error']:.0e}"


COLUMNS = {
    "tokens": lambda row: f"{row['length']:,}",
    "mixer": lambda row: row["mixer"].upper() if is_sdpa(row) else row["mixer"],
    "form": form_cell,
    "ms": lambda row: digits(row["ms"]),
    "x SDPA": ratio_cell,
    "arithmetic ms": lambda row: digits(row["arithmetic_ms"]),
    "bytes ms": lambda row: digits(row["bytes_ms"]),
    "x floor": lambda row: f"{row['ms'] / row['floor_ms']:.1f}",
    "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
    "error": error_cell,
}


def tables_of(rows: list[Row]) -> dict[str, Table]:
    """Return the table of each pass that was measured, by the name of the pass in titles."""
    found = {}
    for name, text in PASSES.items():
        some = of_pass(rows, name)
        if some:
            found[text] = fill(COLUMNS, some)
    return found


def crossovers(rows: Iterable[Row]) -> list[Row]:
    """Return the crossover with SDPA for each mixer, form and pass of one setting."""
    own = [row for row in sorted(rows, key=order) if not is_sdpa(row)]
    found = []
    for line in grouped(own, LINE):
        crossed = {name: line[0][name] for name in LINE}
        points = [(row["length"], row["ratio"]) for row in line]
        found.append(crossed | crossing(points))
    return sorted(found, key=by_line)


def crossing(points: list[tuple[int, float]]) -> Row:
    """Return the length at which the ratio crosses 1 for the last time, interpolated linearly in logarithms.

    Args:
        points: (length, ratio), by rising length.

    Returns:
        `tokens`: the length, or None if the ratio does not cross 1 between the measured lengths.
        `text`: the length as text; without a crossing, an upper or lower bound.
    """
    first, last = points[0], points[-1]
    tokens = None
    text = f"> {last[0]:,}"
    if first[1] < 1:
        text = f"< {first[0]:,}"
    for (a, before), (b, after) in itertools.pairwise(points):
        if (before < 1) == (after < 1):
            continue
        part = math.log(before) / (math.log(before) - math.log(after))
        tokens = math.exp(math.log(a) + part * (math.log(b) - math.log(a)))
        text = f"{tokens:,.0f}"
        if after >= 1:
            text += " (slower above)"
    return {"tokens": tokens, "text": text}


def crossing_table(crossed: list[Row]) -> Table:
    """Return the crossovers of each mixer and form in a line, with a column for each pass."""
    lines: dict[tuple[str, str], Row] = {}
    for row in crossed:
        line = lines.setdefault((row["mixer"], form_of(row)), {"mixer": row["mixer"], "form": form_of(row)})
        line[PASSES[row["pass"]].lower()] = row["text"]
    columns = {}
    for heading in ("mixer", "form", *map(str.lower, PASSES.values())):
        columns[heading] = lambda line, heading=heading: line.get(heading)
    return fill(columns, list(lines.values()))


def panels_of(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Return (pass, value, title) of each panel: ratio to SDPA by pass, and peak memory in the last pass measured."""
    passes = [name for name in PASSES if of_pass(rows, name)]
    panels = [(name, "ratio", f"{PASSES[name]}: time over SDPA's") for name in passes]
    if any(column(rows, "peak_bytes")):
        last = passes[-1]
        panels.append((last, "peak_bytes", f"{PASSES[last]}: peak memory beyond inputs, MiB"))
    return panels


def picture(fig: Any, rows: list[Row]) -> None:
    """Plot the panels of these rows side by side, over length."""
    line = importlib.import_module("matplotlib.lines").Line2D
    panels = panels_of(rows)
    own = [row for row in rows if not is_sdpa(row)]
    mixers = dict.fromkeys(column(sorted(own, key=by_line), "mixer"))
    looks = looks_of(own)
    every_length = sorted(set(column(rows, "length")))
    for ax, (which, value, text) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels):
        scale = 1
        if value == "peak_bytes":
            scale = 2**20
        measured = [row for row in of_pass(rows, which) if row[value]]
        for points in grouped(measured, LINE):
            look = SDPA_LOOK
            if not is_sdpa(points[0]):
                look = looks[form_of(points[0])] | {"color": colour_of(points[0]["mixer"])}
            ax.plot(column(points, "length"), [row[value] / scale for row in points], **look)
        ax.set(title=text, xlabel="tokens")
        by_length(ax, every_length)
        open_sides(ax)
    handles = [line([], [], label="SDPA", **SDPA_LOOK)]
    for mixer in mixers:
        handles.append(line([], [], color=colour_of(mixer), linewidth=4, label=mixer))
    handles.append(line([], [], linestyle="none", label=""))
    for form, look in looks.items():
        handles.append(line([], [], color="0.3", label=form, **look))
    fig.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
    fig.suptitle(f"{title(rows[0])}, torch {rows[0]['torch']}", fontsize=10)


SDPA_LOOK = {"color": "black", "linewidth": 2.2}


def looks_of(rows: list[Row]) -> dict[str, Row]:
    """Return the style of the line of each form: dashes by form, and markers filled by chunk size."""
    looks: dict[str, Row] = {}
    sizes = dict.fromkeys(FORMS, 0)
    for row in sorted(rows, key=by_form):
        if form_of(row) in looks:
            continue
        dashes, marker = lengths.STYLES[row["form"]]
        filled = FILLINGS[sizes[row["form"]] % len(FILLINGS)]
        sizes[row["form"]] += 1
        look = {"linestyle": dashes, "marker": marker, "markersize": 5, "fillstyle": filled, "linewidth": 1.6}
        looks[form_of(row)] = look
    return looks
