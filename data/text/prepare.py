"""Preparation of a token file from a corpus: in parallel, with one part per shard, so that a killed process can resume.

During preparation FOLDER.parts holds the tokenizer and the finished parts. FOLDER.partial holds the token file until it
is complete and renamed to FOLDER.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data.manifest import FORMAT, MANIFEST
from data.pool import InvalidPart, create, emptied, make_missing, read_part
from data.text.corpus import Corpus
from data.text.store import SPLITS, TOKENIZER, Writer, id_type, read_tokenizer
from data.text.tokenizers import Tokenizer
from lion.config import ConfigError
from lion.files import save_json, save_text, write_atomic
from lion.samples.order import permute

log = logging.getLogger("lion")

SEED = 0  # chooses the held-out documents; independent of a recipe's `seed`


class Part(NamedTuple):
    """The ids of a shard: P pieces of documents (see `Piece`) with T ids in total."""

    ids: np.ndarray  # (T,)
    lengths: np.ndarray  # (P,)
    begins: np.ndarray  # (P,) boolean
    ends: np.ndarray  # (P,) boolean


def prepare(
    folder: Path,
    open_corpus: Callable[[], Corpus],
    make: Callable[[Corpus], Tokenizer],
    *,
    held_out: float,
    tail: bool,
    workers: int,
) -> None:
    """Create the token file `folder` if it is missing; one process creates it, and others that need it wait.

    Args:
        folder: Folder of the token file; its name depends on the corpus, the tokenizer and the split.
        open_corpus: Function that opens the corpus; not called if the token file exists.
        make: Function that creates the tokenizer for a corpus.
        held_out: Share that becomes `val`.
        tail: Whether the last ids become `val`, instead of documents drawn with a fixed seed. A corpus of one document
            (a book) always holds out the tail.
        workers: Number of processes.

    Raises:
        ConfigError: The corpus cannot be read or cannot be split.
    """

    def fill(parts: Path, partial: Path) -> str:
        corpus = open_corpus()
        tokenizer = load_or_make_tokenizer(parts, corpus, make)
        shards = [parts / f"{i}.npz" for i in range(len(corpus))]
        work = functools.partial(make_part, parts, corpus, tokenizer)
        make_missing(
            work, range(len(corpus)), shards.__getitem__, workers=workers, place=parts, unit="shard", desc="tokenizing"
        )
        try:
            splits, by_tail = assemble(emptied(partial), shards, tokenizer, held_out, tail)
        except InvalidPart:
            raise
        except ConfigError:  # an error of the whole corpus: its remedy leads to another folder
            for made in (parts, partial):
                shutil.rmtree(made, ignore_errors=True)
            raise
        shutil.copy(parts / TOKENIZER, partial / TOKENIZER)
        described = {"name": tokenizer.name, "vocabulary": tokenizer.vocabulary, "special": tokenizer.special}
        by = "documents"
        if by_tail:
            by = "tail"
        manifest = {
            "format": FORMAT,
            "tokenizer": {**described, "fingerprint": tokenizer.fingerprint},
            **splits,
            "held_out": {"share": held_out, "by": by, "seed": SEED},
            "corpus": corpus.identity,
        }
        save_json(partial / MANIFEST, manifest)
        counts = ", ".join(f"{splits[s]['tokens']:,} {s}" for s in SPLITS)
        return f"{counts} tokens"

    create(folder, fill)


def load_or_make_tokenizer(parts: Path, corpus: Corpus, make: Callable[[Corpus], Tokenizer]) -> Tokenizer:
    """Return the tokenizer of the finished parts; create and save it if there is none yet.

    Raises:
        ConfigError: The tokenizer of the finished parts cannot be read.
    """
    name = parts / "name"
    if not name.exists():
        tokenizer = make(corpus)
        parts.mkdir(exist_ok=True)
        save_text(parts / TOKENIZER, tokenizer.inner.to_str())
        save_text(name, tokenizer.name)
    try:
        return read_tokenizer(parts, name.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not the name of a tokenizer ({error}); remove {parts} and prepare again") from None


def make_part(parts: Path, corpus: Corpus, tokenizer: Tokenizer, shard: int) -> None:
    kind = id_type(tokenizer.vocabulary)
    ids, lengths, begins, ends = [np.empty(0, kind)], [], [], []
    for piece in corpus.read(shard):
        try:
            found = np.asarray(tokenizer.encode(piece.text), kind)
        except ConfigError as error:
            raise ConfigError(f"{corpus.origin(shard)}: {error}") from None
        if len(found) or not (piece.begins and piece.ends):
            ids.append(found)
            lengths.append(len(found))
            begins.append(piece.begins)
            ends.append(piece.ends)
    part = Part(np.concatenate(ids), np.array(lengths, np.int64), np.array(begins, bool), np.array(ends, bool))
    write_atomic(parts / f"{shard}.npz", lambda file: np.savez(file, **part._asdict()))


def assemble(
    folder: Path, parts: list[Path], tokenizer: Tokenizer, held_out: float, tail: bool
) -> tuple[dict[str, Any], bool]:
    """Write all parts as `train` and `val`, with the special tokens around each document.

    Returns:
        The manifest entries of both splits, and whether the tail is held out.

    Raises:
        ConfigError: There are no tokens, or only one token.
        InvalidPart: A part cannot be read.
    """
    frame = tokenizer.frame
    documents = bodies = 0
    for path in parts:
        part = read_part(path, Part)
        documents += int(part.begins.sum())
        bodies += len(part.ids)
    total = bodies + documents * (len(frame[0]) + len(frame[1]))
    if not bodies:
        raise ConfigError("data.path: no tokens, the text is empty")
    if documents > 1 and not any(frame):
        log.warning("tokenizer %r has no token that separates documents, one follows the other", tokenizer.name)
    if documents == 1 and not tail:
        log.info("data.path: one document, so its last %g %% are held out (data.split=tail)", 100 * held_out)
        tail = True
    if tail:
        chosen, cut = np.empty(0, np.int64), total - max(1, round(held_out * total))
        if not cut:
            raise ConfigError("data.path: a single token cannot be split into training and held-out text")
    else:
        count, cut = min(max(1, round(held_out * documents)), documents - 1), total
        chosen = np.sort(permute(torch.arange(count), documents, SEED).numpy())
    kind = id_type(tokenizer.vocabulary)
    train, val = Writer(folder, "train", kind), Writer(folder, "val", kind)
    seen, written = 0, 0  # number of documents that have begun, number of ids
    for path in parts:
        part = read_part(path, Part)
        ids, lengths = with_special_tokens(part, *frame)
        number = seen + part.begins.cumsum() - 1  # (P,) index of the document of each piece
        out = np.isin(number, chosen)
        for writer, mine in ((val, out), (train, ~out)):
            own, ends = ids[np.repeat(mine, lengths)], lengths[mine].cumsum()[part.ends[mine]]
            if writer is train and written + len(own) > cut:
                place = max(0, cut - written)
                train.write(own[:place], ends[ends <= place])
                val.write(own[place:], ends[ends > place] - place)
            else:
                writer.write(own, ends)
            written += len(own)
        seen += int(part.begins.sum())
    if len(chosen) and (share := val.count / total) > 2 * held_out:
        much = f"{len(chosen)} of {documents} documents with {share:.0%} of the tokens"
        log.warning(
            "data.path: %s are held out, asked for %g %%; data.split=tail holds out the end", much, 100 * held_out
        )
    return {"train": train.close(), "val": val.close()}, tail


def with_special_tokens(part: Part, before: list[int], after: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Add the tokens `before` each document that begins and `after` each document that ends.

    Returns:
        The ids (T,) and the new lengths (P,) of the pieces.
    """
    lengths = part.lengths + part.begins * len(before) + part.ends * len(after)
    stops = lengths.cumsum()
    starts = stops - lengths
    ids = np.empty(int(lengths.sum()), part.ids.dtype)
    body = np.ones(len(ids), bool)
    for places, frame in ((starts[part.begins], before), (stops[part.ends] - len(after), after)):
        for i, token in enumerate(frame):
            ids[places + i] = token
            body[places + i] = False
    ids[body] = part.ids
    return ids, lengths
