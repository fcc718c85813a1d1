"""ListOps: nested operators on lists of digits; the class is the value, 0 to 9 (arXiv 1804.06028; long: 2011.04006).

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. A token is a digit, an operator with its opening bracket, or `]`. The parentheses in the
files are not tokens: they only group the tokens into a binary tree.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from data.folders import user_path
from data.lra.lines import Lines, Place
from data.lra.sequences import (
    END,
    MOST,
    PAD,
    UNKNOWN,
    GeneratedConfig,
    SequenceSet,
    TokenConfig,
    checked_files,
    read_text,
)
from data.lra.store import ArrayKind, Arrays, Part, Source, in_parts, write_part
from data.manifest import stamps
from data.pool import read_part
from lion.config import ConfigError, setting
from lion.samples.seeds import derive
from lion.samples.sequences import SequenceInfo

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),  # even count: truncated mean of the middle two
    "[SM": lambda values: sum(values) % 10,
}
CLOSE = "]"
TOKENS = (*"0123456789", *OPERATORS, CLOSE)
OF_TOKEN = dict(zip(TOKENS, itertools.count(3)))
IDS = {"<pad>": PAD, "<unk>": UNKNOWN, "<eos>": END} | OF_TOKEN
OF_ID = dict(zip(IDS.values(), IDS))
DIGIT, CLOSING = IDS["0"], IDS[CLOSE]
FILES = {"train": "basic_train.tsv", "val": "basic_val.tsv", "test": "basic_test.tsv"}  # files of LRA
LEAF = 0.75  # probability that a node below the root is a digit
PART = 500  # samples of a part
TRIES = 100_000  # maximum number of drawn expressions until one has a valid length


@dataclass
class ListOpsConfig(GeneratedConfig, TokenConfig):
    """Settings of ListOps; the defaults of the generator are LRA's.

    max_depth: Maximum depth of the tree; the last level holds only digits.
    max_args: Maximum number of arguments of an operator; the minimum is 2.
    min_length, max_length: Exclusive bounds of the number of tokens, without the end token.
    path: A folder with LRA's basic_train.tsv, basic_val.tsv and basic_test.tsv, which replace generated samples.
    """

    name: str = "listops"
    samples: int = setting(96_000, min=1, max=MOST)
    max_depth: int = setting(10, min=2, max=100)
    max_args: int = setting(10, min=2, max=1000)
    min_length: int = setting(500, min=0)
    max_length: int = setting(2000, min=5)
    share: ClassVar[int] = 48

    def __post_init__(self) -> None:
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = min(2 + self.max_args * longest, 2**62)
        if self.min_length + 2 > self.max_length:
            raise ValueError(
                f"max_length: no length is strictly between min_length={self.min_length} and {self.max_length}, "
                f"nearest: {self.min_length + 2}"
            )
        if longest <= self.min_length:
            raise ValueError(
                f"min_length: {self.min_length}, but with max_depth={self.max_depth} and max_args={self.max_args} no "
                f"expression has more than {longest} tokens, nearest: {longest - 1}"
            )
        if self.path is None and self.max_length > self.length:
            raise ValueError(
                f"length: {self.length} tokens, but samples have up to max_length={self.max_length} tokens with the "
                f"end token, nearest: {self.max_length}"
            )

    def resized(self, sample_size: int) -> Self:
        """Return settings with another `length`, and with `min_length` and `max_length` scaled in proportion."""
        low, high = sample_size * self.min_length // self.length, sample_size * self.max_length // self.length
        return replace(self, length=sample_size, min_length=low, max_length=max(high, low + 2))


class ListOps(SequenceSet):
    """ListOps, generated or read from LRA's files."""

    Config = ListOpsConfig

    def identity(self) -> Any:
        if self.config.path:
            return {"files": stamps(self.files().values()), "length": self.config.length}
        return self.config.decided("length", "pad")

    def files(self) -> dict[str, Path]:
        return checked_files(self.config.name, user_path(self.config.path), FILES)

    def source(self) -> Source:
        if self.config.path:
            return Rows(self.files(), self.config.length)
        return Generator(self.config)

    def kinds(self) -> dict[str, ArrayKind]:
        return {"tokens": ArrayKind("uint8", None), "lengths": ArrayKind("int32"), "label": ArrayKind("uint8")}

    def info(self, manifest: dict[str, Any] | None = None) -> SequenceInfo:
        return SequenceInfo(classes=10, length=self.config.length, vocabulary=len(IDS))

    def published(self) -> tuple[SequenceInfo, int]:
        return self.info(), min(self.config.samples, self.config.limit or self.config.samples)

    def load(self, path: str, info: SequenceInfo) -> dict[str, Tensor]:
        """Load the expression in a text file as {tokens}."""
        ids = parse(read_text(path), path)
        evaluate(ids, path)
        return {"tokens": torch.tensor([*ids, END])}


