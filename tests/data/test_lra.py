"""Tests of the Long Range Arena data sets: generators, published files, and prepared samples."""

import hashlib
import json
import logging
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

import data
from data.lra import lines, pathfinder_dashes, store
from data.lra import pathfinder_contours as drawing
from data.lra.listops import IDS, TOKENS, Generator, ListOpsConfig, evaluate, expression, parse
from data.lra.pathfinder import PathfinderConfig, PathXConfig, is_empty
from data.lra.pathfinder_contours import Canvas, Chance, Targets, draw
from data.lra.pathfinder_dashes import TOUCH, dashes
from data.lra.sequences import END, PAD, UNKNOWN, Collate, Sequences
from lion.config import build
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.samples.sequences import SequenceInfo
from tests.helpers import ROOT, command, here, picture, printed, refusal, refuse, refused
from tools.labels import check_labels, verdict

from .helpers import GONE, counts, edit_manifest, opened, samples_of, tokens_of

SHARED = Path(os.environ.get("LION_SHARED", ROOT.parent / "shared")) / "data"
SHORT = {"min_length": 8, "max_length": 30, "length": 32, "samples": 96}  # expressions
SMALL = {"side": 16, "seed_distance": 3, "contour_length": 4, "distractors": 1, "samples": 16}  # pictures


def lra_set(folder, name, **settings):
    """Return the data set that a recipe would open, with its samples in `folder`."""
    return opened(name, **{"root": folder / "made", "workers": 1, **settings})


def prepared(folder, name, **settings):
    source = lra_set(folder, name, **settings)
    source.prepare()
    return source


