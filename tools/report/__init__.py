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
    args = options.report(argv)
    notes = read_notes(args.notes)
    sections = [read_section(title, runs) for title, runs in asked_for(args.runs, args.section)]
    if not sections and (args.name is None or not (args.out / f"{args.name}.json").exists()):
        missing = "" if args.name is None else f"; there is no {args.out / args.name}.json"
        what = "expected runs, --section TITLE RUN .., or the --name of an existing report"
        raise ConfigError(f"run.sh report: {what}{missing}")
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
        picture = store.draw(
            store.path.with_suffix(".png"),
            (9, 0.4 + 4.8 * len(held)),
            lambda fig: curves(fig, held, store.rows.values()),
        )
        notes = "\n\n".join(row["notes"] for row in store.tables["notes"].values())
        tasks = {row["task"] for row in held}
        title = tasks.pop() if len(tasks) == 1 else name.replace("_", " ").capitalize()
        store.save(markdown(held, title, picture and picture.name, notes))
    comparisons, level = judged(held)
    compared = dict(zip((row["section"] for row in held), comparisons))
    for section in sections:
        claims = [table_of(kind, compared[section.title], level) for kind in VERDICTS]
        tables = [*section.tables(), *((header, rows) for header, rows in claims if rows)]
        parts = [section.title, *(table(*t) for t in tables), section.remarks()]
        print(*filter(None, parts), sep="\n\n", end="\n\n")
    print(store.files_and(picture))
    return 0


def asked_for(runs: list[str], sections: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Return the titles and run names of the sections; runs outside any --section come first, with an empty title.

    Raises:
        ConfigError: A section has no runs, or two sections have the same title.
    """
    asked = [("", runs)] if runs else []
    for title, *names in sections:
        if not names:
            raise ConfigError(f"--section: expected a title and runs, got {title!r} alone")
        if title in dict(asked):
            raise ConfigError(f"--section: duplicate title {title!r}")
        asked.append((title, names))
    return asked


def default_name(sections: list[Section]) -> str:
    """Return the name of the first task; if all runs use user files as data, the name of the first run."""
    runs = [run for section in sections for run in section.runs]
    own = all(run.recipe.data.name in USER_FILES for run in runs)
    return runs[0].folder.name if own else runs[0].recipe.task.name


def read_section(title: str, names: list[str]) -> Section:
    runs = [load(name) for name in dict.fromkeys(names)]
    return Section(title, group(runs))


def put(store: Store, section: Section) -> None:
    """Store a section in place of the section with the same title.

    Raises:
        ConfigError: The old section has runs that the new section lacks.
    """
    about, rows = as_section(section), as_rows(section)
    before = [key for key, row in store.rows.items() if row["section"] == section.title]
    if lost := {named(store.rows[key]) for key in before} - {*map(named, rows)}:
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
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--notes: {path} cannot be read ({error})") from None
