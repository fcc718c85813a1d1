"""What text data tell a model: the vocabulary that its ids belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lion.config import ConfigError
from lion.tasks.data import Info

SPECIAL = ("pad", "mask", "cls", "sep", "unk", "end")  # what a tokenizer may have an id of its own for


@dataclass(frozen=True)
class TextInfo(Info):
    """What a model must know of text.

    A sample is {"tokens": int64 (L,)}; where documents are packed or padded also {"segments": int64 (L,)}: which
    document of the row a token belongs to, -1 for padding.

    Args:
        vocabulary: Ids are below it.
        length: Tokens of a sample.
        tokenizer: Its name.
        fingerprint: SHA-256 of its vocabulary (tokens and their ids).
        special: Ids by name, see `SPECIAL`; those that the tokenizer has.
    """

    kind = "text"

    vocabulary: int
    length: int
    tokenizer: str
    fingerprint: str
    special: Mapping[str, int] = field(default_factory=dict, hash=False)

    def id(self, name: str) -> int:
        """Of a special token.

        Raises:
            ConfigError: The tokenizer has none.
        """
        if name not in self.special:
            has = f"it has {', '.join(self.special)}" if self.special else "it has no special tokens"
            raise ConfigError(f"tokenizer {self.tokenizer!r} has no token {name!r}, {has}")
        return self.special[name]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        vocabulary, length, special = values["vocabulary"], values["length"], dict(values["special"])
        counts, names = (vocabulary, length), (values["tokenizer"], values["fingerprint"])
        if not all(isinstance(n, int) and n > 0 for n in counts) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"no vocabulary, length, tokenizer and fingerprint: {(*counts, *names)}")
        if not all(name in SPECIAL and isinstance(i, int) and 0 <= i < vocabulary for name, i in special.items()):
            raise ValueError(f"no ids of special tokens: {special}")
        return cls(vocabulary, length, *names, special)

    @property
    def sample_size(self) -> int:
        return self.length

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)

    def shares_ids(self, then: dict[str, Any]) -> bool:
        """Whether ids mean the same tokens there."""
        return all(then.get(name) == getattr(self, name) for name in ("vocabulary", "fingerprint"))

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return self.shares_ids(then)

    def check_transfer(self, whose: str, then: dict[str, Any]) -> None:
        TextInfo.check_same(self, whose, then)

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        """Ids must mean the same tokens; another length is the model's own affair."""
        if not self.shares_ids(then):
            old, new = (
                f"{d.get('tokenizer')!r} ({d.get('vocabulary')} ids, fingerprint {str(d.get('fingerprint'))[:12]})"
                for d in (then, self.to_dict())
            )
            raise ConfigError(f"{whose} is of another vocabulary: its tokenizer was {old}, and is {new} now")


@dataclass(frozen=True)
class LabelledTextInfo(TextInfo):
    """What a model must know of sequences with a label each.

    A batch is {"tokens", "types", "segments": int64 (B, L), "label": int64 or float32 (B,)}: rows of one document,
    padded; `types` are 1 in the second of two parts.

    Args:
        classes: Their names, in the order of the labels; none: labels are numbers to come near to.
    """

    kind = "labelled text"

    classes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        classes = tuple(values["classes"])
        if not all(isinstance(name, str) for name in classes):
            raise ValueError(f"no names of classes: {classes}")
        return replace(super().from_dict(values), classes=classes)

    def shares_heads(self, then: dict[str, Any]) -> bool:
        return then.get("classes") == list(self.classes)

    def check_same(self, whose: str, then: dict[str, Any]) -> None:
        super().check_same(whose, then)
        if not self.shares_heads(then):
            old, new = (", ".join(names or ()) or "numbers" for names in (then.get("classes"), self.classes))
            raise ConfigError(f"{whose} is of other labels: they were {old}, and are {new} now")
