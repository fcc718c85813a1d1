"""`report` of language models: layouts with the same held-out samples, speed in tokens, several tables, GLUE."""

import json
import re
import statistics

import pytest

from lion.config import ConfigError
from tests.helpers import here, refuse, tiny_recipe
from tools.compose import open_data
from tools.finished import load
from tools.glue.scores import scores_table
from tools.report.runs import group
from tools.report.tables import glue_table, result_table

LAYOUTS = {"packed": "pack: documents", "borderless": "document_mask: false", "padded": "pack: padded"}


def trained(folder, name, layout, *overrides, seed=0, held_out="eval_pack: padded", mixer="lion_s"):
    path = folder / f"{name}{seed}.yaml"
    path.write_text(f"""
task: {{name: masked_lm}}
data: {{name: text, path: {folder / "text.txt"}, root: {folder / "tokens"}, tokenizer: bytes, document: line,
  length: 16, {held_out}, {layout}}}
model: {{mixer: {mixer}, dim: 16, depth: 1, num_heads: 2}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 4, steps: 4, eval_every: 2, log_every: 1, compile: false, device: cpu}}
seed: {seed}
run: {{root: {folder / "runs"}}}
""")
    assert here("train", path, "--no-eval", *overrides) == 0
    return folder / "runs" / path.stem


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train runs of each layout with two seeds."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "text.txt").write_text("\n".join(f"{i} " + "abc def " * (i % 3) for i in range(60)))
    return [trained(folder, name, layout, seed=seed) for name, layout in LAYOUTS.items() for seed in (0, 1)]


def test_layouts_judged_by_the_same_samples_are_rows(runs):
    groups = group([load(str(run)) for run in runs])
    assert list(groups) == ["lion_s borderless", "lion_s packed", "lion_s padded"]
    header, rows = result_table(groups)
    assert header == ["model", "val MLM accuracy %", "val loss", "n", "parameters", "tokens seen", "tokens/s"]
    packed, padded = (dict(zip(header, row)) for row in rows[1:])
    assert packed["tokens seen"] == f"{4 * 4 * 16}" and int(padded["tokens seen"]) < 0.9 * 4 * 4 * 16
    lines = [
        min((json.loads(t) for t in (run / "metrics.jsonl").read_text().splitlines() if '"val"' in t), key=better)
        for run in runs[:2]
    ]
    losses = [line["loss"] for line in lines]
    assert packed["val loss"] == f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"


def better(line):
    """Return a sort key of validations: the best comes first; of equal ones, the later."""
    return -line["accuracy"], -line["step"]


def test_padding_does_not_count_as_speed(runs):
    packed, padded = load(str(runs[0])), load(str(runs[4]))
    share = open_data(padded.recipe).filled()
    assert 0.3 < share < 0.9
    for run, filled in ((packed, 1.0), (padded, share)):
        lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        rates = [line["sequences_per_second"] for line in lines if line["kind"] == "train"]
        assert len(rates) == 4 and run.speed == pytest.approx(statistics.median(rates) * 16 * filled)


def test_layouts_judged_by_their_own_samples_do_not_compare(runs, tmp_path):
    (tmp_path / "text.txt").write_text((runs[0].parents[1] / "text.txt").read_text())
    own = [trained(tmp_path, name, layout, held_out="eval_pack: null") for name, layout in LAYOUTS.items()]
    with pytest.raises(ConfigError, match=r"they differ in data\.pack"):
        group([load(str(run)) for run in (own[0], own[2])])


