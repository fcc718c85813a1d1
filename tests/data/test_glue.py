"""Tests of GLUE: samples from local files, truncation of pairs, padding of batches, and invalid input."""

import json
import random
import re

import pytest
import tokenizers.processors
import torch

import data
from data.text.glue import TASKS
from data.text.sequences import cut
from data.text.tokenizers import open_tokenizer
from lion.samples.order import Sequential, Shuffled
from tests.helpers import column, glue_folder, read_lines, refusal, refused
from tools.compose import resolve

from .helpers import opened


def glue(root, task="rte", **settings):
    """Return the data set that a recipe would open; the tokenizer `bytes` also has [CLS] and [SEP]."""
    values = {"task": task, "path": root, "tokenizer": "bytes", "length": 32, **settings}
    return opened("glue", **values)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return glue_folder(tmp_path_factory.mktemp("glue"), TASKS)


def rewrite(root, tmp_path, task, row, number=3, name="train.jsonl"):
    """Copy a task and replace one row, counted from 1."""
    copy = tmp_path / task
    copy.mkdir(exist_ok=True)
    for file in (root / task).iterdir():
        (copy / file.name).write_text(file.read_text())
    lines = (copy / name).read_text().splitlines()
    lines[number - 1] = json.dumps(row) if isinstance(row, dict) else row
    (copy / name).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_read_with_its_columns_and_labels(root, task):
    splits, known = glue(root, task, length=80).build(), TASKS[task]
    rows = read_lines(root / task / "train.jsonl")
    assert len(splits.train) == len(rows) and splits.info.classes == known.classes
    assert splits.train.labels.dtype == (torch.int64 if known.classes else torch.float32)
    assert splits.train.labels.tolist() == pytest.approx(column(rows, "label"))
    tokenizer, (cls, sep) = open_tokenizer("bytes"), (splits.info.id(name) for name in ("cls", "sep"))
    for i in (0, 5):
        ids, types = [cls], [0]
        for number, name in enumerate(known.columns):
            text = [*tokenizer.encode(rows[i][name]), sep]
            ids += text
            types += [number] * len(text)
        sample = splits.train[i]
        left = len(sample["tokens"]) - len(ids)
        assert left >= 0 and sample["tokens"][: len(ids)].tolist() == ids
        assert sample["types"].tolist() == types + [0] * left
        assert sample["segments"].tolist() == [0] * len(ids) + [-1] * left
    assert set(splits.more) == ({"mismatched"} if task == "mnli" else set())
    assert splits.test is None and isinstance(splits.order, Shuffled)


def test_other_samples_have_another_fingerprint(root, tmp_path):
    first, row = glue(root).build().fingerprint, read_lines(root / "rte/train.jsonl")[2]
    assert first == glue(root).build().fingerprint
    for name in ("train.jsonl", "validation.jsonl"):
        changed = rewrite(root, tmp_path, "rte", {**row, "label": 1 - row["label"]}, name=name)
        assert glue(changed).build().fingerprint != first


def test_pairs_are_cut_as_the_tokenizers_library_cuts_them():
    rng = random.Random(0)
    inner = open_tokenizer("bytes").inner
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, inner.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    cases = [(rng.randint(0, 40), rng.randint(0, 40), rng.randint(8, 40)) for _ in range(300)]
    for first, second, length in [*cases, (20, 20, 31), (20, 20, 32), (3, 30, 12), (30, 3, 12)]:
        inner.enable_truncation(length, strategy="longest_first")
        theirs = inner.encode("a" * first, "b" * second)
        kept = [theirs.tokens.count("a"), theirs.tokens.count("b")]
        assert [*cut(first, second, length - 3)] == kept, (first, second, length)


def test_a_cut_pair_keeps_both_ends(root, tmp_path):
    long = {"sentence1": "a" * 50, "sentence2": "b" * 5, "label": 0}
    splits = glue(rewrite(root, tmp_path, "rte", long, 1)).build()
    tokenizer, sample = open_tokenizer("bytes"), splits.train[0]
    assert tokenizer.decode(sample["tokens"].tolist()) == f"[CLS]{'a' * 24}[SEP]{'b' * 5}[SEP]"


