"""Tokenizers: by name, from local files, or trained on the text itself."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from data.folders import data_root, looks_like_path, user_path
from data.hub import configure_hub
from lion.config import ConfigError, first_line, nearest
from lion.files import read_json

BUILT_IN = ("bytes", "characters", "wordpiece", "bpe")  # no files; all except `bytes` are made from the training text
NAMES = {  # names of the special tokens
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "unk": ("[UNK]", "<unk>"),
    "end": ("<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]"),
}
WORDPIECE = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0 to 4 of a WordPiece tokenizer trained here
BYTES = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "<|endoftext|>"]  # ids 256 to 260
FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
PIECE = 2**20  # characters that are encoded at once; each takes about 330 bytes
LONGEST = 2**24  # characters that are encoded at once if there is no place to cut them
CHARACTERS = r"[\s\S]"  # pattern of the pre-tokenizer of `characters`
ANYWHERE, BETWEEN_WORDS = re.compile(CHARACTERS), re.compile(r"(?<=\S)[ \n](?=\S)")


class NoTokenizer(ConfigError):
    """There is no tokenizer of this name."""


class Tokenizer:
    """A vocabulary and its rules. Text never becomes a special token: "[MASK]" in a document is three words."""

    def __init__(self, name: str, inner: tokenizers.Tokenizer) -> None:
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True
        self.name, self.inner = name, inner
        self.ids: dict[str, int] = inner.get_vocab()
        self.vocabulary = max(self.ids.values(), default=-1) + 1
        self.special: dict[str, int] = {}
        for key, tokens in NAMES.items():
            for token in tokens:
                if token in self.ids:
                    self.special.setdefault(key, self.ids[token])
        self.added = added_tokens(inner)
        begin, end = self.added
        if begin:
            self.special["cls"] = begin[0]
        if end:
            self.special["sep"] = end[-1]
        if begin and end:  # nothing else ends a document
            self.special.pop("end", None)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and their ids."""
        return hashlib.sha256(json.dumps(sorted(self.ids.items(), key=lambda item: item[1])).encode()).hexdigest()

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after a document.

        They are those that the tokenizer's own post-processor adds, else ([cls], [sep]), ([], [end]) or ([], []).
        """
        if any(self.added):
            return self.added
        if {"cls", "sep"} <= self.special.keys() and "end" not in self.special:
            return [self.special["cls"]], [self.special["sep"]]
        if "end" in self.special:
            return [], [self.special["end"]]
        return [], []

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the ids of `frame`.

        Raises:
            ConfigError: The text cannot be encoded.
        """
        if len(text) <= PIECE:
            return self.encode_piece(text)
        return list(itertools.chain.from_iterable(map(self.encode_piece, self.pieces(text))))

    def pieces(self, text: str) -> Iterator[str]:
        """Yield pieces of a long text, whose ids, one after another, are those of the text.

        Raises:
            ConfigError: A piece is too long, because there is no place to cut it.
        """
        begin, size = 0, len(text)
        while size - begin > PIECE:
            found = self.borders and self.borders.search(text, begin + PIECE, begin + LONGEST)
            end = size
            if found:
                end = found.start()
            if end - begin > LONGEST:
                raise ConfigError(
                    f"tokenizer {self.name!r} cannot encode {text[begin : begin + 40]!r}: there is no place between "
                    f"words to cut {size - begin:,} characters, at most {LONGEST:,} are encoded at once"
                )
            yield text[begin:end]
            begin = end
        yield text[begin:]

    @functools.cached_property
    def borders(self) -> re.Pattern[str] | None:
        """Pattern of the characters before which a text may be cut without other ids; None: no such place is known."""
        rules = json.loads(self.inner.to_str())
        split, model, normalizer = rules["pre_tokenizer"] or {}, rules["model"], rules["normalizer"] or {}
        if any(not added["special"] for added in rules["added_tokens"]):  # these may hold spaces
            return None
        if split.get("type") == "BertPreTokenizer" and normalizer.get("type") == "BertNormalizer":
            return BETWEEN_WORDS
        if normalizer:
            return None
        if split.get("type") == "ByteLevel" and split["use_regex"] and not split["add_prefix_space"]:
            if model.get("merges") == [] and not model["ignore_merges"]:
                return ANYWHERE
            return BETWEEN_WORDS
        if split.get("pattern") == {"Regex": CHARACTERS}:
            return ANYWHERE
        return None

    def encode_piece(self, text: str) -> list[int]:
        """Return the ids of a text, which is encoded at once."""
        try:
            return self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids  # without offsets
        except Exception as error:  # the library `tokenizers` has no error types
            reason = first_line(error)
            if isinstance(self.inner.model, models.WordLevel):
                for character in text:
                    if character not in self.ids:
                        reason = f"no token for {character!r}"
                        break
            raise ConfigError(f"tokenizer {self.name!r} cannot encode {text[:40]!r}: {reason}") from None

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts in parallel; each result is that of `encode`.

        Raises:
            ConfigError: A text cannot be encoded.
        """
        if max(map(len, texts), default=0) <= PIECE:
            with contextlib.suppress(Exception):  # `encode` raises a ConfigError for the text that fails
                return [each.ids for each in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens.

        Raises:
            ConfigError: An id is outside of the vocabulary.
        """
        for i in ids:
            if not 0 <= i < self.vocabulary:
                raise ConfigError(f"tokenizer {self.name!r} has no id {i}, valid ids are 0 to {self.vocabulary - 1}")
        return self.inner.decode(list(ids), skip_special_tokens=False)


