"""Chance as a function of numbers: seeds, and draws on the device that no batch size and no process count changes."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, 2014): a counter in steps of GOLDEN, and the two factors that mix it
GOLDEN, FIRST, SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def derive(*parts: int | str) -> int:
    """A seed, 0 to 2**63 - 1, from several numbers or names; far apart for neighbours."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def place_keys(seed: int, places: Tensor) -> Tensor:
    """A key (N,) for each of the places (N,), integer, under a seed."""
    return mix(derive(seed) + places)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's bijection of 64-bit words, held as int64 (products wrap around)."""
    x = (x ^ shift(x, 30)) * FIRST
    x = (x ^ shift(x, 27)) * SECOND
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def uniform(keys: Tensor, n: int) -> Tensor:
    """`n` draws for each of the keys (B,), int64: float32 (B, n) in [0, 1), in steps of 2**-24.

    A row depends on its key alone: SplitMix64 started there. Such a key is the `key` of an evaluation batch.
    """
    steps = torch.arange(1, n + 1, device=keys.device) * GOLDEN
    return shift(mix(keys[:, None] + steps), 40).float() * 2.0**-24


def normal(keys: Tensor, n: int) -> Tensor:
    """`n` draws from the normal distribution for each of the keys (B,), float32 (B, n), as `uniform` draws them."""
    middle = uniform(keys, n).double() + 2.0**-25  # of a step: never 0 or 1
    return torch.special.ndtri(middle).float()
