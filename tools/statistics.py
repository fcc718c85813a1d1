"""Statistics of runs: differences between rows of runs with intervals, correction for many claims, and power.

Three models of the noise compare two rows. Where runs of one seed are alike because they share the order of the data
(text and digits), the differences of runs with the same seed are compared (`paired`). Elsewhere, a linear model of rows
and seeds is fitted to all runs whose noise is alike, and its residuals estimate the noise of every difference
(`two_way`). Where some rows always solve a task and others by chance, each row has noise of its own (`welch`). All
claims of a report are corrected together by Holm's method.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lion.config import ConfigError

try:
    from scipy import optimize, stats
except ImportError:
    raise ConfigError("statistics of runs need SciPy: pip install scipy") from None

LEVEL = 0.05  # probability of deciding any claim by chance
POWER = 0.8  # probability with which the smallest visible difference would be seen
MOST = 50  # seeds of a row that a report recommends at most

RULE = """\
Differences between rows are positive where the first row is better. The rule for verdicts: where runs of one seed are
alike because they share the order of the data (language models, digits), two rows are compared by the differences of
runs of the same seed. Elsewhere, a linear model of rows and seeds is fitted to the runs, and its residuals estimate
the noise; a difference is adjusted for the seeds where rows have different ones. Where some rows solve a task always
and others only sometimes (recall, selective copying), the noise of each row is estimated alone (Welch's test). A claim
is decided if both rows have all their runs and p is below {level:.0%} after Holm's correction for all claims and
questions of the page; the intervals (95 %) and p are not corrected. Runs without any spread do not show their noise,
and decide nothing. For an undecided claim, the last columns are the smallest difference that its runs would have shown
with a probability of {power:.0%}, and the number of seeds that would show the difference that was found, both after the
correction. Without other claims, three paired seeds show a difference of two standard deviations in {three:.0%} of
all cases; {needed} seeds are needed for {power:.0%}."""

Values = Mapping[str, Mapping[int, float]]  # by row and seed


class Difference(NamedTuple):
    """Difference of the means of two rows of runs.

    Attributes:
        mean: The difference.
        error: Its standard error.
        freedom: Degrees of freedom of the error.
        runs: Number of runs of the row with fewer runs.
    """

    mean: float
    error: float
    freedom: float
    runs: int

    @property
    def half(self) -> float:
        """Return half of the width of the 95 % interval."""
        return float(stats.t.ppf(0.975, self.freedom)) * self.error

    @property
    def p(self) -> float:
        """Return the probability of a difference at least this large without a true difference, not corrected.

        Runs without any spread do not show their noise: then it is 1.
        """
        if not self.error:
            return 1.0
        return 2 * float(stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def smallest(self, level: float = LEVEL) -> float:
        """Return the true difference that these runs would have shown with p below `level` in `POWER` of all cases."""
        limit = float(stats.t.ppf(1 - level / 2, self.freedom))
        shift = optimize.brentq(lambda shift: seen(shift, self.freedom, level) - POWER, 0, 10 * limit)
        return self.error * float(shift)

    def seeds(self, level: float = LEVEL) -> int | None:
        """Return the number of seeds that would show this difference with p below `level` in `POWER` of all cases.

        `MOST` + 1 stands for all larger numbers, and None for a number that is not known (an error of 0).
        """
        if not self.error:
            return None

        for n in range(2, MOST + 1):
            shift = abs(self.mean) / self.error * math.sqrt(n / self.runs)
            if seen(shift, self.freedom * (n - 1) / (self.runs - 1), level) >= POWER:
                return n
        return MOST + 1


def paired(values: Values, first: str, second: str) -> Difference | None:
    """Compare two rows by the differences of runs with the same seed; None with fewer than two such pairs."""
    seeds = [seed for seed in values[first] if seed in values[second]]
    gaps = [round(values[first][seed] - values[second][seed], DIGITS) for seed in seeds]
    if len(gaps) < 2:
        return None
    return Difference(statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1, len(gaps))


def two_way(values: Values, first: str, second: str) -> Difference | None:
    """Compare two rows by a linear model, value = row + seed + noise, fitted to the runs of all rows.

    Returns:
        The difference, or None if a row has fewer than two runs or the runs leave no degrees of freedom.
    """
    rows = sorted(values)
    seeds = sorted(set().union(*values.values()))
    cells = []
    for row in rows:
        for seed, value in values[row].items():
            cells.append((row, seed, value))
    runs = min(len(values[first]), len(values[second]))
    if runs < 2:
        return None
    design = np.zeros((len(cells), len(rows) + len(seeds)))
    for i, (row, seed, _) in enumerate(cells):
        design[i, rows.index(row)] = design[i, len(rows) + seeds.index(seed)] = 1
    found = np.array([value for _, _, value in cells])
    freedom = len(cells) - np.linalg.matrix_rank(design)
    inverse = np.linalg.pinv(design.T @ design)
    contrast = np.zeros(design.shape[1])
    contrast[rows.index(first)], contrast[rows.index(second)] = 1, -1
    if freedom < 1 or not np.allclose(contrast @ inverse @ design.T @ design, contrast):  # no seed in common
        return None
    weights = inverse @ design.T @ found
    noise = ((found - design @ weights) ** 2).sum() / freedom
    mean = round(float(contrast @ weights), DIGITS)
    error = round(math.sqrt(noise * float(contrast @ inverse @ contrast)), DIGITS)
    return Difference(mean, error, int(freedom), runs)


def welch(values: Values, first: str, second: str) -> Difference | None:
    """Compare the means of two rows, each with noise of its own (Welch 1947); None if a row has fewer than two runs."""
    one = list(values[first].values())
    other = list(values[second].values())
    runs = min(len(one), len(other))
    if runs < 2:
        return None
    of_one = statistics.variance(one) / len(one)
    of_other = statistics.variance(other) / len(other)
    squared = of_one + of_other
    weights = of_one**2 / (len(one) - 1) + of_other**2 / (len(other) - 1)
    freedom = len(one) + len(other) - 2.0
    if weights:
        freedom = squared**2 / weights
    mean = statistics.mean(one) - statistics.mean(other)
    return Difference(mean, math.sqrt(squared), freedom, runs)


DIGITS = 10  # of differences and errors: the last digits are of rounding, which would decide ties
NOISES = {"frame": two_way, "pairs": paired, "own": welch}


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
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def seen(shift: float, freedom: float, level: float = LEVEL) -> float:
    """Return the probability that a true difference of `shift` standard errors is found, with p below `level`."""
    return float(stats.nct.sf(stats.t.ppf(1 - level / 2, freedom), freedom, shift))


def power(seeds: int, effect: float, level: float = LEVEL) -> float:
    """Return the probability that pairs of `seeds` runs show a true difference of `effect` deviations of a pair."""
    if seeds < 2:
        return 0.0
    return seen(effect * math.sqrt(seeds), seeds - 1, level)


def seeds_needed(effect: float, level: float = LEVEL) -> int | None:
    """Return the number of seeds that show a true difference of `effect` deviations of a pair in `POWER` of all cases.

    `MOST` + 1 stands for all larger numbers.
    """
    return Difference(effect, 1 / math.sqrt(2), 1, 2).seeds(level)


RULE = RULE.format(level=LEVEL, power=POWER, three=power(3, 2), needed=seeds_needed(2))
