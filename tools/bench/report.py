"""The report of `bench ops`: JSON that grows over several commands, and its Markdown, tables and plots."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.operators import OPERATORS
from tools.cli import table
from tools.colours import colour_of
from tools.store import Row, Store, digits, pipes

FORMS = ("full", "chunk", "rnn")
PASSES = {"forward": "Forward", "both": "Forward and backward"}
SETTING = ("device", "threads", "dtype", "heads", "dim", "tokens", "eager")  # equal within one table
KEY = (*SETTING, "mixer", "form", "chunk_size", "length", "pass")
HEADER = ["tokens", "mixer", "form", "ms", "x SDPA", "arithmetic ms", "bytes ms", "x floor", "peak MiB", "error"]
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
STYLES = {"full": ("-", "o"), "chunk": ((0, (5, 2)), "s"), "rnn": (":", "^")}


class Report(Store):
    """Rows, notes on omitted measurements, and the machine's rates, in `folder/ops.json`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "ops.json", rates=SETTING, rows=KEY, notes=KEY)

    @property
    def notes(self) -> dict[tuple, Row]:
        return self.tables["notes"]

    def add(self, row: Row, table: str = "rows") -> None:
        """Add a row; one of the main table removes the notes that said why it was missing."""
        super().add(row, table)
        if table != "rows":
            return
        for open_ in ((), ("length", "pass"), ("form", "chunk_size", "length", "pass")):
            self.notes.pop(self.key_of({**row, **dict.fromkeys(open_)}), None)

    def settings(self) -> list[list[Row]]:
        """Return the rows of each setting in table order; the setting measured last comes first."""
        return [sorted(rows, key=order) for rows in self.groups(SETTING)]

    def write(self) -> None:
        """Write `ops.json` and `ops.md`."""
        with self.alone():
            self.tables["rows"] = dict(sorted(self.rows.items(), key=lambda item: order(item[1])))
            crossings = [{**setting(rows[0]), **c} for rows in self.settings() for c in crossovers(rows)]
            self.save(self.markdown(), crossovers=crossings)

    def markdown(self) -> str:
        parts = ["# Operators against SDPA", "Written by `./run.sh bench ops`.", "![times](ops.png)"]
        for rows in self.settings():
            parts += [f"## {title(rows[0])}", self.rates_line(rows[0]), self.commands(rows)]
            parts += LEGEND.replace("\n", " ").split("\n")
            for name, text in PASSES.items():
                some = [r for r in rows if r["pass"] == name]
                if some:
                    parts += [f"### {text}", pipes(HEADER, [cells(r) for r in some])]
            crossed = crossovers(rows)
            if crossed:
                parts += ["### Crossover", CROSSOVER]
                parts.append(pipes(*crossing_table(crossed)))
            notes = [n["text"] for n in self.notes.values() if setting(n) == setting(rows[0])]
            if notes:
                parts += ["### Left out", "\n".join(f"- {n}" for n in notes)]
        return "\n\n".join(parts) + "\n"

    def terminal(self) -> str:
        """Return the rows of this command and their crossovers as text."""
        rows = sorted((self.rows[k] for k in self.new), key=order)
        parts = [f"{title(rows[0])}, torch {rows[0]['torch']}", self.rates_line(rows[0])]
        for name, text in PASSES.items():
            some = [r for r in rows if r["pass"] == name]
            if some:
                parts.append(f"{text}\n{table(HEADER, [cells(r) for r in some])}")
        crossed = crossovers(rows)
        if crossed:
            parts.append(f"Crossover with SDPA, tokens\n{table(*crossing_table(crossed))}")
        return "\n\n".join(parts)

    def rates_line(self, about: Row) -> str:
        rates = self.tables["rates"].get(self.key_of(about, "rates"))
        if rates is None:
            return "machine rates not measured"
        product, copy = f"{rates['flops'] / 1e9:,.0f} GFLOP/s", f"{rates['bytes'] / 1e9:,.1f} GB/s"
        return f"This machine: {product} in a large product, {copy} in a large copy."

    def line(self, row: Row) -> str:
        """Return the progress line of a row."""
        text = f"{name_of(row)}, {row['length']:,} tokens, {PASSES[row['pass']].lower()}: {row['ms']:.1f} ms"
        return f"{text}, {row['ratio']:.2f} x SDPA, {row['ms'] / row['floor_ms']:.1f} x floor"

    def widest(self) -> list[Row]:
        """Return the rows of the setting that has the most, on the machine that measured last."""
        settings = self.settings()
        return max((rows for rows in settings if rows[0]["device"] == settings[0][0]["device"]), key=len)

    def draw_widest(self) -> Path | None:
        """Draw `ops.png` for the widest setting."""
        rows = self.widest()
        return self.draw(
            self.path.with_suffix(".png"), (5 * len(panels_of(rows)) + 2, 5.2), lambda fig: picture(fig, rows)
        )


