"""Text corpora, split into shards that can be read independently."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.base import files_below
from data.folders import check_path, user_path
from data.hub import configuration, import_datasets, is_saved, load_saved, readable
from data.manifest import stamps
from data.splits import by_split, canonical
from data.text.tables import kinds_of
from lion.config import ConfigError, nearest

log = logging.getLogger("lion")

SHARD = 2**22  # approximate bytes of text in a shard
BLOCK = 2**16  # bytes read at a time in the search for a border
ROWS = 1000  # rows of a parquet file that are read at a time
JSON = (".jsonl", ".json", ".ndjson")
TEXT = (".txt", ".text", ".md")
TABLES = (".csv", ".tsv")
# places where a text file may be cut, as patterns of bytes shorter than a block: no built-in tokenizer merges
# across them
BORDERS = {"line": rb"\n", "paragraph": rb"\n[ \t\r]{0,4096}\n", "file": rb"[!-~]\n(?=[!-~])"}


class Piece(NamedTuple):
    """A document or a part of one.

    If `begins` or `ends` is False, the previous or next piece holds another part of the document.
    """

    text: str
    begins: bool = True
    ends: bool = True


class Slice(NamedTuple):
    """Bytes of a file, from the first border at or after `begin` to the first border at or after `end`."""

    path: str
    begin: int
    end: int
    size: int


class Corpus(ABC):
    """Documents in shards; any process can read a shard, with the same result each time."""

    identity: Any  # what determines the corpus, as JSON: another identity is another corpus

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of shards."""

    @abstractmethod
    def read(self, shard: int) -> Iterator[Piece]:
        """Yield the documents of a shard in order, without blank ones.

        Raises:
            ConfigError: The shard cannot be read.
        """

    @abstractmethod
    def origin(self, shard: int) -> str:
        """Return the origin of a shard, for messages."""

    def texts(self, most: int | None = None) -> Texts:
        """Return the texts, or about `most` characters of them, in equal shares from evenly spaced shards."""
        return Texts(self, most)


class Texts:
    """Texts of a corpus, which each iteration reads again; see `Corpus.texts`."""

    def __init__(self, corpus: Corpus, most: int | None) -> None:
        self.corpus, self.most = corpus, most

    def __iter__(self) -> Iterator[str]:
        step = 1
        if self.most is not None:
            step = max(1, len(self.corpus) * SHARD // self.most)
        shards, taken = range(0, len(self.corpus), step), 0
        for number, shard in enumerate(shards, 1):
            for piece in self.corpus.read(shard):
                yield piece.text
                taken += len(piece.text)
                if self.most is not None and taken * len(shards) >= self.most * number:
                    break  # the shards so far have given their shares


class Files(Corpus):
    """A corpus of local files: JSON lines with the text in one column, or plain text.

    The documents of plain text are lines, paragraphs or whole files.
    """

    def __init__(self, files: Sequence[Path], *, document: str, column: str | None = None) -> None:
        if column is not None and not any(path.name.lower().endswith(JSON) for path in files):
            raise ConfigError(f"data.column: {column!r}, but {files[0]} is plain text, without columns; leave it null")
        self.document, self.column, self.shards = document, column, list[list[Slice]]()
        described, room = stamps(files), 0
        for path, size, _ in described:
            for begin in range(0, size, SHARD):
                part = Slice(path, begin, min(begin + SHARD, size), size)
                if room < part.end - begin:
                    self.shards.append([])
                    room = SHARD
                self.shards[-1].append(part)
                room -= part.end - begin
        self.identity = {"files": described, "document": document, "column": column}

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, shard: int) -> Iterator[Piece]:
        for part in self.shards[shard]:
            rows, unit = part.path.lower().endswith(JSON), self.document
            if rows:
                unit = "line"
            try:
                raw, begin = cut(part, BORDERS[unit])
            except OSError as error:
                raise ConfigError(f"{part.path}: {error.strerror}") from None
            first, last = begin == 0, part.end == part.size
            encoding = "utf-8"
            if first:
                encoding = "utf-8-sig"
            try:
                text = raw.decode(encoding).replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                odd = f"byte {begin + error.start} is {raw[error.start]:#04x}"
                raise ConfigError(
                    f"{part.path}: not UTF-8 text, {odd} ({error.reason}); convert it with iconv"
                ) from None
            if rows:
                documents = self.rows(part.path, text)
            elif unit == "line":
                documents = text.split("\n")
            elif unit == "paragraph":
                documents = re.split(r"\n[ \t\r]*\n", text)
            else:
                documents = []
                if text.strip() or not (first and last):
                    yield Piece(text, first, last)
            for document in documents:
                if document.strip():
                    yield Piece(document)

    def origin(self, shard: int) -> str:
        paths = list(dict.fromkeys(part.path for part in self.shards[shard]))
        if len(paths) < 3:
            return ", ".join(paths)
        return f"{paths[0]} and {len(paths) - 1} others"

    def rows(self, path: str, text: str) -> Iterator[str]:
        for line in filter(str.strip, text.split("\n")):
            row = parse_row(line, path)
            if self.text_column not in row:
                raise ConfigError(f"{path}: no column {self.text_column!r} in {line[:40]!r}")
            if row[self.text_column] is not None:
                yield whole(row[self.text_column], self.text_column, path)

    @functools.cached_property
    def text_column(self) -> str:
        """The column of the text in all JSON lines: the one set, else the one found in the first line."""
        for path, _, _ in self.identity["files"]:
            if not path.lower().endswith(JSON):
                continue
            with open(path, encoding="utf-8-sig", errors="replace") as file:
                for line in filter(str.strip, file):
                    return find_column(parse_row(line, path), self.column, path)
        raise LookupError("no rows")


