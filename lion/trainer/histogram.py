"""Histograms as TensorBoard draws them, counted where the values are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def bin_edges() -> list[float]:
    """TensorBoard's own: 0, and powers of 1.1 on both sides of it."""
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
    """What `SummaryWriter.add_histogram` makes of values of any shape, sums in float64; only counts leave the device.

    None where nothing can be counted: all is NaN.
    """
    values = values.detach().double().flatten()
    edges = torch.tensor(EDGES, dtype=torch.float64, device=values.device)
    counts = torch.bincount(torch.bucketize(values, edges, out_int32=True, right=True), minlength=len(EDGES) + 1)
    stats = torch.stack([values.min(), values.max(), values.sum(), values.square().sum()])
    low, high, total, squares, *counts = torch.cat([stats, counts.double()]).tolist()
    counts = counts[:-1]  # the last is beyond all edges; counts[i] is below EDGES[i]
    filled = [i for i, count in enumerate(counts) if count and i]
    if not filled:
        return None
    shown = slice(max(filled[0] - 1, 0), filled[-1] + 1)  # an empty bucket first, so that the lowest limit is there
    return Histogram(low, high, len(values), total, squares, EDGES[shown], counts[shown])