def setting(row: Row) -> Row:
    return {name: row[name] for name in SETTING}


def rank(names: Iterable[str], name: str) -> int:
    """Return the position of a name, from 1; 0 for a name that is not listed (SDPA)."""
    return {n: i for i, n in enumerate(names, 1)}.get(name, 0)


def order(row: Row) -> tuple:
    return (
        row["length"],
        rank(OPERATORS, row["mixer"]),
        row["mixer"],
        rank(FORMS, row["form"]),
        row["chunk_size"] or 0,
    )


def title(row: Row) -> str:
    threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    text = f"{row['device']}, {threads}, {row['dtype']}, {row['heads']} heads of {row['dim']}, "
    text += f"about {row['tokens']:,} tokens a batch, or one sequence"
    return text + (", without torch.compile" if row["eager"] else "")


def form_of(row: Row) -> str:
    return row["form"] if row["chunk_size"] is None else f"{row['form']} {row['chunk_size']}"


def name_of(row: Row) -> str:
    return row["mixer"] if row["mixer"] == row["form"] else f"{row['mixer']} {form_of(row)}"


def cells(row: Row) -> list[str]:
    plain = row["mixer"] == row["form"]  # SDPA
    star = "" if row["compiled"] or plain else "*"
    return [
        f"{row['length']:,}",
        row["mixer"].upper() if plain else row["mixer"],
        "" if plain else form_of(row) + star,
        digits(row["ms"]),
        f"{row['ratio']:.2f}" if row["ratio"] >= 0.1 else f"{row['ratio']:.3f}",
        digits(row["arithmetic_ms"]),
        digits(row["bytes_ms"]),
        f"{row['ms'] / row['floor_ms']:.1f}",
        "-" if row["peak_bytes"] is None else digits(row["peak_bytes"] / 2**20),
        "" if row["error"] is None else f"{row['error']:.0e}",
    ]


def crossovers(rows: Iterable[Row]) -> list[Row]:
    """Return the crossover with SDPA for each mixer, form and pass of one setting."""
    lines: dict[tuple, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=order):
        if row["mixer"] != row["form"]:
            lines.setdefault((row["mixer"], row["form"], row["chunk_size"], row["pass"]), []).append(
                (row["length"], row["ratio"])
            )
    names = ("mixer", "form", "chunk_size", "pass")
    found = [{**dict(zip(names, line)), **crossing(points)} for line, points in lines.items()]
    return sorted(found, key=lambda r: order({**r, "length": 0}))


def crossing(points: list[tuple[int, float]]) -> Row:
    """Return the length at which the ratio crosses 1 for the last time, interpolated linearly in logarithms.

    Args:
        points: (length, ratio), by rising length.

    Returns:
        `tokens`: the length, or None if the ratio does not cross 1 between the measured lengths.
        `text`: the length as text; without a crossing, an upper or lower bound.
    """
    tokens, text = None, f"< {points[0][0]:,}" if points[0][1] < 1 else f"> {points[-1][0]:,}"
    for (a, before), (b, after) in itertools.pairwise(points):
        if (before < 1) != (after < 1):
            part = math.log(before) / (math.log(before) - math.log(after))
            tokens = math.exp(math.log(a) + part * (math.log(b) - math.log(a)))
            text = f"{tokens:,.0f}" if after < 1 else f"{tokens:,.0f} (slower above)"
    return {"tokens": tokens, "text": text}