def added_tokens(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor of a tokenizer adds before and after a text."""
    if inner.post_processor is None:
        return [], []
    encoding = inner.encode("a", add_special_tokens=True)
    ids, added = encoding.ids, encoding.special_tokens_mask
    if 0 not in added:
        return ids, []
    begin = added.index(0)
    end = len(ids) - added[::-1].index(0)
    return ids[:begin], ids[end:]


def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer by name or from local files: `tokenizer.json`, `vocab.txt`, or `vocab.json` with `merges.txt`.

    A bare name is searched under `tokenizers` in the data root, and then on the Hub.

    Raises:
        ConfigError: There is no such tokenizer.
    """
    if name == "bytes":
        ids = dict(zip(byte_symbols() + BYTES, itertools.count()))
        return Tokenizer(name, in_bytes(tokenizers.Tokenizer(models.BPE(ids, []))))
    if (local := local_files(name)) is not None:
        return Tokenizer(local_name(local), read_files(local))
    if looks_like_path(name):
        there = f"no file or folder {name}"
        if user_path(name).is_dir():
            there = f"{name} holds none of {', '.join(FILES)}"
        raise ConfigError(f"data.tokenizer: {there}")
    configure_hub()
    try:
        return Tokenizer(name, tokenizers.Tokenizer.from_pretrained(name))
    except Exception as error:  # errors of the network or a missing name share no type
        reason = first_line(error)[:100]
        known = (*BUILT_IN, "bert-base-uncased", "gpt2")
        hint = ""
        if name not in known:
            hint = f"; {nearest(name, known)}"
        place = data_root() / "tokenizers" / name
        raise NoTokenizer(
            f"data.tokenizer: no {name!r} in {place}, and it cannot be loaded from the Hub ({reason}){hint}"
        ) from None


def local_files(name: str) -> Path | None:
    """Return the file or folder of a tokenizer on this machine; None if there is none."""
    places = [data_root() / "tokenizers" / name]
    if "/" in name or looks_like_path(name):
        places.insert(0, user_path(name))
    for place in places:
        if file_of(place) is not None:
            return place
    return None


def local_name(place: Path) -> str:
    """Return the name of the tokenizer of a file or a folder."""
    if place.is_file():
        return place.stem
    return place.name


def file_of(place: Path) -> Path | None:
    """Return the file of a tokenizer, which is in its folder or is itself the place; None if there is none."""
    if place.is_file():
        return place
    for name in FILES:
        if (place / name).is_file():
            return place / name
    return None


def read_files(path: Path) -> tokenizers.Tokenizer:
    """Read the tokenizer of a file or a folder.

    Raises:
        ConfigError: The files cannot be read.
    """
    file = file_of(path)
    try:
        if file.suffix == ".txt":
            rules = file.with_name("tokenizer_config.json")  # written by transformers
            cased = rules.is_file() and read_json(rules).get("do_lower_case") is False
            inner = wordpiece(models.WordPiece.from_file(str(file), unk_token="[UNK]"), cased)
            if inner.token_to_id("[UNK]") is None:
                raise ValueError("not a WordPiece vocabulary, it has no line [UNK]")
            return inner
        if file.name == "vocab.json":
            inner = tokenizers.Tokenizer(models.BPE.from_file(str(file), str(file.with_name("merges.txt"))))
            return in_bytes(inner)
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library `tokenizers` has no error types
        raise ConfigError(f"data.tokenizer: {file} cannot be read ({first_line(error)})") from None


def make_tokenizer(name: str, texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Make the tokenizer `name` of `BUILT_IN` (not `bytes`) from texts, which may be iterated over more than once.

    `wordpiece` and `bpe` have `vocabulary` tokens, or more if the texts have more characters.

    Raises:
        ConfigError: There is no text.
    """
    if name == "characters":
        found: set[str] = set()
        for text in texts:
            found.update(text)
        if not found:
            raise ConfigError("data.path: no text to take the characters from")
        inner = tokenizers.Tokenizer(models.WordLevel(dict(zip(sorted(found), itertools.count()))))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTERS), "isolated")
        inner.decoder = decoders.Fuse()
        return Tokenizer(name, inner)
    if name == "wordpiece":
        inner = wordpiece(models.WordPiece(unk_token="[UNK]"))
        train_wordpiece(inner, texts, vocabulary)
    else:
        inner, special = in_bytes(tokenizers.Tokenizer(models.BPE())), ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        inner.train_from_iterator(texts, trainer)
    return Tokenizer(name, plain(inner))


def train_wordpiece(inner: tokenizers.Tokenizer, texts: Iterable[str], vocabulary: int) -> None:
    """Train on texts, which are read twice; the same texts give the same ids.

    The trainer numbers the characters inside words in the order of a hash table, and these numbers break ties between
    equally frequent pairs. So a first pass finds the characters, and a second pass passes them in sorted order.
    """
    for size in (0, vocabulary):  # 0: only characters, at the beginning of words and inside words (##)
        first = WORDPIECE + sorted(inner.get_vocab().keys() - set(WORDPIECE))
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
        inner.train_from_iterator(texts, trainer)


def plain(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy whose special tokens are only in the vocabulary, so that text never becomes a special token."""
    held = json.loads(inner.to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**held, "added_tokens": []}))


def wordpiece(model: models.WordPiece, cased: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer with BERT's rules; it lowercases text unless `cased`."""
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return inner


def in_bytes(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Add GPT-2's byte-level rules, under which no text is unknown."""
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def byte_symbols() -> list[str]:
    """Return the character that represents each byte in GPT-2's alphabet."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    symbols: list[str] = []
    hidden = 256  # the character of the next byte that has no visible one
    for byte in range(256):
        symbol = chr(byte)
        if symbol not in alphabet:
            symbol = chr(hidden)
            hidden += 1
        symbols.append(symbol)
    return symbols