def test_batches_are_as_long_as_their_longest_row_in_quarters(root):
    splits = glue(root, "cola", length=64).build()
    lengths = {i: int((splits.train[i]["segments"] == 0).sum()) for i in range(len(splits.train))}
    padded = {i: splits.train.batch([i], "cpu")["tokens"].shape[1] for i in lengths}
    for i, length in lengths.items():
        assert padded[i] == min(64, -(-length // 16) * 16)
    short, long = (choose(padded, key=padded.get) for choose in (min, max))
    assert padded[short] < padded[long]
    both = splits.train.batch([short, long], "cpu")
    assert both["tokens"].shape == (2, padded[long]) and both["label"].shape == (2,)
    whole = glue(root, "cola", length=64, padding="max_length").build().train.batch([0], "cpu")
    assert all(whole[name].shape == (1, 64) for name in ("tokens", "types", "segments"))


def test_the_published_order_is_a_switch(root):
    order = glue(root, shuffle=False).build().order
    assert isinstance(order, Sequential)
    assert order.samples(range(4, 8), size=10, seed=3, epoch=2) == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_other_files(root, tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rte").mkdir()
    for split in ("train", "validation"):
        rows = read_lines(root / f"rte/{split}.jsonl")
        rows[0]["sentence1"] = "None"  # a word, not a missing value
        getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(tmp_path / f"rte/{split}.{kind}")
    splits = glue(tmp_path).build()
    assert len(splits.train) == len(glue(root).build().train)
    assert open_tokenizer("bytes").decode(splits.train[0]["tokens"].tolist()).startswith("[CLS]None[SEP]")


def said_of(path, task="rte", **settings):
    return refusal(glue(path, task, **settings).build)


def test_what_is_refused_is_named_with_its_file_and_row(root, tmp_path):
    row = {"sentence1": "x", "sentence2": "y"}
    for label in (2, -1, 0.5, "entailment", None, True, float("nan")):
        assert "rte/train.jsonl" in said_of(rewrite(root, tmp_path, "rte", {**row, "label": label}))
    said = said_of(rewrite(root, tmp_path, "rte", {**row, "label": 2}))
    assert said == (
        f"{tmp_path}/rte/train.jsonl, row 3: label: 2 is not a label of rte, valid: 0 (entailment), 1 (not_entailment)"
    )
    said = said_of(rewrite(root, tmp_path, "stsb", {**row, "label": 5.5}), "stsb")
    assert said.endswith("row 3: label: 5.5 is not a label of stsb, valid: a number from 0 to 5")
    said = said_of(tmp_path, "mrpc")
    assert "no folder" in said and "has rte, stsb" in said
    line = said_of(rewrite(root, tmp_path, "rte", "{ no json"))
    assert re.search(r"train\.jsonl, line \d+: not JSON, '{ no json' \(Expecting property name", line)
    file = tmp_path / "rte/train.jsonl"
    for text, words in {
        "": "train.jsonl: no rows, the file is empty",
        '{"sentence1": "x", "label": 1}\n': "row 1: no column 'sentence2', did you mean 'sentence1'?",
        '{"sentence1": "x", "sentence2": "y"}\n': "row 1: no column 'label'",
        '{"sentence1": "x", "sentence2": 3, "label": 1}\n': "row 1: sentence2: expected text, got 3",
    }.items():
        file.write_text(text)
        assert words in said_of(tmp_path)
    file.unlink()
    assert "no train.jsonl (or .json, .parquet, .csv, .tsv) in" in said_of(tmp_path)
    nowhere = tmp_path / "nowhere"
    said = said_of(nowhere)
    assert f"no folder {nowhere}/rte" in said and "has no GLUE task" in said
    assert "cannot be loaded from the Hub" in said_of("no/such-set")
    assert "has no token 'cls'" in said_of(root, tokenizer=characters(tmp_path))


def characters(folder):
    """Write a tokenizer without special tokens and return its file."""
    from data.text.tokenizers import make_tokenizer

    path = folder / "tokenizer.json"
    path.write_text(make_tokenizer("characters", ["abc"], 0).inner.to_str())
    return path


def test_published_figures_need_no_files(tmp_path):
    recipe = resolve("glue_mnli", [f"data.path={tmp_path / 'gone'}"])
    info, samples = data.dataset("glue")(recipe.data).published()
    assert samples == 392_702 and info.classes == TASKS["mnli"].classes and info.id("cls") == 101


def test_an_unknown_task(root):
    refused(r"data.task: 'colla' is not a choice, did you mean 'cola'\?", resolve, "glue_cola", ["data.task=colla"])