def crossing_table(crossed: list[Row]) -> tuple[list[str], list[list[str]]]:
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for c in crossed:
        texts.setdefault((c["mixer"], form_of(c)), {})[c["pass"]] = c["text"]
    passes = [p for p in PASSES if any(p in t for t in texts.values())]
    rows = [[*names, *(t.get(p, "-") for p in passes)] for names, t in texts.items()]
    return ["mixer", "form", *(PASSES[p].lower() for p in passes)], rows


def panels_of(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Return (pass, value, title) of each panel: ratio to SDPA by pass, and peak memory in the last pass measured."""
    passes = [p for p in PASSES if any(r["pass"] == p for r in rows)]
    panels = [(p, "ratio", f"{PASSES[p]}: time over SDPA's") for p in passes]
    if any(r["peak_bytes"] for r in rows):
        panels.append((passes[-1], "peak_bytes", f"{PASSES[passes[-1]]}: peak memory beyond inputs, MiB"))
    return panels


def picture(fig: Any, rows: list[Row]) -> None:
    """Plot the panels of these rows side by side, over length."""
    line, panels = importlib.import_module("matplotlib.lines").Line2D, panels_of(rows)
    mixers = list(dict.fromkeys(r["mixer"] for r in sorted(rows, key=lambda r: order({**r, "length": 0}))))
    mixers = [m for m in mixers if m != "sdpa"]
    forms = list(dict.fromkeys((r["form"], r["chunk_size"]) for r in sorted(rows, key=form_order)))
    forms = [f for f in forms if f[0] != "sdpa"]
    sizes = {form: [c for f, c in forms if f == form] for form, _ in forms}

    def look(form: str, chunk_size: int | None) -> dict[str, Any]:  # dashes by form, filling by chunk size
        dashes, marker = STYLES[form]
        filled = ("full", "none", "left", "right", "top", "bottom")[sizes[form].index(chunk_size) % 6]
        return {"linestyle": dashes, "marker": marker, "markersize": 5, "fillstyle": filled, "linewidth": 1.6}

    lengths = sorted({r["length"] for r in rows})
    for ax, (which, value, text) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels):
        scale = 2**20 if value == "peak_bytes" else 1
        some = [r for r in rows if r["pass"] == which and r[value]]
        for mixer in ["sdpa", *mixers]:
            for form, size in [("sdpa", None)] if mixer == "sdpa" else forms:
                own = [r for r in some if (r["mixer"], r["form"], r["chunk_size"]) == (mixer, form, size)]
                style = {"color": "black", "linewidth": 2.2} if mixer == "sdpa" else look(form, size)
                style.setdefault("color", colour_of(mixer))
                ax.plot([r["length"] for r in own], [r[value] / scale for r in own], **style)
        ax.set(title=text, xlabel="tokens")
        by_length(ax, lengths)
        ax.spines[["top", "right"]].set_visible(False)
    handles = [line([], [], color="black", linewidth=2.2, label="SDPA")]
    handles += [line([], [], color=colour_of(m), linewidth=4, label=m) for m in mixers]
    handles += [line([], [], linestyle="none", label="")]
    names = [f if c is None else f"{f} {c}" for f, c in forms]
    handles += [line([], [], color="0.3", label=name, **look(*f)) for name, f in zip(names, forms)]
    fig.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
    fig.suptitle(f"{title(rows[0])}, torch {rows[0]['torch']}", fontsize=10)


def by_length(ax: Any, lengths: Sequence[int]) -> None:
    """Make both axes logarithmic, with ticks at the lengths and at round values."""
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    steps = [d * 10.0**e for e in range(-4, 8) for d in ((1, 2, 5) if high / low < 300 else (1,))]
    ticks = [s for s in steps if low <= s <= high]
    ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
    ax.grid(True, color="0.88", linewidth=0.7)


def form_order(row: Row) -> tuple[int, int]:
    return rank(FORMS, row["form"]), row["chunk_size"] or 0
