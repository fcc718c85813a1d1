"""Tables of GLUE scores of several models, one row for each model and fine-tuning recipe."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lion.config import ConfigError
from tools.glue.plan import read_table, table_names
from tools.glue.results import best_rate

Scores = dict[str, list[float]]  # by task, a score for each seed


def scores_table(
    found: Mapping[tuple[str, str], Sequence[Scores]], averages: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with the mean score of each task and the mean over all tasks.

    `n` is the number of scores per task; it is a range if tasks differ. MNLI counts twice in the mean of a recipe whose
    average is over numbers (`Table.average`).

    Args:
        found: For each model and fine-tuning recipe (row of the paper's Table 8), the scores of each of its runs.
        averages: What the mean of a row is over (`read_average`); by default as in the recipe of the row's name.
    """
    tasks = tasks_of([scores for some in found.values() for scores in some])
    rows = []
    for (name, recipe), some in found.items():
        means = {task: statistics.mean(x for scores in some for x in scores.get(task, ())) for task in tasks_of(some)}
        counts = [sum(len(scores.get(task, ())) for scores in some) for task in means]
        n = "-".join(map(str, sorted({min(counts), max(counts)})))
        over = averages.get((name, recipe)) or average_of(recipe)
        weights = [2 if over == "numbers" and task == "mnli" else 1 for task in means]
        average = f"{statistics.fmean(means.values(), weights):.2f}" if len(means) == len(tasks) else "-"
        if 2 in weights and average != "-":
            average += ", MNLI twice"
        rows.append([name, recipe, *(f"{means[t]:.2f}" if t in means else "-" for t in tasks), average, n])
    return ["model", "fine-tuned as", *tasks, f"mean of {len(tasks)}", "n"], rows


def average_of(recipe: str) -> str:
    """Return what the average of a fine-tuning recipe is over, `tasks` for an unknown one."""
    return read_table(recipe).average if recipe in table_names() else "tasks"


def read_average(path: Path) -> str | None:
    """Return what the average in a file of `./run.sh glue` is over; None for files of earlier versions."""
    return json.loads(path.read_text()).get("average_over")


def tasks_of(some: Sequence[Scores]) -> list[str]:
    return list(dict.fromkeys(task for scores in some for task in scores))


def read_scores(path: Path) -> Scores:
    """Read the scores in a file of `./run.sh glue`; of several learning rates, those of the best one of each task.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    scores: Scores = {}
    try:
        for row in best_rate(json.loads(path.read_text())["rows"]):
            scores.setdefault(row["task"], []).append(float(row["score"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh glue ({type(error).__name__}: {error})") from None
    return scores
