"""Tables of GLUE scores of several models, one row for each model and fine-tuning recipe."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lion.config import ConfigError
from lion.files import read_json
from tools.glue.plan import read_table, table_names
from tools.glue.results import best_rate, counts_of, scores_of
from tools.tables import Table, hundredths

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
        counts: How often each task counts in the mean of a row (`read_scores`); by default as in the recipe of the
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
        cells = [name, recipe]
        for task in tasks:
            cells.append(hundredths(means.get(task)))
        rows.append([*cells, average, n])
    return ["model", "fine-tuned as", *tasks, f"mean of {len(tasks)}", "n"], rows


def joint(some: Sequence[Scores]) -> Scores:
    """Return the scores of several runs together."""
    found: Scores = {}
    for scores in some:
        for task, values in scores.items():
            found[task] = found.get(task, []) + values
    return found


def default_counts(recipe: str) -> dict[str, int]:
    """Return how often tasks count in the mean of a fine-tuning recipe, where no file says it."""
    if recipe in table_names() and read_table(recipe).average == "numbers":
        return {"mnli": 2}
    return {}


def read_scores(path: Path) -> tuple[Scores, dict[str, int]]:
    """Read the scores in a file of `./run.sh glue`; of several learning rates, those of the best one of each task.

    Returns:
        The scores, and how often each task counts in their average; empty in files of earlier versions.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    try:
        held = read_json(path)
        scores = scores_of(best_rate(held["rows"]))
        if not scores:
            raise ValueError("no scores")
        counts = {}
        if "average_over" in held:
            counts = counts_of(held["rows"], held["average_over"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh glue ({type(error).__name__}: {error})") from None
    return scores, counts