class Table(Corpus):
    """A corpus that the `datasets` library streams: a Hub id, or parquet files."""

    def __init__(
        self, path: str, subset: str | None, split: str, column: str | None, files: Sequence[Path] = ()
    ) -> None:
        self.where = (path, subset, split, tuple(map(str, files)))
        self.path = path
        with readable(path, exists=True):
            row = next(iter(self.stream), None)
        if row is None:
            raise ConfigError(f"data.path: {path!r} has no rows")
        self.column = find_column(row, column, path)
        self.identity = {"table": stamps(files) or [path, subset, split], "column": self.column}

    def __len__(self) -> int:
        return self.stream.num_shards

    @property
    def stream(self) -> Any:
        """The rows, which each process opens itself."""
        return open_stream(*self.where)

    def read(self, shard: int) -> Iterator[Piece]:
        with readable(self.path, exists=True):
            for row in self.stream.shard(num_shards=len(self), index=shard):
                text = row[self.column]
                if text is not None and (text := whole(text, self.column, self.path)).strip():
                    yield Piece(text)

    def origin(self, shard: int) -> str:
        return self.path


@functools.lru_cache(maxsize=1)
def open_stream(path: str, subset: str | None, split: str, files: tuple[str, ...]) -> Any:
    """Open the rows of a data set as a stream, with as many shards as possible.

    Raises:
        ConfigError: The data set or the split does not exist, or cannot be read.
    """
    datasets = import_datasets()
    with readable(path, bool(files)):
        if is_saved(user_path(path)):
            found = load_saved(user_path(path))
            if split not in found:
                raise ConfigError(f"data.source: {path} has no split {split!r}, {nearest(split, found)}")
            rows = found[split]
            return rows.to_iterable_dataset(num_shards=max(1, len(rows) // ROWS))
        if not files:
            return datasets.load_dataset(path, subset, split=split, streaming=True)
        # the default batch size fails for files without rows
        stream = datasets.load_dataset(
            "parquet", data_files=list(files), split="train", streaming=True, batch_size=ROWS
        )
        return stream.reshard()


def open_corpus(path: str, *, document: str, column: str | None, subset: str | None, split: str) -> Corpus:
    """Open the corpus of a local file or folder, or else of the Hub.

    Raises:
        ConfigError: There is no text.
    """
    check_path(path)
    root = Path(os.path.abspath(user_path(path)))
    if not root.exists():
        return Table(path, subset, split, column)
    if is_saved(root):
        return Table(path, None, split, column, sorted(root.rglob("*.arrow")))
    if root.is_file() and suffix(root) in TABLES:
        raise ConfigError(
            f"data.path: {root} is a table, expected .txt, .jsonl or .parquet; data.name=labelled_text reads tables of "
            "texts with labels, for task sequence_classification"
        )
    files = [root]
    if not root.is_file():
        files = files_of_split(root, subset, split)
    tables = any(suffix(file) in (".parquet", *JSON) for file in files)  # such as a clone from the Hub
    cards, rows, texts, others = [], [], [], []
    for file in sorted(files):
        if tables and suffix(file) == ".md":
            cards.append(file)
        elif suffix(file) == ".parquet":
            rows.append(file)
        elif suffix(file) in JSON + TEXT or file == root:
            texts.append(file)
        else:
            others.append(file)
    if cards:
        names = ", ".join(sorted(card.name for card in cards))
        log.info("%s: the folder holds tables, so %s is not read", path, names)
    if rows and not texts and not others:
        return Table(path, None, "train", column, rows)
    if not texts or rows:
        found = suffixes(rows + texts + others) or "nothing"
        raise ConfigError(f"data.path: {path} holds {found}; expected .txt and .jsonl files, or only .parquet files")
    if others:
        log.info("%s: files of other kinds are not read: %s", path, suffixes(others))
    return Files(texts, document=document, column=column)


def suffixes(files: list[Path]) -> str:
    """Return the suffixes of files, the name of one without a suffix, for a message."""
    return ", ".join(sorted({file.suffix or file.name for file in files})[:5])


def suffix(path: Path) -> str:
    """Return the suffix of a file in lower case."""
    return path.suffix.lower()


def files_of_split(root: Path, subset: str | None, split: str) -> list[Path]:
    """Return the files under `root` of a split; files that name no split are those of the split `train`.

    In a clone from the Hub, each configuration may have a folder of parquet files, of which `subset` is read.

    Raises:
        ConfigError: There are several configurations or splits, but not the one that is set.
    """
    files = [path.relative_to(root) for path in files_below(root)]
    root, files = configuration(root, files, split, subset)
    splits = by_split(root, files)
    name = canonical(split) or split
    if name not in splits and splits:
        others = ", ".join(sorted(splits))
        raise ConfigError(f"data.source: {root} has no files of split {split!r}, only of {others}; set data.source")
    return splits.get(name, [])


def cut(part: Slice, border: bytes) -> tuple[bytes, int]:
    """Read a slice; return its bytes and their offset in the file."""
    pattern = re.compile(border)
    with open(part.path, "rb") as file:
        begin = following(file, part.begin, part.end, part.size, pattern)
        if begin == part.size:  # the slice lies inside a document that begins before it
            return b"", begin
        end = following(file, part.end, part.size, part.size, pattern)
        file.seek(begin)
        return file.read(end - begin), begin


def following(file: Any, place: int, before: int, size: int, pattern: re.Pattern[bytes]) -> int:
    """Return the end of the first border at or after `place`; `size` if no border begins `before` another place.

    A border that is found depends on `place` alone, so neighbouring slices meet exactly. At most a block or two are
    read behind `before`.
    """
    if place in (0, size):
        return place
    file.seek(place)
    last = b""
    while place < before and (block := file.read(BLOCK)):
        if found := pattern.search(last + block):  # a border may span two blocks
            if place + found.start() < before:
                return place + found.end()
            return size
        place, last = place + len(last), block
    return size


def parse_row(line: str, path: str) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Raises:
        ConfigError: The line is not a JSON object.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON lines with one object per line: {line[:40]!r} ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: not a JSON object with a text column: {line[:40]!r}")
    return row


def find_column(row: dict[str, Any], name: str | None, path: str) -> str:
    """Return the column that holds the text: the one set as `name`, else `text`, else the only column of strings.

    Raises:
        ConfigError: There is no column `name`, or the column must be set.
    """
    found = [n for n, value in row.items() if isinstance(value, str)]
    if name is not None:
        if name not in row:
            raise ConfigError(f"data.column: no column {name!r} in {path}, {nearest(name, found)}")
        return name
    if "text" in found or row.get("text", "") is None:
        return "text"
    if not found:
        raise ConfigError(f"{path}: no column holds text: {kinds_of(row)}")
    if len(found) != 1:
        raise ConfigError(f"data.column: must be set, more than one of {', '.join(found)} in {path} holds text")
    return found[0]


def whole(text: Any, column: str, path: str) -> str:
    """Return the text of a row; an unpaired surrogate, which has no encoding, becomes a question mark.

    Raises:
        ConfigError: The value is not text.
    """
    if not isinstance(text, str):
        raise ConfigError(
            f"{path}: column {column!r} holds {str(text)[:40]!r}, not text; set data.column to another column"
        )
    return text.encode("utf-8", "replace").decode()
