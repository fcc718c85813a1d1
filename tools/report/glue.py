"""Tables of the scores that `./run.sh glue` measured for runs (RUN/glue/RECIPE/results.json)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from lion.config import ConfigError
from tools.report.tables import Groups, Table

Scores = dict[str, list[float]]  # by task, a score for each seed


def glue_table(groups: Groups) -> Table:
    """Return a table with a row for each row of runs and each fine-tuning recipe (row of the paper's Table 8).

    The columns are the mean score of each task and the mean over all tasks. `n` is the number of scores per task; it is
    a range if tasks differ.
    """
    found: dict[tuple[str, str], list[Scores]] = {}
    for name, runs in groups.items():
        for path in sorted(p for run in runs for p in run.folder.glob("glue/*/results.json")):
            found.setdefault((name, path.parent.name), []).append(read_scores(path))
    tasks = list(dict.fromkeys(task for some in found.values() for scores in some for task in scores))
    rows = []
    for (name, recipe), some in found.items():
        means = {task: statistics.mean(x for scores in some for x in scores.get(task, ())) for task in tasks_of(some)}
        counts = [sum(len(scores.get(task, ())) for scores in some) for task in means]
        n = "-".join(map(str, sorted({min(counts), max(counts)})))
        average = f"{statistics.mean(means.values()):.2f}" if len(means) == len(tasks) else "-"
        rows.append([name, recipe, *(f"{means[t]:.2f}" if t in means else "-" for t in tasks), average, n])
    return ["model", "fine-tuned as", *tasks, f"mean of {len(tasks)}", "n"], rows


def tasks_of(some: list[Scores]) -> list[str]:
    return list(dict.fromkeys(task for scores in some for task in scores))


def read_scores(path: Path) -> Scores:
    """Read the scores in a file of `./run.sh glue`.

    Raises:
        ConfigError: `./run.sh glue` did not write the file.
    """
    scores: Scores = {}
    try:
        for row in json.loads(path.read_text())["rows"]:
            scores.setdefault(row["task"], []).append(float(row["score"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of ./run.sh glue ({type(error).__name__}: {error})") from None
    return scores
