"""Tests of text: tokenizers, token files, and the samples from them."""

import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch

import data
from data import pool
from data.text import corpus as corpora
from data.text import prepare as preparing
from data.text.layouts import Packed
from data.text.prepare import load_or_make_tokenizer
from data.text.store import Tokens, Writer, id_type
from data.text.tokenizers import Tokenizer, make_tokenizer, open_tokenizer
from lion.files import read_json
from lion.samples.order import Drawn, Shuffled
from lion.samples.text import TextInfo
from tests.helpers import ROOT, assert_equal, here, printed, refusal, refuse, refused, trained
from tests.processes import CONTEXT, in_processes
from tools import compose
from tools.compose import resolve

from .helpers import GONE, edit_manifest, opened, samples_of, tokens_of

SHARED = Path(os.environ.get("LION_SHARED", ROOT.parent / "shared")) / "data"
WORDS = "lion reads text in both directions at once , the mask decays and the sum is kept é ü 日本".split()
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data on this machine")


def sentences(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Return different lines of random words."""
    rng = random.Random(seed)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for i in range(count)]


def text_set(folder, name="text", **settings):
    """Return the data set that a recipe would open, with its token files in `folder`."""
    return opened(name, **{"root": folder / "root", "workers": 1, **settings})


def bytes_set(folder, path, **settings):
    return text_set(folder, **{"path": path, "tokenizer": "bytes", "length": 8} | settings)


def lines_set(folder, lines, **settings):
    folder.mkdir(exist_ok=True)
    path = folder / "text.txt"
    path.write_text("\n".join(lines))
    return text_set(folder, **{"path": path, "document": "line", "tokenizer": "bytes", "length": 16} | settings)


def prepared(source):
    source.prepare()
    return source


def prepared_lines(folder, lines, **settings):
    return prepared(lines_set(folder, lines, **settings))


def documents(source, split):
    """Return the ids of each document of a split, read from the token file."""
    layout = getattr(source.build(), split)
    ids, ends = layout.tokens.ids, layout.tokens.ends.tolist()
    return [ids[begin:end].tolist() for begin, end in zip([0, *ends], ends)]


def joined(rows):
    return list(itertools.chain.from_iterable(rows))


def texts_of(source):
    """Prepare a data set of bytes; return the texts of all its documents."""
    source.prepare()
    both = documents(source, "train") + documents(source, "val")
    return {source.tokenizer.decode(ids[:-1]) for ids in both}


def recipe(folder, **settings):
    """Write a recipe that trains on a text; return its file."""
    path = folder / "text.yaml"
    data = json.dumps({"name": "text", "root": folder / "root", "tokenizer": "bytes", **settings}, default=str)
    path.write_text(f"""
data: {data}
task: {{name: causal_lm}}
model: {{mixer: softmax, dim: 16, depth: 1, num_heads: 2}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 2, steps: 1, compile: false}}
run: {{root: {folder / "runs"}}}
""")
    return path


def source_of(file, *overrides):
    """Return the data set of a recipe."""
    return data.dataset("text")(resolve(file, overrides).data)


def recipe_of_lines(folder, lines, **settings):
    (folder / "text.txt").write_text("\n".join(lines))
    return recipe(folder, path=folder / "text.txt", document="line", workers=1, length=16, **settings)


def save(tokenizer, folder):
    (folder / "tokenizer.json").write_text(tokenizer.inner.to_str())


# tokenizers


@pytest.mark.parametrize("name", ["bytes", "bpe", "characters"])
def test_what_is_encoded_comes_back(name):
    text = "\n".join(sentences(30)) + "\n\n  [MASK] <|endoftext|>\t"
    tokenizer = open_tokenizer(name) if name == "bytes" else make_tokenizer(name, [text], 400)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values()), "text never becomes a special token"
    assert max(ids) < tokenizer.vocabulary <= 400


def test_bytes_are_their_own_ids():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode("aé\n") == list("aé\n".encode())
    assert sorted(tokenizer.special.values()) == list(range(256, 261))


def test_a_trained_wordpiece_has_berts_special_tokens_and_keeps_its_ids(tmp_path):
    tokenizer = make_tokenizer("wordpiece", sentences(50), 300)
    assert tokenizer.special == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    save(tokenizer, tmp_path)
    again = open_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("Lion reads [MASK]") == tokenizer.encode("lion reads [mask]")
    assert 4 not in again.encode("[MASK]")


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "characters"])
def test_the_same_text_trains_the_same_tokenizer(name):
    """This includes equally frequent pairs, and more characters than requested tokens: no character is lost."""
    rare = [chr(0x4E00 + i) for i in range(1600)]
    texts = [*sentences(40), "abab cdcd efef ghgh xyxy zwzw", " ".join(rare)]
    made = [make_tokenizer(name, texts, 1500) for _ in range(3)]
    assert len({tokenizer.fingerprint for tokenizer in made}) == 1
    assert made[0].inner.to_str() == made[1].inner.to_str()
    if name == "wordpiece":
        assert not set(rare) - made[0].ids.keys() and made[0].vocabulary < 1750
        assert "reads" in make_tokenizer(name, texts[:-1], 300).ids


@shared
@pytest.mark.parametrize(
    "name, ids, frame",
    [("bert-base-uncased", [7592, 2088], ([101], [102])), ("gpt2", [15496, 995], ([], [50256]))],
)
def test_published_vocabularies_are_what_recipes_say_without_their_files(name, ids, frame, monkeypatch):
    monkeypatch.setenv("LION_DATA", str(SHARED))  # a bare name is searched in the data root
    tokenizer = open_tokenizer(name)
    info, _ = opened("c4", tokenizer=name).published()
    assert info.vocabulary == tokenizer.vocabulary
    assert (info.fingerprint, info.special) == (tokenizer.fingerprint, tokenizer.special)
    assert tokenizer.encode("Hello world") == ids
    assert tokenizer.frame == frame


def test_what_cannot_be_encoded_is_named():
    tokenizer = make_tokenizer("characters", ["abc"], 0)
    info = TextInfo(3, 8, "characters", tokenizer.fingerprint, tokenizer.special)
    assert "'characters' cannot encode 'abz': no token for 'z'" in refusal(tokenizer.encode, "abz")
    assert "no id 3, valid ids are 0 to 2" in refusal(tokenizer.decode, [0, 3])
    assert "no token 'mask'" in refusal(info.id, "mask")


ODD = "ab'sé\u0301ß日本7. -_\t\n\r\x0b\x1c\x1f\x85\xa0\u2003\u2028\u3000\u200b\ufeff\x00\ufffd  \n"


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe", "wordpiece"])
def test_long_texts_have_the_same_ids_in_pieces(name, monkeypatch):
    plain = "\n".join(sentences(150))
    mixed = "".join(random.Random(1).choices([*ODD, "a b", "it's 7", "x\ny"], k=10_000))
    tokenizer = open_tokenizer(name) if name == "bytes" else make_tokenizer(name, [plain, mixed], 400)
    whole = {text: tokenizer.encode(text) for text in (plain, mixed)}
    for size in (1, 7):
        monkeypatch.setattr("data.text.tokenizers.PIECE", size)
        for text, ids in whole.items():
            pieces = list(tokenizer.pieces(text))
            assert len(pieces) > 1000 / size and "".join(pieces) == text
            assert tokenizer.encode(text) == ids == tokenizer.encode_all([text, "a"])[0]


def test_a_long_text_is_not_cut_by_rules_that_are_not_known(monkeypatch):
    monkeypatch.setattr("data.text.tokenizers.PIECE", 10)
    bpe = make_tokenizer("bpe", ["the cat sat"], 300)
    known = json.loads(bpe.inner.to_str())
    added = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for change in (
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"added_tokens": [{"id": 400, "content": "t s", **added}]},
    ):
        other = tokenizers.Tokenizer.from_str(json.dumps(known | change))
        assert list(Tokenizer("other", other).pieces("the cat sat")) == ["the cat sat", ""]
    assert list(bpe.pieces("the cat sat")) == ["the cat sat", ""]
    assert len(list(bpe.pieces("the cat sat on it"))) == 2


def test_a_word_without_end_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.tokenizers.PIECE", 10)
    monkeypatch.setattr("data.text.tokenizers.LONGEST", 20)
    tokenizer = make_tokenizer("bpe", ["abc"], 300)
    assert tokenizer.encode("a" * 20) and tokenizer.encode("a" * 15 + " " + "b" * 19)
    long = lines_set(tmp_path, [*sentences(5), "a" * 21], tokenizer="bpe", vocabulary=300)
    said = r"text\.txt: tokenizer 'bpe' cannot encode 'a+': .* cut 21 characters, at most 20 are encoded at once$"
    refused(said, long.prepare)
    assert len(open_tokenizer("bytes").encode("a" * 100)) == 100


def test_a_tokenizer_that_is_not_there_has_a_hint_where_its_name_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("LION_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = r"no 'bert-base-uncased' in .*, and it cannot be loaded from the Hub \([^;]*\)$"
    refused(said, open_tokenizer, "bert-base-uncased")
    refused(r"\); did you mean 'gpt2'\?$", open_tokenizer, "gpt3")


# a corpus in shards


def corpus_of(path, document="file", subset=None, split="train"):
    return corpora.open_corpus(str(path), document=document, column=None, subset=subset, split=split)


def reassembled(corpus):
    found = []
    for shard in range(len(corpus)):
        for piece in corpus.read(shard):
            if piece.begins:
                found.append("")
            found[-1] += piece.text
    return found


@pytest.mark.parametrize("document", ["line", "paragraph", "file"])
@pytest.mark.parametrize("shard", [64, 1000, 2**22])
def test_every_document_is_read_once_however_the_corpus_is_cut(tmp_path, monkeypatch, document, shard):
    monkeypatch.setattr(corpora, "SHARD", shard)
    monkeypatch.setattr(corpora, "BLOCK", 16)
    lines = [line if i % 3 else f"{line}\n" for i, line in enumerate(sentences(40))]  # a blank line after each third
    texts = ["\n".join(lines), "the second file\nhas a few lines\n"]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.TXT").write_text(texts[1])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "c.txt.gz").write_bytes(b"not read")
    corpus = corpus_of(tmp_path, document)
    border = {"line": "\n", "paragraph": "\n\n", "file": "\0"}[document]
    wanted = [part.strip() for text in texts for part in text.split(border)]
    assert [part.strip() for part in reassembled(corpus)] == [part for part in wanted if part]
    assert len(corpus) > 1 or shard > 2000


@pytest.mark.parametrize("document", ["line", "paragraph", "file"])
def test_one_line_in_many_shards_is_read_about_once(tmp_path, monkeypatch, document):
    monkeypatch.setattr(corpora, "SHARD", 1000)
    monkeypatch.setattr(corpora, "BLOCK", 64)
    text, read = "a word " * 10_000, []

    class Counted(io.FileIO):
        def read(self, size: int) -> bytes:
            read.append(size)
            return super().read(size)

    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(corpora, "open", Counted, raising=False)
    corpus = corpus_of(tmp_path, document)
    assert len(corpus) == 70
    assert reassembled(corpus) == [text]
    assert sum(read) < 4 * len(text)


def test_blanks_of_many_blocks_between_paragraphs(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 10_000)
    (tmp_path / "a.txt").write_text(f"one\n{' ' * 200_000}\ntwo\n{' ' * 3000}\nthree")
    assert reassembled(corpus_of(tmp_path, "paragraph")) == ["one", "two", "three"]


def test_a_document_in_many_shards_has_the_ids_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 300)
    text = "\n".join(sentences(60)) + "\n\n\nthe end \n"
    tokenizer = make_tokenizer("bpe", [text], 400)
    save(tokenizer, tmp_path)
    (tmp_path / "one.txt").write_text(text)
    file = tmp_path / "tokenizer.json"
    source = prepared(text_set(tmp_path, path=tmp_path / "one.txt", tokenizer=file, split="tail", length=8))
    ids = joined(documents(source, "train") + documents(source, "val"))
    assert ids == [*tokenizer.encode(text), tokenizer.special["end"]]


def write_table(path, columns):
    table = datasets.Dataset.from_dict(columns)
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_json(path)


@pytest.mark.parametrize("kind", ["jsonl", "JSONL", "parquet"])
def test_tables_are_read_by_their_column_without_descriptions_beside_them(tmp_path, kind, caplog):
    """Every clone of a data set from the Hub has such a description."""
    caplog.set_level("INFO", "lion")
    lines, folder = sentences(50), tmp_path / "clone"
    folder.mkdir()
    write_table(folder / f"table.{kind}", {"url": lines[::-1], "text": lines})
    (folder / "README.md").write_text("what these data are\n")
    assert texts_of(bytes_set(tmp_path, folder)) == set(lines)
    assert "README.md is not read" in caplog.text
    refused(r"no column 'txt' in .*did you mean 'text'", bytes_set(tmp_path, folder, column="txt").prepare)


@pytest.mark.parametrize("value", ['{"a": [1, 2]}', "5", "true", '["a", "b"]', "1.5"])
def test_a_value_that_is_not_text_is_refused(tmp_path, value):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{{"text": "two"}}\n{{"text": {value}}}\n')
    refused(
        r"a\.jsonl: column 'text' holds .*, not text; set data\.column to another", bytes_set(tmp_path, path).prepare
    )


def test_rows_and_tables_without_text_are_left_out(tmp_path):
    rows = ['{"text": null, "id": "x"}', "", '{"text": "one"}', '{"text": " "}', '{"text": "two", "b": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert texts_of(bytes_set(tmp_path, tmp_path / "a.jsonl")) == {"one", "two"}
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.parquet").write_bytes(NO_ROWS)
    parquet(tables / "b.parquet", ["one", "two"])
    assert list(corpus_of(tables, "line").texts()) == ["one", "two"]


# token files


@pytest.mark.parametrize("tokenizer", ["bytes", "wordpiece"])
def test_a_token_file_holds_each_document_once_in_its_frame(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 500)
    lines = sentences(100)
    source = prepared_lines(tmp_path, lines, tokenizer=tokenizer, vocabulary=300, val_split=0.1)
    before, after = source.tokenizer.frame
    wanted = [before + source.tokenizer.encode(line) + after for line in lines]
    train, val = documents(source, "train"), documents(source, "val")
    assert len(val) == 10
    assert sorted(train + val) == sorted(wanted)
    assert train == [ids for ids in wanted if ids in train], "in order"
    info = source.build().info
    assert (info.fingerprint, info.vocabulary) == (source.tokenizer.fingerprint, source.tokenizer.vocabulary)


def test_processes_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 2000)
    assert [pool.worker_count(n) for n in (0, 3)] == [0, 3] and pool.worker_count(None) >= 1
    lines = sentences(100)
    one, two = (lines_set(tmp_path, lines, root=tmp_path / str(n), workers=n) for n in (1, 2))
    for source in (one, two):
        source.prepare()
    assert (one.folder / "train.bin").read_bytes() == (two.folder / "train.bin").read_bytes()
    assert not list(two.folder.parent.glob("*.parts"))
    monkeypatch.setattr(compose, "locked", lambda path: pytest.fail("prepared data are only read"))
    made = resolve(recipe(tmp_path, path=tmp_path / "text.txt", root=tmp_path / "1", document="line"))
    assert compose.build_data(made).fingerprint == one.build().fingerprint


def test_the_tail_is_held_out_of_one_document(tmp_path):
    source = prepared_lines(tmp_path, ["abcdefghij" * 10], tokenizer="characters", split="tail", val_split=0.1)
    splits = source.build()
    assert (len(splits.train.tokens.ids), len(splits.val.tokens.ids)) == (90, 10)


def test_another_text_is_another_token_file(tmp_path):
    first = lines_set(tmp_path, sentences(20))
    assert first.folder != lines_set(tmp_path, sentences(20), val_split=0.2).folder
    path = tmp_path / "text.txt"
    now = bytes_set(tmp_path, path).folder
    assert now == bytes_set(tmp_path, os.path.relpath(path), length=99).folder
    path.write_text("another\ntext")
    assert now != bytes_set(tmp_path, path).folder


def test_a_token_file_can_be_carried_elsewhere(tmp_path):
    source = prepared_lines(tmp_path, sentences(20))
    before = source.build()
    moved = source.folder.rename(tmp_path / "moved")
    (tmp_path / "text.txt").unlink()
    carried = prepared(text_set(tmp_path, path=moved, tokenizer="no/such-tokenizer", length=16))
    there = carried.build()
    assert there.info == before.info and len(there.train) == len(before.train)
    assert carried.tokenizer.fingerprint == there.info.fingerprint  # which a run keeps


@pytest.mark.parametrize(
    "place, value",
    [
        ("tokenizer/vocabulary", 5),
        ("tokenizer/vocabulary", 270),
        ("tokenizer/vocabulary", "261"),
        ("tokenizer/special", GONE),
        ("tokenizer/special", {"pad": 0}),
        ("tokenizer/special", []),
        ("tokenizer/name", GONE),
        ("tokenizer/fingerprint", GONE),
        ("train/tokens", "9"),
        ("train/sha256", {}),
        ("val/sha256/val.bin", "0"),
        ("val/sha256", GONE),
    ],
)
def test_a_manifest_that_was_edited_is_refused(tmp_path, place, value):
    source = prepared_lines(tmp_path, sentences(20))
    edit_manifest(source.folder, place, value)
    assert "create it again with ./run.sh prepare RECIPE" in refusal(source.check)


def test_the_same_tokens_have_the_same_fingerprint_wherever_they_lie(tmp_path):
    lines = sentences(40)
    one, two = (prepared_lines(tmp_path / name, lines) for name in "ab")
    other = prepared_lines(tmp_path / "c", lines[1:])
    assert one.build().fingerprint == two.build().fingerprint != other.build().fingerprint
    assert one.folder.name != two.folder.name


@pytest.fixture
def run_on_words(tmp_path):
    """Train a run on wordpieces of a text, without evaluation; return the run and its training command."""
    file = recipe_of_lines(tmp_path, sentences(80), tokenizer="wordpiece", vocabulary=320)
    return trained(file), ("train", file, "--no-eval")


@pytest.mark.slow
def test_a_run_keeps_its_tokenizer_where_token_files_are_lost(tmp_path, run_on_words, monkeypatch, capsys):
    run, line = run_on_words
    evaluation = ("eval", run, "--form", "full", "--eager")
    before = (run / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "root")
    assert here("generate", run, "--prompt", "lion reads", "--tokens", 2, "--eager") == 0, "no token file is needed"
    other = make_tokenizer("wordpiece", ["another text altogether"] * 9, 320)
    # another version of the library might train such a tokenizer
    monkeypatch.setattr("data.text.text.make_tokenizer", lambda *_: other)
    assert here(*evaluation) == 0
    assert here(*line[:-1], "--form", "full") == 0
    assert (run / "tokenizer.json").read_bytes() == before

    assert here("prepare", line[1]) == 0  # independent of any run: it trains a tokenizer and writes other token files
    assert source_of(line[1]).build().info.fingerprint == other.fingerprint
    assert here(*evaluation) == 0
    (run / "tokenizer.json").unlink()
    assert "another vocabulary" in refuse(capsys, *evaluation)


def test_what_is_kept_is_of_the_text_that_is_trained_on(tmp_path):
    """This holds even if a run on another text ended before its first checkpoint."""
    run = tmp_path / "run"
    run.mkdir()
    for seed in (0, 1):
        source = prepared_lines(tmp_path, sentences(30, seed=seed), tokenizer="wordpiece", vocabulary=300)
        source.keep(run)
        assert open_tokenizer(str(run)).fingerprint == source.tokenizer.fingerprint


@pytest.mark.slow
def test_a_command_that_is_refused_leaves_the_run_as_it_is(tmp_path, run_on_words, capsys):
    """The recipe of a run never records a text or a folder that the run was not trained on."""
    run, line = run_on_words
    before = (run / "recipe.yaml").read_bytes()
    (tmp_path / "other.txt").write_text("\n".join(sentences(80, seed=1)))
    said = refuse(capsys, *line, f"data.path={tmp_path / 'other.txt'}", f"data.tokenizer={run / 'tokenizer.json'}")
    assert "the training samples have changed since step 1: their fingerprint was" in said
    assert (run / "recipe.yaml").read_bytes() == before
    refuse(capsys, "train", run / "recipe.yaml", "--no-eval", f"data.path={tmp_path / 'nothing.txt'}")
    assert (run / "recipe.yaml").read_bytes() == before
    assert here(*line, f"data.root={tmp_path / 'elsewhere'}") == 0
    assert (run / "recipe.yaml").read_bytes() == before, "a complete run keeps what it was trained on"


def begun(source):
    """Write the tokenizer of an unfinished preparation; return the folder of its parts."""
    parts = source.folder.with_name(f"{source.folder.name}.parts")
    parts.parent.mkdir()
    load_or_make_tokenizer(parts, source.corpus(), source.make_tokenizer)
    return parts


def test_unfinished_parts_are_named(tmp_path):
    source = lines_set(tmp_path, sentences(20))
    part = begun(source) / "0.npz"
    said = rf"^{part}: not a finished part .*; remove it"
    part.mkdir()
    refused(said, source.prepare)
    part.rmdir()
    np.savez(part, other=np.zeros(3))
    for odd in (b"", b"no archive", b"PK\3\4" + bytes(99), part.read_bytes()):
        part.write_bytes(odd)
        refused(said, source.prepare)
    part.unlink()
    assert prepared(source).check()


def test_a_name_of_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    source = lines_set(tmp_path, sentences(20))
    parts = begun(source)
    said = rf"^{parts / 'name'}: not the name of a tokenizer .*; remove {parts} and"
    (parts / "name").write_bytes(b"\xff\xfe")
    refused(said, source.prepare)
    (parts / "name").unlink()
    (parts / "name").mkdir()
    refused(said, source.prepare)


@pytest.mark.parametrize("kind", ["", ".parts", ".partial"])
def test_a_file_where_a_folder_is_to_be_is_named(tmp_path, kind):
    source = lines_set(tmp_path, sentences(20))
    file = source.folder.with_name(source.folder.name + kind)
    file.parent.mkdir()
    file.write_text("kept")
    refused(rf"^{file}: exists and is not a folder; remove it", source.prepare)
    assert file.read_text() == "kept"


def prepare_and_hang(file):
    """Prepare a text whose third and later shards are never finished."""
    multiprocessing.set_start_method("fork", force=True)  # the workers are children of this process
    corpora.SHARD = 1500
    preparing.make_part = hang_after_two
    here("prepare", file)


def hang_after_two(parts, corpus, tokenizer, shard, make=preparing.make_part):
    if shard >= 2:
        threading.Event().wait(120)
    make(parts, corpus, tokenizer, shard)


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_killed_preparation_goes_on(tmp_path, monkeypatch, caplog, capsys):
    """After kill -9 there is no partial file, finished shards are kept, and the result equals an undisturbed one."""
    caplog.set_level("INFO", "lion")
    monkeypatch.setattr(corpora, "SHARD", 1500)
    (tmp_path / "text.txt").write_text("\n".join(sentences(120)))
    file = recipe(tmp_path, path=tmp_path / "text.txt", document="line", workers=2)
    source = source_of(file)
    parts = source.folder.with_name(f"{source.folder.name}.parts")
    first = CONTEXT.Process(target=prepare_and_hang, args=(str(file),))
    first.start()
    deadline = time.monotonic() + 120
    try:
        while len(list(parts.glob("*.npz"))) < 2:
            assert first.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        workers = children(first.pid)
    finally:
        first.kill()
    first.join(60)
    assert len(workers) == 2
    kept = set(parts.glob("*.npz"))
    assert not source.folder.exists()
    assert "prepare RECIPE makes it" in refusal(source.build)
    while any(map(runs, workers)):  # workers end with their parent
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.01)
    assert set(parts.glob("*.npz")) == kept and len(kept) == 2
    assert here("prepare", file) == 0
    assert f"2 of {len(source.corpus())} shards are finished, resuming" in caplog.text
    assert "checksums match" in capsys.readouterr().out
    quiet = prepared(source_of(file, f"data.root={tmp_path / 'quiet'}", "data.workers=1"))
    assert read_json(quiet.folder / "manifest.json") == read_json(source.folder / "manifest.json")  # with checksums
    assert {p.name for p in source.folder.parent.iterdir()} == {source.folder.name, f"{source.folder.name}.lock"}


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def runs(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# samples


@pytest.mark.parametrize("length", [7, 16, 1000])
def test_packing_loses_and_doubles_nothing(tmp_path, length):
    source = prepared_lines(tmp_path, sentences(60), length=length)
    pad = source.build().info.id("pad")
    for split in ("train", "val"):
        layout = getattr(source.build(), split)
        wanted = documents(source, split)
        ids = joined(wanted)
        number = joined([i] * len(part) for i, part in enumerate(wanted))
        assert len(layout) == -(-len(ids) // length)
        for i, row in enumerate(samples_of(layout)):
            piece = slice(i * length, (i + 1) * length)
            left = length - len(ids[piece])
            segments = [
                n - number[i * length] for n in number[piece]
            ]  # the first of a row is 0, even inside a document
            assert row["tokens"].tolist() == ids[piece] + [pad] * left
            assert row["segments"].tolist() == segments + [-1] * left


def test_without_a_mask_samples_have_no_document_borders(tmp_path):
    train = prepared_lines(tmp_path, sentences(60), document_mask=False).build().train
    held = train.tokens.ids
    assert train[0].keys() == {"tokens"}
    assert joined(tokens_of(train)) == held[: len(held) // 16 * 16].tolist()


def test_padded_samples_are_documents(tmp_path):
    lines = sentences(60, longest=8)
    source = prepared_lines(tmp_path, lines, tokenizer="wordpiece", vocabulary=300, pack="padded", length=12)
    splits = source.build()
    pad, sep = splits.info.id("pad"), splits.info.id("sep")
    wanted = documents(source, "train")
    assert len(splits.train) == len(wanted)
    assert {len(ids) > 12 for ids in wanted} == {True, False}
    for i, ids in enumerate(wanted):
        cut = ids if len(ids) <= 12 else [*ids[:11], sep]
        left = 12 - len(cut)
        assert splits.train[i]["tokens"].tolist() == cut + [pad] * left
        assert splits.train[i]["segments"].tolist() == [0] * len(cut) + [-1] * left


@pytest.mark.parametrize(
    "layout, label",
    [
        ({}, "packed"),
        ({"document_mask": False}, "borderless"),
        ({"pack": "padded"}, "padded"),
        ({"pack": "windows"}, "windows"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_runs_of_any_layout_can_be_judged_by_the_same_samples(tmp_path, layout, label):
    lines = sentences(60, longest=8)

    def of(**settings):
        return prepared_lines(tmp_path, lines, tokenizer="wordpiece", vocabulary=300, **settings)

    source, own = of(**layout, eval_pack="padded"), of(**layout)
    made, plain = source.build(), own.build()
    assert_equal(samples_of(made.val), samples_of(of(pack="padded").build().val))
    assert_equal(samples_of(made.train), samples_of(plain.train))
    assert made.order == plain.order
    assert source.config.label() == label and source.config.of_training == ("pack", "document_mask")
    apart = of(**layout, eval_pack="documents").build().val
    assert_equal(samples_of(apart), samples_of(of().build().val))
    assert own.config.label() == "" and own.config.of_training == ()


@pytest.mark.parametrize("pack", ["documents", "padded", "windows"])
def test_the_share_of_places_that_hold_tokens(tmp_path, pack):
    source = prepared_lines(tmp_path, sentences(60, longest=5), pack=pack)
    train = source.build().train
    segments = torch.stack([row.get("segments", row["tokens"]) for row in samples_of(train)])
    assert source.filled() == pytest.approx((segments >= 0).double().mean().item(), abs=1 / len(train))
    assert (source.filled() < 0.9) == (pack == "padded")


def test_windows_begin_anywhere_and_are_drawn(tmp_path):
    source = prepared_lines(tmp_path, sentences(60), pack="windows")
    splits = source.build()
    ids = splits.train.tokens.ids
    assert len(splits.train) == len(ids) - 16 + 1
    for start in (0, 5, len(splits.train) - 1):
        assert splits.train[start]["tokens"].tolist() == ids[start : start + 16].tolist()
    assert splits.order == Drawn()
    targets = splits.val.tokens.ids[1:].tolist()
    judged = joined(tokens[1:] for tokens in tokens_of(splits.val))
    assert judged == targets[: len(judged)], "each token once"
    assert 0 <= len(targets) - len(judged) < 15
    assert prepared_lines(tmp_path, sentences(60)).build().order == Shuffled()
    with pytest.raises(IndexError):
        splits.train[len(splits.train)]


@pytest.mark.slow
def test_batches_are_the_samples(tmp_path):
    train = prepared_lines(tmp_path, sentences(60)).build().train
    batch = train.batch([3, 0, 3], "cpu")
    assert batch["tokens"].dtype == batch["segments"].dtype == torch.int64
    for row, index in enumerate([3, 0, 3]):
        assert_equal({name: value[row] for name, value in batch.items()}, train[index])


def grown_by_reading(group, folder):
    """Return the number of rows of a token file, and the bytes by which this process grows while it reads some."""

    def held():  # bytes of this process's own, without what is only mapped
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    layout = Packed(Tokens(folder, "train", 300), 128, 0)
    rng = np.random.default_rng(0)
    layout.batch(range(64), "cpu")
    before = held()
    for _ in range(40):
        layout.batch(rng.integers(len(layout), size=64), "cpu")
    return len(layout), held() - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.process
def test_reading_takes_the_same_memory_whatever_the_size(tmp_path):
    count = 2**28  # half a GiB of ids, in a sparse file that takes no disk
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(2 * count)
    (np.arange(1, 2**16 + 1) * (count // 2**16)).astype(np.int64).tofile(tmp_path / "train.ends")
    ((size, grown),) = in_processes(1, grown_by_reading, tmp_path)
    assert size == count // 128
    assert grown < 2**24, f"{grown:,} bytes more after 40 batches"


def grown_by_preparing(group, folder):
    """Return by how many bytes more this process grows for a long text than for a short one, and the ids of it."""
    corpora.SHARD = 2**18
    peaks = []
    for name in ("short", "long"):
        source = text_set(folder / name, path=folder / f"{name}.txt", tokenizer="bytes", document="line")
        source.prepare()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks[1] - peaks[0], len(source.build().train.tokens.ids)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
def test_preparing_takes_the_same_memory_whatever_the_size(tmp_path):
    line = "many words " * 90 + "\n"
    for name, size in (("short", 2**20), ("long", 2**23)):
        (tmp_path / f"{name}.txt").write_text(line * (size // len(line)))
    ((grown, ids),) = in_processes(1, grown_by_preparing, tmp_path)
    assert ids > 0.9 * 2**23
    assert grown < ids, f"{grown:,} bytes more for {ids:,} ids, which take two each"


# named data sets


def test_python_source_is_there_on_every_machine(tmp_path, monkeypatch):
    kind = data.dataset("python_source")
    files = kind.files(text_set(tmp_path, "python_source"))
    assert len(files) > 300 and all(path.suffix == ".py" for path in files)
    some = files[:12]
    monkeypatch.setattr(kind, "files", lambda self: some)
    texts = {path.read_text(encoding="utf-8") for path in some}
    assert texts_of(text_set(tmp_path, "python_source", tokenizer="bytes")) == set(filter(str.strip, texts))
    source = prepared(text_set(tmp_path, "python_source", tokenizer="bytes", document="paragraph", pack="padded"))
    train, val = (len(part) for part in source.build()[:2])
    assert train + val > 10 * len(some)
    assert source.published()[1] == pytest.approx(train, rel=0.15), "what is said before it is prepared"


@pytest.mark.parametrize("name", ["c4", "openwebtext", "pile", "python_source", "wikitext103"])
def test_sets_are_known_without_their_files(name, tmp_path):
    source = text_set(tmp_path, name)
    info, count = source.published()
    assert count > 1000 and info.length == source.config.length
    assert TextInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_a_set_is_known_with_any_tokenizer_that_is_there(tmp_path):
    tokenizer = make_tokenizer("wordpiece", sentences(50), 300)
    save(tokenizer, tmp_path)
    info, count = text_set(tmp_path, "c4", tokenizer=tmp_path).published()
    assert (info.vocabulary, info.fingerprint, count) == (tokenizer.vocabulary, tokenizer.fingerprint, 364_868_892)
    missing = text_set(tmp_path, "c4", tokenizer="./none")
    assert "data.tokenizer: no file or folder ./none" in refusal(missing.published)


def test_what_the_hub_does_not_give_is_one_line(tmp_path, monkeypatch):
    def away(*args, **kwargs):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", away)
    said = r"'allenai/c4' is not a local file.*ConnectionError: no route\)"
    refused(said, text_set(tmp_path, "c4", tokenizer="bytes").prepare)
    assert not list((tmp_path / "root").glob("*[0-9a-f]"))


# invalid data


def test_a_run_of_another_vocabulary_is_refused(tmp_path):
    info = prepared_lines(tmp_path, sentences(20)).build().info
    there = make_tokenizer("characters", ["abc"], 0)
    then = TextInfo(there.vocabulary, 16, "characters", there.fingerprint).to_dict()
    refused(r"another vocabulary: its tokenizer was 'characters'.* and is 'bytes'", info.check_same, "run x", then)
    swapped = {**info.to_dict(), "fingerprint": "0" * 64}  # as many ids, but for other tokens
    assert not info.shares_heads(swapped)
    assert "fingerprint 000000000000" in refusal(info.check_same, "run x", swapped)
    info.check_same("run x", info.resized(99).to_dict())


def parquet(file, texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), file)


EMPTY = io.BytesIO()
parquet(EMPTY, [])
NO_ROWS = EMPTY.getvalue()
EMPTY_TEXT = "no tokens, the text is empty"


def check_bad_text(tmp_path, message, **settings):
    values = {"path": tmp_path / "texts", "document": "line", "tokenizer": "bytes", **settings}
    refused(message, lambda: text_set(tmp_path, **values).prepare())
    if message.startswith("no t"):
        assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b" \n\n", EMPTY_TEXT),
        ("a.txt", b"", EMPTY_TEXT),
        ("a.txt", b"caf\xe9 \nand\n", r"a.txt: not UTF-8 text, byte 3 is 0xe9 \(.*\); convert it with iconv"),
        ("a.jsonl", b"{}\n", "a.jsonl: no column holds text: the first row is empty"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "more than one of a, b"),
        ("a.jsonl", b"{no\n", "a.jsonl: not JSON lines"),
        ("a.jsonl", b'["x"]\n', "not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b\n{"text": "c"}', """a.jsonl: not JSON lines.*{"text": "b'"""),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', """a.jsonl: no column 'text' in '{"txt": "b"}'"""),
        ("a.csv", b"x", "holds .csv; expected .txt"),
        ("a.parquet", b"x", "texts' cannot be read"),
        ("a.parquet", NO_ROWS, "data.path: '.*texts' has no rows"),
    ],
)
def test_bad_text_is_refused_and_leaves_nothing_behind(name, content, message, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(content)
    check_bad_text(tmp_path, message)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tokenizer": "./nothing"}, "data.tokenizer: no file or folder ./nothing"),
        ({"tokenizer": "./own/v.txt"}, r"v.txt cannot be read \(not a WordPiece vocabulary"),
        ({"tokenizer": "./own/v.json"}, "data.tokenizer: .*v.json cannot be read"),
        ({"tokenizer": "./own"}, r"data.tokenizer: .*own holds none of tokenizer.json, vocab.txt, vocab.json"),
        ({"path": "nowhere.txt"}, "data.path: no file or folder .*nowhere.txt"),
        ({"path": None}, "data.path: missing"),
        ({"path": "nulls"}, EMPTY_TEXT),
        ({"path": "blank", "split": "tail"}, EMPTY_TEXT),
        ({"path": "blank", "tokenizer": "characters"}, "no text to take the characters from"),
        ({"path": "empty"}, "holds nothing; expected .txt"),
        ({"column": "body"}, "data.column: 'body', but .*a.txt is plain text, without columns"),
        ({"pack": "rows"}, "data.pack"),
        ({"document": "word"}, "data.document"),
    ],
)
def test_settings_that_do_not_fit_a_text(settings, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LION_DATA", f"{tmp_path}/none")
    monkeypatch.chdir(tmp_path)
    for folder in ("texts", "own", "blank", "nulls", "empty"):
        Path(folder).mkdir()
    for name in ("texts/a.txt", "own/v.txt"):
        Path(name).write_text("a\nb")
    for name in ("nulls/a.jsonl", "nulls/b.jsonl"):
        Path(name).write_text('{"text": null}\n')
    Path("own/v.json").write_text("{}")
    Path("blank/a.txt").write_text(" \n\n")
    check_bad_text(tmp_path, message, **settings)


def test_a_damaged_token_file_is_refused(tmp_path, capsys):
    file = recipe_of_lines(tmp_path, sentences(20))
    source = prepared(source_of(file))
    held = source.folder / "train.bin"
    whole = held.read_bytes()
    held.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "damaged, its SHA-256" in refuse(capsys, "prepare", file)
    held.write_bytes(whole[:-2])
    for name in ("prepare", "train"):
        assert "a truncated token file; remove" in refuse(capsys, name, file)
    held.write_bytes(whole)
    swapped = make_tokenizer("bpe", ["abc"], 300).inner.to_str()
    (source.folder / "tokenizer.json").write_text(swapped)
    assert "tokenizer.json: damaged, not the tokenizer of the manifest" in refuse(capsys, "prepare", file)
    (source.folder / "tokenizer.json").unlink()
    assert "tokenizer.json: cannot be read" in refuse(capsys, "prepare", file)
    (source.folder / "manifest.json").write_text("{")
    assert "manifest.json: cannot be read" in refuse(capsys, "train", file)


def test_what_is_not_there_is_bad_input(tmp_path, capsys):
    """Cases: a broken link, a file in place of the folder of token files, a manifest that names a missing file."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("\n".join(sentences(20)))
    link = tmp_path / "texts/b.txt"
    link.symlink_to(tmp_path / "nowhere")
    file = recipe(tmp_path, path=tmp_path / "texts", document="line", workers=1)
    assert refuse(capsys, "prepare", file) == f"error: {link}: No such file or directory\n"
    link.unlink()
    line = refuse(capsys, "prepare", file, f"data.root={file}")
    assert f"{file}/text-bytes-" in line
    assert "cannot be written (File exists), set data.root or $LION_DATA" in line
    folder = prepared(source_of(file)).folder
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"train.bin"', '"none.bin"'))
    assert f"{manifest}: cannot be read (KeyError: 'train.bin')" in refuse(capsys, "prepare", file)


@pytest.mark.parametrize("document", ["file", "line"])
def test_of_one_book_the_end_is_held_out(tmp_path, caplog, document):
    """A corpus of one document (`data.path=book.txt`) trains with the default settings of recipes."""
    caplog.set_level("INFO")
    text = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 40
    lines = [text if document == "file" else text.replace("\n", " ")]
    source = prepared_lines(tmp_path / "one", lines, document=document, val_split=0.1)
    tail = prepared_lines(tmp_path / "tail", lines, document=document, val_split=0.1, split="tail")
    for split, share in (("train", 0.9), ("val", 0.1)):
        ids = getattr(source.build(), split).tokens.ids
        assert np.array_equal(ids, getattr(tail.build(), split).tokens.ids)
        assert abs(len(ids) / len(text) - share) < 0.01
    assert read_json(source.folder / "manifest.json")["held_out"]["by"] == "tail"
    assert "one document, so its last 10 % are held out" in caplog.text


def test_a_large_document_that_is_held_out_is_said(tmp_path, caplog):
    for name, size in (("a", 4000), ("b", 1000)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    bytes_set(tmp_path, tmp_path, val_split=0.05).prepare()
    assert "1 of 2 documents with" in caplog.text
    assert "asked for 5 %; data.split=tail holds out the end" in caplog.text


@pytest.mark.parametrize("pack", ["documents", "padded", "windows"])
def test_a_damaged_id_is_named_where_it_is_read(pack, tmp_path):
    file = recipe_of_lines(tmp_path, sentences(20), pack=pack)
    held = prepared(source_of(file)).folder / "train.bin"
    held.write_bytes(b"\xff\xff" * (held.stat().st_size // 2))  # the size is right
    refused(r"train.bin: damaged, it holds id 65535 .*has 261; ./run.sh prepare RECIPE", trained, file)


def test_too_little_text_for_a_sample_is_refused(tmp_path):
    for pack, apart in (("documents", {"document_mask": False}), ("padded", {"pack": "windows"})):
        how = {"tokenizer": "characters", "pack": pack}
        source = prepared_lines(tmp_path, ["a"] * 40, **how)
        assert "data.path: every document of train is one token, without context" in refusal(source.build)
        assert len(prepared_lines(tmp_path, ["a"] * 400, **how | apart).build().train)
    source = prepared_lines(tmp_path, ["ab", "cd"], pack="windows")
    assert "data.length: 16 is more than the 3 tokens of train" in refusal(source.build)


def test_a_worker_that_dies_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 200)
    monkeypatch.setattr(pool, "start_worker", os._exit)
    refused(r"a process died.*finished parts are kept", lines_set(tmp_path, sentences(50), workers=2).prepare)


def test_a_set_that_needs_nothing_says_so(tmp_path, capsys):
    assert "'digits' needs no preparation" in printed(capsys, "prepare", "quickstart")


def test_tokens_of_a_large_vocabulary_take_four_bytes(tmp_path):
    assert id_type(2**16) == np.uint16
    assert id_type(2**16 + 1) == np.uint32
    writer = Writer(tmp_path, "train", id_type(70_000))
    writer.write(np.array([1, 69_999, 5]), np.array([2]))
    assert writer.close()["documents"] == 2
    tokens = Tokens(tmp_path, "train", 70_000)
    assert tokens.ids.tolist() == [1, 69_999, 5] and tokens.ends.tolist() == [2, 3]
    assert isinstance(tokens.ids, np.memmap)


def clone(root: Path, *subsets: str) -> Path:
    """Write parquet files as in a clone of a data set of the Hub, each with one text that names its place."""
    for subset in subsets:
        (root / subset).mkdir(parents=True, exist_ok=True)
        for split in ("train", "validation", "test"):
            parquet(root / subset / f"{split}-00000-of-00001.parquet", [f"{subset} {split}"])
    return root


def test_a_clone_from_the_hub_is_read_by_subset_and_split(tmp_path):
    def texts(path, subset=None, split="train"):
        return sorted(corpus_of(path, subset=subset, split=split).texts())

    two = clone(tmp_path / "two", "raw", "small")
    assert texts(two, "raw") == ["raw train"]
    assert texts(two, "small", "test") == ["small test"]
    one = clone(tmp_path / "one", "data")
    (one / "README.md").write_text("A card.")
    assert texts(one, "raw") == ["data train"], "a single configuration needs no name"
    other = clone(tmp_path / "other", "small")
    assert texts(other) == ["small train"]
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("train.txt", "valid.txt", "test.txt", "notes.txt"):
        (plain / name).write_text(name)
    assert texts(plain) == ["notes.txt", "train.txt"]
    (plain / "train.txt").unlink()
    assert texts(plain) == ["notes.txt"]
    shards = tmp_path / "shards"
    shards.mkdir()
    for i in range(2):
        parquet(shards / f"data-0000{i}-of-00002.parquet", [f"{i}"])
    assert texts(shards) == ["0", "1"], "a single name is no split"
    refused(r"data.subset: .* has raw, small, did you mean 'raw'", texts, two, "row")
    refused(r"data.source: .* no files of split 'extra', only of test, train, validation", texts, two, "raw", "extra")
    refused(r"data.subset: .* has small, ", texts, other, "raw")
    refused(r"no files of split 'extra', only of test, train, validation", texts, plain, None, "extra")


def test_a_tokenizer_is_trained_on_all_shards_of_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SHARD", 100)  # a file of a table may be larger
    for i in range(4):
        parquet(tmp_path / f"{i}.parquet", [f"{i}" * 100] * 50)
    taken = list(corpus_of(tmp_path).texts(1000))
    assert {text[0] for text in taken} == set("0123")
    assert 1000 <= sum(map(len, taken)) < 1500


def test_the_tokenizer_of_a_run_serves_where_its_own_file_is_gone(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be")
    path, run, gone = tmp_path / "a.txt", tmp_path / "run", f"{tmp_path}/gone/tokenizer.json"
    made = prepared(text_set(tmp_path, path=path, tokenizer="characters", val_split=0.2))
    run.mkdir()
    made.keep(run)
    moved = text_set(tmp_path, path=path, tokenizer=gone)
    moved.restore(run, {"tokenizer": gone})
    assert moved.tokenizer.encode("be") == made.tokenizer.encode("be")


def framing(special, single):
    """Return a tokenizer of bytes whose post-processor adds special tokens to a text, and the names of a frame."""
    inner = tokenizers.Tokenizer.from_str(open_tokenizer("bytes").inner.to_str().replace("<|endoftext|>", "<|x|>"))
    inner.add_special_tokens(special)
    used = [(name, inner.token_to_id(name)) for name in special if name in single]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=used)
    made = Tokenizer("own", inner)
    before, after = made.frame
    return made, " ".join([*map(inner.id_to_token, before), "$A", *map(inner.id_to_token, after)])


@pytest.mark.parametrize(
    "special, single, roles",
    [
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|begin_of_text|> $A", ("<|begin_of_text|>", "[SEP]")),
        (["<bos>", "<eos>"], "<bos> $A", ("<bos>", "[SEP]")),
        (["</s>"], "$A </s>", ("[CLS]", "</s>")),
        (["[CLS]", "[SEP]", "<|endoftext|>"], "[CLS] $A [SEP]", ("[CLS]", "[SEP]")),
        (["<cls>", "<eos>"], "<cls> $A <eos>", ("<cls>", "<eos>")),
    ],
)
def test_the_post_processor_of_a_tokenizer_frames_documents(special, single, roles):
    made, frame = framing(special, single)
    assert frame == single
    assert tuple(made.inner.id_to_token(made.special[role]) for role in ("cls", "sep")) == roles
    before, after = made.frame
    assert made.inner.encode("ab").ids == before + made.encode("ab") + after


def test_documents_without_a_border_are_a_line(tmp_path, caplog):
    prepared_lines(tmp_path / "lines", ["ab", "ba", "aa"], tokenizer="characters")
    assert "tokenizer 'characters' has no token that separates documents" in caplog.text
    caplog.clear()
    prepared_lines(tmp_path / "one", ["ab", "ba", "aa"], tokenizer="characters", document="file")
    assert "separates documents" not in caplog.text
