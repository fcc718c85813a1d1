"""What `bench ops` measured, as JSON that grows over several runs, and as Markdown, a table and pictures made of it."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lion.layers.mixers import MIXERS
from lion.trainer.checkpoint import save_text, write_atomic
from tools.bench.rows import SCHEMA, digits, pipes, read_report
from tools.cli import table

FORMS = ("full", "chunk", "rnn", "blockwise")
PASSES = {"forward": "Forward", "both": "Forward and backward"}
SETTING = ("device", "threads", "dtype", "heads", "dim", "tokens", "eager")  # the same within one table
KEY = (*SETTING, "mixer", "form", "chunk_size", "length", "pass")
HEADER = ["tokens", "mixer", "form", "ms", "x SDPA", "arithmetic ms", "bytes ms", "x floor", "peak MiB", "error"]
LEGEND = """\
`x SDPA` is the median over rounds of the time over that of `scaled_dot_product_attention` in the same round (no mask,
no dropout, same dtype, contiguous); rows of SDPA itself are from the last process that timed it. `arithmetic` and
`bytes` are the least times: matrix products that the form cannot do without, none twice, and inputs, output and their
gradients moved once, at the rates above; `x floor` is the time over the larger one. `peak` is memory beyond the inputs;
`error` is the largest one against the definition in float64 at 130 tokens, in float32, over the largest value. A form
is followed by its tokens a chunk; `*` marks those timed without torch.compile."""
COLOURS = (
    "#1f77b4 #d62728 #2ca02c #9467bd #ff7f0e #17becf #e377c2 #8c564b #7f9a00 #003f8a #c2a000 #5c5c5c #00a878 #a3004f"
).split()
STYLES = {"full": ("-", "o"), "chunk": ((0, (5, 2)), "s"), "rnn": (":", "^"), "blockwise": ("-.", "D")}

Row = dict[str, Any]


class Report:
    """Rows, notes and machine rates by key, in a folder; `new` are the keys measured in this run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[tuple, Row] = {}
        self.notes: dict[tuple, Row] = {}
        self.rates: dict[tuple, Row] = {}
        self.new: dict[tuple, None] = {}

    @classmethod
    def load(cls, folder: Path, fresh: bool = False) -> Report:
        """What is in a folder, or nothing.

        Raises:
            ConfigError: No place for a report, or one that cannot be read.
        """
        report = cls(folder)

        def take(held: dict[str, Any]) -> None:
            report.rows = {key(r): r for r in held["rows"]}
            report.notes = {key(r): r for r in held["notes"]}
            report.rates = {setting(r): r for r in held["rates"]}

        read_report(folder / "ops.json", fresh, take)
        return report

    def add_rates(self, about: Row, rates: dict[str, float]) -> None:
        self.rates[setting(about)] = {**about, **rates}

    def add_row(self, row: Row) -> None:
        """Later measurements replace earlier ones, and what was said of why there are none."""
        place = key(row)
        self.rows[place] = row
        self.new[place] = None
        for open_ in ((), ("length", "pass"), ("form", "chunk_size", "length", "pass")):
            self.notes.pop(key({**row, **dict.fromkeys(open_)}), None)

    def add_note(self, note: Row) -> None:
        self.notes[key(note)] = note

    def settings(self) -> list[tuple]:
        """Those that were measured, the latest first."""
        latest: dict[tuple, str] = {}
        for row in self.rows.values():
            latest[setting(row)] = max(latest.get(setting(row), ""), row["date"])
        return sorted(latest, key=latest.get, reverse=True)

    def select(self, **where: Any) -> list[Row]:
        """Rows in the order of a table."""
        return sorted((r for r in self.rows.values() if all(r[k] == v for k, v in where.items())), key=order)

    def save(self) -> None:
        """Write `ops.json` and `ops.md`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = sorted(self.rows.values(), key=order)
        crossings = [
            {**dict(zip(SETTING, which)), **c} for which in self.settings() for c in crossovers(self.of(which))
        ]
        held = {"schema": SCHEMA, "rates": list(self.rates.values()), "rows": rows, "crossovers": crossings}
        text = json.dumps({**held, "notes": list(self.notes.values())}, indent=1)
        save_text(self.folder / "ops.json", text + "\n")
        save_text(self.folder / "ops.md", self.markdown())

    def of(self, which: tuple) -> list[Row]:
        return self.select(**dict(zip(SETTING, which)))

    def markdown(self) -> str:
        parts = ["# Operators against SDPA", "Written by `./run.sh bench ops`.", "![times](ops.png)"]
        for which in self.settings():
            rows = self.of(which)
            parts += [f"## {title(rows[0])}", self.rates_line(rows[0])]
            runs = dict.fromkeys((r["date"][:10], r["command"], r["torch"]) for r in sorted(rows, key=dated))
            parts.append("\n".join(f"- {date}, torch {torch}: `{command}`" for date, command, torch in runs))
            parts += LEGEND.replace("\n", " ").split("\n")
            for name, text in PASSES.items():
                some = [r for r in rows if r["pass"] == name]
                if some:
                    parts += [f"### {text}", pipes(HEADER, [cells(r) for r in some])]
            crossed = crossovers(rows)
            if crossed:
                parts += ["### Crossover", "The length, in tokens, at which a form's time crosses that of SDPA."]
                parts.append(pipes(*crossing_table(crossed)))
            notes = [n["text"] for n in self.notes.values() if setting(n) == which]
            if notes:
                parts += ["### Left out", "\n".join(f"- {n}" for n in notes)]
        return "\n\n".join(parts) + "\n"

    def terminal(self) -> str:
        """The rows of this run, and their crossovers."""
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
        rates = self.rates.get(setting(about))
        if rates is None:
            return "machine rates not measured"
        product, copy = f"{rates['flops'] / 1e9:,.0f} GFLOP/s", f"{rates['bytes'] / 1e9:,.1f} GB/s"
        return f"This machine: {product} in a large product, {copy} in a large copy."

    def line(self, row: Row) -> str:
        """One measurement, for those who wait."""
        text = f"{name_of(row)}, {row['length']:,} tokens, {PASSES[row['pass']].lower()}: {row['ms']:.1f} ms"
        return f"{text}, {row['ratio']:.2f} x SDPA, {row['ms'] / row['floor_ms']:.1f} x floor"

    def draw(self) -> str:
        """Write `ops.png` of the setting measured last; returns where everything is."""
        written = f"written: {self.folder / 'ops.md'}, {self.folder / 'ops.json'}"
        try:
            figure = importlib.import_module("matplotlib.figure").Figure
            lines = importlib.import_module("matplotlib.lines")
        except ImportError:
            return f"{written}; no picture, which needs matplotlib (pip install matplotlib)"
        drawn = picture(self.of(self.settings()[0]), figure, lines.Line2D)
        write_atomic(self.folder / "ops.png", lambda file: drawn.savefig(file, format="png", dpi=120))
        return f"{written}, {self.folder / 'ops.png'}"


def key(row: Row) -> tuple:
    return tuple(row[k] for k in KEY)


def setting(row: Row) -> tuple:
    return tuple(row[k] for k in SETTING)


def dated(row: Row) -> str:
    return row["date"]


def rank(names: Iterable[str], name: str) -> int:
    """Place in a table of names; before all of them is what is not there (SDPA)."""
    return {n: i for i, n in enumerate(names, 1)}.get(name, 0)


def order(row: Row) -> tuple:
    return (row["length"], rank(MIXERS, row["mixer"]), row["mixer"], rank(FORMS, row["form"]), row["chunk_size"] or 0)


def title(row: Row) -> str:
    threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    text = f"{row['device']}, {threads}, {row['dtype']}, {row['heads']} heads of {row['dim']}, "
    return text + f"about {row['tokens']:,} tokens a batch" + (", without torch.compile" if row["eager"] else "")


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
        f"{row['ratio']:.2f}",
        digits(row["arithmetic_ms"]),
        digits(row["bytes_ms"]),
        f"{row['ms'] / row['floor_ms']:.1f}",
        "-" if row["peak_bytes"] is None else digits(row["peak_bytes"] / 2**20),
        "" if row["error"] is None else f"{row['error']:.0e}",
    ]


def crossovers(rows: Iterable[Row]) -> list[Row]:
    """For each mixer, form and pass of one setting, where its time crosses SDPA's."""
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
    """Where a ratio over length, in order, passes 1 for the last time: straight between the logarithms.

    `tokens` is None where it does not between the lengths measured; `text` says where it is then.
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


def picture(rows: list[Row], figure: type, line: type) -> Any:
    """Panels side by side: ratio to SDPA over length in each pass, and peak memory in the larger pass measured."""
    passes = [p for p in PASSES if any(r["pass"] == p for r in rows)]
    panels = [(p, "ratio", f"{PASSES[p]}: time over SDPA's") for p in passes]
    if any(r["peak_bytes"] for r in rows):
        panels.append((passes[-1], "peak_bytes", f"{PASSES[passes[-1]]}: peak memory beyond inputs, MiB"))
    fig = figure(figsize=(5 * len(panels) + 2, 5.2), layout="constrained")
    mixers = list(dict.fromkeys(r["mixer"] for r in sorted(rows, key=lambda r: order({**r, "length": 0}))))
    mixers = [m for m in mixers if m != "sdpa"]
    forms = list(dict.fromkeys((r["form"], r["chunk_size"]) for r in sorted(rows, key=form_order)))
    forms = [f for f in forms if f[0] != "sdpa"]
    sizes = {form: [c for f, c in forms if f == form] for form, _ in forms}

    def look(form: str, chunk_size: int | None) -> dict[str, Any]:  # a form is its dashes, a chunk size its filling
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
                style.setdefault("color", COLOURS[rank(MIXERS, mixer) % len(COLOURS) - 1])
                ax.plot([r["length"] for r in own], [r[value] / scale for r in own], **style)
        ax.set(xscale="log", yscale="log", title=text, xlabel="tokens")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.minorticks_off()
        low, high = ax.get_ylim()
        steps = [d * 10.0**e for e in range(-4, 8) for d in ((1, 2, 5) if high / low < 300 else (1,))]
        ticks = [s for s in steps if low <= s <= high]
        ax.set_yticks(ticks, [f"{t:,g}" for t in ticks])
        ax.grid(True, color="0.88", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    handles = [line([], [], color="black", linewidth=2.2, label="SDPA")]
    handles += [line([], [], color=COLOURS[rank(MIXERS, m) % len(COLOURS) - 1], linewidth=4, label=m) for m in mixers]
    handles += [line([], [], linestyle="none", label="")]
    names = [f if c is None else f"{f} {c}" for f, c in forms]
    handles += [line([], [], color="0.3", label=name, **look(*f)) for name, f in zip(names, forms)]
    fig.legend(handles=handles, loc="outside right center", frameon=False, handlelength=3.2)
    fig.suptitle(f"{title(rows[0])}, torch {rows[0]['torch']}", fontsize=10)
    return fig


def form_order(row: Row) -> tuple[int, int]:
    return rank(FORMS, row["form"]), row["chunk_size"] or 0
