"""Named text data sets: data sets of the Hub, and the source code of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text.corpus import Corpus, Files
from data.text.text import LAYOUTS, SPLITTINGS, Text, TextConfig
from lion.config import ConfigError, setting


@dataclass
class C4Config(TextConfig):
    """Settings of the English part of C4, for BERT."""

    name: str = "c4"
    path: str | None = setting("allenai/c4", free=True)
    subset: str | None = "en"
    val_split: float = setting(0.001, above=0, max=0.5)
    pack: str = setting("padded", choices=LAYOUTS)


class C4(Text):
    """C4: 364,868,892 documents, about 156 billion tokens."""

    Config = C4Config

    download = 326_778_635_540
    size = 156e9, 364_868_892


@dataclass
class OpenWebTextConfig(TextConfig):
    """Settings of OpenWebText, as in nanoGPT."""

    name: str = "openwebtext"
    path: str | None = setting("Skylion007/openwebtext", free=True)
    tokenizer: str = setting("gpt2", free=True)
    length: int = setting(1024, min=2, max=2**20)
    pack: str = setting("windows", choices=LAYOUTS)
    val_split: float = setting(0.0005, above=0, max=0.5)


class OpenWebText(Text):
    """OpenWebText: 8,013,769 documents, 9,035,582,198 training tokens."""

    Config = OpenWebTextConfig

    download = 12_880_027_468
    size = 9_035_582_198, 8_009_762


@dataclass
class PileConfig(TextConfig):
    """Settings of the deduplicated Pile, as in crammed BERT: a vocabulary trained on it, and packed documents."""

    name: str = "pile"
    path: str | None = setting("EleutherAI/the_pile_deduplicated", free=True)
    tokenizer: str = setting("wordpiece", free=True)
    vocabulary: int = setting(32_768, min=300, max=2**20)
    document_mask: bool = False
    val_split: float = setting(0.0001, above=0, max=0.5)


class Pile(Text):
    """The Pile: 134,318,121 documents; 207 billion tokens by Pythia's count."""

    Config = PileConfig

    download = 451_079_111_579
    size = 207e9, 134_318_121


@dataclass
class PythonSourceConfig(TextConfig):
    """Settings of the source code of Python's standard library."""

    name: str = "python_source"
    tokenizer: str = setting("wordpiece", free=True)


class PythonSource(Text):
    """The source code of the running Python's standard library without its tests, about 12 MB.

    Another Python version gives another text.
    """

    Config = PythonSourceConfig

    def identity(self) -> Any:
        return self.corpus().identity

    def corpus(self) -> Corpus:
        if self.config.path:
            raise ConfigError(
                "data.path: 'python_source' reads only the standard library of this Python, use data.name=text"
            )
        return Files(self.files(), document=self.config.document)

    def files(self) -> list[Path]:
        found, outside = [], {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
            below[:] = [name for name in below if name not in outside]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found)

    def held(self) -> tuple[float, int] | None:
        return self.held_by_files(self.files())


@dataclass
class WikiText103Config(TextConfig):
    """Settings of WikiText-103 (raw), with one document per line; the end of the text is held out."""

    name: str = "wikitext103"
    path: str | None = setting("Salesforce/wikitext", free=True)
    subset: str | None = "wikitext-103-raw-v1"
    tokenizer: str = setting("gpt2", free=True)
    length: int = setting(513, min=2, max=2**20)
    pack: str = setting("windows", choices=LAYOUTS)
    split: str = setting("tail", choices=SPLITTINGS)
    val_split: float = setting(0.002, above=0, max=0.5)


class WikiText103(Text):
    """WikiText-103: 1,165,029 nonblank lines, about 119 million GPT-2 tokens including the ends of lines."""

    Config = WikiText103Config

    download = 191_984_949

    def held(self) -> tuple[float, int]:
        return 119e6 * (1 - self.config.val_split), 1_165_029
