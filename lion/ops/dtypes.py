"""Dtypes of sums, gates and states."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of gates, states and row sums beside x: float32, or float64 if x is float64."""
    if x.dtype == torch.float64:
        return x.dtype
    return torch.float32


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over tokens before the division: float32 for float16, else that of x.

    The largest float16 value is 65,504, which such sums exceed.
    """
    if x.dtype == torch.float16:
        return torch.float32
    return x.dtype
