"""Distances between generated and real images, from features (N, D) of a classifier.

Frechet distance (1706.08500), inception score (1606.03498), precision and recall (1904.06991).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEIGHBOURS = 3  # k of 1904.06991
GROUPS = 10  # of images, left out in turn
QUANTILE = 2.262157  # of Student's t with GROUPS - 1 degrees of freedom, for 95 %
ROWS = 1024  # images whose distances to all others are in memory at once


class Gaussian(NamedTuple):
    """A Gaussian fitted to features: `mean` (D,) and `root` (R, D), float64, with covariance `root^T root`."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """Fit a Gaussian to features (N, D), N at least 2."""
        x = features.double()
        mean = x.mean(0)
        root = torch.linalg.qr(x - mean, mode="r").R  # computing the covariance would lose half the digits
        return cls(mean, root / math.sqrt(len(x) - 1))


def frechet_distance(a: Gaussian, b: Gaussian) -> Tensor:
    """Compute `|mean_a - mean_b|^2 + Tr(C_a + C_b - 2 (C_a C_b)^(1/2))`; equal Gaussians have distance 0.

    The last trace is the sum of the singular values of `root_a root_b^T`. So no matrix square root is needed, and there
    may be more features than images.
    """
    shared = torch.linalg.svdvals(a.root @ b.root.mT).sum()
    spread = a.root.square().sum() + b.root.square().sum() - 2 * shared
    return (a.mean - b.mean).square().sum() + spread.clamp(min=0)


def inception_score(shares: Tensor) -> Tensor:
    """Compute `exp(mean KL(p(class | image) || p(class)))` from class probabilities (N, classes).

    The score lies between 1 and the number of classes.
    """
    shares = shares.double()
    entropy = torch.special.entr(shares).sum(1).mean()
    return (torch.special.entr(shares.mean(0)).sum() - entropy).exp()


def radii(features: Tensor, neighbours: int = NEIGHBOURS) -> Tensor:
    """Return the distance (N,) from each of the features (N, D) to its `neighbours`-th nearest neighbour."""
    x = features.double()
    rows = []
    for start in range(0, len(x), ROWS):
        found = torch.cdist(x[start : start + ROWS], x)
        found.diagonal(start).fill_(math.inf)  # the distance to itself, also where features repeat
        rows.append(found.kthvalue(neighbours, 1).values)
    return torch.cat(rows)


def precision_recall(real: Tensor, made: Tensor, real_radii: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute precision and recall of generated images, from features (N, D) of real and (M, D) of generated ones.

    Precision is the share of generated images within reach of a real one. Recall is the share of real images within
    reach of a generated one. The reach of an image is the distance to its third nearest neighbour in its own set.

    Each set needs more than three images, and both sets should have about the same size: smaller sets have a larger
    reach.
    """
    real = real.double()
    made = made.double()
    if real_radii is None:
        real_radii = radii(real)
    made_radii = radii(made)
    held = []
    covered = torch.zeros_like(real_radii, dtype=torch.bool)
    for start in range(0, len(made), ROWS):
        some = slice(start, start + ROWS)
        found = torch.cdist(made[some], real)  # (rows, N)
        held.append((found <= real_radii).any(1))
        covered |= (found <= made_radii[some, None]).any(0)
    precision = torch.cat(held).double().mean()
    recall = covered.double().mean()
    return precision, recall


def jackknife(figures: Callable[[Tensor], Tensor], count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Compute figures (F,) over all of `count` images, and the half-widths of their 95 % intervals.

    `figures` takes a mask (count,) of the images to use. A random tenth of the images is left out at a time. The
    remaining sets are nearly as large as the whole set, and so are biases that fall with the size.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.randperm(count, generator=generator) % GROUPS
    parts = torch.stack([figures(group != i) for i in range(GROUPS)])  # (GROUPS, F)
    spread = (parts - parts.mean(0)).square().sum(0)
    error = ((GROUPS - 1) / GROUPS * spread).sqrt()
    every = torch.ones(count, dtype=torch.bool)
    return figures(every), QUANTILE * error
