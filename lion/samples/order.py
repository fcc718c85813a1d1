"""Order of an epoch's samples: a pure function of (seed, epoch, position).

No state is kept between steps, so that a run can stop and resume anywhere. Work and memory for a batch depend on the
batch size, however large the data set is.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lion.samples.seeds import GOLDEN, derive, mix, shift

MAX_STORED = 2**21  # up to this many samples, a permutation is stored (16 MiB) once per epoch
ROUNDS = 8


class Order(ABC):
    """Order of the samples in an epoch."""

    @abstractmethod
    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        """Return the samples, 0 to `size` - 1, at these positions, 0 to `size` - 1, of an epoch."""


@dataclass(frozen=True)
class Shuffled(Order):
    """A random order that reads every sample once per epoch.

    With `repeats` r, an epoch reads only 1 / r of the samples, each r times in a row (DeiT's repeated augmentation).
    """

    repeats: int = 1

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        places = torch.arange(positions.start, positions.stop, positions.step) // self.repeats
        key = derive(seed, epoch)
        if size <= MAX_STORED:
            return permutation(size, key)[places].tolist()
        return permute(places, size, key).tolist()


@dataclass(frozen=True)
class Sequential(Order):
    """The order of the data set: every sample once per epoch."""

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        return list(positions)


@dataclass(frozen=True)
class Drawn(Order):
    """Sampling with replacement: every position draws from all samples, such as windows anywhere in a token file."""

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        places = torch.arange(positions.start, positions.stop, positions.step)
        words = mix(derive(seed, epoch) + (places + 1) * GOLDEN)
        return (shift(words, 1) % size).tolist()


@functools.lru_cache(maxsize=2)  # the loader may be an epoch ahead
def permutation(size: int, key: int) -> Tensor:
    """Return `range(size)` in a random order."""
    generator = torch.Generator().manual_seed(key)
    return torch.randperm(size, generator=generator)


def permute(places: Tensor, size: int, key: int) -> Tensor:
    """Map places (B,) through a pseudo-random permutation of `range(size)`, in memory and time of O(B).

    A Feistel network works on a grid of hardly more than `size` cells. Rows and columns are shifted in turn, each by a
    hash of the other. Values outside of `range(size)` go through the network again (cycle walking).
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    keys = [derive(key, i) for i in range(ROUNDS)]
    found = network(places, rows, columns, keys)
    while (outside := found >= size).any():
        found[outside] = network(found[outside], rows, columns, keys)
    return found


def network(x: Tensor, rows: int, columns: int, keys: list[int]) -> Tensor:
    """Map cells x (B,) of a grid through the Feistel network of `permute`, which has a round for every key."""
    row = x // columns
    column = x % columns
    for first, second in zip(keys[::2], keys[1::2]):
        row = (row + shift(mix(column ^ first), 1)) % rows
        column = (column + shift(mix(row ^ second), 1)) % columns
    return row * columns + column
