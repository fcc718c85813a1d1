"""The order in which an epoch reads its samples: a pure function of (seed, epoch, position).

Nothing is kept between steps, so that a run can stop and go on anywhere, and what is computed for a batch has the
batch's size, however large the data set.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lion.tasks.seeds import GOLDEN, derive, mix, shift

LISTED = 2**21  # samples whose permutation is drawn as a list (of 16 MiB) once an epoch
ROUNDS = 8


class Order(ABC):
    """Which sample stands at a position of an epoch."""

    @abstractmethod
    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        """The samples, 0 to `size` - 1, at these positions, 0 to `size` - 1, of an epoch."""


@dataclass(frozen=True)
class Shuffled(Order):
    """Every sample once an epoch; with `repeats`, as many fewer, each that often in a row (DeiT's augmentation)."""

    repeats: int = 1

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        places = torch.arange(positions.start, positions.stop, positions.step) // self.repeats
        key = derive(seed, epoch)
        return (permutation(size, key)[places] if size <= LISTED else permute(places, size, key)).tolist()


@dataclass(frozen=True)
class Sequential(Order):
    """Every sample once an epoch, as they stand."""

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        return list(positions)


@dataclass(frozen=True)
class Drawn(Order):
    """Each sample drawn from all, with replacement: windows that begin anywhere in a token file."""

    def samples(self, positions: range, *, size: int, seed: int, epoch: int) -> list[int]:
        places = torch.arange(positions.start, positions.stop, positions.step)
        return (shift(mix(derive(seed, epoch) + (places + 1) * GOLDEN), 1) % size).tolist()


@functools.lru_cache(maxsize=2)  # the loader may be an epoch ahead
def permutation(size: int, key: int) -> Tensor:
    """All of `range(size)` in a random order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(key))


def permute(places: Tensor, size: int, key: int) -> Tensor:
    """Where a pseudo-random permutation of `range(size)` takes the places (B,): memory and time of O(B).

    A Feistel network on a grid of hardly more than `size` cells, whose rows and columns are shifted in turn by a hash
    of the other; what falls outside of `range(size)` goes through it again (cycle walking).
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    keys = [derive(key, i) for i in range(ROUNDS)]

    def network(x: Tensor) -> Tensor:
        row, column = x // columns, x % columns
        for first, second in zip(keys[::2], keys[1::2]):
            row = (row + shift(mix(column ^ first), 1)) % rows
            column = (column + shift(mix(row ^ second), 1)) % columns
        return row * columns + column

    found = network(places)
    while (outside := found >= size).any():
        found[outside] = network(found[outside])
    return found
