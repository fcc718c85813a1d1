"""Sections of a report (tables of comparable runs), and the Markdown and curves of several sections."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.claims import CLAIM, QUESTION, Comparison, table_of, verdicts
from tools.colours import colour_of
from tools.finished import Run
from tools.options import FIGURES
from tools.report.distance import distance_table, frechet
from tools.report.paper import claims_about
from tools.report.runs import settings_of
from tools.report.tables import Groups, Table, comparisons, glue_table, own_metric, result_table
from tools.statistics import RULE
from tools.store import Row, widen
from tools.tables import pipes

JUDGES = {"diffusion": frechet}  # by task, what its rows are compared by, if not by the metric of the task
TEXT = ("model", CLAIM, QUESTION, "verdict", "fine-tuned as")  # columns of text
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "*-.")
HEADINGS = {CLAIM: "Claims of the papers", QUESTION: "Open questions"}
LEGEND = (
    "Values are mean ± sample standard deviation over n seeds. `test` is measured with the weights that were best on "
    "`val`; other metrics on `val` are from the same step. Speed is the median training speed in the log, without "
    "padding; other jobs on the machine may have reduced it. Rows are compared on test if all runs were tested."
)


@dataclass(frozen=True)
class Section:
    """A section of a report: comparable runs in rows. The title may be empty if the report has one section."""

    title: str
    groups: Groups

    @property
    def runs(self) -> list[Run]:
        return [run for some in self.groups.values() for run in some]

    def remarks(self) -> str:
        """Return the remarks on single runs as Markdown, one line per run."""
        remarked = [(name, run) for name, runs in self.groups.items() for run in runs if run.remark]
        return "\n".join(f"- {name}, seed {run.recipe.seed}: {run.remark}" for name, run in remarked)

    def comparisons(self) -> list[Comparison]:
        task = self.runs[0].recipe.task.name
        return comparisons(self.groups, claims_about(task), JUDGES.get(task, own_metric))

    def tables(self) -> list[Table]:
        """Return the tables that have rows."""
        return [rows for _, rows in self.parts()]

    def parts(self) -> list[tuple[str, Table]]:
        """Return the tables that have rows, each with its heading."""
        found = [
            ("", result_table(self.groups)),
            ("Distance from real pictures", distance_table(self.groups)),
            ("GLUE", glue_table(self.groups)),
        ]
        return [(heading, rows) for heading, rows in found if rows[1]]


def markdown(sections: list[Row], title: str, picture: str | None, notes: str = "") -> str:
    """Return the Markdown of a whole report from the results of `as_section`."""
    only = len(sections) == 1
    title = (sections[0]["section"] or sections[0]["task"]) if only else title
    parts = [f"# {title}: runs at one budget{'' if only else ' each'}", "Written by `./run.sh report`.", LEGEND]
    comparisons, level = judged(sections)
    if any(comparisons):
        parts.append(RULE)
    for section, compared in zip(sections, comparisons):
        parts += [f"## {section['section'] or section['task']}"] if not only else []
        tables = [(HEADINGS[kind], *table_of(kind, compared, level)) for kind in HEADINGS]
        claims = [(heading, pipes(header, rows, text=TEXT)) for heading, header, rows in tables if rows]
        for heading, text in [*section["parts"], *claims]:
            parts += [f"{'##' if only else '###'} {heading}"] if heading else []
            parts.append(text)
    if picture:
        parts += ["## Curves", f"![validation curves]({picture})", "Mean over seeds, with the range as a band."]
    if notes:
        parts += ["## Notes", notes]
    return "\n\n".join(parts) + "\n"


def judged(sections: list[Row]) -> tuple[list[list[tuple[Comparison, str]]], float]:
    """Return the comparisons of each section with their verdicts, and the level of one more verdict.

    The verdicts are corrected for the comparisons of all sections, see `tools.claims.verdicts`.
    """
    found = [[Comparison.of(row) for row in section["comparisons"]] for section in sections]
    words, level = verdicts([each for some in found for each in some])
    every = iter(words)
    return [[(each, next(every)) for each in some] for some in found], level


def budget(runs: list[Run]) -> str:
    """Return the data, model, budget, differing settings, environments and commands of the runs, as Markdown."""
    c, first = runs[0].recipe.trainer, runs[0].recipe
    environments = dict.fromkeys(
        f"{e.get('device')}, {e.get('threads')} thread(s), Python {e.get('python')}, torch {e.get('torch')}, commit "
        f"{str(e.get('commit'))[:9]}"
        for e in (run.environment for run in runs)
    )
    keys = [settings_of(run.recipe) for run in runs]
    differing = sorted(k for k in keys[0] if any(other.get(k) != keys[0][k] for other in keys))
    marks = ", ".join(dict.fromkeys(run.data for run in runs if run.data)) or "not known"
    rates = dict.fromkeys(f"{run.recipe.optim.peak(c.batch_size):g}" for run in runs)
    commands = dict.fromkeys(run.environment.get("command") for run in runs)
    lines = [
        f"- Data: {first.data.describe()}; fingerprint {marks}",
        f"- Model: {' or '.join(dict.fromkeys(run.recipe.model.shape() for run in runs))}",
        f"- Budget: {c.describe()}, {c.precision}; peak of the learning rate {' or '.join(rates)}",
        f"- Settings that differ between rows: {', '.join(f'`{k}`' for k in differing) or 'none'}",
        *(f"- Ran on: {text}" for text in environments),
        *(f"- Made by: `{command}`" for command in commands if command),
    ]
    return "\n".join(lines)


def as_section(section: Section) -> Row:
    """Return the JSON row of a section: its text by headings, and the axes of its curves. Runs are in `as_rows`."""
    first = section.runs[0]
    tables = [(heading, pipes(header, rows, text=TEXT)) for heading, (header, rows) in section.parts()]
    parts = [("", budget(section.runs)), *tables, *([("", remarks)] if (remarks := section.remarks()) else [])]
    return {
        "section": section.title,
        "task": first.task.title,
        "parts": [list(part) for part in parts],
        "comparisons": [each.as_row() for each in section.comparisons()],
        "x": "step" if first.recipe.trainer.epochs is None else "epoch",
        "y": f"val {first.metric.heading}",
    }


def as_rows(section: Section) -> list[Row]:
    """Return the JSON rows of a section's runs."""
    return [
        {
            "section": section.title,
            "model": name,
            "run": run.folder.name,
            "seed": run.recipe.seed,
            "val": run.val,
            "test": run.test,
            "beside": {metric.name: value for metric, value in run.beside},
            "speed": run.speed,
            "parameters": run.parameters,
            "curve": [(x, run.metric.scaled(value)) for x, value in run.curve],
            "recipe": settings_of(run.recipe),
            "commit": run.environment.get("commit"),
            "data": run.data,
            **raw_results(run.folder),
        }
        for name, runs in section.groups.items()
        for run in runs
    ]


