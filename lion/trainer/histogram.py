"""TensorBoard histograms, counted on the device of the values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def bin_edges() -> list[float]:
    """Return the bin edges of TensorBoard: 0, and `1e-12 * 1.1**n` with both signs."""
    positive = [1e-12]
    while positive[-1] * 1.1 < 1e20:
        positive.append(positive[-1] * 1.1)
    return [*(-v for v in reversed(positive)), 0.0, *positive]


EDGES = bin_edges()


class Histogram(NamedTuple):
    """The arguments of `SummaryWriter.add_histogram_raw`."""

    min: float
    max: float
    num: float
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[float]


def histogram(values: Tensor) -> Histogram | None:
    """Compute the histogram that `SummaryWriter.add_histogram` would make of values of any shape.

    Sums are in float64. Only the counts and statistics are copied from the device. The result is None if no value
    can be counted, for example because all values are NaN.
    """
    values = values.detach().double().flatten()
    edges = torch.tensor(EDGES, dtype=torch.float64, device=values.device)
    counts = torch.bincount(torch.bucketize(values, edges, out_int32=True, right=True), minlength=len(EDGES) + 1)
    stats = torch.stack([values.min(), values.max(), values.sum(), values.square().sum()])
    low, high, total, squares, *counts = torch.cat([stats, counts.double()]).tolist()
    counts = counts[:-1]  # the last count is beyond all edges; counts[i] lies below EDGES[i]
    filled = [i for i, count in enumerate(counts) if count and i]
    if not filled:
        return None
    shown = slice(max(filled[0] - 1, 0), filled[-1] + 1)  # an empty bucket first, which supplies the lower limit
    return Histogram(low, high, len(values), total, squares, EDGES[shown], counts[shown])
