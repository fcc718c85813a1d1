"""The papers' numbers and claims about runs, from the recipes and from the tables of `./run.sh paper`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from lion.config import flatten, to_dict
from lion.recipe import Recipe, free_keys
from tools.claims import CLAIM, QUESTION
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
    claims: dict[tuple[str, str], None] = {}
    asked: dict[tuple[str, str], None] = {}
    both: set[tuple[str, str]] = set()
    for kind, pair, printed in pairs_of(task):
        other = pair[::-1]
        held = asked
        if kind == CLAIM:
            held = claims
        if other not in held:
            held[pair] = None
        if printed or (kind == CLAIM and other in claims):
            both |= {pair, other}
    clear = [pair for pair in claims if pair not in both]
    questions: dict[tuple[str, str], None] = {}
    for pair in asked | claims:
        if pair[::-1] in claims:
            pair = pair[::-1]
        if pair not in clear:
            questions[pair] = None
    return Claims(tuple(clear), tuple(questions))


def pairs_of(task: str) -> Iterator[tuple[str, tuple[str, str], bool]]:
    """Yield the claims and questions of all tables about rows of a task, with names that differ.

    Yields:
        The kind, the pair, and whether it is a question about two rows that the paper prints.
    """
    for name, table in read_tables().items():
        for scale in SCALES:
            names = {}
            for cell in cells(name, table, scale):
                if cell.recipe.task.name == task:
                    names[cell.row] = called(cell.recipe)
            for kind, pairs in ((CLAIM, table.claims), (QUESTION, table.open)):
                for a, b in pairs:
                    printed = kind == QUESTION and table.rows[a].published and table.rows[b].published
                    if a in names and b in names and names[a] != names[b]:
                        yield kind, (names[a], names[b]), bool(printed)


def published(recipe: Recipe) -> str:
    """Return the papers' result of the same model on the same data, or "-" if there is none."""
    found = results().get(kind_of(recipe), [])
    return " / ".join(dict.fromkeys(found)) or "-"


@functools.cache
def results() -> dict[str, list[str]]:
    """Return the papers' results in our recipes by the kind of the recipe, without the name of the metric."""
    found: dict[str, list[str]] = {}
    for path in recipe_files().values():
        recipe = resolve(path)
        if NUMBER.match(recipe.about.expected) and not NO_ROW.match(recipe.about.row):
            text = recipe.about.expected.removesuffix(f" {metric_of(recipe).title}")
            found.setdefault(kind_of(recipe), []).append(text)
    return found


def kind_of(recipe: Recipe) -> str:
    """Return the task, the start, and all settings of data and model that affect a result, as text."""
    values = flatten({"model": to_dict(recipe.model.resolved()), "data": to_dict(recipe.data)})
    for key in free_keys(recipe) | {"model.attention.form", "model.attention.chunk_size"}:
        values.pop(key, None)
    return json.dumps([recipe.task.name, recipe.init_from is None, values], sort_keys=True)


def called(recipe: Recipe) -> str:
    """Return the name of a recipe's row.

    The name consists of the label of the model, the label of the data (if rows may differ in training data), and
    "pre-trained" if the run started from another run.
    """
    words = [recipe.model.label()]
    if recipe.data.label():
        words.append(recipe.data.label())
    if recipe.init_from is not None:
        words.append("pre-trained")
    return " ".join(words)
