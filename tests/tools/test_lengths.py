"""Tests of `./run.sh eval RUN --lengths ..`: the same tokens at every length, with metrics computed by hand."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lion.config import ConfigError
from lion.runs import open_run
from lion.samples.seeds import derive
from tests.helpers import here, refuse, tiny_recipe
from tools import lengths
from tools.lengths import HeldOut, Windows

TEXT = "the cat sat on the mat. the dog sat on the log. a hat, a bat; what of that?\n" * 60


def trained(folder, task, mixer):
    file = folder / "text.txt"
    file.write_text(TEXT)
    path, causal = folder / f"{task}_{mixer}.yaml", task == "causal_lm"
    data = "characters, pack: windows, length: 17" if causal else "wordpiece, vocabulary: 300, length: 16"
    positions = "" if causal else ", max_positions: 16"
    path.write_text(f"""
task: {{name: {task}}}
data: {{name: text, path: {file}, tokenizer: {data}, split: tail, val_split: 0.2}}
model: {{mixer: {mixer}, dim: 16, depth: 2, num_heads: 2, init_std: 0.3{positions}}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: 4, eval_every: 4, save_every: 4, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    assert here("train", path, "--no-eval") == 0
    return folder / "runs" / path.stem


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LION_DATA", str(folder / "data"))
        cases = [("causal_lm", "softmax"), ("causal_lm", "lion_s"), ("masked_lm", "lion_s")]
        yield {case: trained(folder, *case) for case in cases}


def rows_of(out):
    return json.loads((out / "extrapolation.json").read_text())["rows"]


def held_out(run):
    found = list((run.parents[1] / "data" / "text").glob("*characters*/val.bin"))
    return np.fromfile(found[0], np.uint16).astype(np.int64)


def test_the_same_tokens_at_every_length():
    text = HeldOut.of(np.arange(100), (4, 8, 16), 1000, 1)
    assert text.count == 96
    judged = {}
    for length in text.lengths:
        windows = Windows(text, length, 0)
        batches = list(windows)
        assert len(batches) == len(windows) and all(b["tokens"].shape == batches[0]["tokens"].shape for b in batches)
        rows = torch.cat([b["tokens"][b["mask"]] for b in batches])
        assert rows.shape == (96 // length, length + 1)
        keys = torch.cat([b["key"][b["mask"]] for b in batches])
        judged[length] = rows[:, 1:].flatten().tolist(), keys.flatten().tolist()
    assert judged[4] == judged[8] == judged[16]
    assert judged[4][0] == list(range(1, 97)) and len(set(judged[4][1])) == 24


def test_what_cannot_be_cut():
    with pytest.raises(ConfigError, match="multiples of the shortest, 4, got 6"):
        HeldOut.of(np.arange(100), (4, 6), 1000, 0)
    with pytest.raises(ConfigError, match=r"at least 128 tokens .*, there are 99"):
        HeldOut.of(np.arange(100), (4, 128), 1000, 1)


def test_perplexity_by_hand(runs, tmp_path, capsys):
    run = runs["causal_lm", "lion_s"]
    assert here("eval", run, "--lengths", "16,64", "--chunk-size", "8", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "trained at 16 tokens" in out and "extrapolation.json" in out
    ids, model, rows = torch.from_numpy(held_out(run)), open_run(run).model, rows_of(tmp_path)
    count = (len(ids) - 1) // 64 * 64
    assert [(r["length"], r["form"], r["chunk_size"]) for r in rows] == [
        (n, *form) for n in (16, 64) for form in (("full", None), ("chunk", 8), ("rnn", 8))
    ]
    for row in rows:
        read, asked = ids[:count].view(-1, row["length"]), ids[1 : count + 1].view(-1, row["length"])
        with torch.inference_mode():
            loss = F.cross_entropy(model(read).flatten(0, 1), asked.flatten()).item()
        assert row["value"] == pytest.approx(math.exp(loss), rel=1e-4) and row["tokens"] == count
        assert row["deviation"] < 1e-4 and row["rate"] > 0


@pytest.mark.slow
def test_texts_are_tables_of_their_own(runs, tmp_path, capsys):
    run, other = runs["causal_lm", "lion_s"], tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    command = ["eval", run, "--lengths", "16", "--tokens", "32", "--form", "full", "--out", tmp_path]
    assert here(*command) == 0 and here(*command, f"data.path={other}") == 0
    assert len({row["fingerprint"] for row in rows_of(tmp_path)}) == 2
    assert (tmp_path / "extrapolation.md").read_text().count("\n## ") == 2
    again = tmp_path / "again" / run.name  # another model of this name
    assert here("train", run.parents[1] / f"{run.name}.yaml", "seed=1", f"run.root={again.parent}", "--no-eval") == 0
    assert here("eval", again, *command[2:]) == 0 and len(rows_of(tmp_path)) == 3


def test_beyond_the_positions_there_is_nothing(runs, tmp_path, capsys):
    assert here("eval", runs["causal_lm", "softmax"], "--lengths", "8,16,32", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "more than the 16 positions" in err
    assert [("value" in row, row["shown"] == "-") for row in rows_of(tmp_path)] == [(True, False)] * 2 + [(False, True)]
    assert next(line for line in out.splitlines() if line.startswith("32")).split() == ["32", "full", *"----"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "extrapolation_causal_lm_softmax.png").read_bytes().startswith(b"\x89PNG")
    assert "| 32 | full | - |" in (tmp_path / "extrapolation.md").read_text()


def test_accuracy_of_a_masked_model(runs, tmp_path):
    run = runs["masked_lm", "lion_s"]
    assert here("eval", run, "--form", "full", "--lengths", "16,32", "--out", tmp_path) == 0
    loaded, (short, long) = open_run(run), rows_of(tmp_path)
    assert (short["metric"], short["trained_at"]) == ("MLM accuracy %", 16)
    file = next((run.parents[1] / "data" / "text").glob("*wordpiece*/val.bin"))
    text = HeldOut.of(np.fromfile(file, np.uint16), (16, 32), 1000, 0)
    for row in (short, long):
        right = asked = 0
        for batch in Windows(text, row["length"], derive(loaded.recipe.seed, "val")):
            with torch.inference_mode():
                hits, count = loaded.task.evaluate(loaded.model, batch).sums["accuracy"]
            right, asked = right + hits.item(), asked + count.item()
        assert row["value"] == pytest.approx(right / asked) and asked > 10


@pytest.mark.slow
def test_the_deviation_is_from_the_first_form_of_a_mixer_without_the_full_form(tmp_path, monkeypatch):
    monkeypatch.setenv("LION_DATA", str(tmp_path / "data"))
    run = trained(tmp_path, "causal_lm", "vim")
    assert here("eval", run, "--lengths", "16,32", "--chunk-size", "8", "--out", tmp_path) == 0
    rows = rows_of(tmp_path)
    assert [(row["length"], row["form"]) for row in rows] == [(n, form) for n in (16, 32) for form in ("chunk", "rnn")]
    assert all(row["deviation"] <= (0 if row["form"] == "chunk" else 1e-4) for row in rows)


@pytest.mark.slow
def test_one_form_of_long_text_is_not_compared_with_the_full_form(runs, monkeypatch):
    measured, measure = [], lengths.measure
    monkeypatch.setattr("lion.evaluation.forms.LONG", 20)
    monkeypatch.setattr(lengths, "measure", lambda *args: measured.append(args[4]) or measure(*args))
    assert here("eval", runs["causal_lm", "lion_s"], "--lengths", "16,32", "--form", "rnn", "--chunk-size", "8") == 0
    assert measured == [[("full", None), ("rnn", 8)], [("chunk", 8), ("rnn", 8)]]


@pytest.mark.slow
def test_lengths_are_of_text(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    capsys.readouterr()
    assert "expected a run on text" in refuse(capsys, "eval", tmp_path / "runs" / "tiny", "--lengths", "16")


def test_the_weights_are_those_asked_for(runs, monkeypatch):
    asked = []
    monkeypatch.setattr("tools.lengths.open_run", lambda run, **how: asked.append(how) or open_run(run))
    call = ["--lengths", "16", "--form", "full", "--ema", "--checkpoint", "last"]
    assert here("eval", runs["causal_lm", "lion_s"], *call) == 0
    assert asked == [{"checkpoint": "last", "ema": True}]
