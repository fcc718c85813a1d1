"""Metadata of rows of tokens, some of which have a class each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from lion.samples.base import Info, are_counts

UNLABELLED = -100  # label of tokens without a class, which PyTorch's cross-entropy ignores


@dataclass(frozen=True)
class TokenLabelsInfo(Info):
    """Metadata of labelled tokens that models need.

    A sample is {"tokens": int64 (L, ids), "labels": int64 (L,)}; a label is a class, or `UNLABELLED`. The embedding of
    a token is the sum of the embeddings of its ids.

    Args:
        classes: Number of classes; labels are smaller.
        length: Tokens of a training sample.
        longest: Tokens of the longest sample of any held-out set.
        vocabulary: Number of different ids; ids are smaller.
        ids: Number of ids of a token.
    """

    kind = "labelled tokens"

    classes: int
    length: int
    longest: int
    vocabulary: int
    ids: int = 1

    def __post_init__(self) -> None:
        counts = (self.classes, self.length, self.longest, self.vocabulary, self.ids)
        if not are_counts(counts):
            raise ValueError(f"expected classes, length, longest, vocabulary and ids above 0, got {counts}")

    @property
    def sample_size(self) -> int:
        return self.length

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size, longest=sample_size)
