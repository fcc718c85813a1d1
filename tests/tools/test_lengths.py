"""Tests of `./run.sh eval RUN --lengths ..`: the same tokens at every length, with metrics computed by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lion.files import read_json
from lion.runs import open_run
from lion.samples.seeds import derive
from tests.helpers import column, here, printed, refused, trained
from tools import lengths
from tools.lengths import HeldOut, Windows

TEXT = "the cat sat on the mat. the dog sat on the log. a hat, a bat; what of that?\n" * 60


def small_run(folder, task, mixer):
    file = folder / "text.txt"
    file.write_text(TEXT)
    path = folder / f"{task}_{mixer}.yaml"
    data, positions = "characters, pack: windows, length: 17", ""
    if task == "masked_lm":
        data, positions = "wordpiece, vocabulary: 300, length: 16", ", max_positions: 16"
    path.write_text(f"""
task: {{name: {task}}}
data: {{name: text, path: {file}, root: {folder / "data"}, tokenizer: {data}, split: tail, val_split: 0.2}}
model: {{mixer: {mixer}, dim: 16, depth: 2, num_heads: 2, init_std: 0.3{positions}}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: 4, eval_every: 4, save_every: 4, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    return trained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


@pytest.fixture(scope="module")
def run(folder):
    return small_run(folder, "causal_lm", "lion_s")


def rows_of(out):
    return read_json(out / "extrapolation.json")["rows"]


def held_out(folder, tokenizer):
    (file,) = folder.rglob(f"*{tokenizer}*/val.bin")
    return np.fromfile(file, np.uint16).astype(np.int64)


def test_the_same_tokens_at_every_length():
    text = HeldOut.of(np.arange(100), (4, 8, 16), 1000, 1)
    assert text.count == 96
    judged = []
    for length in text.lengths:
        windows = Windows(text, length, 0)
        batches = list(windows)
        assert len(batches) == len(windows)
        assert len({batch["tokens"].shape for batch in batches}) == 1
        rows = torch.cat([batch["tokens"][batch["mask"]] for batch in batches])
        assert rows.shape == (96 // length, length + 1)
        assert rows[:, 1:].flatten().tolist() == list(range(1, 97))
        judged.append(torch.cat([batch["key"][batch["mask"]] for batch in batches]).flatten())
    first, *others = judged
    assert len(first.unique()) == 24
    for keys in others:
        assert torch.equal(keys, first)


def test_what_cannot_be_cut():
    refused("multiples of the shortest, 4, got 6", HeldOut.of, np.arange(100), (4, 6), 1000, 0)
    refused(r"at least 128 tokens .*, there are 99", HeldOut.of, np.arange(100), (4, 128), 1000, 1)


@pytest.mark.slow
def test_perplexity_by_hand(run, folder, tmp_path, capsys):
    out = printed(capsys, "eval", run, "--lengths", "16,64", "--chunk-size", "8", "--out", tmp_path)
    assert "trained at 16 tokens" in out
    assert "extrapolation.json" in out
    rows = rows_of(tmp_path)
    forms = [("full", None), ("chunk", 8), ("rnn", 8)]
    assert [(r["length"], r["form"], r["chunk_size"]) for r in rows] == [(n, *form) for n in (16, 64) for form in forms]
    ids = torch.from_numpy(held_out(folder, "characters"))
    count = (len(ids) - 1) // 64 * 64
    model = open_run(run).model
    for row in rows:
        read = ids[:count].view(-1, row["length"])
        with torch.inference_mode():
            loss = F.cross_entropy(model(read).flatten(0, 1), ids[1 : count + 1]).item()
        assert row["value"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert row["tokens"] == count
        assert row["deviation"] < 1e-4
        assert row["rate"] > 0


@pytest.mark.slow
def test_texts_are_tables_of_their_own(run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    command = ["--lengths", "16", "--tokens", "32", "--form", "full", "--out", tmp_path]
    assert here("eval", run, *command) == 0
    assert here("eval", run, *command, f"data.path={other}", f"data.root={tmp_path / 'data'}") == 0
    assert len(set(column(rows_of(tmp_path), "fingerprint"))) == 2
    assert (tmp_path / "extrapolation.md").read_text().count("\n## ") == 2
    trained(run.parents[1] / f"{run.name}.yaml", "seed=1", f"run.root={tmp_path}")  # another model of this name
    assert here("eval", tmp_path / run.name, *command) == 0
    assert len(rows_of(tmp_path)) == 3


@pytest.mark.slow
def test_beyond_the_positions_there_is_nothing(folder, tmp_path, capsys):
    run = small_run(folder, "causal_lm", "softmax")
    capsys.readouterr()
    assert here("eval", run, "--lengths", "8,16,32", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "more than the 16 positions" in err
    found = [("value" in row, row["shown"] == "-") for row in rows_of(tmp_path)]
    assert found == [(True, False), (True, False), (False, True)]
    (line,) = (line for line in out.splitlines() if line.startswith("32"))
    assert line.split() == ["32", "full", *"----"]
    assert "| 32 | full | - |" in (tmp_path / "extrapolation.md").read_text()
    pytest.importorskip("matplotlib")
    assert (tmp_path / "extrapolation_causal_lm_softmax.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_accuracy_of_a_masked_model(folder, tmp_path):
    run = small_run(folder, "masked_lm", "lion_s")
    assert here("eval", run, "--form", "full", "--lengths", "16,32", "--out", tmp_path) == 0
    loaded = open_run(run)
    rows = rows_of(tmp_path)
    assert column(rows, "length") == [16, 32]
    assert (rows[0]["metric"], rows[0]["trained_at"]) == ("MLM accuracy %", 16)
    text = HeldOut.of(held_out(folder, "wordpiece"), (16, 32), 1000, 0)
    for row in rows:
        sums = []
        for batch in Windows(text, row["length"], derive(loaded.recipe.seed, "val")):
            with torch.inference_mode():
                sums.append(torch.stack(loaded.task.evaluate(loaded.model, batch).sums["accuracy"]))
        right, asked = sum(sums).tolist()
        assert row["value"] == pytest.approx(right / asked)
        assert asked > 10


@pytest.mark.slow
def test_the_deviation_is_from_the_first_form_of_a_mixer_without_the_full_form(folder, tmp_path):
    run = small_run(folder, "causal_lm", "vim")
    assert here("eval", run, "--lengths", "16,32", "--chunk-size", "8", "--out", tmp_path) == 0
    rows = rows_of(tmp_path)
    assert [(row["length"], row["form"]) for row in rows] == [(n, form) for n in (16, 32) for form in ("chunk", "rnn")]
    for row in rows:
        assert row["deviation"] <= (0 if row["form"] == "chunk" else 1e-4)


@pytest.mark.slow
def test_one_form_of_long_text_is_not_compared_with_the_full_form(run, monkeypatch):
    measured = []
    measure = lengths.measure

    def kept(*args):
        measured.append(args[4])
        return measure(*args)

    monkeypatch.setattr("lion.evaluation.forms.LONG", 20)
    monkeypatch.setattr(lengths, "measure", kept)
    assert here("eval", run, "--lengths", "16,32", "--form", "rnn", "--chunk-size", "8") == 0
    assert measured == [[("full", None), ("rnn", 8)], [("chunk", 8), ("rnn", 8)]]


def test_the_weights_are_those_asked_for(run, weights_asked):
    assert here("eval", run, "--lengths", "16", "--form", "full", "--ema", "--checkpoint", "last") == 0
    assert weights_asked == [{"checkpoint": "last", "ema": True}]
