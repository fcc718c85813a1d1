"""`bench generate`: built models, counted bytes and the report. Times are not checked."""

from argparse import Namespace

import pytest
import torch

from lion.files import read_json
from lion.inference.text import Continuation
from lion.layers.mixers import SOFTMAX
from tests.helpers import here, refuse
from tools.bench import engine, generate


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure a recipe and softmax, eager, in this process; return the rows and the folder of the report."""
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "in_a_process", lambda measure, job, receive: measure(job, receive))
        command = ["bench", "generate", "shakespeare_char_lion_s", "--lengths", "80,20"]
        assert here(*command, "--batch", 2, "--rounds", 1, "--eager", "--out", out) == 0
    return read_json(out / "generate.json")["rows"], out


@pytest.mark.slow
def test_every_mode_at_every_length(measured):
    rows, out = measured
    modes = [(SOFTMAX, "attention"), (SOFTMAX, "kv"), ("lion_s", "attention"), ("lion_s", "rnn")]
    found = sorted((r["batch"], r["length"], r["mixer"], r["mode"]) for r in rows)
    assert found == sorted((2, n, *mode) for n in (20, 80) for mode in modes)
    for row in rows:
        assert row["ms"] > 0
        assert row["vocabulary"] == 65
        assert row["shape"] == "dim 128, depth 4, 4 heads"
        assert row["growth"] == 1 if row["length"] == 20 else row["growth"] > 0
        assert (row["ratio"] == 1) == (row["mode"] == "kv")
    alone = rows[0] | {"length": 80, "shortest": 80, "growth": 1.0}
    short = [row for row in rows if row["length"] == 20]
    header, cells = generate.GenerateReport(out).tabled([alone, *short])
    column = header.index("x shortest")
    assert {(cell[1], cell[column]) for cell in cells} == {("20", "1.00"), ("80", "-")}


def test_bytes_of_states(measured):
    """Check the bytes for 4 layers and 4 heads of 32 in float32.

    A cache holds keys, values and a mask of every token; a recurrent state holds a matrix and a vector per head.
    """
    for row in measured[0]:
        length = row["length"]
        room = length + generate.FREE_SLOTS
        expected = {
            "attention": 8 * length,
            "kv": 4 * (2 * 4 * 128 * room + length) + 8,
            "rnn": 4 * (4 * (4 * 32 * 32 + 128) + 8) + 8,
        }
        assert row["state_bytes"] == row["batch"] * expected[row["mode"]]
        assert row["peak_bytes"] > 0


def test_the_report(measured):
    rows, out = measured
    text = (out / "generate.md").read_text()
    assert "dim 128, depth 4, 4 heads, vocabulary 65" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| 2 | 80 | lion_s | rnn |"))
    state = {r["mode"]: r["state_bytes"] for r in rows if r["length"] == 80}
    assert line.split(" | ")[8] == generate.digits(state["kv"] / state["rnn"])
    fox = [r | {"mixer": "fox", "state_bytes": 1} for r in rows if r["mode"] == "kv"]  # a cache, not of softmax
    report = generate.GenerateReport(out)
    _, cells = report.tabled([*rows, *fox])
    for row in report.tabled(rows)[1]:
        assert row in cells
    pytest.importorskip("matplotlib")
    assert (out / "generate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mixer, mode", [(SOFTMAX, "kv"), ("lion_s", "rnn")])
def test_what_is_timed_is_what_generation_does(mixer, mode):
    task, config = generate.models([f"shakespeare_char_{mixer}"])[mixer]
    torch.manual_seed(0)
    model = task.build_model(config).double().eval()
    tokens = torch.randint(65, (1, 21))
    job = Namespace(lengths=(8, 20), batch=2)
    text = Continuation.of(model, mode, [tokens[0, :20].tolist()] * 2)
    text.append(tokens[:, 20].expand(2))
    state = generate.states_of(model, tokens[:, :20], job)[20]
    for _ in range(2):  # repeated calls give the same logits
        logits = generate.go_on(model, tokens[:, 20:].expand(2, -1), state)
        torch.testing.assert_close(logits[:, -1], text.logits, rtol=0, atol=1e-10)
    anew = generate.recompute_logits(model, tokens.expand(2, -1))
    torch.testing.assert_close(anew[:, -1], text.logits, rtol=0, atol=1e-10)


def test_what_cannot_be_measured(capsys):
    for recipes, message in {
        "shakespeare_char_lion_s gpt2_small_lion_s": "dim 768, depth 12, 12 heads, vocabulary 50,257; "
        "shakespeare_char_lion_s has dim 128",
        "shakespeare_char_lion_s shakespeare_char_lion_s": "shakespeare_char_lion_s: a second lion_s; omit one",
        "shakespeare_char_lion": "no recipe of that name either: shakespeare_char_lion: no such recipe",
        "quickstart": "does not generate text",
    }.items():
        assert message in refuse(capsys, "bench", "generate", *recipes.split(), "--eager")
