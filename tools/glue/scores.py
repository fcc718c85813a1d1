"""Tables of GLUE scores of several models, one row for each model and fine-tuning recipe."""

from __future__ import annotations

import contextlib
import json
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lion.config import ConfigError
from tools.glue.plan import read_table, table_names
from tools.glue.results import best_rate, counts_of
from tools.tables import Cell, Table, fill, hundredths

Scores = dict[str, list[float]]  # by task, a score for each seed


def scores_table(
    found: Mapping[tuple[str, str], Sequence[Scores]],
    counts: Mapping[tuple[str, str], Mapping[str, int]] = MappingProxyType({}),
) -> Table:
    """Return a table with the mean score of each task and the mean over all tasks.

    `n` is the number of scores per task; it is a range if tasks differ. MNLI counts twice in the mean of a recipe whose
    average is over numbers (`Table.average`), if both accuracies were measured.

    Args:
        found: For each model and fine-tuning recipe (row of the paper's Table 8), the scores of each of its runs.
        counts: How often each task counts in the mean of a row (`read_counts`); by default as in the recipe of the
            row's name.
    """
    joined = {row: joint(some) for row, some in found.items()}
    tasks = list(joint(list(joined.values())))
    rows = []
    for (name, recipe), scores in joined.items():
        means = {task: statistics.mean(values) for task, values in scores.items()}
        weights = counts.get((name, recipe)) or default_counts(recipe)
        average = "-"
        if len(means) == len(tasks):
            own = [weights.get(task, 1) for task in means]
            average = hundredths(statistics.fmean(means.values(), own))
            if 2 in own:
                average += ", MNLI twice"
        sizes = {len(values) for values in scores.values()}
        n = "-".join(map(str, sorted({min(sizes), max(sizes)})))
        row = {"model": name, "fine-tuned as": recipe, f"mean of {len(tasks)}": average, "n": n}
        for task, mean in means.items():
            row[task] = hundredths(mean)
        rows.append(row)
    columns: dict[str, Cell] = {}
    for heading in ("model", "fine-tuned as", *tasks, f"mean of {len(tasks)}", "n"):
        columns[heading] = operator.methodcaller("get", heading)
    return fill(columns, rows)


def joint(some: Sequence[Scores]) -> Scores:
    """Return the scores of several runs together."""
    found: Scores = {}
    for scores in some:
        for task, values in scores.items():
            found[task] = found.get(task, []) + values
    return found


def default_counts(recipe: str) -> dict[str, int]:
    """Return how often tasks count in the mean of a fine-tuning recipe, where no file says it."""
    if average_of(recipe) == "numbers":
        return {"mnli": 2}
    return {}


def average_of(recipe: str) -> str:
    """Return what the average of a fine-tuning recipe is over, `tasks` for an unknown one."""
    if recipe in table_names():
        return read_table(recipe).average
    return "tasks"


def read_counts(path: Path) -> dict[str, int] | None:
    """Return how often each task counts in the average of a file of `./run.sh glue`; None in files of earlier versions.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    with file_of_glue(path):
        held = json.loads(path.read_text())
        if "average_over" not in held:
            return None
        return counts_of(held["rows"], held["average_over"])


def read_scores(path: Path) -> Scores:
    """Read the scores in a file of `./run.sh glue`; of several learning rates, those of the best one of each task.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    scores: Scores = {}
    with file_of_glue(path):
        for row in best_rate(json.loads(path.read_text())["rows"]):
            scores.setdefault(row["task"], []).append(float(row["score"]))
        if not scores:
            raise ValueError("no scores")
    return scores


@contextlib.contextmanager
def file_of_glue(path: Path) -> Iterator[None]:
    """Translate the errors of reading a file that `./run.sh glue` did not write."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh glue ({type(error).__name__}: {error})") from None
