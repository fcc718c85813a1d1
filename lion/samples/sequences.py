"""Metadata of long sequences with a class: ids or pixels, length, and number of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.samples.base import Info, are_counts

PIXELS = 256  # number of intensities
SHAPES = 4  # different lengths of batches: few, because each length is compiled


def padded_length(longest: int, limit: int, shapes: int = SHAPES) -> int:
    """Return the length of a batch whose longest sample has `longest` tokens, at most `limit`.

    It is a multiple of a share of `limit`, so that batches have `shapes` different lengths.
    """
    step = -(-limit // shapes)
    return min(-(-longest // step) * step, limit)


def inputs_of(vocabulary: int | None) -> str:
    """Name the inputs of a model with this vocabulary."""
    if vocabulary is None:
        return "pixels"
    return f"{vocabulary} ids"


@dataclass(frozen=True)
class SequenceInfo(Info):
    """Metadata of long sequences with a class each that models need.

    A sample is {"tokens": int64 (L,), "label": int} or {"pixels": uint8 (L,), "label": int}. A pair of documents is
    {"tokens": int64 (L,), "second": int64 (L2,), "label": int}.

    A batch holds "label" (B,) and "pixels" (B, L), or "tokens" (B, L) with "segments" (B, L), which are 0 for tokens
    and -1 for padding. For pairs both are (B, 2, L): first and second document, padded to one length.

    Args:
        classes: Number of classes; labels are smaller.
        length: Tokens of the longest sample; for pairs, of the longest document.
        vocabulary: Number of ids; ids are smaller. None: the inputs are pixels.
        parts: 2 if a sample is a pair of documents, otherwise 1.
        mean, std: Mean and standard deviation of pixels in [0, 1].
        alphabet: Fingerprint of the meaning of ids, if the training documents determine it.
    """

    kind = "sequences"

    classes: int
    length: int
    vocabulary: int | None = None
    parts: int = 1
    mean: float = 0.0
    std: float = 1.0
    alphabet: str | None = None

    def __post_init__(self) -> None:
        vocabulary = 1 if self.vocabulary is None else self.vocabulary
        counts = (self.classes, self.length, vocabulary)
        if not are_counts(counts) or self.parts not in (1, 2):
            raise ValueError(
                f"expected classes, length and vocabulary above 0 and parts 1 or 2, got {(*counts, self.parts)}"
            )
        if self.parts == 2 and self.vocabulary is None:
            raise ValueError("parts: expected 1 for pixels, got 2")
        if not self.std > 0:
            raise ValueError(f"std: expected more than 0, got {self.std}")

    @property
    def sample_size(self) -> int:
        return self.length

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return all(then.get(name) == getattr(self, name) for name in ("classes", "vocabulary", "parts", "alphabet"))

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:
        """Check that ids mean the same tokens, as far as the vocabulary size and the alphabet show.

        Raises:
            ConfigError: The ids have another meaning.
        """
        vocabulary = then.get("vocabulary")
        if vocabulary != self.vocabulary:
            old = inputs_of(vocabulary)
            new = inputs_of(self.vocabulary)
            raise ConfigError(f"{whose} was trained on other inputs: they were {old}, and are {new} now")
        if then.get("alphabet") != self.alphabet:
            raise ConfigError(
                f"{whose} was trained on other inputs: its {self.vocabulary} ids stand for other characters"
            )
