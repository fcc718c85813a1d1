"""Spectra of state matrices from HiPPO, from which decays start.

A new spectrum is one function and its line in `SPECTRA`. In a step dt, a state matrix with eigenvalues
`-rate + i frequency` decays by `exp(-rate dt)` and rotates by `frequency dt`. A function returns the rates (D,) of a
head's D key dimensions, and the frequencies (D/2,) of its pairs or None without rotation. A pair (p, p + D/2) is one
complex state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def s4d_real(dim: int) -> tuple[Tensor, None]:
    """Return S4D-Real (2206.11893): rates 1, 2, .., D, the diagonal of HiPPO-LegS."""
    return torch.arange(1, dim + 1, dtype=torch.float64), None


def s4d_lin(dim: int) -> tuple[Tensor, Tensor]:
    """Return S4D-Lin (2206.11893), a Fourier series: rates 1/2, and frequencies pi n for n = 0, 1, .."""
    return torch.full((dim,), 0.5, dtype=torch.float64), math.pi * torch.arange(dim // 2, dtype=torch.float64)


def legs(dim: int) -> tuple[Tensor, Tensor]:
    """Return the normal part of HiPPO-LegS of size D, from which S5 starts (2208.04933).

    The rates are 1/2. The frequencies are those of one eigenvalue from each conjugate pair.
    """
    n = torch.arange(dim, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    skew = (root[:, None] * root).tril(-1) / 2  # lower half of A + P P^T; the upper half is its negative
    frequencies = torch.linalg.eigvalsh(1j * (skew - skew.mT))  # in pairs +-, ascending
    return torch.full((dim,), 0.5, dtype=torch.float64), frequencies[dim - dim // 2 :]


RANDOM = "random"  # no HiPPO, and steps of 1: exp(B dt) = sigmoid(a), a ~ N(0, 1), the usual start of Lion-D
SPECTRA: dict[str, Callable[[int], tuple[Tensor, Tensor | None]]] = {
    "s4d_real": s4d_real,
    "s4d_lin": s4d_lin,
    "legs": legs,
}
ROTATING = ("s4d_lin", "legs")
