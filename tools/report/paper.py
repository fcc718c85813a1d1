"""The papers' numbers and claims about runs, from the recipes and from the tables of `./run.sh paper`."""

from __future__ import annotations

import functools
import json
import re
from typing import NamedTuple

from lion.config import flatten, to_dict
from lion.recipe import Recipe, free_keys
from tools.compose import metric_of, resolve
from tools.listing import NO_ROW, recipe_files
from tools.options import SCALES
from tools.paper.tables import cells, read_tables

NUMBER = re.compile(r"\d|fail")  # beginning of an `about.expected` that is a result


class Claims(NamedTuple):
    """Claims and questions about rows, by the names that `called` returns.

    Attributes:
        claims: Pairs of rows (better, worse), as claimed by a paper.
        open: Pairs of rows about which the papers make no claim.
    """

    claims: tuple[tuple[str, str], ...]
    open: tuple[tuple[str, str], ...]


@functools.cache
def claims_about(task: str) -> Claims:
    """Return the claims and questions of all tables of a task (`tools/paper/tables`).

    A pair that the papers print in two orders, on any data, is a question.
    """
    claims, asked, both = dict[tuple[str, str], None](), dict[tuple[str, str], None](), set[tuple[str, str]]()
    for name, table in read_tables().items():
        printed = {row for row, each in table.rows.items() if each.published}
        for scale in SCALES:
            names = {cell.row: called(cell.recipe) for cell in cells(name, table, scale) if of(cell.recipe) == task}
            for found, pairs in ((claims, table.claims), (asked, table.open)):
                for a, b in pairs:
                    pair, other = (names.get(a), names.get(b)), (names.get(b), names.get(a))
                    if None in pair or pair == other:
                        continue
                    opposite = other in claims if found is claims else printed >= {a, b}
                    if opposite:
                        both |= {pair, other}
                    if other not in found:
                        found[pair] = None
    clear = tuple(pair for pair in claims if pair not in both)
    questions = dict.fromkeys(pair[::-1] if pair[::-1] in claims else pair for pair in (*asked, *claims))
    return Claims(clear, tuple(pair for pair in questions if pair not in clear))


def published(recipe: Recipe) -> str:
    """Return the papers' result of the same model on the same data, or "-" if there is none."""
    kind = kind_of(recipe)
    return " / ".join(dict.fromkeys(text for other, text in results() if other == kind)) or "-"


@functools.cache
def results() -> list[tuple[str, str]]:
    """Return the papers' results in our recipes, each with the kind of its recipe, without the name of the metric."""
    recipes = [resolve(path) for path in recipe_files().values()]
    return [
        (kind_of(recipe), recipe.about.expected.removesuffix(f" {metric_of(recipe).title}"))
        for recipe in recipes
        if NUMBER.match(recipe.about.expected) and not NO_ROW.match(recipe.about.row)
    ]


def kind_of(recipe: Recipe) -> str:
    """Return the task, the start, and all settings of data and model that affect a result, as text."""
    found = {"model": to_dict(recipe.model.resolved()), "data": to_dict(recipe.data)}
    free = {*free_keys(recipe), "model.attention.form", "model.attention.chunk_size"}
    values = {key: value for key, value in flatten(found).items() if key not in free}
    return json.dumps([of(recipe), recipe.init_from is None, values], sort_keys=True)


def of(recipe: Recipe) -> str:
    return recipe.task.name


def called(recipe: Recipe) -> str:
    """Return the name of a recipe's row.

    The name consists of the label of the model, the label of the data (if rows may differ in training data), and
    "pre-trained" if the run started from another run.
    """
    started = "" if recipe.init_from is None else "pre-trained"
    return " ".join(filter(None, (recipe.model.label(), recipe.data.label(), started)))
