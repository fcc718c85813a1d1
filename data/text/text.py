"""Text data sets as token files, from local text, the Hub, or a token file prepared before."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from data.base import DataConfig
from data.folders import looks_like_path, root_of, user_path
from data.manifest import FORMAT, MANIFEST, fingerprint_of, short_hash
from data.pool import worker_count
from data.text.corpus import BORDERS, Corpus, open_corpus
from data.text.layouts import Packed, Padded, TokenLayout, Windows
from data.text.prepare import prepare
from data.text.store import (
    SPLITS,
    TOKENIZER,
    KeepsTokenizer,
    Tokens,
    check_sums,
    files_of,
    id_type,
    read_manifest,
    read_tokenizer,
)
from data.text.tokenizers import (
    BUILT_IN,
    WORDPIECE,
    Tokenizer,
    local_files,
    local_name,
    make_tokenizer,
    open_tokenizer,
)
from lion.config import ConfigError, setting
from lion.samples.base import Splits
from lion.samples.order import Drawn, Shuffled
from lion.samples.text import TextInfo

LAYOUTS = ("documents", "padded", "windows")
SPLITTINGS = ("documents", "tail")
TRAINING_CHARACTERS = 2**28  # maximum number of characters that a tokenizer is trained on
BYTES_A_TOKEN = {"bytes": 1.0, "characters": 1.0}  # of source code; other tokenizers have about 3.5
BERT = {"pad": 0, "mask": 103, "cls": 101, "sep": 102, "unk": 100}
KNOWN = {  # number of ids, fingerprint and special tokens of tokenizers, known without their files
    "bert-base-uncased": (30522, "75b0b67765a160f58e037b3293f971ba596bab207cfec1cb10be8d5492d2e2a1", BERT),
    "gpt2": (50257, "140f02bb05c0d82c3e45f14050c6be40a9b6fe2773b7dfce0fbb815918c30199", {"end": 50256}),
}


@dataclass
class TextConfig(DataConfig):
    """Settings of text.

    Args:
        root: Folder of the token files; null: `text` in the data root.
        workers: Number of processes that tokenize; null: one per core.
        path: A file or folder of txt, jsonl or parquet files, a Hub id, or the folder of an existing token file.
        subset, source: Configuration and split of a Hub id, or of a folder with files named like those of a Hub id.
        column: Column of the text; null: detected.
        document: Unit that is a document in plain text: a `line`, a `paragraph` or a whole `file`.
        tokenizer: `bytes`; `characters` of the text; `wordpiece` or `bpe`, trained on the text to `vocabulary` tokens;
            a name (`bert-base-uncased`, `gpt2`); or local files.
        length: Tokens of a sample.
        pack: Layout of the samples: packed `documents`; `padded`, one document per sample; `windows` at any offset.
        eval_pack: Layout of the held-out samples, always with separated documents; null: the training layout. With
            this setting, runs with different training layouts are evaluated on the same samples.
        document_mask: Whether packed documents are separated by `segments`; if not, the last incomplete sample is
            dropped.
        split, val_split: Held-out data: the share `val_split` of the `documents`, or of the tokens at the `tail`.
    """

    name: str = "text"
    path: str | None = setting(None, free=True)
    subset: str | None = None
    source: str = "train"
    column: str | None = None
    document: str = setting("file", choices=("line", "paragraph", "file"))
    tokenizer: str = setting("bert-base-uncased", free=True)
    vocabulary: int = setting(8192, min=300, max=2**20)
    length: int = setting(128, min=2, max=2**20)
    pack: str = setting("documents", choices=LAYOUTS)
    eval_pack: str | None = setting(None, choices=LAYOUTS)
    document_mask: bool = True
    split: str = setting("documents", choices=SPLITTINGS)
    val_split: float = setting(0.05, above=0, max=0.5)

    @property
    def of_training(self) -> tuple[str, ...]:
        if self.eval_pack is None:
            return ()
        return ("pack", "document_mask")

    def label(self) -> str:
        if self.eval_pack is None:
            return ""
        return self.packing()

    def packing(self) -> str:
        """Return a word for the layout of the training samples."""
        if self.pack != "documents":
            return self.pack
        if self.document_mask:
            return "packed"
        return "borderless"

    def describe(self) -> str:
        made = ""
        if self.tokenizer in BUILT_IN[2:]:
            made = f", {self.vocabulary:,} ids"
        how = self.packing()
        if self.eval_pack is not None:
            how = f"held out: {self.eval_pack}"
        rows = f"samples of {self.length} tokens, {how}"
        return f"{super().describe()}, tokenizer {self.tokenizer}{made}, a document a {self.document}, {rows}"

    def resized(self, sample_size: int) -> Self:
        return replace(self, length=sample_size)


def estimate(config: TextConfig, tokens: float, documents: int) -> tuple[TextInfo, int]:
    """Return the info and the number of samples of a training split of this size.

    Raises:
        ConfigError: There is no such tokenizer.
    """
    name = Path(config.tokenizer).name
    if name in KNOWN:
        vocabulary, fingerprint, special = KNOWN[name]
    elif name in BUILT_IN[1:]:
        wordpiece = dict(zip(("pad", "unk", "cls", "sep", "mask"), range(len(WORDPIECE))))
        special = {"wordpiece": wordpiece, "bpe": {"end": 0}}.get(name, {})
        vocabulary, fingerprint = config.vocabulary, "not known before ./run.sh prepare RECIPE"
    else:
        made = open_tokenizer(config.tokenizer)
        vocabulary, fingerprint, special = made.vocabulary, made.fingerprint, made.special
    rows = {"padded": documents, "documents": tokens / config.length, "windows": tokens - config.length + 1}
    return TextInfo(vocabulary, config.length, name, fingerprint, special), max(1, math.ceil(rows[config.pack]))


class Text(KeepsTokenizer):
    """Text that is tokenized once and then read from a memory-mapped file of any size."""

    Config, Info = TextConfig, TextInfo
    workers = 0  # whole batches are built in microseconds
    size: tuple[float, int] | None = None  # published tokens and documents of `train`

    def prepare(self) -> None:
        """Create the token file if it is missing."""
        config = self.config
        if self.made_before is not None:
            return
        tail, count = config.split == "tail", worker_count(config.workers)
        try:
            prepare(self.folder, self.corpus, self.make_tokenizer, held_out=config.val_split, tail=tail, workers=count)
        except ConfigError as error:
            own = ""
            if self.own_tokenizer:
                own = f"; the tokenizer comes from {self.kept}"
            raise ConfigError(f"{error}{own}") from None

    def is_prepared(self) -> bool:
        try:
            return self.folder.is_dir()
        except ConfigError:  # `prepare` raises it, too, with its reason
            return False

    def check(self) -> str:
        """Read the whole token file and return a line that describes it.

        Raises:
            ConfigError: The token file is damaged.
        """
        check_sums(self.folder)
        manifest = read_manifest(self.folder)
        parts = []
        for split in SPLITS:
            held = manifest[split]
            parts.append(f"{split} {held['tokens']:,} tokens of {held['documents']:,} documents")
        return f"{self.folder}: {', '.join(parts)}; tokenizer {manifest['tokenizer']['name']}, checksums match"

    def build(self) -> Splits:
        config, folder = self.config, self.folder
        if not folder.is_dir():
            raise ConfigError(f"data set '{config.name}': no token file {folder}, ./run.sh prepare RECIPE makes it")
        manifest = read_manifest(folder)
        info = self.info(manifest["tokenizer"])
        train = self.layout(info, "train")
        val = self.layout(info, "val")
        order = Shuffled()
        if config.pack == "windows":
            order = Drawn()
        return Splits(train, val, None, info, order=order, fingerprint=fingerprint_of(files_of(manifest)))

    def filled(self) -> float:
        if self.config.pack != "padded":
            return 1.0
        return self.build().train.filled()

    def layout(self, info: TextInfo, split: str) -> TokenLayout:
        """Return the samples of a split.

        Windows of the held-out split overlap by one token, so that a causal model predicts every token once.

        Raises:
            ConfigError: The split is shorter than a sample, or each document is a single token.
        """
        config, pad = self.config, info.special.get("pad", 0)
        tokens = Tokens(self.folder, split, info.vocabulary)
        pack, apart = config.pack, config.document_mask
        if split == "val" and config.eval_pack is not None:
            pack, apart = config.eval_pack, True
        if (pack == "padded" or (pack == "documents" and apart)) and len(tokens.ids) == len(tokens.ends):
            raise ConfigError(
                f"data.path: every document of {split} is one token, without context: data.document=file joins them, "
                "data.pack=windows ignores borders of documents"
            )
        if pack == "padded":
            close = info.special.get("sep")
            if "end" in info.special:
                close = None
            return Padded(tokens, config.length, pad, close)
        if pack == "documents" and apart:
            return Packed(tokens, config.length, pad)
        if len(tokens.ids) < config.length:
            raise ConfigError(f"data.length: {config.length} is more than the {len(tokens.ids)} tokens of {split}")
        stride = config.length
        if pack == "windows":
            stride -= 1
            if split == "train":
                stride = 1
        return Windows(tokens, config.length, stride)

    def info(self, described: dict[str, Any]) -> TextInfo:
        """Return the info for a manifest's description of the tokenizer."""
        return TextInfo(
            vocabulary=described["vocabulary"],
            length=self.config.length,
            tokenizer=described["name"],
            fingerprint=described["fingerprint"],
            special=described["special"],
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the token file, or that would make it.

        If the tokenizer's files are available, no text is needed.

        Raises:
            ConfigError: The tokenizer does not exist yet.
        """
        name = self.config.tokenizer
        if (made := self.made_before) is not None:
            return read_tokenizer(made, read_manifest(made)["tokenizer"]["name"])
        if name == BUILT_IN[0] or local_files(name) is not None:
            return open_tokenizer(name)
        if (own := self.own_tokenizer) is not None:
            return own
        if looks_like_path(name):
            return open_tokenizer(name)
        if self.folder.is_dir():
            return read_tokenizer(self.folder, read_manifest(self.folder)["tokenizer"]["name"])
        if name in BUILT_IN[1:]:
            raise ConfigError(f"data.tokenizer: {name!r} is made by ./run.sh prepare RECIPE")
        return open_tokenizer(name)

    @functools.cached_property
    def own_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that a run saved, unless the settings name `bytes` or local files."""
        name = self.config.tokenizer
        if self.kept is None or name == BUILT_IN[0] or local_files(name) is not None:
            return None
        return read_tokenizer(self.kept, name)

    def transfer_hint(self) -> str:
        kept = (self.kept or self.folder) / TOKENIZER
        if kept.is_file():
            return f"data.tokenizer={kept} uses the tokenizer of the run"
        return ""

    @property
    def made_before(self) -> Path | None:
        """`data.path` if it is the folder of a token file, else None."""
        path = self.config.path
        if path and (user_path(path) / MANIFEST).is_file():
            return user_path(path)
        return None

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the token file; its name is a hash of all that determines its content."""
        if (made := self.made_before) is not None:
            return made
        config = self.config
        keys = ("name", "subset", "source", "column", "document", "tokenizer", "split", "val_split")
        decided = {key: getattr(config, key) for key in keys} | {"format": FORMAT, "corpus": self.identity()}
        if config.tokenizer in BUILT_IN[2:]:
            decided["vocabulary"] = config.vocabulary
        if (files := local_files(config.tokenizer)) is not None:
            decided["tokenizer"] = local_name(files)
            decided["rules"] = open_tokenizer(config.tokenizer).inner.to_str()  # other files may have the same name
        root = root_of("text", config.root)
        name, own = f"{config.name}-{decided['tokenizer'].replace('/', '_')}", self.own_tokenizer
        usual = root / f"{name}-{short_hash(decided)}"
        if own is None or (usual.is_dir() and read_manifest(usual)["tokenizer"]["fingerprint"] == own.fingerprint):
            return usual
        return root / f"{name}-{short_hash({**decided, 'rules': own.inner.to_str()})}"

    def identity(self) -> Any:
        """Return the identity of the text: the files with their sizes and times, or a Hub id."""
        if not self.config.path:
            raise ConfigError("data.path: missing, expected a file or folder of txt, jsonl or parquet, or a Hub id")
        if user_path(self.config.path).exists():
            return self.corpus().identity
        return self.config.path

    def corpus(self) -> Corpus:
        c = self.config
        return open_corpus(c.path, document=c.document, column=c.column, subset=c.subset, split=c.source)

    def make_tokenizer(self, corpus: Corpus) -> Tokenizer:
        name = self.config.tokenizer
        if (own := self.own_tokenizer) is not None:
            return own
        if name not in BUILT_IN[1:]:
            return open_tokenizer(name)
        most = TRAINING_CHARACTERS
        if name == "characters":
            most = None
        return make_tokenizer(name, corpus.texts(most), self.config.vocabulary)

    def held(self) -> tuple[float, int] | None:
        """Estimate the tokens and documents of `train`; None if only `prepare` can count them."""
        if self.size is not None:
            return self.size
        path = self.config.path
        if path is None or self.folder.is_dir() or not user_path(path).exists():
            return None
        return self.held_by_files([Path(stamp[0]) for stamp in self.identity().get("files", [])])

    def held_by_files(self, files: Sequence[Path]) -> tuple[float, int] | None:
        """Estimate the tokens and documents of `train` from the sizes of local files; None without files."""
        config, share = self.config, 1 - self.config.val_split
        size, documents = sum(path.stat().st_size for path in files), len(files)
        if config.document != "file" and config.pack == "padded":
            documents += sum(len(re.findall(BORDERS[config.document], path.read_bytes())) for path in files)
        if not files:
            return None
        return share * size / BYTES_A_TOKEN.get(config.tokenizer, 3.5), max(1, int(share * documents))

    def published(self) -> tuple[TextInfo, int] | None:
        if (held := self.held()) is None:
            return None
        return estimate(self.config, *held)

    def disk(self) -> float:
        if (held := self.held()) is None:
            return 0.0
        info, _ = estimate(self.config, *held)
        return held[0] * id_type(info.vocabulary).itemsize
