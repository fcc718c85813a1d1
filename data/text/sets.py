"""Text that has a name: data sets of the Hub, and the source of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text.corpus import Corpus, Files
from data.text.text import Text, TextConfig
from lion.config import ConfigError, setting


@dataclass
class C4Config(TextConfig):
    """C4's English text, as BERT reads it."""

    name: str = "c4"
    path: str | None = setting("allenai/c4", free=True)
    subset: str | None = "en"
    val_split: float = setting(0.001, above=0, max=0.5)
    pack: str = setting("padded", choices=("documents", "padded", "windows"))


class C4(Text):
    """364,868,892 documents, about 156 billion tokens."""

    Config = C4Config

    download = 326_778_635_540

    def held(self) -> tuple[float, int]:
        return 156e9, 364_868_892


@dataclass
class OpenWebTextConfig(TextConfig):
    """OpenWebText, as nanoGPT reads it."""

    name: str = "openwebtext"
    path: str | None = setting("Skylion007/openwebtext", free=True)
    tokenizer: str = setting("gpt2", free=True)
    length: int = setting(1024, min=2, max=2**20)
    pack: str = setting("windows", choices=("documents", "padded", "windows"))
    val_split: float = setting(0.0005, above=0, max=0.5)


class OpenWebText(Text):
    """8,013,769 documents, 9,035,582,198 tokens to train on."""

    Config = OpenWebTextConfig

    download = 12_880_027_468

    def held(self) -> tuple[float, int]:
        return 9_035_582_198, 8_009_762


@dataclass
class PileConfig(TextConfig):
    """The Pile without duplicates, as crammed BERT reads it: a vocabulary of its own, documents side by side."""

    name: str = "pile"
    path: str | None = setting("EleutherAI/the_pile_deduplicated", free=True)
    tokenizer: str = setting("wordpiece", free=True)
    vocabulary: int = setting(32_768, min=300, max=2**20)
    document_mask: bool = False
    val_split: float = setting(0.0001, above=0, max=0.5)


class Pile(Text):
    """134,318,121 documents; 207 billion tokens, as Pythia counts them."""

    Config = PileConfig

    download = 451_079_111_579

    def held(self) -> tuple[float, int]:
        return 207e9, 134_318_121


@dataclass
class PythonSourceConfig(TextConfig):
    """The source of Python's standard library; its tests are left out."""

    name: str = "python_source"
    tokenizer: str = setting("wordpiece", free=True)


class PythonSource(Text):
    """About 12 MB. It is of this Python: another version is another text."""

    Config = PythonSourceConfig

    def identity(self) -> Any:
        return self.corpus().identity

    def corpus(self) -> Corpus:
        if self.config.path:
            raise ConfigError("data.path: 'python_source' is this Python's own, data.name=text reads other text")
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
    """WikiText-103 as it was written, a document a line; held out is its end."""

    name: str = "wikitext103"
    path: str | None = setting("Salesforce/wikitext", free=True)
    subset: str | None = "wikitext-103-raw-v1"
    tokenizer: str = setting("gpt2", free=True)
    length: int = setting(513, min=2, max=2**20)
    pack: str = setting("windows", choices=("documents", "padded", "windows"))
    split: str = setting("tail", choices=("documents", "tail"))
    val_split: float = setting(0.002, above=0, max=0.5)


class WikiText103(Text):
    """1,165,029 lines that are not blank; about 119 million tokens of GPT-2, the ends of lines included."""

    Config = WikiText103Config

    download = 191_984_949

    def held(self) -> tuple[float, int]:
        return 119e6 * (1 - self.config.val_split), 1_165_029