def parse(text: str, where: Place | str) -> list[int]:
    """Parse an expression into ids.

    Raises:
        ConfigError: A word is not a token.
    """
    words = text.replace("(", " ").replace(")", " ").split()
    try:
        return [OF_TOKEN[word] for word in words]
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]!r} is not a token of ListOps ({' '.join(TOKENS)})") from None


def evaluate(ids: list[int], where: Place | str) -> int:
    """Return the value of an expression.

    Raises:
        ConfigError: The ids are not a valid expression.
    """
    stack: list[tuple[int, list[int]]] = []
    values: list[int] = []  # arguments of the open operator, or values at the top level
    for i, token in enumerate(ids, 1):
        if token == CLOSING:
            if not stack:
                raise ConfigError(f"{where}: token {i} is a ']' that closes nothing")
            if not values:
                raise ConfigError(f"{where}: the operator that token {i} closes has no arguments")
            operator, outer = stack.pop()
            outer.append(OPERATORS[OF_ID[operator]](values))
            values = outer
        elif DIGIT <= token < DIGIT + 10:
            values.append(token - DIGIT)
        else:
            stack.append((token, values))
            values = []
    if stack:
        raise ConfigError(f"{where}: {len(stack)} brackets are never closed")
    if len(values) != 1:
        raise ConfigError(f"{where}: expected one expression, found {len(values)}")
    return values[0]


def arrays_of(samples: list[tuple[list[int], int]]) -> Arrays:
    """Return the arrays of samples (ids, value), and append the end token to each sample."""
    tokens, lengths, values = [], [], []
    for ids, value in samples:
        tokens += ids
        tokens.append(END)
        lengths.append(len(ids) + 1)
        values.append(value)
    return {
        "tokens": np.array(tokens, np.uint8),
        "lengths": np.array(lengths, np.int32),
        "label": np.array(values, np.uint8),
    }


def split_rows(arrays: Arrays) -> list[np.ndarray]:
    """Return the ids of each sample, with the end token."""
    return np.split(arrays["tokens"], arrays["lengths"].cumsum()[:-1])


def digest_of(ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=16).digest()


class Rows(Lines):
    """A source of LRA's files: each row has an expression and its value, which is checked."""

    def __init__(self, files: dict[str, Path], length: int) -> None:
        super().__init__(files, header="Source\tTarget")
        self.length = length

    def arrays(self, rows: list[tuple[Place, str]]) -> Arrays:
        return arrays_of([self.sample(where, line) for where, line in rows])

    def sample(self, where: Place, line: str) -> tuple[list[int], int]:
        source, tab, target = line.partition("\t")
        if not tab or target.strip() not in TOKENS[:10]:
            raise ConfigError(f"{where}: expected an expression, a tab and its value 0 to 9, got {line[-40:]!r}")
        ids = parse(source, where)
        value = evaluate(ids, where)
        if value != int(target):
            raise ConfigError(f"{where}: the expression's value is {value}, its label {int(target)}")
        if len(ids) >= self.length:
            raise ConfigError(
                f"{where}: {len(ids)} tokens and the end token, data.length is {self.length}; truncation would "
                f"change the expression, nearest: {len(ids) + 1}"
            )
        return ids, value