@pytest.mark.slow
def test_several_tables_in_one_report(runs, tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    capsys.readouterr()
    sections = ["--section", "Packing", *runs, "--section", "Pictures", tmp_path / "runs" / "tiny"]
    assert here("report", *sections, "--out", tmp_path, "--name", "both") == 0
    out, text = capsys.readouterr().out, (tmp_path / "both.md").read_text()
    assert text.startswith("# Both: runs at one budget each\n")
    parts = text.split("\n## ")
    assert [part.split("\n")[0] for part in parts[1:3]] == ["Packing", "Pictures"]
    assert "tokens/s" in parts[1]
    assert re.search(r"a document a line, samples of 16 tokens, held out: padded; fingerprint [0-9a-f]{12}\n", parts[1])
    assert "images/s" in parts[2] and "images seen" not in parts[2] and "6 steps in batches of 64" in parts[2]
    assert out.index("Packing") < out.index("tokens/s") < out.index("Pictures") < out.index("images/s")
    rows = json.loads((tmp_path / "both.json").read_text())["rows"]
    assert [row["section"] for row in rows] == ["Packing"] * 6 + ["Pictures"]
    assert rows[0]["beside"].keys() == {"loss"} and rows[0]["speed"] > 0 and [x for x, _ in rows[0]["curve"]] == [2, 4]


@pytest.mark.slow
def test_a_report_can_be_made_again_of_what_it_holds(runs, tmp_path, capsys):
    """Check that rows hold recipe, commit and fingerprint; without runs, the Markdown is rewritten with new notes."""
    assert here("report", *runs, "--name", "masked_lm", "--out", tmp_path) == 0
    held = json.loads((tmp_path / "masked_lm.json").read_text())
    row = held["rows"][0]
    assert row["recipe"]["model.mixer"] == "lion_s" and "data.path" not in row["recipe"]
    assert re.fullmatch("[0-9a-f]{12}", row["data"]) and row["commit"] is not None
    before = (tmp_path / "masked_lm.md").read_text()
    assert "- Made by: `./run.sh" in before and "peak of the learning rate 0.001" in before and "Python 3" in before
    assert str(tmp_path.parent) not in before, "no folder of this machine"
    notes = tmp_path / "notes.md"
    notes.write_text("Read this.")
    assert here("report", "--name", "masked_lm", "--out", tmp_path, "--notes", notes) == 0
    assert (tmp_path / "masked_lm.md").read_text() == before + "\n## Notes\n\nRead this.\n"
    capsys.readouterr()
    assert "expected runs" in refuse(capsys, "report", "--name", "other", "--out", tmp_path)


def test_sections_that_are_none(runs, capsys):
    assert "expected runs, --section TITLE RUN" in refuse(capsys, "report")
    assert "expected a title and runs, got 'Packing' alone" in refuse(capsys, "report", "--section", "Packing")
    twice = ["--section", "A", runs[0], "--section", "A", runs[1]]
    assert "duplicate title 'A'" in refuse(capsys, "report", *twice)


def test_what_glue_has_made_of_runs_stands_below(runs, tmp_path, capsys):
    groups = group([load(str(run)) for run in runs[:2]])
    assert not glue_table(groups)[1]
    scores = [{"cola": (10.0, 20.0), "rte": (50.0, 60.0)}, {"cola": (30.0, 40.0), "rte": (70.0, 80.0)}]
    files = [run / "glue" / "m2_base" / "results.json" for run in runs[:2]]
    for path, held in zip(files, scores):
        path.parent.mkdir(parents=True)
        rows = [
            {"task": task, "seed": i, "lr": lr, "score": x - 1e4 * (lr > 1e-5)}
            for task, some in held.items()
            for lr in (1e-5, 1e-4)  # the better one counts
            for i, x in enumerate(some)
        ]
        path.write_text(json.dumps({"rows": rows, "average_over": "tasks"}))
    header, rows = glue_table(groups)
    assert header == ["model", "fine-tuned as", "cola", "rte", "mean of 2", "n"]
    assert rows == [["lion_s packed", "m2_base", "25.00", "65.00", "45.00", "4"]]
    scores = {"mnli": [80.0], "rte": [50.0]}
    found = scores_table({("a", "m2_base"): [scores], ("a", "cramming"): [scores]})[1]
    assert [row[-2] for row in found] == ["65.00", "70.00, MNLI twice"]  # as its recipe counts numbers
    assert scores_table({("a", "own"): [scores]}, {("a", "own"): {"mnli": 2}})[1][0][-2] == "70.00, MNLI twice"
    assert scores_table({("a", "cramming"): [scores]}, {("a", "cramming"): {"mnli": 1}})[1][0][-2] == "65.00"
    files[1].write_text(json.dumps({"rows": [{"task": "rte", "seed": 0, "lr": 1e-5, "score": 70.0}]}))
    ((*_, n),) = glue_table(groups)[1]
    assert n == "2-3"
    files[0].write_text("{}")
    assert "not a file of ./run.sh glue" in refuse(capsys, "report", runs[0], "--out", tmp_path)
    for path in files:
        path.unlink()


def test_a_run_limited_by_time_reports_its_tokens(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(f"{i} " + "abc def " * (i % 3) for i in range(60)))
    growing = ("trainer.time=0.002min", "trainer.batch_ramp=60%", "trainer.batch_start=2")
    run = trained(tmp_path, "timed", LAYOUTS["packed"], *growing)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    held = load(str(run))
    assert held.seen == 16 * last["samples"] and held.curve[-1][0] == last["step"]
    assert here("report", run, "--out", tmp_path, "--name", "timed") == 0
    assert "0.002min of training in batches of 2 to 4, reached after 60%" in (tmp_path / "timed.md").read_text()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace(f'"seconds": {last["seconds"]}', '"seconds": 0.01'))
    with pytest.raises(ConfigError, match=r"stopped at step \d+, finish its training first"):
        load(str(run))