def raw_results(folder: Path) -> Row:
    """Read the results that `./run.sh glue` and `./run.sh distance` stored in the folder of a run."""
    found: Row = {}
    for path in sorted(folder.glob("glue/*/results.json")):
        found.setdefault("glue", {})[path.parent.name] = json.loads(path.read_text())["rows"]
    if (path := folder / FIGURES).is_file():
        found["distance"] = json.loads(path.read_text())
    return found


def curves(fig: Any, sections: list[Row], rows: Iterable[Row]) -> None:
    """Plot the validation metric over steps, or over epochs if the budget is in epochs; one panel per section."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["section"], row["model"]), []).append(row)
    panels = fig.subplots(len(sections), squeeze=False)[:, 0]
    for ax, section in zip(panels, sections):
        own = [(name, runs) for (title, name), runs in groups.items() if title == section["section"]]
        seen: dict[str, int] = {}
        for name, runs in own:
            lines = [dict(map(tuple, run["curve"])) for run in runs]
            places = sorted(set.intersection(*map(set, lines)))
            columns = [[line[x] for line in lines] for x in places]
            colour, mixer = colour_of(name), name.split()[0]
            style = STYLES[seen.get(mixer, 0) % len(STYLES)]  # rows of one mixer have one colour
            seen[mixer] = seen.get(mixer, 0) + 1
            means = [statistics.mean(c) for c in columns]
            ax.plot(places, means, style, color=colour, markersize=3, label=name)
            ax.fill_between(places, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=colour)
        ax.set(title=section["section"], xlabel=section["x"], ylabel=section["y"])
        widen(ax)
        ax.grid(True, color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
