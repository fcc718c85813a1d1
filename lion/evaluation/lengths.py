"""Windows of several lengths over the same held-out text, to evaluate a model beyond its training length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from lion.config import ConfigError
from lion.samples.base import Batch
from lion.samples.seeds import derive


@dataclass(frozen=True)
class HeldOut:
    """Held-out text to cut into windows of the given lengths.

    Attributes:
        ids: Token ids (T,).
        count: Number of tokens that are evaluated.
        ahead: Number of further tokens that are read.
        lengths: Lengths of the windows, the shortest first.
    """

    ids: np.ndarray
    count: int
    ahead: int
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, ids: np.ndarray, lengths: tuple[int, ...], most: int, ahead: int) -> Self:
        """Take as many tokens of the text as possible, so that their number is a multiple of all lengths.

        Raises:
            ConfigError: The text is too short, or a length is not a multiple of the shortest length.
        """
        for length in lengths:
            if length % lengths[0]:
                raise ConfigError(f"--lengths: expected multiples of the shortest, {lengths[0]}, got {length}")
        there = min(most, len(ids) - ahead)
        step = math.lcm(*lengths)
        if step > there:
            raise ConfigError(
                f"--lengths: expected at least {step:,} tokens (the common multiple), there are {max(there, 0):,}"
            )
        return cls(ids, there - there % step, ahead, lengths)


@dataclass(frozen=True)
class Windows:
    """Batches of windows of one length, which can be iterated repeatedly.

    The key `key` (B, n) of a batch has one number for each part of a window that is as long as the shortest window.
    """

    text: HeldOut
    length: int
    seed: int

    @property
    def size(self) -> int:
        """Number of windows per batch, so that a batch has as many tokens as the longest window."""
        return max(1, self.text.lengths[-1] // self.length)

    def __len__(self) -> int:
        return -(-self.text.count // (self.size * self.length))

    def __iter__(self) -> Iterator[Batch]:
        text = self.text
        length = self.length
        starts: np.ndarray = np.arange(text.count // length) * length
        for first in range(0, len(starts), self.size):
            some = starts[first : first + self.size]
            real = torch.arange(self.size) < len(some)  # all batches have the same shape
            some = np.resize(some, self.size)
            places = some[:, None] + np.arange(length + text.ahead)  # (B, L)
            parts = some[:, None] + np.arange(0, length, text.lengths[0])  # (B, n)
            keys = []
            for row in parts:
                keys.append([derive(self.seed, int(place)) for place in row])
            tokens = torch.from_numpy(text.ids[places].astype(np.int64))
            yield {"tokens": tokens, "mask": real, "key": torch.tensor(keys)}
