"""Report runs as tables beside the papers' numbers: mean and deviation over seeds, the papers' claims, and curves.

    ./run.sh report [RUN ...] [--section TITLE RUN [RUN ...] ..]
        [--out reports] [--name vision] [--notes FILE] [--fresh]

Runs whose recipes differ only in the seed form one row. All runs of a table must have the same data and budget (epochs
or steps, batch size); other differing settings are listed. Each --section is a separate table, for another task, data
set or budget. A paper's number stands beside runs of the same model on the same data. The claims are those of the
tables of `./run.sh paper` for this task; on other data they are about the order of rows. Results of `./run.sh glue`
follow the table of their runs.

The command writes NAME.md, NAME.json and NAME.png. It keeps the content of an existing report of that name: a new table
replaces only the table with the same title, and new notes replace the old notes. The runs of the other tables are
therefore not needed. Without runs, the command rewrites the report of this name from its JSON, with the notes passed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lion.config import ConfigError
from tools import options
from tools.claims import VERDICTS, table_of
from tools.finished import load
from tools.report.runs import group
from tools.report.section import Section, as_rows, as_section, curves, judged, markdown
from tools.store import Row, Store
from tools.tables import table

USER_FILES = ("hf", "imagefolder", "text")  # data sets of user files


def main(argv: list[str]) -> int:
    args = options.read("report", argv)
    notes = read_notes(args.notes)
    sections = []
    for title, names in asked_for(args.runs, args.section).items():
        runs = [load(run) for run in dict.fromkeys(names)]
        sections.append(Section(title, group(runs)))
    if not sections:
        check_report(args.out, args.name)
    name = args.name or default_name(sections)
    store = Store(args.out / f"{name}.json", rows=("section", "model", "seed"), sections=("section",), notes=("notes",))
    store.load(args.fresh)
    with store.alone():
        for section in sections:
            put(store, section)
        if notes:
            store.tables["notes"] = {}
            store.add({"notes": notes}, "notes")
        held = list(store.tables["sections"].values())
        size = (9, 0.4 + 4.8 * len(held))
        picture = store.draw(
            store.path.with_suffix(".png"), size, partial(curves, sections=held, rows=store.rows.values())
        )
        notes = "\n\n".join(row["notes"] for row in store.tables["notes"].values())
        store.save(markdown(held, title_of(held, name), picture and picture.name, notes))
    print_sections(sections, held)
    print(store.files_and(picture))
    return 0


def check_report(folder: Path, name: str | None) -> None:
    """Check that there is a report of that name, because no runs were given.

    Raises:
        ConfigError: There is no name, or no such report.
    """
    text = "run.sh report: expected runs, --section TITLE RUN .., or the --name of an existing report"
    if name is None:
        raise ConfigError(text)
    if not (folder / f"{name}.json").exists():
        raise ConfigError(f"{text}; there is no {folder / name}.json")


def title_of(held: list[Row], name: str) -> str:
    """Return the title of a report: the task of its sections, or its name if they differ."""
    tasks = {row["task"] for row in held}
    if len(tasks) == 1:
        return tasks.pop()
    return name.replace("_", " ").capitalize()


def print_sections(sections: list[Section], held: list[Row]) -> None:
    """Print the tables of the sections of this command; verdicts are corrected for all sections that are held."""
    comparisons, level = judged(held)
    titles = [row["section"] for row in held]
    compared = dict(zip(titles, comparisons))
    for section in sections:
        parts = [section.title]
        for _, (header, rows) in section.parts():
            parts.append(table(header, rows))
        for kind in VERDICTS:
            header, rows = table_of(kind, compared[section.title], level)
            if rows:
                parts.append(table(header, rows))
        parts.append(section.remarks())
        for part in parts:
            if part:
                print(f"{part}\n")


def asked_for(runs: list[str], sections: list[list[str]]) -> dict[str, list[str]]:
    """Return the run names of the sections by title; runs outside any --section come first, with an empty title.

    Raises:
        ConfigError: A section has no runs, or two sections have the same title.
    """
    asked = {}
    if runs:
        asked[""] = runs
    for title, *names in sections:
        if not names:
            raise ConfigError(f"--section: expected a title and runs, got {title!r} alone")
        if title in asked:
            raise ConfigError(f"--section: duplicate title {title!r}")
        asked[title] = names
    return asked


def default_name(sections: list[Section]) -> str:
    """Return the name of the first task; if all runs use user files as data, the name of the first run."""
    first = sections[0].runs[0]
    for section in sections:
        for run in section.runs:
            if run.recipe.data.name not in USER_FILES:
                return first.recipe.task.name
    return first.folder.name


def put(store: Store, section: Section) -> None:
    """Store a section in place of the section with the same title.

    Raises:
        ConfigError: The old section has runs that the new section lacks.
    """
    about = as_section(section)
    rows = as_rows(section)
    before = [key for key, row in store.rows.items() if row["section"] == section.title]
    lost = {named(store.rows[key]) for key in before}
    lost.difference_update(map(named, rows))
    if lost:
        raise ConfigError(
            f"{store.path}: holds {min(lost)}, missing here; --name NAME starts another report, --fresh replaces this"
        )
    for key in before:
        del store.rows[key]
    store.tables["sections"][section.title,] = about  # at its old position
    for row in rows:
        store.add(row)


def named(row: Row) -> str:
    """Return the name of a stored run with its seed: runs in several folders may have one name."""
    return f"{row['run']} (seed {row['seed']})"


def read_notes(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--notes: {path} cannot be read ({error})") from None
