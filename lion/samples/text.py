"""Metadata of text data: the tokenizer and vocabulary of the ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.samples.base import Info, are_counts

SPECIAL = ("pad", "mask", "cls", "sep", "unk", "end")  # names of special tokens


class OtherVocabulary(ConfigError):
    """Ids stand for other tokens than those that a model was trained with."""


@dataclass(frozen=True)
class TextInfo(Info):
    """Metadata of text that models need.

    A sample is {"tokens": int64 (L,)}. Where documents are packed or padded it also holds {"segments": int64 (L,)}: the
    number of the token's document within the row, -1 for padding.

    Args:
        vocabulary: Number of ids; ids are smaller.
        length: Tokens of a sample.
        tokenizer: Name of the tokenizer.
        fingerprint: SHA-256 of the tokenizer's vocabulary (tokens and their ids).
        special: Ids of the tokenizer's special tokens by name, see `SPECIAL`.
    """

    kind = "text"

    vocabulary: int
    length: int
    tokenizer: str
    fingerprint: str
    special: Mapping[str, int] = field(default_factory=dict, hash=False)

    def id(self, name: str) -> int:
        """Return the id of a special token.

        Raises:
            ConfigError: The tokenizer does not have this token.
        """
        if name not in self.special:
            has = "it has no special tokens"
            if self.special:
                has = f"it has {', '.join(self.special)}"
            raise ConfigError(f"tokenizer {self.tokenizer!r} has no token {name!r}, {has}")
        return self.special[name]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict({f.name: values[f.name] for f in fields(cls)})

    def check(self) -> None:
        named = isinstance(self.tokenizer, str) and isinstance(self.fingerprint, str)
        if not are_counts((self.vocabulary, self.length)) or not named:
            got = (self.vocabulary, self.length, self.tokenizer, self.fingerprint)
            raise ValueError(f"expected vocabulary, length, tokenizer and fingerprint, got {got}")
        for name, i in dict(self.special).items():
            if name not in SPECIAL or not isinstance(i, int) or not 0 <= i < self.vocabulary:
                raise ValueError(f"expected ids of special tokens, got {self.special}")

    @property
    def sample_size(self) -> int:
        return self.length

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)

    def shares_ids(self, then: dict[str, Any]) -> bool:
        """Return whether ids have the same meaning in the data `then`."""
        return all(then.get(name) == getattr(self, name) for name in ("vocabulary", "fingerprint"))

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return self.shares_ids(then)

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:
        TextInfo.check_same(self, whose, then)

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        """Check that ids mean the same tokens; the length may differ, because the model handles it.

        Raises:
            ConfigError: The vocabulary differs.
        """
        if not self.shares_ids(then):
            old = tokenizer_of(then)
            new = tokenizer_of(self.to_dict())
            raise OtherVocabulary(
                f"{whose} was trained with another vocabulary: its tokenizer was {old}, and is {new} now"
            )


def tokenizer_of(values: dict[str, Any]) -> str:
    """Describe the tokenizer of the result of `to_dict`."""
    fingerprint = str(values.get("fingerprint"))[:12]
    return f"{values.get('tokenizer')!r} ({values.get('vocabulary')} ids, fingerprint {fingerprint})"


@dataclass(frozen=True)
class LabelledTextInfo(TextInfo):
    """Metadata of labelled sequences that models need.

    A batch is {"tokens", "types", "segments": int64 (B, L), "label": int64 or float32 (B,)}. A row is one document,
    padded; `types` are 1 in the second of two parts.

    Args:
        classes: Names of the classes, in the order of the labels; empty: labels are numbers to predict.
    """

    kind = "labelled text"

    classes: tuple[str, ...] = ()

    def check(self) -> None:
        super().check()
        if not all(isinstance(name, str) for name in self.classes):
            raise ValueError(f"expected names of classes, got {self.classes}")

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return then.get("classes") == list(self.classes)

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        super().check_same(whose, then)
        if not self.shares_heads(then):
            old = ", ".join(then.get("classes") or ()) or "numbers"
            new = ", ".join(self.classes) or "numbers"
            raise ConfigError(f"{whose} was trained on other labels: they were {old}, and are {new} now")
