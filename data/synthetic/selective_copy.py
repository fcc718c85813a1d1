"""Selective copying (arXiv 2312.00752), in one direction and in both.

A sample holds symbols at random places among empty tokens, and a block of as many markers. The label of the i-th marker
is the i-th symbol. The markers stand at the end, or in the middle, with half of the symbols before and half after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.synthetic.base import Shape, SyntheticConfig, SyntheticSet, places, unlabelled
from lion.config import setting
from lion.samples.labels import TokenLabelsInfo

EMPTY, MARKER = 0, 1  # ids; symbols follow


@dataclass
class SelectiveCopyConfig(SyntheticConfig):
    """Settings of selective copying. `items` are symbols to copy; `symbols` is the number of different ones."""

    name: str = "selective_copy"
    symbols: int = setting(16, min=2, max=10_000)


class SelectiveCopy(SyntheticSet):
    """Generated samples of selective copying."""

    Config = SelectiveCopyConfig

    @property
    def info(self) -> TokenLabelsInfo:
        c = self.config
        return TokenLabelsInfo(classes=c.symbols, length=c.length, longest=c.longest(), vocabulary=2 + c.symbols)

    def draw(self, rng: np.random.Generator, count: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        c, (length, items) = self.config, shape
        first, start = items // 2, (length - items) // 2  # symbols before the markers, place of the first marker
        if c.sides == "before":
            first, start = items, length - items
        symbols = rng.integers(c.symbols, size=(count, items))
        tokens, labels = np.full((count, length), EMPTY), unlabelled(count, length)
        tokens[:, start : start + items], labels[:, start : start + items] = MARKER, symbols
        before = np.sort(places(rng, count, start, first))
        after = start + items + np.sort(places(rng, count, length - start - items, items - first))
        np.put_along_axis(tokens, np.concatenate([before, after], 1), 2 + symbols, 1)
        return tokens[..., None], labels
