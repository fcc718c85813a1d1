"""Statistics of runs: differences between rows of runs with intervals, correction for many claims, and power.

Runs of one seed share the order of the data. Where this makes them alike (text and digits), two rows are compared by
the differences of runs with the same seed (`paired`). Elsewhere, a linear model of rows and seeds is fitted to all runs
whose noise is alike, and its residuals estimate the noise of every difference (`two_way`). All claims of a report are
corrected together by Holm's method.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lion.config import ConfigError

try:
    from scipy import stats
except ImportError:
    raise ConfigError("statistics of runs need SciPy: pip install scipy") from None

LEVEL = 0.05  # probability of deciding any claim by chance
POWER = 0.8  # probability with which the smallest visible difference would be seen
MOST = 50  # seeds of a row that a report recommends at most

RULE = """\
Differences between rows are positive where the first row is better. The rule for verdicts: where runs of one seed are
alike because they share the order of the data (text, digits), two rows are compared by the differences of runs of the
same seed. Elsewhere, a linear model of rows and seeds is fitted to the runs, and its residuals estimate the noise; a
difference is adjusted for the seeds where rows have different ones. A claim is decided if both rows have two runs and p
is below {level:.0%} after Holm's correction for all claims and questions of the page; the intervals (95 %) and p are
not corrected. For an undecided claim, the last columns are the smallest difference that its runs would have shown with
a probability of {power:.0%}, and the number of seeds that would show the difference that was found, both without the
correction. By this calculation, three paired seeds show a difference of two standard deviations in {three:.0%} of all
cases; {needed} seeds are needed for {power:.0%}."""

Values = Mapping[str, Mapping[int, float]]  # by row and seed


class Difference(NamedTuple):
    """Difference of the means of two rows of runs.

    Attributes:
        mean: The difference.
        half: Half of the width of its 95 % interval.
        p: Probability of a difference at least this large without a true difference, not corrected.
        smallest: Smallest true difference that these runs would have shown in `POWER` of all cases, not corrected.
        seeds: Number of seeds that would show a difference of `mean` in `POWER` of all cases, not corrected; `MOST` + 1
            stands for more, None for a number that is not known.
    """

    mean: float
    half: float
    p: float
    smallest: float
    seeds: int | None = None


def paired(values: Values, first: str, second: str) -> Difference | None:
    """Compare two rows by the differences of runs with the same seed; None with fewer than two such pairs."""
    gaps = [values[first][seed] - values[second][seed] for seed in values[first] if seed in values[second]]
    if len(gaps) < 2:
        return None
    return difference(statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1, len(gaps))


def two_way(values: Values, first: str, second: str) -> Difference | None:
    """Compare two rows by a linear model, value = row + seed + noise, fitted to the runs of all rows.

    Returns:
        The difference, or None if a row has fewer than two runs or the runs leave no degrees of freedom.
    """
    rows, seeds = sorted(values), sorted({seed for runs in values.values() for seed in runs})
    cells = [(row, seed, value) for row in rows for seed, value in values[row].items()]
    if min(len(values[first]), len(values[second])) < 2:
        return None
    design = np.zeros((len(cells), len(rows) + len(seeds)))
    for i, (row, seed, _) in enumerate(cells):
        design[i, rows.index(row)] = design[i, len(rows) + seeds.index(seed)] = 1
    found = np.array([value for *_, value in cells])
    freedom = len(cells) - np.linalg.matrix_rank(design)
    inverse = np.linalg.pinv(design.T @ design)
    contrast = np.zeros(design.shape[1])
    contrast[rows.index(first)], contrast[rows.index(second)] = 1, -1
    if freedom < 1 or not np.allclose(contrast @ inverse @ design.T @ design, contrast):  # no seed in common
        return None
    weights = inverse @ design.T @ found
    noise = ((found - design @ weights) ** 2).sum() / freedom
    mean = round(float(contrast @ weights), 10)  # the last digits depend on the processor, which would decide ties
    error, pairs = (
        math.sqrt(noise * float(contrast @ inverse @ contrast)),
        min(map(len, (values[first], values[second]))),
    )
    return difference(mean, error, int(freedom), pairs)


def difference(mean: float, error: float, freedom: int, pairs: int) -> Difference:
    """Return a difference with its standard error, of `pairs` seeds and `freedom` degrees of freedom (Student's t)."""
    t = stats.t(freedom)
    p = 2 * float(t.sf(abs(mean) / error)) if error else float(mean == 0)
    half, smallest = float(t.ppf(0.975)) * error, float(t.ppf(0.975) + t.ppf(POWER)) * error
    needed = seeds_needed(abs(mean) / (error * math.sqrt(pairs))) if error else None
    return Difference(mean, half, p, smallest, needed)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): below a level, any is wrong with at most that chance."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def interval(values: Sequence[float]) -> float:
    """Return half of the width of the 95 % interval of a mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(stats.t(len(values) - 1).ppf(0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def power(seeds: int, effect: float) -> float:
    """Return the probability that pairs of `seeds` runs show a true difference of `effect` deviations of a pair."""
    if seeds < 2:
        return 0.0
    limit, shift = stats.t(seeds - 1).ppf(0.975), effect * math.sqrt(seeds)
    return float(stats.nct(seeds - 1, shift).sf(limit) + stats.nct(seeds - 1, shift).cdf(-limit))


def seeds_needed(effect: float, wanted: float = POWER) -> int:
    """Return the number of seeds that show a true difference of `effect` deviations of a pair with this power.

    `MOST` + 1 stands for all larger numbers.
    """
    return next((n for n in range(2, MOST + 1) if power(n, effect) >= wanted), MOST + 1)


RULE = RULE.format(level=LEVEL, power=POWER, three=power(3, 2), needed=seeds_needed(2))