class Generator(Source):
    """A source of generated expressions.

    An expression depends only on (seed, split, number), not on the number of processes or on the hash order of a set.
    """

    def __init__(self, config: ListOpsConfig) -> None:
        self.config = config

    def parts(self) -> list[Part]:
        return in_parts(self.config.counts(), PART)

    def make(self, part: Part) -> Arrays:
        samples = []
        for number in range(part.first, part.first + part.count):
            ids = self.draw(part.split, number)
            samples.append((ids, evaluate(ids, "generated")))
        return arrays_of(samples)

    def draw(self, split: str, number: int, attempt: int = 0) -> list[int]:
        """Draw an expression and return its ids.

        Raises:
            ConfigError: Hardly any expression has a length within the bounds.
        """
        config = self.config
        # the same numbers in every version of Python
        uniform = random.Random(derive(config.seed, split, number, attempt)).random
        for _ in range(TRIES):
            ids = expression(uniform, config.max_depth, config.max_args, config.max_length)
            if len(ids) > config.min_length:
                return ids
        raise ConfigError(
            f"data.min_length: of {TRIES:,} expressions none had more than {config.min_length} and fewer than "
            f"{config.max_length} tokens (data.max_depth={config.max_depth}, data.max_args={config.max_args})"
        )

    def finish(self, path: Callable[[Part], Path]) -> None:
        """Replace duplicates in order, so that every expression occurs once and in one split only."""
        seen: set[bytes] = set()
        again: dict[Part, list[int]] = {}
        for part in self.parts():
            for i, ids in enumerate(split_rows(read_part(path(part)))):
                digest = digest_of(ids.tobytes())
                if digest in seen:
                    again.setdefault(part, []).append(i)
                seen.add(digest)
        for part, places in again.items():
            arrays = read_part(path(part))
            samples = [(row[:-1].tolist(), int(label)) for row, label in zip(split_rows(arrays), arrays["label"])]
            for i in places:
                ids = self.unseen(part.split, part.first + i, seen)
                samples[i] = ids, evaluate(ids, "generated")
            write_part(path(part), arrays_of(samples))

    def unseen(self, split: str, number: int, seen: set[bytes]) -> list[int]:
        """Draw an expression that is not in `seen`, and add it.

        Raises:
            ConfigError: There are too few different expressions.
        """
        for attempt in range(1, 1000):
            ids = self.draw(split, number, attempt)
            digest = digest_of(bytes([*ids, END]))
            if digest not in seen:
                seen.add(digest)
                return ids
        raise ConfigError(
            f"data.samples: {sum(self.config.counts().values()):,} samples, but there are too few different "
            f"expressions (data.max_depth={self.config.max_depth}, data.max_length={self.config.max_length})"
        )


def expression(uniform: Callable[[], float], max_depth: int, max_args: int, max_length: int) -> list[int]:
    """Draw the ids of a tree; the list is empty if the tree has `max_length` tokens or more.

    The root is an operator, because LRA discards single digits as too short.
    """
    ids: list[int] = []
    operators = len(OPERATORS)
    first = IDS["[MIN"]
    todo = [1]  # depths of the remaining nodes, the next one last; 0 closes a bracket
    while todo:
        depth = todo.pop()
        if len(ids) + len(todo) + 1 >= max_length:  # each remaining node is at least one token
            return []
        if not depth:
            ids.append(CLOSING)
        elif depth == max_depth or (depth > 1 and uniform() < LEAF):
            ids.append(DIGIT + int(10 * uniform()))
        else:
            ids.append(first + int(operators * uniform()))
            todo.append(0)
            todo.extend([depth + 1] * (2 + int((max_args - 1) * uniform())))
    return ids
