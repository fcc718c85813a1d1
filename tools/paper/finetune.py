"""Fine-tuning on GLUE of the runs of the tables, after their training (`./run.sh glue`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lion.config import ConfigError
from lion.recipe_files import SUMMARY
from tools import glue
from tools.cli import say
from tools.glue.scores import Scores, read_scores
from tools.paper.results import results_of
from tools.paper.tables import Cell, Table, cells
from tools.store import Store


def fine_tune(tables: Mapping[str, Table], scale: str, store: Store, options: Sequence[str]) -> int:
    """Fine-tune all finished runs that their tables ask for, and add the scores to their raw rows.

    Args:
        tables: The tables.
        scale: Scale of the runs.
        store: The raw results.
        options: Options of `./run.sh glue`, such as `--jobs` and `data.path`.

    Returns:
        0, the exit code of the first fine-tuning that failed, or 130 after an interrupt.
    """
    code = 0
    left: list[tuple[Cell, str, tuple[str, ...]]] = []
    for name, table in tables.items():
        left += missing(name, table, scale, store)
    for cell, recipe, own in left:
        if not (cell.run / SUMMARY).is_file():
            say(f"{cell.run.name}: not fine-tuned, its folder is gone")
            continue
        try:
            ended = glue.main([str(cell.run), "--recipe", recipe, *own, *options])
        except ConfigError as error:
            say(f"GLUE is left out, --data glue data.path=FOLDER names its data: {error}")
            break
        if ended == 130:
            return ended
        code = code or ended
        if not ended:
            scores, _ = read_scores(cell.run / "glue" / recipe / "results.json")
            row = store.rows[cell.place]
            store.add(row | {"glue": scores_of(cell, store) | {recipe: scores}})
            store.save_rows()
    return code


def missing(name: str, table: Table, scale: str, store: Store) -> list[tuple[Cell, str, tuple[str, ...]]]:
    """List the runs of a table to fine-tune, each with a recipe and the options of `./run.sh glue` at this scale."""
    if table.glue is None:
        return []
    every = cells(name, table, scale)
    options: tuple[str, ...] = ()
    if scale == "mini":
        every = best(table, every, store)
        options = table.glue.mini
    found = []
    for cell in every:
        if cell.place not in store.rows:
            continue
        recipes = table.rows[cell.row].glue or table.glue.recipes
        if scale == "mini":
            recipes = recipes[:1]
        for recipe in recipes:
            if recipe not in scores_of(cell, store):
                found.append((cell, recipe, options))
    return found


def best(table: Table, every: Sequence[Cell], store: Store) -> list[Cell]:
    """Return the runs with the first seed of the best rows; none before all runs of the table are finished."""
    if not every:
        return []
    results = results_of(table, every, store)
    if results.made < len(every):
        return []
    means = {row: statistics.mean(found.values()) for row, found in results.values.items() if found}
    falling = table.metric(every).higher_is_better
    names = sorted(means, key=means.__getitem__, reverse=falling)[: table.glue.best]
    return [cell for cell in every if cell.seed == 0 and cell.row in names]


def scores_of(cell: Cell, store: Store) -> dict[str, Scores]:
    """Return the scores of a finished run on GLUE, by fine-tuning recipe."""
    return store.rows[cell.place].get("glue", {})
