"""Multi-query associative recall (arXiv 2312.04927), in one direction and in both.

A sample holds pairs of a key and a value, and queries: keys that occur again among empty tokens. The label of a query
is the value of its key. Pairs stand before the queries, or half of them before and half after. A pair is one token with
two ids, so that the task does not also ask for a shift by one token, which short convolutions or induction heads do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.synthetic.base import Shape, SyntheticConfig, SyntheticSet, places, unlabelled
from lion.config import setting
from lion.samples.labels import TokenLabelsInfo

EMPTY = 0  # id of tokens that mean nothing; keys follow, then values


@dataclass
class RecallConfig(SyntheticConfig):
    """Settings of associative recall. `items` are pairs; `keys` and `values` are the numbers of different ones."""

    name: str = "recall"
    keys: int = setting(32, min=1, max=10_000)
    values: int = setting(16, min=2, max=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = max(shape.items for shape in self.training_shapes() + self.held_out_shapes())
        if self.keys < most:
            raise ValueError(f"keys: {self.keys}, but samples have up to {most} pairs of different keys")


class Recall(SyntheticSet):
    """Generated samples of associative recall."""

    Config = RecallConfig

    @property
    def info(self) -> TokenLabelsInfo:
        c = self.config
        return TokenLabelsInfo(
            classes=c.values, length=c.length, longest=c.longest(), vocabulary=1 + c.keys + c.values, ids=2
        )

    def draw(self, rng: np.random.Generator, count: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        c, (length, pairs) = self.config, shape
        first = pairs // 2
        if c.sides == "before":
            first = pairs
        start, end = first, length - (pairs - first)  # the queries stand in between
        keys = 1 + places(rng, count, c.keys, pairs)
        values = rng.integers(c.values, size=(count, pairs))
        tokens, labels = np.full((count, length, 2), EMPTY), unlabelled(count, length)
        both = np.stack([keys, 1 + c.keys + values], -1)
        tokens[:, :start], tokens[:, end:] = both[:, :first], both[:, first:]
        queries = start + places(rng, count, end - start, pairs)
        np.put_along_axis(tokens[..., 0], queries, keys, 1)
        np.put_along_axis(labels, queries, values, 1)
        return tokens, labels
