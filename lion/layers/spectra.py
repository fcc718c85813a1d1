"""Where decays start: spectra of state matrices from HiPPO. A new one is one function and its line in `SPECTRA`.

A state matrix with eigenvalues `-rate + i frequency` decays by `exp(-rate dt)` and turns by `frequency dt` a step dt.
A function gives the rates (D,) of a head's D key dimensions and the frequencies (D/2,) of its pairs, None where nothing
turns; a pair (p, p + D/2) is one complex state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def s4d_real(dim: int) -> tuple[Tensor, None]:
    """S4D-Real (2206.11893): the diagonal of HiPPO-LegS, 1, 2, .., D."""
    return torch.arange(1, dim + 1, dtype=torch.float64), None


def s4d_lin(dim: int) -> tuple[Tensor, Tensor]:
    """S4D-Lin (2206.11893): 1/2, and pi n for n = 0, 1, ..: a Fourier series."""
    return torch.full((dim,), 0.5, dtype=torch.float64), math.pi * torch.arange(dim // 2, dtype=torch.float64)


def legs(dim: int) -> tuple[Tensor, Tensor]:
    """The normal part of HiPPO-LegS of size D, as S5 starts (2208.04933): 1/2, and one eigenvalue of each pair."""
    n = torch.arange(dim, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    skew = (root[:, None] * root).tril(-1) / 2  # of A + P P^T, whose other half is its negative
    frequencies = torch.linalg.eigvalsh(1j * (skew - skew.mT))  # in pairs +-, rising
    return torch.full((dim,), 0.5, dtype=torch.float64), frequencies[dim - dim // 2 :]


RANDOM = "random"  # no HiPPO, and steps of 1: exp(B dt) = sigmoid(a), a ~ N(0, 1), as Lion-D starts elsewhere
SPECTRA: dict[str, Callable[[int], tuple[Tensor, Tensor | None]]] = {
    "s4d_real": s4d_real,
    "s4d_lin": s4d_lin,
    "legs": legs,
}
TURNING = ("s4d_lin", "legs")
