"""`report` of language models: layouts with the same held-out samples, speed in tokens, several tables, GLUE."""

import json
import re
import statistics

import pytest

from lion.files import read_json
from tests.helpers import assert_in, column, here, printed, read_lines, refuse, refused, tiny_recipe, trained
from tools.compose import open_data
from tools.finished import load
from tools.glue.scores import scores_table
from tools.report.runs import group
from tools.report.tables import glue_table, result_table

LAYOUTS = {"packed": "pack: documents", "borderless": "document_mask: false", "padded": "pack: padded"}


def small_run(folder, name, layout, *overrides, held_out="eval_pack: padded"):
    (folder / "text.txt").write_text("\n".join(f"{i} " + "abc def " * (i % 3) for i in range(60)))
    path = folder / f"{name}.yaml"
    path.write_text(f"""
task: {{name: masked_lm}}
data: {{name: text, path: {folder / "text.txt"}, root: {folder / "tokens"}, tokenizer: bytes, document: line,
  length: 16, {held_out}, {layout}}}
model: {{mixer: lion_s, dim: 16, depth: 1, num_heads: 2}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 4, steps: 4, eval_every: 2, log_every: 1, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    return trained(path, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train runs of each layout with two seeds."""
    folder = tmp_path_factory.mktemp("report")
    found = []
    for name, layout in LAYOUTS.items():
        found += [small_run(folder, f"{name}{seed}", layout, f"seed={seed}") for seed in (0, 1)]
    return found


def grouped(runs):
    return group([load(str(run)) for run in runs])


def metrics_of(run, kind):
    return [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == kind]


def goodness(line):
    """Return a sort key of validations: the best comes last; of equal ones, the later."""
    return line["accuracy"], line["step"]


@pytest.mark.slow
def test_layouts_judged_by_the_same_samples_are_rows(runs):
    groups = grouped(runs)
    assert list(groups) == ["lion_s borderless", "lion_s packed", "lion_s padded"]
    header, rows = result_table(groups)
    assert header == ["model", "val MLM accuracy %", "val loss", "n", "parameters", "tokens seen", "tokens/s"]
    packed, padded = (dict(zip(header, row)) for row in rows[1:])
    assert packed["tokens seen"] == f"{4 * 4 * 16}"
    assert int(padded["tokens seen"]) < 0.9 * 4 * 4 * 16
    losses = [max(metrics_of(run, "val"), key=goodness)["loss"] for run in runs[:2]]
    assert packed["val loss"] == f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"


def test_padding_does_not_count_as_speed(runs):
    share = open_data(load(str(runs[4])).recipe).filled()
    assert 0.3 < share < 0.9
    for run, filled in ((runs[0], 1.0), (runs[4], share)):
        rates = column(metrics_of(run, "train"), "sequences_per_second")
        assert len(rates) == 4
        assert load(str(run)).speed == pytest.approx(statistics.median(rates) * 16 * filled)


@pytest.mark.slow
def test_layouts_judged_by_their_own_samples_do_not_compare(tmp_path):
    own = [small_run(tmp_path, name, LAYOUTS[name], held_out="eval_pack: null") for name in ("packed", "padded")]
    refused(r"they differ in data\.pack", grouped, own)


@pytest.mark.slow
def test_several_tables_in_one_report(runs, tmp_path, capsys):
    pytest.importorskip("sklearn")
    sections = ["--section", "Packing", *runs, "--section", "Pictures", trained(tiny_recipe(tmp_path))]
    out = printed(capsys, "report", *sections, "--out", tmp_path, "--name", "both")
    assert out.index("Packing") < out.index("tokens/s") < out.index("Pictures") < out.index("images/s")
    text = (tmp_path / "both.md").read_text()
    assert text.startswith("# Both: runs at one budget each\n")
    _, packing, images, *_ = text.split("\n## ")
    assert packing.startswith("Packing\n")
    assert "tokens/s" in packing
    assert re.search(r"a document a line, samples of 16 tokens, held out: padded; fingerprint [0-9a-f]{12}\n", packing)
    assert images.startswith("Pictures\n")
    assert "images/s" in images
    assert "images seen" not in images
    assert "6 steps in batches of 64" in images
    rows = read_json(tmp_path / "both.json")["rows"]
    assert column(rows, "section") == ["Packing"] * 6 + ["Pictures"]
    assert rows[0]["beside"].keys() == {"loss"}
    assert rows[0]["speed"] > 0
    assert [x for x, _ in rows[0]["curve"]] == [2, 4]


@pytest.mark.slow
def test_a_report_can_be_made_again_of_what_it_holds(runs, tmp_path, capsys):
    """Check that rows hold recipe, commit and fingerprint; without runs, the Markdown is rewritten with new notes."""
    where = ("--name", "masked_lm", "--out", tmp_path)
    assert here("report", *runs, *where) == 0
    row = read_json(tmp_path / "masked_lm.json")["rows"][0]
    assert row["recipe"]["model.mixer"] == "lion_s"
    assert "data.path" not in row["recipe"]
    assert re.fullmatch("[0-9a-f]{12}", row["data"])
    assert row["commit"] is not None
    before = (tmp_path / "masked_lm.md").read_text()
    assert_in(before, "- Made by: `./run.sh", "peak of the learning rate 0.001", "Python 3")
    assert str(tmp_path.parent) not in before, "no folder of this machine"
    notes = tmp_path / "notes.md"
    notes.write_text("Read this.")
    assert here("report", *where, "--notes", notes) == 0
    assert (tmp_path / "masked_lm.md").read_text() == before + "\n## Notes\n\nRead this.\n"
    assert "expected runs" in refuse(capsys, "report", "--name", "other", "--out", tmp_path)


@pytest.mark.slow
def test_sections_that_are_none(runs, capsys):
    for words, message in {
        "": "expected runs, --section TITLE RUN",
        "--section Packing": "expected a title and runs, got 'Packing' alone",
        f"--section A {runs[0]} --section A {runs[1]}": "duplicate title 'A'",
    }.items():
        assert message in refuse(capsys, "report", *words.split())


def glue_rows(scores):
    """Return rows of GLUE from scores by task, each with the better of two learning rates first."""
    rows = []
    for task, some in scores.items():
        for i, score in enumerate(some):
            rows.append({"task": task, "seed": i, "lr": 1e-5, "score": score})
            rows.append({"task": task, "seed": i, "lr": 1e-4, "score": score - 1e4})
    return rows


@pytest.mark.slow
def test_what_glue_has_made_of_runs_stands_below(runs, tmp_path, capsys):
    groups = grouped(runs[:2])
    assert not glue_table(groups)[1]
    scores = [{"cola": (10.0, 20.0), "rte": (50.0, 60.0)}, {"cola": (30.0, 40.0), "rte": (70.0, 80.0)}]
    files = [run / "glue/m2_base/results.json" for run in runs[:2]]
    for path, some in zip(files, scores):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rows": glue_rows(some), "average_over": "tasks"}))
    header, rows = glue_table(groups)
    assert header == ["model", "fine-tuned as", "cola", "rte", "mean of 2", "n"]
    assert rows == [["lion_s packed", "m2_base", "25.00", "65.00", "45.00", "4"]]
    files[1].write_text(json.dumps({"rows": [{"task": "rte", "seed": 0, "lr": 1e-5, "score": 70.0}]}))
    (row,) = glue_table(groups)[1]
    assert row[-1] == "2-3"
    files[0].write_text("{}")
    assert "not a file of ./run.sh glue" in refuse(capsys, "report", runs[0], "--out", tmp_path)
    for path in files:
        path.unlink()


@pytest.mark.parametrize(
    "recipe, numbers, mean",
    [
        ("m2_base", None, "65.00"),
        ("cramming", None, "70.00, MNLI twice"),  # as its recipe counts numbers
        ("own", 2, "70.00, MNLI twice"),
        ("cramming", 1, "65.00"),
    ],
)
def test_the_mean_of_glue_counts_the_numbers_of_mnli_as_the_recipe_does(recipe, numbers, mean):
    key = ("a", recipe)
    counted = [] if numbers is None else [{key: {"mnli": numbers}}]
    _, (row,) = scores_table({key: [{"mnli": [80.0], "rte": [50.0]}]}, *counted)
    assert row[-2] == mean


@pytest.mark.slow
def test_a_run_limited_by_time_reports_its_tokens(tmp_path):
    growing = ("trainer.time=0.002min", "trainer.batch_ramp=60%", "trainer.batch_start=2")
    run = small_run(tmp_path, "timed", LAYOUTS["packed"], *growing)
    text = (run / "metrics.jsonl").read_text()
    last = json.loads(text.splitlines()[-1])
    held = load(str(run))
    assert held.seen == 16 * last["samples"]
    assert held.curve[-1][0] == last["step"]
    assert here("report", run, "--out", tmp_path, "--name", "timed") == 0
    assert "0.002min of training in batches of 2 to 4, reached after 60%" in (tmp_path / "timed.md").read_text()
    (run / "metrics.jsonl").write_text(text.replace(f'"seconds": {last["seconds"]}', '"seconds": 0.01'))
    refused(r"stopped at step \d+, finish its training first", load, str(run))