def recipe(folder, **settings):
    path = folder / "lra.yaml"
    data = json.dumps({"root": folder / "made", "workers": 1, **settings}, default=str)
    path.write_text(f"""
task: {{name: lra}}
data: {data}
model: {{mixer: softmax, dim: 16, depth: 1, num_heads: 2}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 4, steps: 2, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    return path


def words(ids):
    names = {i: word for word, i in IDS.items()}
    return " ".join(names[int(i)] for i in ids)


def checksums(source):
    return {name: held["sha256"] for name, held in source.manifest()["arrays"].items()}


def check_same(one, same, other):
    """Check that two prepared data sets are the same, and that another one differs."""
    assert one.folder.name == same.folder.name != other.folder.name
    assert checksums(one) == checksums(same) != checksums(other)


# all data sets


@pytest.mark.parametrize(
    "name, settings, classes, length, vocabulary, samples",
    [
        ("listops", {}, 10, 2048, 18, 96_000),
        ("listops", {"limit": 100_000}, 10, 2048, 18, 96_000),
        ("imdb", {}, 2, 4096, 259, 25_000),
        ("aan", {}, 2, 4000, 259, 147_086),
        ("cifar10_pixels", {}, 10, 1024, None, 45_000),
        ("pathfinder", {}, 2, 1024, None, 160_000),
        ("pathx", {"limit": 500}, 2, 16_384, None, 500),
    ],
)
def test_recipes_know_what_the_sets_hold_without_their_files(
    tmp_path, name, settings, classes, length, vocabulary, samples
):
    info, count = lra_set(tmp_path, name, **settings).published()
    assert (info.classes, info.length, info.vocabulary, count) == (classes, length, vocabulary, samples)
    assert (info.parts == 2) == (name == "aan")
    assert type(info).from_dict(info.to_dict()) == info
    assert not (tmp_path / "made").exists()
    if name == "cifar10_pixels":  # mean and deviation of S5
        assert (info.mean, info.std) == pytest.approx((122.6 / 255, 61 / 255), abs=1e-4)


@pytest.mark.process
def test_images_are_the_same_however_many_processes_make_them(tmp_path, monkeypatch):
    monkeypatch.setattr(data.lra.pixels, "PART", 5 * 16**2)
    one = prepared(tmp_path / "1", "pathfinder", **SMALL)
    two = prepared(tmp_path / "2", "pathfinder", **SMALL, workers=2)
    check_same(one, two, prepared(tmp_path / "3", "pathfinder", **SMALL, seed=1))
    assert len(one.build().train) == SMALL["samples"]


@pytest.mark.process
def test_expressions_depend_on_no_process_part_or_order_of_a_set(tmp_path, monkeypatch):
    """LRA's generator writes its samples in the order of a set of tuples of text, which differs between processes."""
    file = recipe(tmp_path, name="listops", **SHORT)
    out = command("prepare", file, "data.workers=2", env={"PYTHONHASHSEED": "7"})
    assert out.returncode == 0 and "96 train, 2 val, 2 test, checksums match" in out.stdout, out.stderr
    monkeypatch.setattr(data.lra.listops, "PART", 10)
    alone = prepared(tmp_path / "alone", "listops", **SHORT)
    check_same(lra_set(tmp_path, "listops", **SHORT), alone, prepared(tmp_path / "3", "listops", **SHORT, seed=1))


def test_a_killed_generation_goes_on_where_it_was(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lion")
    monkeypatch.setattr(data.lra.listops, "PART", 10)
    whole = prepared(tmp_path / "whole", "listops", **SHORT)
    made, write, killed = [], store.write_part, True

    def failing(path, arrays):
        if killed and len(made) == 4:
            raise KeyboardInterrupt
        made.append(path)
        write(path, arrays)

    monkeypatch.setattr(store, "write_part", failing)
    source = lra_set(tmp_path / "cut", "listops", **SHORT)
    with pytest.raises(KeyboardInterrupt):
        source.prepare()
    assert not source.folder.exists()
    killed = False
    source.prepare()
    assert "4 of 12 parts are finished, resuming" in caplog.text
    assert len(made) == len(set(made)) == 12
    assert checksums(source) == checksums(whole)
    assert not list((tmp_path / "cut/made").glob("*.parts"))


def test_unfinished_parts_are_named(tmp_path):
    source = lra_set(tmp_path, "listops", **SHORT)
    part = source.folder.with_name(f"{source.folder.name}.parts") / "train.0.npz"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"no archive")
    refused(rf"^{part}: not a finished part .*; remove it", source.prepare)
    assert part.read_bytes() == b"no archive"


def test_damage_is_found(tmp_path, capsys):
    file = recipe(tmp_path, name="listops", **SHORT)
    folder = prepared(tmp_path, "listops", **SHORT).folder
    path = folder / "train.tokens.bin"
    held = path.read_bytes()
    damaged = held[:-1] + bytes([held[-1] ^ 1])
    for content, said in (
        (damaged, f"{path}: damaged, its SHA-256 differs from the manifest"),
        (held[:-1], "a truncated file; remove"),
    ):
        path.write_bytes(content)
        assert said in refuse(capsys, "prepare", file)
    path.write_bytes(held)
    edit_manifest(folder, "samples/train", 5)
    for doing in ("prepare", "train"):
        assert "create it again with ./run.sh prepare RECIPE" in refuse(capsys, doing, file)
    (folder / "manifest.json").write_text("{}")
    assert "manifest.json: cannot be read" in refuse(capsys, "train", file)


@pytest.fixture(scope="module")
def expressions(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("listops"), "listops", **SHORT)


@pytest.mark.parametrize(
    "place, value",
    [
        ("arrays/val.label", GONE),
        ("arrays/train.second", {"shape": [9], "type": "uint8"}),
        ("arrays/train.label", 5),
        ("arrays/train.label/type", "int8"),
        ("arrays/train.lengths/type", "float32"),
        ("arrays/train.label/shape", [48, 2]),
        ("arrays/train.label/shape", [96.0]),
        ("arrays/train.tokens/shape", []),
        ("arrays/train.tokens/sha256", None),
        ("samples/train", 5),
        ("samples/train", "x"),
        ("samples/train", True),
        ("samples", {}),
        ("samples", 7),
        ("of/seed", 3),
        ("of", GONE),
    ],
)
def test_a_manifest_that_was_edited_is_refused(expressions, place, value):
    path = expressions.folder / "manifest.json"
    before = path.read_text()
    edit_manifest(expressions.folder, place, value)
    try:
        for reading in (expressions.check, expressions.build):
            assert "create it again with ./run.sh prepare RECIPE" in refusal(reading)
    finally:
        path.write_text(before)
    assert "96 train, 2 val, 2 test, checksums match" in expressions.check()


def test_what_files_alone_decide_is_checked_as_well(tmp_path):
    path = listops_files(tmp_path, "[SM 9 8 ]\t7")
    read = prepared(tmp_path, "listops", path=path, length=16)
    edit_manifest(read.folder, "samples/test", GONE)
    for name in read.kinds():
        edit_manifest(read.folder, f"arrays/test.{name}", GONE)
    refused(r"arrays: test\.\w+\.bin is not listed", read.check)
    drawn = prepared(tmp_path, "pathfinder", **SMALL)
    assert "checksums match" in drawn.check()
    edit_manifest(drawn.folder, "arrays/val.pixels/shape", [4, 128])
    assert "val.pixels: expected uint8 [2, 256], got uint8 [4, 128]" in refusal(drawn.check)


def test_a_limit_takes_the_same_training_samples_each_time(expressions):
    few = opened("listops", root=expressions.folder.parent, workers=1, **SHORT, limit=10)
    assert few.folder == expressions.folder
    chosen = few.build().train.indices.tolist()
    assert len(set(chosen)) == 10
    assert chosen == few.build().train.indices.tolist() != list(range(10))
    assert few.published()[1] == 10
    assert len(few.build().val) == 2


def test_a_run_trains_shows_its_images_and_predicts(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = recipe(tmp_path, name="pathfinder", **SMALL)
    assert here("prepare", file) == 0
    assert here(file) == 0
    run = tmp_path / "runs/lra"
    events = EventAccumulator(str(next(run.rglob("events.*")).parent)).Reload()
    assert any("inputs" in tag for tag in events.Tags()["images"])
    pixels = prepared(tmp_path, "pathfinder", **SMALL).build().val[0]["pixels"]
    Image.fromarray(pixels.view(16, 16).numpy()).save(tmp_path / "one.png")
    picture(0, (20, 16)).save(tmp_path / "odd.png")
    capsys.readouterr()
    assert here("predict", run, tmp_path / "one.png", tmp_path / "odd.png", "--eager") == 2
    out = capsys.readouterr()
    assert "class 0" in out.out
    assert "odd.png: an image of 20 x 16 pixels, expected 16 x 16" in out.err


# ListOps


def listops_files(folder, *rows, header="Source\tTarget", **special):
    """Write the rows of every split, or other rows of a split in `special`; return the folder."""
    for split in ("train", "val", "test"):
        text = "\n".join([header, *special.get(split, rows)])
        (folder / f"basic_{split}.tsv").write_text(text, newline="")
    return folder


def test_brackets_are_kept_and_parentheses_are_not(tmp_path):
    ids = parse("( ( ( [MAX 2 ) ( ( [MIN 9 ) 7 ) ] ) ) 0 ) ]", "here")
    assert words(ids) == "[MAX 2 [MIN 9 7 ] 0 ]" and len(ids) == 8
    assert len(set(IDS.values())) == len(IDS) == 18 and len(TOKENS) == 15
    path = listops_files(tmp_path, "( ( [SM 9 ) 8 ) ]\t7\r", "", header="Source\tTarget\r")
    splits = prepared(tmp_path, "listops", path=path, length=16).build()
    assert words(splits.train[0]["tokens"]) == "[SM 9 8 ] <eos>"
    assert len(splits.train) == 1
    batch = splits.train.batch([0, 0], "cpu")
    assert batch["tokens"].shape == (2, 16)
    assert batch["tokens"][0, 5:].unique().tolist() == [PAD]
    assert batch["segments"].tolist() == [[0] * 5 + [-1] * 11] * 2
    assert batch["label"].tolist() == [7, 7]
    short = prepared(tmp_path, "listops", path=path, length=128, pad="batch").build()
    assert short.train.batch([0], "cpu")["tokens"].shape == (1, 32)  # a quarter of the length


@pytest.mark.parametrize(
    "text, value",
    {
        "3": 3,
        "[MIN 4 2 8 ]": 2,
        "[MAX 4 2 8 ]": 8,
        "[MED 4 2 8 ]": 4,
        "[MED 1 2 8 9 ]": 5,
        "[MED 1 2 ]": 1,  # 1.5, truncated
        "[SM 9 9 9 ]": 7,
        "[MAX 1 [SM [MED 0 9 9 ] 4 ] 2 ]": 3,
    }.items(),
)
def test_values_are_those_of_the_operators(text, value):
    assert evaluate(parse(text, "here"), "here") == value


def test_generated_expressions_are_lras(tmp_path):
    settings = {**SHORT, "max_depth": 4, "max_args": 5, "samples": 200}
    for sample in samples_of(prepared(tmp_path, "listops", **settings).build().train):
        *ids, end = sample["tokens"].tolist()
        assert SHORT["min_length"] < len(ids) < SHORT["max_length"]
        assert end == END
        nested, depth, most = read(words(ids).split())
        assert 1 < depth <= 4 and most <= 5
        assert value_of(nested) == sample["label"]


def read(tokens):
    """Parse an expression independently: return its tree, depth and maximum number of arguments."""
    token = tokens.pop(0)
    if not token.startswith("["):
        return int(token), 1, 0
    arguments, depth, most = [], 0, 0
    while tokens[0] != "]":
        argument, deep, many = read(tokens)
        arguments.append(argument)
        depth = max(depth, deep)
        most = max(most, many)
    tokens.pop(0)
    assert len(arguments) >= 2
    return (token, arguments), depth + 1, max(most, len(arguments))


def value_of(tree):
    if isinstance(tree, int):
        return tree
    operator, values = tree[0], sorted(map(value_of, tree[1]))
    middle = (values[len(values) // 2] + values[(len(values) - 1) // 2]) / 2
    return {"[MIN": values[0], "[MAX": values[-1], "[MED": int(middle), "[SM": int(str(sum(values))[-1])}[operator]


def test_the_shares_of_digits_operators_and_arguments_are_lras():
    uniform, operators, counts, digits, deepest = random.Random(0).random, [], [], [], []
    for _ in range(1500):
        (operator, children), *_ = read(words(expression(uniform, 3, 10, 10**6)).split())
        operators.append(operator)
        counts.append(len(children))
        for child in children:
            digits.append(isinstance(child, int))
            deepest += [] if digits[-1] else child[1]  # digits, or else `bincount` fails
    assert abs(np.mean(digits) - 0.75) < 0.02
    assert np.abs(np.bincount(counts, minlength=11)[2:] / 1500 - 1 / 9).max() < 0.03
    assert np.abs(np.bincount(deepest) / len(deepest) - 0.1).max() < 0.02
    for name in ("[MIN", "[MAX", "[MED", "[SM"):
        assert abs(operators.count(name) / 1500 - 0.25) < 0.05


def test_an_expression_stays_the_same_in_every_version_of_ours():
    found = Generator(build(ListOpsConfig, {"samples": 2}, source=str)).draw("train", 0)
    assert 500 < len(found) < 2000
    assert hashlib.sha256(bytes(found)).hexdigest()[:16] == "2810991f56c31aef"


def test_more_samples_are_more_of_the_same(tmp_path):
    few, many = (prepared(tmp_path, "listops", **{**SHORT, "samples": n}).build() for n in (48, 144))
    assert tokens_of(few.train) == tokens_of(many.train)[:48]
    assert tokens_of(few.val)[0] == tokens_of(many.val)[0]


def test_no_expression_is_there_twice(tmp_path):
    tiny = {"max_depth": 2, "max_args": 2, "min_length": 3, "max_length": 5, "length": 5}  # 400 expressions
    splits = prepared(tmp_path, "listops", **tiny, samples=300, val_samples=30, test_samples=30).build()
    found = {tuple(tokens) for part in splits[:3] for tokens in tokens_of(part)}
    assert len(found) == sum(counts(splits)) == 360
    said = r"data.samples: 480 samples, but there are too few different expressions"
    refused(said, prepared, tmp_path, "listops", **tiny, samples=400, val_samples=40, test_samples=40)


IMPOSSIBLE_EXPRESSIONS = [
    (
        {"min_length": 100, "max_length": 101},
        "max_length: no length is strictly between min_length=100 and 101, nearest: 102",
    ),
    ({"max_depth": 2}, "max_depth=2 and max_args=10 no expression has more than 12 tokens, nearest: 11"),
    ({"length": 1000}, "length: 1000 tokens, but samples have up to max_length=2000 tokens"),
    ({"max_args": 1}, "data.max_args: expected at least 2"),
    ({"samples": 10**12}, "data.samples: expected at most 10000000, got 1000000000000"),
    ({"max_depth": 1}, "data.max_depth: expected at least 2"),
]
IMPOSSIBLE_IMAGES = [
    ({"seed_distance": 8}, "seed_distance: contours begin twice 8 pixels from every border, but 32 pixels (side)"),
    ({"side": 4, "seed_distance": 1}, "side: 4 pixels have no room for two contours, nearest: 5"),
    ({"margins": [0]}, "margins: expected gaps of 1 to 32 pixels, got [0]"),
    ({"margins": []}, "margins: expected gaps of 1 to 32 pixels, got []"),
    ({"paddle_thickness": 0.3}, "paddle_thickness: 0.3 is not a whole number of pixels drawn 2 times finer"),
    ({"frame": 16}, "frame: 16 leaves nothing of 32 pixels, nearest: 15"),
    ({"marker_radius": 10.5}, "marker_radius: 10.5 is more than dashes of 2 pixels leave room for, nearest: 10"),
    ({"contour_length": 1}, "data.contour_length: expected at least 2"),
    (
        {"contour_length": 60},
        "contour_length: two contours of 60 dashes and their margins take more than 32 x 32 pixels",
    ),
    ({"distractor_dashes": 99_999}, "data.distractor_dashes: expected at most 1000, got 99999"),
    ({"samples": 10**12}, "data.samples: expected at most 10000000, got 1000000000000"),
    ({"val_samples": 10**12}, "data.val_samples: expected at most 10000000"),
]


def test_settings_that_cannot_be_are_refused(tmp_path):
    for settings, message in IMPOSSIBLE_EXPRESSIONS:
        assert message in refusal(prepared, tmp_path, "listops", **settings)
    for settings, message in IMPOSSIBLE_IMAGES:
        assert message in refusal(prepared, tmp_path, "pathfinder", **settings)


def test_expressions_that_hardly_ever_are_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(data.lra.listops, "TRIES", 50)
    rare = {"max_depth": 3, "max_args": 10, "min_length": 120, "max_length": 125, "length": 128, "samples": 1}
    said = refusal(prepared, tmp_path, "listops", **rare)
    assert "data.min_length: of 50 expressions none had more than 120 and fewer than 125" in said


BAD_LINES = {
    "[MAX 1 2 ]": "expected an expression, a tab and its value 0 to 9",
    "[MAX 1 2 ]\t10": "expected an expression, a tab and its value 0 to 9",
    "[MAX 1 2\t2": "1 brackets are never closed",
    "1 ]\t1": "token 2 is a ']' that closes nothing",
    "[MAX ]\t1": "the operator that token 2 closes has no arguments",
    "1 2\t1": "expected one expression, found 2",
    "\t1": "expected one expression, found 0",
    "[FIRST 1 2 ]\t1": "'[FIRST' is not a token of ListOps",
    "<unk> 1 2 ]\t1": "'<unk>' is not a token of ListOps",
    "[MAX 1 <eos> ]\t1": "'<eos>' is not a token of ListOps",
    "[MAX 1 2 ]\t1": "the expression's value is 2, its label 1",
    "[MAX 1 2 3 4 5 6 7 8 ]\t8": "10 tokens and the end token, data.length is 10",
}


def test_what_is_malformed_is_named_with_its_file_and_line(tmp_path, capsys):
    good = "[MAX 1 2 ]\t2"
    path = listops_files(tmp_path, good)
    val = tmp_path / "basic_val.tsv"
    for line, message in BAD_LINES.items():
        listops_files(tmp_path, good, val=[good, line])
        assert f"{val}, line 3: {message}" in refusal(prepared, tmp_path, "listops", path=path, length=10)
    listops_files(tmp_path, good, val=[])
    line = refuse(capsys, "prepare", recipe(tmp_path, name="listops", path=path, length=10))
    assert f"{val}: no samples, none is left for val" in line
    assert not list((tmp_path / "made").glob("*partial"))
    listops_files(tmp_path, good, header=good)
    said = refusal(prepared, tmp_path, "listops", path=path, length=10)
    train = tmp_path / "basic_train.tsv"
    assert f"{train}, line 1: expected the header 'Source\\tTarget', got '[MAX 1 2 ]" in said
    val.unlink()
    said = refusal(prepared, tmp_path, "listops", path=path)
    assert f"no file {val}; data.path must be a folder with basic_train.tsv" in said


def test_files_are_read_whole_and_lines_counted_however_they_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "SHARD", 50)
    rows = [f"[SM {i % 10} {i // 10} ]\t{(i % 10 + i // 10) % 10}" for i in range(60)]
    path = listops_files(tmp_path, *rows)
    splits = prepared(tmp_path, "listops", path=path, length=16).build()
    assert [words(ids[:-1]) for ids in tokens_of(splits.train)] == [row.partition("\t")[0] for row in rows]
    listops_files(tmp_path, *rows, val=[*rows, "[MAX 1"])
    refused(r"basic_val.tsv, line 62: expected an expression", prepared, tmp_path, "listops", path=path, length=16)
    rows[33] = "[MAX 1 2 ]\t3"
    listops_files(tmp_path, *rows, "")
    said = r"basic_train.tsv, line 35: the expression's value is 2, its label 3"
    refused(said, prepared, tmp_path, "listops", path=path, length=16)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data on this machine")
def test_our_values_are_those_of_a_published_file(tmp_path):
    source = prepared(tmp_path, "listops", path=SHARED / "lra/listops_d20s")  # checks every label
    assert "5,970 train, 500 val, 500 test" in source.check()


# documents


REVIEWS = [{"text": "Bad.", "label": 0}, {"text": 'Gööd, a "joy"\tyes', "label": 1}, {"text": "", "label": 0}]


def reviews(folder, **splits):
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_reviews_are_read_by_byte(tmp_path):
    path = reviews(tmp_path, train=REVIEWS, test=REVIEWS[:1])
    splits = prepared(tmp_path, "imdb", path=path, length=12).build()
    for row, sample in zip(REVIEWS, samples_of(splits.train), strict=True):
        *ids, end = sample["tokens"].tolist()
        assert bytes(j - 3 for j in ids) == row["text"].encode()[:11]
        assert end == END and sample["label"] == row["label"]
    assert splits.info == SequenceInfo(2, 12, 259)
    assert counts(splits)[1:] == [1, None], "the test documents validate, as in S5"
    own = reviews(tmp_path, val=REVIEWS[:2])
    splits = prepared(tmp_path, "imdb", path=own, length=12).build()
    assert counts(splits) == [3, 2, 1]


def test_reviews_by_character_leave_rare_ones_out(tmp_path):
    path = reviews(tmp_path, train=[{"text": "abba", "label": 0}, {"text": "abcc", "label": 1}], test=REVIEWS[:1])
    source = prepared(tmp_path, "imdb", path=path, length=4, tokenizer="characters", min_count=2)
    splits = source.build()
    assert splits.info.vocabulary == 3 + 2, "what is cut off does not count"
    assert tokens_of(splits.train) == [[3, 4, 4, END], [3, 4, UNKNOWN, END]]
    (tmp_path / "new.txt").write_text("bz")
    assert source.load(str(tmp_path / "new.txt"), splits.info)["tokens"].tolist() == [4, UNKNOWN, END]
    assert source.published() is None


def test_ids_of_different_characters_are_distinguished(tmp_path):
    """The two data sets have equally many characters, so their number does not distinguish them."""
    infos = []
    for text in ("abab", "acac"):
        path = reviews(tmp_path / text, train=[{"text": text, "label": 0}], test=REVIEWS[:1])
        infos.append(prepared(tmp_path, "imdb", path=path, tokenizer="characters", min_count=2, length=8).build().info)
    one, other = infos
    assert one.vocabulary == other.vocabulary
    assert not one.shares_heads(other.to_dict())
    one.check_transfer("a run", one.to_dict())
    assert "other characters" in refusal(one.check_transfer, "a run", other.to_dict())
    assert "alphabet was" in refusal(one.check_same, "a run", other.to_dict())


def test_a_share_of_the_reviews_may_validate(tmp_path):
    path = reviews(tmp_path, train=[{"text": str(i), "label": 0} for i in range(20)], test=REVIEWS)
    splits = prepared(tmp_path, "imdb", path=path, val_split=0.25).build()
    assert counts(splits) == [15, 5, 3]
    assert not any(tokens in tokens_of(splits.val) for tokens in tokens_of(splits.train))
    (tmp_path / "test.jsonl").unlink()
    splits = prepared(tmp_path, "imdb", path=path, val_split=0.25).build()
    assert counts(splits) == [15, 5, None]
    few = prepared(tmp_path, "imdb", path=reviews(tmp_path, train=REVIEWS, test=REVIEWS), val_split=0.1)
    refused(r"too few samples in .*, none is left for val", few.build)


def test_reviews_without_a_split_are_refused(tmp_path):
    for split in ("train", "unsupervised"):
        datasets.Dataset.from_list(REVIEWS * 9).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    path = tmp_path
    assert "no test.jsonl in" in refusal(prepared, tmp_path, "imdb", path=path)
    assert len(prepared(tmp_path, "imdb", path=path, val_split=0.5).build().train) > 9
    reviews(tmp_path, train=REVIEWS * 9, val=REVIEWS)
    both = prepared(tmp_path, "imdb", path=path, val_split=0.5)
    assert "data.val_split: data set 'imdb' already has validation documents" in refusal(both.build)


def test_a_table_is_read_as_lines_are(tmp_path):
    table = tmp_path / "table"
    table.mkdir()
    path = reviews(tmp_path / "lines", train=REVIEWS, test=REVIEWS)
    for split in ("train", "test"):
        datasets.Dataset.from_list(REVIEWS).to_parquet(table / f"{split}.parquet")
    for tokenizer in ("bytes", "characters"):
        how = {"length": 12, "tokenizer": tokenizer, "min_count": 1}
        one = prepared(tmp_path, "imdb", path=path, **how)
        two = prepared(tmp_path, "imdb", path=table, **how)
        assert one.folder != two.folder
        assert checksums(one) == checksums(two)


PAIR = "{}\tA-1\tB-2\t{}\t{}"
BAD_REVIEWS = {
    "{no": "not JSON (",
    "[" * 100_000: "not JSON (",
    '{"text": "a", "label": -1}': "expected a text and a label 0 or 1, got",
    '{"text": 3, "label": 1}': "expected a text and a label 0 or 1, got",
    '["text", 1]': "expected a text and a label 0 or 1, got",
}
BAD_PAIRS = {
    "1\tA-1\tB-2\tonly one": "expected label, two names and two documents separated by tabs, got 4 columns",
    PAIR.format(1, "a", " "): "incomplete pair, the second document is empty",
    PAIR.format(1, "", "b"): "incomplete pair, the first document is empty",
    PAIR.format(1, "b'a'", "b''"): "incomplete pair, the second document is empty",
    "\t\t\t\t": "incomplete pair, the first document is empty",
    PAIR.format(2, "a", "b"): "expected label 0 or 1, got '2'",
}


def pairs(folder, *rows):
    for name in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def test_a_bad_row_is_named_with_its_file_and_line(tmp_path):
    path = reviews(tmp_path, train=REVIEWS)
    for row, message in BAD_REVIEWS.items():
        (tmp_path / "test.jsonl").write_text(f"{json.dumps(REVIEWS[0])}\n\n{row}\n")
        said = refusal(prepared, tmp_path, "imdb", path=path)
        assert f"{tmp_path / 'test.jsonl'}, line 3: {message}" in said
    good = PAIR.format("0.0", "a", "b")
    pairs(tmp_path, good)
    last = tmp_path / "new_aan_pairs.test.tsv"
    for row, message in BAD_PAIRS.items():
        last.write_text(f"{good}\n\n{row}\n")
        assert f"{last}, line 3: {message}" in refusal(prepared, tmp_path, "aan", path=path)


def test_pairs_are_two_rows_of_one_length(tmp_path):
    texts = [("one", '"two'), ("b'x\"", "y" * 99)]  # quotation marks are text
    path = pairs(tmp_path, *(PAIR.format(f"{i}.0", *pair) for i, pair in enumerate(texts)))
    source = prepared(tmp_path, "aan", path=path, length=80, pad="batch")
    splits = source.build()
    assert splits.info == SequenceInfo(2, 80, 259, parts=2)
    assert counts(splits) == [2, 2, 2]
    for pair, sample in zip(texts, samples_of(splits.train), strict=True):
        for name, text in zip(("tokens", "second"), pair):
            assert bytes(j - 3 for j in sample[name][:-1].tolist()).decode() == text[:79]
    batch = splits.train.batch([0, 1], "cpu")
    assert batch["tokens"].shape == batch["segments"].shape == (2, 2, 80)
    assert batch["label"].tolist() == [0, 1]
    assert (batch["segments"] == 0).sum(-1).tolist() == [[4, 5], [5, 80]]
    assert splits.train.batch([0], "cpu")["tokens"].shape == (1, 2, 20)
    file = tmp_path / "pair.txt"
    file.write_text("one\ttwo")
    assert source.collate([source.load(str(file), splits.info)])["tokens"].shape == (1, 2, 20)
    file.write_text("one")
    assert "expected two documents separated by a tab" in refusal(source.load, str(file), splits.info)


def test_where_documents_come_from_is_said(tmp_path):
    path = tmp_path
    said = refusal(prepared, tmp_path, "aan", path=path)
    assert "no file" in said and "new_aan_pairs.train.tsv" in said
    assert "no train.jsonl in" in refusal(prepared, tmp_path, "imdb", path=path)
    reviews(tmp_path, train=REVIEWS)
    assert "no test.jsonl in" in refusal(prepared, tmp_path, "imdb", path=path)
    (tmp_path / "test.jsonl").write_text("")
    assert "test.jsonl: no rows, the file is empty" in refusal(prepared, tmp_path, "imdb", path=path)
    said = refusal(prepared, tmp_path, "imdb", path="nobody/nothing")
    assert "is not a local file or folder and cannot be loaded from the Hub" in said


# pictures


def parquet(folder, pictures):
    """Write pictures of two classes, in turn, as the splits train and test."""
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"img": pictures, "label": [i % 2 for i in range(len(pictures))]}
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def test_images_are_grey_and_read_row_by_row_or_averaged_over_blocks(tmp_path):
    originals = [picture(i, (32, 32)) for i in range(20)]
    path = parquet(tmp_path, originals)
    splits = prepared(tmp_path, "cifar10_pixels", path=path).build()
    source = prepared(tmp_path, "cifar10_pixels", path=path, side=16)
    small = source.build()
    assert counts(splits) == counts(small) == [18, 2, 20]
    assert (splits.info.classes, splits.info.length, splits.info.vocabulary) == (2, 1024, None)
    assert small.info.length == 256
    for i, (original, whole, half) in enumerate(zip(originals, splits.test, small.test)):
        grey = np.asarray(original.convert("L"))
        assert whole["label"] == i % 2 and whole["pixels"].dtype == torch.uint8
        assert np.array_equal(whole["pixels"], grey.reshape(-1))
        blocks = grey.astype(float).reshape(16, 2, 16, 2).mean((1, 3)).reshape(-1)
        assert np.abs(half["pixels"].numpy() - blocks).max() <= 0.5
    assert splits.train.batch([0, 1], "cpu")["pixels"].shape == (2, 1024)
    originals[0].save(tmp_path / "first.png")
    assert source.load(str(tmp_path / "first.png"), small.info)["pixels"].equal(small.test[0]["pixels"])


def test_images_of_another_size_are_named_or_have_a_folder_of_their_own(tmp_path):
    odd = [picture(i, (32, 32) if i != 3 else (32, 30)) for i in range(6)]
    said = "train row 4: an image of 32 x 30 pixels, expected 32 x 32"
    refused(said, prepared, tmp_path, "cifar10_pixels", path=parquet(tmp_path, odd))
    folders = [lra_set(tmp_path, "cifar10_pixels", path="some/set", side=side).folder for side in (16, 32)]
    assert folders[0] != folders[1]
    drawn = lra_set(tmp_path, "pathfinder").config
    assert "square images: 1000 pixels, nearest: 1024" in refusal(drawn.resized, 1000)
    refused(r"of 8 x 8 pixels: seed_distance: .* nearest: 1", drawn.resized, 64)


def test_cifars_place_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LION_DATA", f"{tmp_path}/nowhere")
    line = refuse(capsys, "prepare", recipe(tmp_path, name="cifar10_pixels"))
    assert "cifar-10-batches-py" in line
    assert "data.download=true downloads it" in line


def test_what_is_fetched_is_made_once(tmp_path, monkeypatch):
    """The folder's name depends on torchvision's files, which the first `prepare` downloads."""
    monkeypatch.setenv("LION_DATA", f"{tmp_path}/data")

    def fetch(self):
        held = tmp_path / "data/cifar10" / self.base_folder
        if held.exists():
            return
        held.mkdir(parents=True)
        for names, count in ((self.train_list, 4), (self.test_list, 2)):
            pixels = np.zeros((count, 3 * 32 * 32), np.uint8)
            for name, _ in names:
                (held / name).write_bytes(pickle.dumps({"data": pixels, "labels": list(range(count))}))
        (held / self.meta["filename"]).write_bytes(pickle.dumps({self.meta["key"]: list("abcdefghij")}))

    monkeypatch.setattr(CIFAR10, "download", fetch)
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    folders = [prepared(tmp_path, "cifar10_pixels", download=True).folder for _ in range(2)]
    assert folders[0] == folders[1]
    assert [path for path in (tmp_path / "made").iterdir() if path.is_dir()] == folders[:1]


# Pathfinder


def keys_of(count, seed=0):
    return np.array([derive(seed, "train", i) for i in range(count)])


def look(**settings):
    return build(PathfinderConfig, settings, source=str).contours()


def places_of(start, table):
    """Return the rows and columns of dashes, (B, 2, dashes, 2)."""
    return np.stack([start // table.width, start % table.width], -1) - table.border


@pytest.mark.slow
def test_an_image_depends_on_its_key_alone(monkeypatch):
    small = {"side": 40, "seed_distance": 8, "paddle_length": 3, "contour_length": 4}
    contours = build(PathXConfig, small, source=str).contours()
    assert contours.margins == (2, 3)
    pictures, labels = draw(contours, keys_of(12))
    monkeypatch.setattr(drawing, "SLOTS", 7)
    again, same = draw(contours, keys_of(12)[[7, 2, 5]])
    assert (again == pictures[[7, 2, 5]]).all() and (same == labels[[7, 2, 5]]).all()
    assert len({picture.tobytes() for picture in pictures}) == 12


@pytest.mark.slow
def test_the_discs_stand_at_the_ends_that_the_label_says():
    contours = look(contrast=0.4, distractors=0, marker_radius=1.0)  # the discs are the brightest pixels
    table, keys = dashes(contours.shape), keys_of(40)
    _, start = Targets(contours, table, keys).draw()
    places = places_of(start, table)
    pictures, labels = draw(contours, keys)
    found = []
    for i, (shown, label) in enumerate(zip(pictures, labels)):
        y, x = places[i, :, [0, -1]].T  # (contours, ends)
        first, last = (shown[y, x] == 255).T
        assert first.sum() == last.sum() == 1
        assert (first == last).all() == label
        found.append(first[1])
    assert 10 < labels.sum() < 30 and 10 < sum(found) < 30


def test_dashes_follow_one_another_and_touch_no_others():
    contours = look()
    table, keys = dashes(contours.shape), keys_of(20)
    dash, start = Targets(contours, table, keys).draw()
    places = places_of(start, table)
    assert (places >= 0).all() and (places < 32).all()
    steps = np.linalg.norm(np.diff(places, axis=2), axis=-1)[:, :, 1:]
    length, margin = contours.shape.length, contours.shape.margin
    assert steps.max() <= 2 * length + 3 * margin + 2 and steps.min() > 1
    for i in range(len(keys)):
        rooms = np.zeros((2, contours.length, table.width**2), int)
        for place in np.ndindex(rooms.shape[:2]):
            which = dash[i][place]
            rooms[place][start[i][place] + table.room.cells[which]] = table.room.values[which]
        for contour, number in np.ndindex(2, contours.length - 2):  # a dash may touch the one before it alone
            own = rooms[contour, : number + 1].max(0)
            assert (own + rooms[contour, number + 2]).max() < TOUCH
        assert (rooms[0, :-1].max(0) + rooms[1, -1]).max() < TOUCH


def test_dashes_begin_at_the_center_of_their_drawing():
    shape = look().shape._replace(thickness=0.0)  # one pixel of the fine scale
    for angle in (0.0, np.pi / 2):
        drawn = pathfinder_dashes.line(angle, shape.length, shape)
        opposite = pathfinder_dashes.line(angle + np.pi, shape.length, shape)
        assert (drawn > 0).sum() == shape.length * shape.scale + 1
        assert np.array_equal(opposite, drawn[::-1, ::-1])


@pytest.mark.slow
def test_images_look_as_published():
    contours = look()
    pictures, labels = draw(contours, keys_of(100))
    assert pictures.shape == (100, 32, 32) and pictures.dtype == np.uint8
    assert (pictures.max((1, 2)) == 255).all()
    assert abs(labels.mean() - 0.5) < 0.2
    table = dashes(contours.shape)
    targets = Targets(contours, table, keys_of(100)).draw()
    canvas = Canvas(contours, table, Chance(keys_of(100), 1), np.arange(100), *targets)
    canvas.draw_distractors()
    count = canvas.count[:, 2:]
    assert set(np.unique(count)) == {0, 4}
    assert count.shape[1] == 5 and (count > 0).mean() > 0.5
    _, label = canvas.render()
    assert (label == labels).all()
    large = build(PathXConfig, {}, source=str).contours()
    assert (large.distractors, large.distractor_length, large.length, large.shape.side) == (8, 4, 14, 128)


@pytest.mark.slow
def test_the_largest_discs_stay_in_their_images():
    """An image drawn alone equals the same image drawn with others."""
    keys, contours = keys_of(6), look(marker_radius=10.0)
    together, _ = draw(contours, keys)
    for key, drawn in zip(keys, together):
        assert np.array_equal(draw(contours, key[None])[0][0], drawn)


def test_contours_without_room_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "MAX_ATTEMPTS", 2000)
    said = refusal(prepared, tmp_path, "pathfinder", **{**SMALL, "contour_length": 12})
    assert "no room in 16 x 16 pixels for two contours of 12 dashes" in said
    assert "data.margins" in said
    before_any_part = lra_set(tmp_path, "pathfinder", contour_length=40).source
    assert "no room in 32 x 32 pixels for two contours of 40 dashes" in refusal(before_any_part)


def lra_folder(root, name, rows, *, binary=False):
    """Write files in the format of the published generator; return the metadata file."""
    (root / name / "metadata").mkdir(parents=True)
    (root / name / "imgs/0").mkdir(parents=True)
    table = []
    for number, label in rows:
        file = root / name / f"imgs/0/sample_{number}.png"
        picture(number, (32, 32), "L").save(file)
        table.append(["imgs/0", file.name, str(number), str(label), "1.0", "14", "4", "2", "0.5", "1", "1"])
    path = root / name / "metadata/0.npy"
    if binary:
        np.save(path, np.array(table))
    else:
        path.write_text("".join(" ".join(row) + "\n" for row in table))
    return path


@pytest.mark.parametrize("binary", [False, True])
def test_lras_images_are_read_from_the_folder_of_the_task(tmp_path, binary, caplog):
    caplog.set_level(logging.INFO, "lion")
    root = tmp_path / "pathfinder32"
    rows = [(i, i % 2) for i in range(40)]
    lra_folder(root, "curv_contour_length_14", rows, binary=binary)
    lra_folder(root, "curv_baseline", [(100 + i, 1) for i in range(3)] + [(172, 0)])
    (root / "curv_baseline/imgs/0/sample_172.png").write_bytes(b"")  # as in the LRA release
    for path in (tmp_path, root, root / "curv_contour_length_14"):
        splits = prepared(tmp_path, "pathfinder", path=path).build()
        assert counts(splits) == [32, 4, 4]
    samples = [sample for part in splits[:3] for sample in samples_of(part)]
    whole = {sample["pixels"].numpy().tobytes(): sample["label"] for sample in samples}
    assert whole == {np.asarray(picture(i, (32, 32), "L")).tobytes(): label for i, label in rows}
    easy = prepared(tmp_path, "pathfinder", path=root, contour_length=6)
    assert easy.manifest()["samples"] == {"train": 3}
    assert "sample_172.png: skipped, the file is known to be empty" in caplog.text
    assert not is_empty(root / "curv_baseline/imgs/0/sample_17.png")


def test_an_image_that_is_listed_twice_counts_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lion")
    root = tmp_path / "pathfinder32"
    path = lra_folder(root, "curv_contour_length_14", [(i, i % 2) for i in range(20)])
    listed = path.read_text()
    path.write_text(listed + listed)
    path.with_name("1.npy").write_text(listed)
    source = prepared(tmp_path, "pathfinder", path=root)
    assert source.manifest()["samples"] == {"train": 20}
    assert "40 repeated entries of images are ignored" in caplog.text


def test_bad_images_and_metadata_are_named(tmp_path):
    root = tmp_path / "pathfinder32"
    path = lra_folder(root, "curv_contour_length_14", [(i, 0) for i in range(12)])
    third = path.parent.parent / "imgs/0/sample_2.png"

    def said(**settings):
        return refusal(prepared, tmp_path, "pathfinder", path=root, **settings)

    picture(0, (64, 64), "L").save(third)
    assert f"{third}: an image of 64 x 64 pixels, expected 32 x 32" in said()
    third.write_bytes(b"")
    assert f"{third}: not a readable image" in said()
    third.unlink()
    assert f"{third}: no such file" in said()
    for text, message in {
        "imgs/0 sample_0.png 0 0\nimgs/0 sample_1.png\n": f"{path}, row 2: expected folder, file, number and label 0",
        "": "there are no samples",
        f"{tmp_path} sample_0.png 0 0\n": "lies outside of",
        "../imgs sample_0.png 0 0\n": "lies outside of",
        "imgs ../../../sample_0.png 0 0\n": "lies outside of",
        "imgs/0 sample_0.png 0 0\nimgs/./0 sample_0.png 0 1\n": "its metadata list both labels 0 and 1",
    }.items():
        path.write_text(text)
        assert message in said()
    for broken in (b"\x93NUMPY", b"\xff\xfe"):
        path.write_bytes(broken)
        assert f"{path}: not a metadata file (" in said()
    none = said(contour_length=9)
    assert "no folder" in none and "curv_contour_length_9" in none
    assert "LRA's images have 6, 9, 14 dashes" in said(contour_length=10)
    shutil.rmtree(root)
    assert "no folder" in said()


# Labels that can be learned


def striped(labels):
    """Return a split of noisy images with stripes, whose direction is the class of the image; its rows are shuffled."""
    rng = np.random.default_rng(0)
    classes = np.arange(len(labels)) % 2
    pixels = rng.integers(0, 100, (len(labels), 16, 16), np.uint8)
    pixels[classes == 0, ::4] += 150
    pixels[classes == 1, :, ::4] += 150
    arrays = {"pixels": pixels.reshape(-1, 256), "label": labels}
    return Sequences(arrays, Collate(256), rng.permutation(len(labels)))


@pytest.mark.slow
def test_a_small_network_learns_each_half_of_the_images_alike():
    """Half of a published Path-X could not be learned; random labels in one half reproduce this."""
    info, labels = SequenceInfo(2, 256), np.arange(600, dtype=np.uint8) % 2
    val = striped(labels[:200])
    *halves, said = check_labels(Splits(striped(labels), val, None, info), 30).splitlines()
    assert said == "the two networks agree: the labels can be learned"
    for number, line in enumerate(halves, 1):
        assert line.startswith(f"network trained on half {number}: accuracy ")
        assert min(map(float, re.findall(r"\d+\.\d+", line))) > 90
    labels[300:] = np.random.default_rng(0).integers(0, 2, 300)
    broken = Splits(striped(labels), val, None, info)
    assert "the labels of one half cannot be learned" in check_labels(broken, 30)
    assert "at chance after 1 steps" in check_labels(broken, 1)


def test_two_networks_differ_by_ten_points_or_are_at_chance():
    differs = "the accuracies differ by 10.0 points: the labels of one half cannot be learned"
    assert verdict([(80, 75), (90, 75)], 50, 9) == verdict([(80, 75), (80, 65)], 50, 9) == differs
    assert verdict([(80, 75), (89, 84)], 50, 9).startswith("the two networks agree")
    assert verdict([(99, 51), (99, 59)], 50, 9).startswith("the validation accuracy is at chance after 9 steps")
    assert verdict([(99, 51), (99, 60)], 50, 9).startswith("the two networks agree")


def test_labels_are_checked_after_preparing_and_those_of_texts_are_not(tmp_path, capsys):
    file = recipe(tmp_path, name="pathfinder", **SMALL)
    assert "network trained on half 2: accuracy" in printed(capsys, "prepare", file, "--check-labels", 1)
    file = recipe(tmp_path, name="listops", **SHORT)
    assert "are not images" in refuse(capsys, "prepare", file, "--check-labels", "1")
