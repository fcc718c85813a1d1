"""Splits by the words in names of files and folders."""

import logging
from pathlib import Path

import pytest

from data.splits import by_split, split_of
from tests.helpers import refused

NAMES = {
    "train": "ptb.train.txt Train.txt TRAIN.csv training.txt a_train.jsonl train2017.txt trainSet.tsv "
    "mnist-train.parquet TinyStoriesV2-GPT4-train.txt training/a.txt Training/cat/1.txt wikiTrain.txt x.train "
    "traindata.txt",
    "validation": "ptb.valid.txt Valid.txt val.csv a_dev.jsonl validation.txt wiki.valid.raw dev-clean.txt "
    "val2017/a.txt TinyStoriesV2-GPT4-valid.txt devset.txt train/val.txt VALID.TXT validation-00000-of-00002.parquet",
    "test": "ptb.test.txt Test.txt testing.txt eval.txt seg_test/1.txt t_eval_2.txt test_set/a.txt testData.csv "
    "devtest.txt tst2013.en.txt heldout.txt",
    None: "latest.txt contest.txt interval.txt rain.txt a.txt README.md trainer.txt protested.txt device.txt",
}


@pytest.mark.parametrize("split", NAMES)
def test_a_split_is_a_word_of_a_name(split):
    for name in NAMES[split].split():
        assert split_of(Path(name)) == split, name


def test_names_of_several_splits_are_refused():
    refused(r"train_test.csv: names several splits \(test, train\)", split_of, Path("train_test.csv"))
    assert split_of(Path("train-test-split/test/1.csv")) == "test"


def test_what_files_are_taken_for_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lion")
    files = [Path(name) for name in ("a.txt", "b.txt", "c.txt", "d.txt", "x_test.txt")]
    found = by_split(tmp_path, files)
    assert found == {"train": [tmp_path / file for file in files[:4]], "test": [tmp_path / "x_test.txt"]}
    assert f"{tmp_path}: files by split: train: a.txt, b.txt, c.txt and 1 more; test: x_test.txt" in caplog.text
    caplog.clear()
    assert by_split(tmp_path, files[:4]) == {"train": found["train"]} and not caplog.text
