"""Sections of a report (tables of comparable runs), and the Markdown and curves of several sections."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lion.files import read_json
from tools.claims import CLAIM, QUESTION, Comparison, table_of, verdicts
from tools.colours import colour_of
from tools.finished import Run
from tools.options import FIGURES
from tools.plots import tidy, widen
from tools.report.distance import distance_table, frechet
from tools.report.paper import claims_about
from tools.report.runs import differing, settings_of
from tools.report.tables import Groups, comparisons, glue_table, own_metric, result_table
from tools.statistics import RULE
from tools.store import Row, grouped
from tools.tables import Table, pipes

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
        return list(itertools.chain(*self.groups.values()))

    def remarks(self) -> str:
        """Return the remarks on single runs as Markdown, one line per run."""
        lines = []
        for name, runs in self.groups.items():
            for run in runs:
                if run.remark:
                    lines.append(f"- {name}, seed {run.recipe.seed}: {run.remark}")
        return "\n".join(lines)

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
    if only:
        title = f"{sections[0]['section'] or sections[0]['task']}: runs at one budget"
    else:
        title = f"{title}: runs at one budget each"
    parts = [f"# {title}", "Written by `./run.sh report`.", LEGEND]
    comparisons, level = judged(sections)
    if any(comparisons):
        parts.append(RULE)
    for section, compared in zip(sections, comparisons):
        if not only:
            parts.append(f"## {section['section'] or section['task']}")
        texts = list(section["parts"])
        for kind, heading in HEADINGS.items():
            header, rows = table_of(kind, compared, level)
            if rows:
                texts.append((heading, pipes(header, rows, text=TEXT)))
        for heading, text in texts:
            if heading:
                parts.append(f"{'##' if only else '###'} {heading}")
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
    found: list[Comparison] = []
    for section in sections:
        found += map(Comparison.of, section["comparisons"])
    words, level = verdicts(found)
    every = zip(found, words)
    return [list(itertools.islice(every, len(section["comparisons"]))) for section in sections], level


def budget(runs: list[Run]) -> str:
    """Return the data, model, budget, differing settings, environments and commands of the runs, as Markdown."""
    first = runs[0].recipe
    c = first.trainer
    marks = [run.data for run in runs if run.data]
    shapes = [run.recipe.model.shape() for run in runs]
    rates = [f"{run.recipe.optim.peak(c.batch_size):g}" for run in runs]
    differing = [f"`{key}`" for key in differing_settings(runs)]
    lines = [
        f"- Data: {first.data.describe()}; fingerprint {', '.join(once(marks)) or 'not known'}",
        f"- Model: {' or '.join(once(shapes))}",
        f"- Budget: {c.describe()}, {c.precision}; peak of the learning rate {' or '.join(once(rates))}",
        f"- Settings that differ between rows: {', '.join(differing) or 'none'}",
    ]
    for text in once(environment_of(run) for run in runs):
        lines.append(f"- Ran on: {text}")
    for command in once(run.environment.get("command") for run in runs):
        if command:
            lines.append(f"- Made by: `{command}`")
    return "\n".join(lines)


def once(items: Iterable[Any]) -> list[Any]:
    """Return each item once, in order."""
    return list(dict.fromkeys(items))


def environment_of(run: Run) -> str:
    """Return the machine and the versions of a run as text."""
    found = run.environment
    text = f"{found.get('device')}, {found.get('threads')} thread(s), Python {found.get('python')}, "
    return f"{text}torch {found.get('torch')}, commit {str(found.get('commit'))[:9]}"


def differing_settings(runs: list[Run]) -> list[str]:
    """Return the keys of the settings in which runs differ."""
    first = settings_of(runs[0].recipe)
    found = set()
    for run in runs:
        found.update(differing(first, settings_of(run.recipe)))
    return sorted(found)


def as_section(section: Section) -> Row:
    """Return the JSON row of a section: its text by headings, and the axes of its curves. Runs are in `as_rows`."""
    first = section.runs[0]
    parts = [["", budget(section.runs)]]
    for heading, (header, rows) in section.parts():
        parts.append([heading, pipes(header, rows, text=TEXT)])
    task = first.recipe.task.name
    compared = comparisons(section.groups, claims_about(task), JUDGES.get(task, own_metric))
    remarks = section.remarks()
    if remarks:
        parts.append(["", remarks])
    return {
        "section": section.title,
        "task": first.task.title,
        "parts": parts,
        "comparisons": [each.as_row() for each in compared],
        "x": "step" if first.recipe.trainer.epochs is None else "epoch",
        "y": f"val {first.metric.heading}",
    }


def as_rows(section: Section) -> list[Row]:
    """Return the JSON rows of a section's runs."""
    rows = []
    for name, runs in section.groups.items():
        for run in runs:
            row = {
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
            }
            rows.append(row | raw_results(run.folder))
    return rows


def raw_results(folder: Path) -> Row:
    """Read the results that `./run.sh glue` and `./run.sh distance` stored in the folder of a run."""
    found: Row = {}
    for path in sorted(folder.glob("glue/*/results.json")):
        found.setdefault("glue", {})[path.parent.name] = read_json(path)["rows"]
    path = folder / FIGURES
    if path.is_file():
        found["distance"] = read_json(path)
    return found


def curves(fig: Any, sections: list[Row], rows: Iterable[Row]) -> None:
    """Plot the validation metric over steps, or over epochs if the budget is in epochs; one panel per section."""
    groups = grouped(rows, ("section", "model"))
    panels = fig.subplots(len(sections), squeeze=False)[:, 0]
    for ax, section in zip(panels, sections):
        seen: collections.Counter[str] = collections.Counter()
        for runs in groups:
            name = runs[0]["model"]
            if runs[0]["section"] != section["section"]:
                continue
            colour = colour_of(name)
            mixer = name.split()[0]
            style = STYLES[seen[mixer] % len(STYLES)]  # rows of one mixer have one colour
            seen[mixer] += 1
            places, values = shared_places(runs)
            means = list(map(statistics.mean, values))
            ax.plot(places, means, style, color=colour, markersize=3, label=name)
            ax.fill_between(places, list(map(min, values)), list(map(max, values)), alpha=0.15, color=colour)
        ax.set(title=section["section"], xlabel=section["x"], ylabel=section["y"])
        widen(ax)
        tidy(ax)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def shared_places(runs: list[Row]) -> tuple[list[float], list[list[float]]]:
    """Return the places of the curves that all runs have, and the values of the runs at each of them."""
    found: dict[float, list[float]] = {}
    for run in runs:
        for place, value in dict(run["curve"]).items():  # of several values at a place, the last
            found.setdefault(place, []).append(value)
    places = sorted(place for place, values in found.items() if len(values) == len(runs))
    return places, [found[place] for place in places]
