"""What long sequences with a class tell a model: ids or pixels, how many of them, and of how many classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.tasks.data import Info

PIXELS = 256  # intensities


@dataclass(frozen=True)
class SequenceInfo(Info):
    """What a model must know of long sequences, each with one class.

    A sample is {"tokens": int64 (L,), "label": int}, {"pixels": uint8 (L,), "label": int}, or, of pairs of documents,
    {"tokens": int64 (L,), "second": int64 (L2,), "label": int}. A batch holds "label" (B,) and "pixels" (B, L), or
    "tokens" (B, L) with "segments" (B, L), which are 0 for tokens and -1 for padding; of pairs both are (B, 2, L),
    first and second document, padded to one length.

    Args:
        classes: Labels are below it.
        length: Tokens of the longest sample; of a pair, of the longest document.
        vocabulary: Ids are below it; None: the inputs are pixels.
        parts: 2 where a sample is a pair of documents.
        mean, std: Of pixels in [0, 1].
        alphabet: Fingerprint of what the ids stand for, where training documents decide it.
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
        counts = (self.classes, self.length, 1 if self.vocabulary is None else self.vocabulary)
        if not all(isinstance(n, int) and n > 0 for n in counts) or self.parts not in (1, 2):
            raise ValueError(f"no classes, length, vocabulary and parts: {(*counts, self.parts)}")
        if self.parts == 2 and self.vocabulary is None:
            raise ValueError("parts: pictures come one by one")
        if not self.std > 0:
            raise ValueError(f"std: expected more than 0, got {self.std}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**values)

    @property
    def sample_size(self) -> int:
        return self.length

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return all(then.get(name) == getattr(self, name) for name in ("classes", "vocabulary", "parts", "alphabet"))

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:
        """Ids must mean the same tokens, as far as their number and alphabet tell."""
        if then.get("vocabulary") != self.vocabulary:
            old, new = ("pixels" if n is None else f"{n} ids" for n in (then.get("vocabulary"), self.vocabulary))
            raise ConfigError(f"{whose} is of other inputs: they were {old}, and are {new} now")
        if then.get("alphabet") != self.alphabet:
            raise ConfigError(f"{whose} is of other inputs: its {self.vocabulary} ids stand for other characters")
