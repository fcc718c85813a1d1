"""Tests of the metadata of data: conversion to plain data, and refusal of other data."""

import json
from dataclasses import dataclass, replace

import pytest

from lion.config import ConfigError
from lion.samples.base import Info
from lion.samples.images import ImageInfo, numbered
from tests.helpers import refused

INFO = ImageInfo((8, 4), 1, ("cat", "dog"), (0.5,), (0.25,))


def test_info_survives_plain_data():
    assert ImageInfo.from_dict(json.loads(json.dumps(INFO.to_dict()))) == INFO
    for name, wrong in (("size", [8]), ("size", [8, 0]), ("channels", "1"), ("mean", [0.5, 0.5]), ("std", None)):
        with pytest.raises((LookupError, TypeError, ValueError)):
            ImageInfo.from_dict({**INFO.to_dict(), name: wrong})


@pytest.mark.parametrize(
    ("then", "what"),
    [
        ({"size": (8, 8)}, r"size was \[8, 8\], and is \[8, 4\] now"),
        ({"mean": (0.4,)}, r"mean was \[0.4\]"),
        ({"classes": ("cat", "eel")}, "class 1 was 'eel', and is 'dog' now"),
        ({"classes": ("cat",)}, "number of classes was 1, and is 2 now"),
    ],
)
def test_images_of_other_shapes_or_labels_are_others(then, what):
    refused(f"^it was trained on other data: {what}", INFO.check_same, "it", replace(INFO, **then).to_dict())
    refused("size was None", INFO.check_same, "it", {})


def test_numbered_classes_may_be_any():
    INFO.check_same("it", replace(INFO, classes=numbered(2)).to_dict())
    refused(
        "class 0 was 'cat', and is 'class 0' now", replace(INFO, classes=numbered(2)).check_same, "it", INFO.to_dict()
    )


def test_images_of_another_size():
    assert INFO.resized(6) == replace(INFO, size=(6, 6)) and INFO.resized(6).sample_size == 6
    with pytest.raises(ConfigError, match="8 x 4, expected squares"):
        INFO.sample_size  # noqa: B018


@dataclass(frozen=True)
class Tokens(Info):
    """Metadata of text, another kind of data: the tokenizer must be the same, the length may differ."""

    kind = "text"

    tokenizer: str
    length: int

    @classmethod
    def from_dict(cls, values):
        return cls(values["tokenizer"], values["length"])

    def difference(self, name, old, new):
        return None if name == "length" else super().difference(name, old, new)


def test_a_kind_of_data_has_its_own_rule():
    then = Tokens("a1", 128).to_dict()
    assert Tokens.from_dict(then) == Tokens("a1", 128)
    Tokens("a1", 512).check_same("it", then)
    refused(
        "it was trained on other data: tokenizer was 'a1', and is 'b2' now", Tokens("b2", 128).check_same, "it", then
    )
