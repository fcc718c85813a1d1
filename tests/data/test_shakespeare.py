"""Tests of Tiny Shakespeare, with a text of the same characters instead of the file."""

import string

from data.text.shakespeare import TinyShakespeare, TinyShakespeareConfig
from lion.samples.order import Drawn
from tests.helpers import refused

CHARACTERS = "\n !$&',-.3:;?" + string.ascii_letters


def test_its_characters_are_those_that_are_published(tmp_path):
    file = tmp_path / "input.txt"
    file.write_text(CHARACTERS * 20)
    source = TinyShakespeare(TinyShakespeareConfig(path=str(file), root=str(tmp_path)))
    source.prepare()
    splits = source.build()
    assert splits.info == source.published()[0] and splits.info.vocabulary == 65
    assert isinstance(splits.order, Drawn)
    assert len(splits.train) == 1170 - 64 and len(splits.val) == 2  # 130 held-out characters: 1 + 64 + 64, and one left
    first, second = (source.tokenizer.decode(sample["tokens"].tolist()) for sample in splits.val)
    assert first + second[1:] == (CHARACTERS * 2)[:-1] and second[0] == first[-1]


def test_another_split_is_not_published():
    assert TinyShakespeare(TinyShakespeareConfig(val_split=0.2)).published() is None
    assert TinyShakespeare(TinyShakespeareConfig(length=129)).published()[1] == 1_003_855 - 128


def test_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LION_DATA", str(tmp_path))
    refused(
        r"no file .*tinyshakespeare/input.txt .*karpathy/char-rnn", TinyShakespeare(TinyShakespeareConfig()).prepare
    )
