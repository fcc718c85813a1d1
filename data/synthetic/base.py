"""Base class of generated rows of labelled tokens: all samples are drawn in memory when the data set is built."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch

from data.base import BatchedSamples, DataConfig, DataSet
from lion.config import setting
from lion.samples.base import Batch, Splits, moved
from lion.samples.labels import UNLABELLED, TokenLabelsInfo
from lion.samples.seeds import derive

SIDES = ("both", "before")
LONGEST = 2**16  # tokens of a sample


class Shape(NamedTuple):
    """Size of samples: tokens, and items to remember in each sample."""

    length: int
    items: int

    def __str__(self) -> str:
        return f"{self.length}x{self.items}"


@dataclass
class SyntheticConfig(DataConfig):
    """Settings of generated rows of labelled tokens.

    length: Number of tokens of a training sample.
    items: Numbers of items to remember; each training sample has one of these numbers, all equally often.
    sides: `both`: items stand before and after the tokens that ask for them, so that one direction finds only half of
        them. `before`: all items come first, which suits causal models.
    shapes: Further held-out sets, LENGTHxITEMS.
    samples, held_out: Number of training samples, and of samples of every held-out set.
    seed: Seed of the samples, independent of the seed of a run.
    """

    length: int = setting(128, min=4, max=LONGEST)
    items: tuple[int, ...] = (4, 8, 16)
    sides: str = setting("both", choices=SIDES)
    shapes: tuple[str, ...] = ()
    samples: int = setting(50_000, min=1, max=1_000_000)
    held_out: int = setting(1_000, min=1, max=100_000)
    seed: int = setting(0, min=0)

    per_item: ClassVar[int] = 2  # tokens that an item needs: the one that holds it, and the one that asks for it

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("items: expected at least one number")
        for text in self.shapes:
            if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", text):
                raise ValueError(f"shapes: expected LENGTHxITEMS, such as 256x16, got {text!r}")
        if (longest := self.longest()) > LONGEST:
            raise ValueError(f"shapes: {longest:,} tokens, at most {LONGEST:,}")
        for shape in self.training_shapes() + self.held_out_shapes():
            if not 1 <= shape.items <= shape.length // self.per_item:
                raise ValueError(
                    f"items: {shape.items} of them do not fit into {shape.length} tokens, an item takes "
                    f"{self.per_item}; nearest: {max(1, min(shape.items, shape.length // self.per_item))}"
                )

    def training_shapes(self) -> list[Shape]:
        return [Shape(self.length, items) for items in self.items]

    def held_out_shapes(self) -> list[Shape]:
        shapes = []
        for text in self.shapes:
            length, items = text.split("x")
            shapes.append(Shape(int(length), int(items)))
        return shapes

    def longest(self) -> int:
        return max(shape.length for shape in self.training_shapes() + self.held_out_shapes())

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size, shapes=())


class LabelledTokens(BatchedSamples):
    """Rows of tokens (N, L, ids) with labels (N, L), both int16: vocabularies are smaller than 2**15."""

    def __init__(self, tokens: np.ndarray, labels: np.ndarray) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(
        self, indices: Sequence[int], device: torch.device | str, generator: torch.Generator | None = None
    ) -> Batch:
        """Return int64 tokens (B, L, ids) and labels (B, L)."""
        batch = {}
        for name, rows in (("tokens", self.tokens), ("labels", self.labels)):
            batch[name] = moved(torch.from_numpy(rows[list(indices)].astype(np.int64)), device)
        return batch


class SyntheticSet(DataSet):
    """A generated data set. A subclass draws the samples of one shape."""

    Info = TokenLabelsInfo
    workers = 0

    @property
    @abstractmethod
    def info(self) -> TokenLabelsInfo: ...

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Draw `count` samples of a shape: tokens (count, L, ids) and labels (count, L)."""

    def published(self) -> tuple[TokenLabelsInfo, int]:
        return self.info, self.config.samples

    def rows(self, split: str, count: int, shapes: Sequence[Shape]) -> LabelledTokens:
        """Return `count` samples of shapes of one length, in random order; the seed and the split determine them."""
        rng = np.random.default_rng(derive(self.config.seed, self.config.name, split))
        parts = [self.draw(rng, size, shape) for shape, size in zip(shapes, shares(count, len(shapes)))]
        tokens, labels = map(np.concatenate, zip(*parts))
        order = rng.permutation(count)
        return LabelledTokens(tokens[order].astype(np.int16), labels[order].astype(np.int16))

    def build(self) -> Splits:
        c = self.config
        shapes = c.training_shapes()
        train = self.rows("train", c.samples, shapes)
        val = self.rows("val", c.held_out, shapes)
        test = self.rows("test", c.held_out, shapes)
        more = {str(shape): self.rows(str(shape), c.held_out, [shape]) for shape in c.held_out_shapes()}
        digest = hashlib.sha256()
        for each in (train, val, test, *more.values()):
            digest.update(each.tokens.tobytes())
            digest.update(each.labels.tobytes())
        return Splits(train, val, test, self.info, more=more, fingerprint=digest.hexdigest()[:12])


def shares(count: int, parts: int) -> list[int]:
    """Split a count into parts that differ by at most 1."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def places(rng: np.random.Generator, count: int, room: int, chosen: int) -> np.ndarray:
    """Draw `chosen` different places below `room` in random order for each of `count` rows: (count, chosen)."""
    return rng.random((count, room)).argsort(1)[:, :chosen]


def unlabelled(count: int, length: int) -> np.ndarray:
    return np.full((count, length), UNLABELLED)
