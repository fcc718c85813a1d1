"""Reproducible random numbers: seeds and draws on the device, independent of batch size and number of processes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, 2014): a counter in steps of GOLDEN, and the two factors that mix it
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def derive(*parts: int | str) -> int:
    """Return a seed, 0 to 2**63 - 1, from numbers or names; similar inputs give unrelated seeds."""
    name = ",".join(map(str, parts))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def place_keys(seed: int, places: Tensor) -> Tensor:
    """Return a key (N,) for each of the integer places (N,), under a seed."""
    return mix(derive(seed) + places)


def mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's bijection to 64-bit words stored as int64 (products wrap around)."""
    x = (x ^ shift(x, 30)) * FIRST
    x = (x ^ shift(x, 27)) * SECOND
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift bits to the right and fill with zeros."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def uniform(keys: Tensor, n: int) -> Tensor:
    """Return `n` draws for each of the keys (B,), int64: float32 (B, n) in [0, 1), in steps of 2**-24.

    A row depends only on its key, which starts SplitMix64. The `key` of an evaluation batch is such a key.
    """
    steps = torch.arange(1, n + 1, device=keys.device) * GOLDEN
    words = mix(keys[:, None] + steps)
    return shift(words, 40).float() * 2.0**-24


def normal(keys: Tensor, n: int) -> Tensor:
    """Return `n` draws from the normal distribution, float32 (B, n), for each of the keys (B,); see `uniform`."""
    middle = uniform(keys, n).double() + 2.0**-25  # middle of a step, so never 0 or 1
    return torch.special.ndtri(middle).float()
