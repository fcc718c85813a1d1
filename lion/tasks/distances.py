"""How far made pictures are from real ones, by features (N, D) of a classifier: Frechet distance (1706.08500), the
score of their classes (1606.03498), precision and recall (1904.06991)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NEIGHBOURS = 3  # k of 1904.06991
GROUPS = 10  # of pictures that are left out in turn
QUANTILE = 2.262157  # of Student's t with GROUPS - 1 degrees of freedom, for 95 %
ROWS = 1024  # pictures whose distances to all others are held at once


class Gaussian(NamedTuple):
    """Features as one: `mean` (D,), and `root` (R, D), float64, with `root^T root` their covariance."""

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Gaussian:
        """That of features (N, D), N at least 2."""
        x = features.double()
        mean = x.mean(0)
        root = torch.linalg.qr(x - mean, mode="r").R  # the covariance itself would have half the digits
        return cls(mean, root / math.sqrt(len(x) - 1))


def frechet_distance(a: Gaussian, b: Gaussian) -> Tensor:
    """`|mean_a - mean_b|^2 + Tr(C_a + C_b - 2 (C_a C_b)^(1/2))`, 0 for equals.

    The last trace is the sum of the singular values of `root_a root_b^T`: no square root of a matrix is taken, and
    features may be more than pictures.
    """
    shared = torch.linalg.svdvals(a.root @ b.root.mT).sum()
    spread = a.root.square().sum() + b.root.square().sum() - 2 * shared
    return (a.mean - b.mean).square().sum() + spread.clamp(min=0)


def inception_score(shares: Tensor) -> Tensor:
    """`exp(mean KL(p(class | picture) || p(class)))` of the classes' shares (N, classes): 1 to as many as classes."""
    shares = shares.double()
    entropy = torch.special.entr(shares).sum(1).mean()
    return (torch.special.entr(shares.mean(0)).sum() - entropy).exp()


def radii(features: Tensor, neighbours: int = NEIGHBOURS) -> Tensor:
    """The distance (N,) of each of features (N, D) from its `neighbours`-th nearest other one."""
    x = features.double()
    rows = []
    for start in range(0, len(x), ROWS):
        found = torch.cdist(x[start : start + ROWS], x)
        found.diagonal(start).fill_(math.inf)  # itself, also where it has doubles
        rows.append(found.kthvalue(neighbours, 1).values)
    return torch.cat(rows)


def precision_recall(real: Tensor, made: Tensor, real_radii: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The share of made pictures that lie within reach of a real one, and that of real ones within reach of a made one;
    a picture reaches as far as its third neighbour of its own kind. Features (N, D), (M, D) of more than three each,
    about as many: the fewer there are, the farther they reach.
    """
    real, made = real.double(), made.double()
    reach_real, reach_made = (radii(real) if real_radii is None else real_radii), radii(made)
    covered, held = torch.zeros_like(reach_real, dtype=torch.bool), []
    for start in range(0, len(made), ROWS):
        some = slice(start, start + ROWS)
        found = torch.cdist(made[some], real)  # (rows, N)
        held.append((found <= reach_real).any(1))
        covered |= (found <= reach_made[some, None]).any(0)
    return torch.cat(held).double().mean(), covered.double().mean()


def jackknife(figures: Callable[[Tensor], Tensor], count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Figures (F,) of all of `count` pictures, and half their 95 % intervals.

    `figures` is given which pictures to look at, a mask (count,). A tenth of them, drawn at random, is left out at a
    time: the sets are nearly as large as the whole one, and so are biases that fall with the size.
    """
    group = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % GROUPS
    parts = torch.stack([figures(group != i) for i in range(GROUPS)])  # (GROUPS, F)
    error = ((GROUPS - 1) / GROUPS * (parts - parts.mean(0)).square().sum(0)).sqrt()
    return figures(torch.ones(count, dtype=torch.bool)), QUANTILE * error
