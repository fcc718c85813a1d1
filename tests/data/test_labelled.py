"""Tests of labelled texts of one's own: files, columns, classes and splits that are detected or set; invalid input."""

import csv
import json
import re

import pytest
import torch

from data.text.corpus import open_corpus
from data.text.tokenizers import open_tokenizer
from tests.helpers import assert_in, column, printed, refusal, refuse, refused

from .helpers import counts, opened

ROWS = [{"text": f"{'good' if i % 3 else 'bad'} word{i}", "label": "yes" if i % 3 else "no"} for i in range(30)]


def labelled(path, **settings):
    return opened("labelled_text", **{"path": path, "tokenizer": "bytes", "length": 32, **settings})


def write(path, rows):
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path, rows, names):
    """Write texts and numbers of classes as the Hub has them, with the names of the classes, if there are any."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)


def of_labels(path, labels, **settings):
    """Write rows with these labels, and return the data set."""
    return labelled(write(path, [{"text": "x", "label": label} for label in labels]), **settings)


def texts_of(split):
    tokenizer = open_tokenizer("bytes")
    return [tokenizer.decode(split.sample(i).ids.tolist()) for i in range(len(split))]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_folder_of_splits(tmp_path, suffix):
    write(tmp_path / f"train{suffix}", ROWS)
    write(tmp_path / f"dev{suffix}", ROWS[:4])
    write(tmp_path / f"test{suffix}", ROWS[4:10])
    splits = labelled(tmp_path).build()
    assert splits.info.classes == ("no", "yes") and counts(splits) == [30, 4, 6]
    assert texts_of(splits.val) == [f"[CLS]{row['text']}[SEP]" for row in ROWS[:4]]
    assert splits.train.labels.tolist() == [int(i % 3 > 0) for i in range(30)]
    again = labelled(tmp_path).build()
    assert splits.fingerprint == again.fingerprint
    write(tmp_path / f"test{suffix}", ROWS[4:9])
    assert labelled(tmp_path).build().fingerprint != splits.fingerprint


def test_rows_are_held_out_of_a_single_file(tmp_path, caplog):
    file = write(tmp_path / "reviews.csv", ROWS)
    splits = labelled(file, val_split=0.2).build()
    assert not caplog.text
    held, kept = texts_of(splits.val), texts_of(splits.train)
    assert counts(splits) == [24, 6, None]
    assert sorted([*held, *kept]) == sorted(f"[CLS]{row['text']}[SEP]" for row in ROWS)
    assert held == texts_of(labelled(file, val_split=0.2, length=64).build().val)
    blank = [{**ROWS[0], "text": text} for text in ("", " ")]
    labelled(write(tmp_path / "reviews.csv", blank * 5 + ROWS), val_split=0.5).build()
    first, second = re.findall(r"reviews.csv: (\d+) of 20 rows have an empty text", caplog.text)
    assert int(first) + int(second) == 10


def test_pairs_numbers_and_columns(tmp_path):
    pairs = [{"id": str(i), "premise": "a", "hypothesis": f"b{i}", "label": i % 3} for i in range(12)]
    splits = labelled(write(tmp_path / "pairs.jsonl", pairs)).build()
    assert splits.info.classes == ("0", "1", "2") and texts_of(splits.train)[0].startswith("[CLS]a[SEP]b")
    numbers = [{"title": "x", "body": f"y{i}", "target": i / 4} for i in range(12)]
    file = write(tmp_path / "numbers.csv", numbers)
    splits = labelled(file, text_columns=["body", "title"]).build()
    assert splits.info.classes == () and splits.train.labels.dtype == torch.float32
    assert texts_of(splits.train)[0].endswith("[SEP]x[SEP]")
    assert of_labels(tmp_path / "words.csv", ["NA", "None"] * 6).build().info.classes == ("NA", "None")
    years = range(2000, 2011)
    assert of_labels(tmp_path / "years.csv", [*years] * 3).build().info.classes == tuple(map(str, years))


def test_what_is_refused_is_named(tmp_path):
    def check(message, path, **settings):
        assert message in refusal(lambda: labelled(path, **settings).build())

    file = write(tmp_path / "train.csv", ROWS)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "none").mkdir()
    check("no file or folder", tmp_path / "nosuch")
    check("ends with .txt, expected one of .jsonl, .json", tmp_path / "notes.txt")
    check("no file train.csv in", tmp_path / "none")
    check("text_columns: expected one or two columns", file, text_columns=["a", "b", "c"])
    check("no column 'txt', did you mean 'text'", file, text_columns=["txt"])
    check("no column 'labl', did you mean 'label'", file, label_column="labl")
    check("val_split: 0.01 of 30 rows leaves a split empty", file, val_split=0.01)
    other = write(tmp_path / "other.csv", [{"a": "x", "b": "y", "c": f"z{i % 2}"} for i in range(9)])
    check("data.label_column: must be set to one of a, b, c", other)
    check("data.text_columns: must be set to one or two of a, b", other, label_column="c")
    check("has 1 different labels, expected 2 to 1,000", other, label_column="b", text_columns=["a"])
    odd = tmp_path / "odd.csv"
    of_labels(odd, [*"yyyy", "", *"yyyy"])
    check("row 5: data.label_column: 'label' holds '', expected classes or numbers", odd)
    of_labels(odd, [f"l{i}" for i in range(1001)])
    check("has 1,001 different labels", odd)
    of_labels(tmp_path / "validation.csv", ["maybe"])
    check("row 1: label: 'maybe' is not a label of the training rows", tmp_path)
    (tmp_path / "validation.csv").write_text("")
    check("validation.csv: no rows, the file is empty", tmp_path)


def test_prepare_reads_the_files(tmp_path, capsys):
    """Check that data which training would refuse are not called ready."""
    name = ("data.name=labelled_text", "data.tokenizer=bytes")
    assert "no file train.csv" in refuse(capsys, "prepare", "texts", *name, f"data.path={tmp_path}")
    write(tmp_path / "train.csv", ROWS)
    out = printed(capsys, "prepare", "texts", *name, f"data.path={tmp_path}")
    assert "27 samples for training, 3 for validation" in out


def test_classes_have_the_names_that_a_set_of_the_hub_gives_them(tmp_path):
    """Check parquet as the Hub has it, with numbers as labels and their names beside them."""
    rows = [{"text": f"word{i}", "label": i % 2} for i in range(30)]
    for names in (["positive", "negative"], None):
        table(tmp_path / "train.parquet", rows, names)
        splits = labelled(tmp_path).build()
        assert splits.info.classes == tuple(names or "01")
        assert splits.train.labels[:4].tolist() == [int(text[9:-5]) % 2 for text in texts_of(splits.train)[:4]]
    table(tmp_path / "train.parquet", rows, ["pos", "neg"])
    table(tmp_path / "validation.parquet", rows, ["neg", "pos"])
    refused(r"classes of column 'label' differ: pos, neg in .* and neg, pos in", labelled(tmp_path).build)


def test_labels_of_several_classes_are_refused_in_one_line(tmp_path):
    for label in ([1, 2], {"a": 1}, None):
        several = of_labels(tmp_path / "several.jsonl", [label] * 9)
        refused(r"'label' holds .*, expected classes or numbers", several.build)
    write(tmp_path / "train.jsonl", ROWS)
    of_labels(tmp_path / "validation.jsonl", [["yes"]])
    refused(r"row 1: label: \['yes'\] is not a label of the training rows", labelled(tmp_path).build)


@pytest.mark.parametrize("column", ["label", "other"])
@pytest.mark.parametrize("numbers", [False, True])
def test_a_test_split_without_labels_is_skipped(tmp_path, caplog, numbers, column):
    write(tmp_path / "train.jsonl", [{**row, "label": 0.5 + i} for i, row in enumerate(ROWS)] if numbers else ROWS)
    write(tmp_path / "test.jsonl", [{"text": "x", column: "hidden" if numbers else -1} for _ in range(3)])
    splits = labelled(tmp_path).build()
    assert counts(splits)[1:] == [3, None]
    assert "test.jsonl: test is skipped, none of its labels is one of the training rows" in caplog.text


def test_a_set_of_the_hub_needs_a_split_for_training(monkeypatch):
    monkeypatch.setattr("data.text.labelled.hub_splits", lambda path, subset: ["validation", "all"])
    refused(r"data.path: 'some/set' has no split 'train', it has validation, all", labelled("some/set").build)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_run_classifies_texts_without_its_data(tmp_path, capsys, pairs):
    """Check a real run: its tokenizer is trained on the training texts and kept, and `predict` needs nothing else."""
    rows, columns, words = ROWS, "text", ["good word7"]
    if pairs:
        rows = [{"premise": row["text"], "hypothesis": "x", "label": row["label"]} for row in ROWS]
        columns, words = "premise, hypothesis", [*words, "x"]
    file = write(tmp_path / "own.csv", rows)
    run = tmp_path / "own"
    small = "model.dim=16 model.depth=1 model.num_heads=2 trainer.compile=false trainer.epochs=1 trainer.batch_size=4"
    small += " data.vocabulary=300 data.length=32"
    where = [f"data.path={file}", f"run.root={tmp_path}", "run.name=own"]
    out = printed(capsys, "train", "text_tiny_lion_s", *where, *small.split())
    assert f"texts: {columns}; label: label" in out
    file.unlink()
    out = printed(capsys, "predict", run, *words, "--eager")
    assert_in(out, "yes", "no")
    assert ("hypothesis" in out) == pairs
    (tmp_path / "review.txt").write_text("good")
    said = refuse(capsys, "predict", run, tmp_path / "review.txt", *words[1:])
    assert "review.txt is a file; this run expects" in said
    if pairs:
        said = refuse(capsys, "predict", run, "good word7")
        assert "'good word7' is incomplete, this run expects premise and hypothesis for each sample" in said


def test_rows_without_a_label_are_left_out(tmp_path, caplog):
    """Check tables with names of classes, in which -1 is no label, as in SNLI."""
    for split, labels in (("train", [0, 1, -1, 1] * 5), ("validation", [0, -1]), ("test", [-1, -1])):
        rows = [{"text": f"{split} {i}", "label": label} for i, label in enumerate(labels)]
        table(tmp_path / f"{split}.parquet", rows, ["no", "yes"])
    caplog.set_level("INFO")
    splits = labelled(tmp_path).build()
    assert splits.info.classes == ("no", "yes") and counts(splits) == [15, 1, None]
    assert "5 rows of train are left out, their label is -1" in caplog.text


def test_cells_of_tables_are_text_and_labels_one_kind(tmp_path):
    """Readers that guess types by chunks find numbers in one part of a column and words in another."""
    file = tmp_path / "own.csv"
    built = of_labels(file, [0, 1] * 6000 + ["unknown"], val_split=0.5).build()
    assert built.info.classes == ("0", "1", "unknown") and len(built.train) + len(built.val) == 12_001
    for labels, numbers in (((".25", "+1.5", "2.", "3"), [0.25, 1.5, 2, 3]), ((" 0.5", " 1", "2 "), [0.5, 1, 2])):
        assert of_labels(file, labels * 9).build().train.labels.unique().tolist() == numbers
    assert of_labels(file, ("7", "007", "9" * 5000) * 20).build().info.classes == ("007", "7", "9" * 5000)
    for labels, missing in (("0.5", "1", "2e-1"), "none"), (("0", "1", "2"), "NA"), (("0", "1", "2"), "nan"):
        mixed = of_labels(file, (*labels, missing), val_split=0.5)
        refused(f"'label' holds '{missing}' among numbers", mixed.build)
    of_labels(tmp_path / "train.csv", [*range(11)] * 4)
    (tmp_path / "validation.jsonl").write_text('{"text": "x", "label": 10}\n')
    built = labelled(tmp_path).build()
    assert built.info.classes == tuple(map(str, range(11))) and built.val.labels.tolist() == [10]


def test_rows_of_tables_have_the_columns_of_the_header(tmp_path):
    file = tmp_path / "own.csv"
    for text, message in {
        b"text,label\nnice,pos\nnice, really,pos\n": "own.csv, line 3: expected 2 columns as in the header, got 3",
        b'text,label\n"never closed,pos\n': "own.csv: not a table of text in UTF-8 (unexpected end of data",
        b"text;label\na;b\n": "own.csv: columns are separated by ';', expected commas",
        b"text,text\na,b\n": "two columns have one name in the header: text, text",
        b"text,label\n\xff,pos\n": "own.csv: not a table of text in UTF-8",
    }.items():
        file.write_bytes(text)
        assert message in refusal(labelled(file).build)
    tabs = tmp_path / "own.tsv"
    tabs.write_text("text\tlabel\n" + '"hi" he said\tpos\n"so bad\tneg\n\n' * 10)
    built = labelled(tabs).build()
    assert len(built.train) + len(built.val) == 20
    assert {'[CLS]"hi" he said[SEP]', '[CLS]"so bad[SEP]'} == set(texts_of(built.train)), "quotes are text"
    assert "data.label_column: 'text' is the text" in refusal(labelled(tabs, label_column="text").build)


def test_files_of_splits_are_known_by_their_words(tmp_path, caplog):
    caplog.set_level("INFO", "lion")
    for name, rows in (("my_Training.csv", ROWS), ("my_dev.csv", ROWS[:4]), ("my_test.csv", ROWS[4:9])):
        write(tmp_path / name, rows)
    write(tmp_path / "other.csv", ROWS)
    splits = labelled(tmp_path).build()
    assert counts(splits) == [30, 4, 5]
    assert "files that name no split are left out: other.csv" in caplog.text
    write(tmp_path / "train.jsonl", ROWS)
    refused(r"my_Training.csv and train.jsonl are both of split train", labelled(tmp_path).build)


def test_labels_are_trimmed_and_missing_ones_refused(tmp_path):
    rows = [dict(row, label=f" {row['label']} ") if i % 2 else row for i, row in enumerate(ROWS)]
    file = write(tmp_path / "train.csv", rows)
    splits = labelled(file).build()
    assert splits.info.classes == ("no", "yes")
    for missing in ("nan", "NULL", " "):
        write(file, [*ROWS, dict(ROWS[0], label=missing)])
        refused(r"row 31: data\.label_column: 'label' holds", labelled(file).build)
    commas = of_labels(file, ["2", "3,5", "4,5"] * 9)
    refused(r"'label' holds '\d,5'; write numbers as \d\.5", commas.build)


def test_text_like_dates_stays_text_and_lists_are_named(tmp_path):
    rows = [dict(row, text=f"2024-01-{i + 1:02}") for i, row in enumerate(ROWS)]
    splits = labelled(write(tmp_path / "a.jsonl", rows)).build()
    assert "[CLS]2024-01-07[SEP]" in texts_of(splits.train) + texts_of(splits.val)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    again = labelled(tmp_path / "a.json").build()
    assert again.fingerprint == splits.fingerprint
    write(tmp_path / "b.jsonl", [dict(row, text=["a", "b"]) for row in ROWS])
    refused(r"b\.jsonl: no column holds text: text holds a list", labelled(tmp_path / "b.jsonl").build)


def test_tables_saved_to_disk_are_loaded(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "dev": table.select(range(4))}).save_to_disk(str(tmp_path / "two"))
    assert len(labelled(tmp_path / "one", val_split=0.2).build().train) == 24
    assert len(labelled(tmp_path / "two").build().val) == 4
    corpus = open_corpus(str(tmp_path / "two"), document="file", column="text", subset=None, split="train")
    assert sorted(corpus.texts()) == sorted(column(ROWS, "text"))
