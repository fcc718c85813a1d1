"""Tables of GLUE scores of several models, one row for each model and fine-tuning recipe."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lion.config import ConfigError
from tools.glue.plan import read_table, table_names
from tools.glue.results import best_rate, counts_of

Scores = dict[str, list[float]]  # by task, a score for each seed


def scores_table(
    found: Mapping[tuple[str, str], Sequence[Scores]],
    counts: Mapping[tuple[str, str], Mapping[str, int]] = MappingProxyType({}),
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with the mean score of each task and the mean over all tasks.

    `n` is the number of scores per task; it is a range if tasks differ. MNLI counts twice in the mean of a recipe whose
    average is over numbers (`Table.average`), if both accuracies were measured.

    Args:
        found: For each model and fine-tuning recipe (row of the paper's Table 8), the scores of each of its runs.
        counts: How often each task counts in the mean of a row (`read_counts`); by default as in the recipe of the
            row's name.
    """
    tasks = tasks_of([scores for some in found.values() for scores in some])
    rows = []
    for (name, recipe), some in found.items():
        means = {task: statistics.mean(x for scores in some for x in scores.get(task, ())) for task in tasks_of(some)}
        sizes = [sum(len(scores.get(task, ())) for scores in some) for task in means]
        n = "-".join(map(str, sorted({min(sizes), max(sizes)})))
        own = counts.get((name, recipe)) or ({"mnli": 2} if average_of(recipe) == "numbers" else {})
        weights = [own.get(task, 1) for task in means]
        average = f"{statistics.fmean(means.values(), weights):.2f}" if len(means) == len(tasks) else "-"
        if 2 in weights and average != "-":
            average += ", MNLI twice"
        rows.append([name, recipe, *(f"{means[t]:.2f}" if t in means else "-" for t in tasks), average, n])
    return ["model", "fine-tuned as", *tasks, f"mean of {len(tasks)}", "n"], rows


def average_of(recipe: str) -> str:
    """Return what the average of a fine-tuning recipe is over, `tasks` for an unknown one."""
    return read_table(recipe).average if recipe in table_names() else "tasks"


def read_counts(path: Path) -> dict[str, int] | None:
    """Return how often each task counts in the average of a file of `./run.sh glue`; None in files of earlier versions.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    with file_of_glue(path):
        held = json.loads(path.read_text())
        return counts_of(held["rows"], held["average_over"]) if "average_over" in held else None


def tasks_of(some: Sequence[Scores]) -> list[str]:
    return list(dict.fromkeys(task for scores in some for task in scores))


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
