"""Runs as tables beside the paper's numbers: mean and deviation over seeds, what the paper claims, and curves.

    ./run.sh report [RUN ...] [--section TITLE RUN [RUN ...] ..]
        [--out reports] [--name vision] [--notes FILE] [--fresh]

Runs whose recipes agree but for the seed are one row. All runs of a table must have the same data and budget (epochs or
steps, batch), and what else differs is listed; each --section is a table of its own, of another task, data or budget.
The paper's numbers (`tools/report/papers/TASK.yaml`) are those that our recipes claim for the same mixer, scans and
direction: other data, so only their order compares. What `./run.sh glue` has made of the runs stands below their
table. Writes NAME.md, NAME.json and NAME.png; what a report of that name held stays: a table gives way to one of its
title, and notes to notes, so the runs of the others need not be at hand. Without runs, the report of this name is
written anew of its JSON, with these notes.
"""

from __future__ import annotations

from pathlib import Path

from lion.config import ConfigError
from tools.cli import Parser, file_name, table
from tools.report.paper import OWN_FILES, read_paper
from tools.report.runs import group, load
from tools.report.section import Section, as_rows, as_section, curves, markdown
from tools.store import Store


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument(
        "--section", nargs="+", action="append", default=[], metavar=("TITLE", "RUN"), help="a table more"
    )
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--name", type=file_name, help="of its files (default: that of the task, or of the first run)")
    parser.add_argument("--notes", type=Path, help="Markdown to end the report with")
    parser.add_argument("--fresh", action="store_true", help="write over a report of other runs")
    args = parser.parse_args(argv)
    notes = read_notes(args.notes)
    sections = [read_section(title, runs) for title, runs in asked_for(args.runs, args.section)]
    if not sections and (args.name is None or not (args.out / f"{args.name}.json").exists()):
        raise ConfigError("run.sh report: give runs, --section TITLE RUN .., or the --name of a report to write anew")
    name = args.name or default_name(sections)
    store = Store(args.out / f"{name}.json", rows=("section", "model", "seed"), sections=("section",), notes=("notes",))
    store.load(args.fresh)
    for section in sections:
        put(store, section)
    if notes:
        store.tables["notes"] = {}
        store.add({"notes": notes}, "notes")
    held = list(store.tables["sections"].values())
    picture = store.draw(
        store.path.with_suffix(".png"),
        (9, 0.4 + 4.8 * len(held)),
        lambda fig: curves(fig, held, store.rows.values()),
    )
    notes = "\n\n".join(row["notes"] for row in store.tables["notes"].values())
    of = {row["paper"] for row in held}
    title = of.pop() if len(of) == 1 else name.replace("_", " ").capitalize()
    store.save(markdown(held, title, picture and picture.name, notes))
    for section in sections:
        parts = [section.title, *(table(*t) for t in section.tables()), section.remarks()]
        print(*filter(None, parts), sep="\n\n", end="\n\n")
    print(store.files_and(picture))
    return 0


def asked_for(runs: list[str], sections: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Titles and names of runs; those that stand in no section come first, without a title.

    Raises:
        ConfigError: There are none, or a title is given twice.
    """
    asked = [("", runs)] if runs else []
    for title, *names in sections:
        if not names:
            raise ConfigError(f"--section: expected a title and runs, got {title!r} alone")
        if title in dict(asked):
            raise ConfigError(f"--section: {title!r} is given twice")
        asked.append((title, names))
    return asked


def default_name(sections: list[Section]) -> str:
    """The name of the task's report; of runs on files of one's own, that of the first run."""
    runs = [run for section in sections for run in section.runs]
    own = all(run.recipe.data.name in OWN_FILES for run in runs)
    return runs[0].folder.name if own else sections[0].paper.name


def read_section(title: str, names: list[str]) -> Section:
    runs = [load(name) for name in dict.fromkeys(names)]
    paper = read_paper(runs[0].recipe.task.name)
    return Section(title, paper, group(runs, paper))


def put(store: Store, section: Section) -> None:
    """A section in place of that of its title.

    Raises:
        ConfigError: That one has runs which are not among these.
    """
    runs = {run.folder.name for run in section.runs}
    before = {key: row["run"] for key, row in store.rows.items() if row["section"] == section.title}
    if lost := set(before.values()) - runs:
        raise ConfigError(f"{store.path}: holds {min(lost)}, not given here; --name NAME starts another, --fresh this")
    for key in before:
        del store.rows[key]
    store.tables["sections"][section.title,] = as_section(section)  # where it stood
    for row in as_rows(section):
        store.add(row)


def read_notes(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--notes: {path} cannot be read ({error})") from None
