"""Bounds on what a reader meets, at what was reached: how much code, how long its statements, how dense their syntax.

Imports and docstrings do not count. Dense syntax is comprehensions, stars and conditional expressions.
"""

import ast
import io
import statistics
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
DENSE = (ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp, ast.Starred, ast.IfExp)


class Reading(NamedTuple):
    """Measures of a folder: tokens, their median in a statement without a body, dense syntax in 100 statements."""

    tokens: int
    median: float
    dense: float


BOUNDS = {  # lower them with every change that can; never raise them without a reason in the commit
    "lion/ops": Reading(47_200, 12, 5.9),
    "lion/layers": Reading(39_500, 12, 9.9),
    "lion": Reading(163_700, 10, 6.2),
    "data": Reading(48_200, 9, 4.6),
    "tools": Reading(111_540, 9, 8.4),
    "tests": Reading(328_000, 14, 13.5),
}


@pytest.mark.parametrize("folder", BOUNDS)
def test_code_does_not_become_harder_to_read(folder):
    found = measure(sorted((ROOT / folder).rglob("*.py")))
    bound = BOUNDS[folder]
    assert found.tokens <= bound.tokens
    assert found.median <= bound.median
    assert found.dense <= bound.dense


def test_what_counts():
    """Check the measures on a few lines whose tokens are counted by hand."""
    source = '"""Words."""\nimport os\nx = [y for y in z]\nif x:\n    """No docstring."""\n    f(*x, **y)\n'
    lengths, statements, dense = read(source)
    assert (sorted(lengths), statements, dense) == ([1, 8, 9], 4, 3)


def measure(paths: list[Path]) -> Reading:
    lengths, statements, dense = [], 0, 0
    tokens = 0
    for path in paths:
        source = path.read_text()
        found = read(source)
        lengths += found[0]
        statements += found[1]
        dense += found[2]
        tokens += sum(words_by_line(source).values())
    return Reading(tokens, statistics.median_low(lengths), 100 * dense / statements)


def read(source: str) -> tuple[list[int], int, int]:
    """Return the tokens of each statement without a body, the number of statements, and the dense syntax in them."""
    words = words_by_line(source)
    lengths, statements, dense = [], 0, 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno in words:
            statements += 1
            if not hasattr(node, "body"):
                lengths.append(sum(words.get(line, 0) for line in range(node.lineno, node.end_lineno + 1)))
        if isinstance(node, DENSE):
            dense += 1
        if isinstance(node, ast.Call):
            dense += sum(keyword.arg is None for keyword in node.keywords)
    return lengths, statements, dense


def words_by_line(source: str) -> dict[int, int]:
    """Return the number of tokens of every line outside of imports and docstrings."""
    left_out = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            left_out.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    words = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type in WORDS and line not in left_out:
            words[line] = words.get(line, 0) + 1
    return words
