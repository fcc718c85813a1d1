"""`report`: groups of seeds, their numbers beside the paper's, and refused runs."""

import dataclasses
import json
import math
import re
import shutil
import statistics

import pytest

import data
from lion.files import read_json
from lion.samples.labels import TokenLabelsInfo
from lion.tasks import TASKS
from lion.tasks.metrics import MetricOfMeans
from tests.helpers import assert_in, column, here, printed, read_lines, refuse, refused, tiny_recipe, trained
from tools.claims import CLAIM, INCOMPLETE, QUESTION, verdicts
from tools.compose import resolve
from tools.finished import load
from tools.report.paper import claims_about, published
from tools.report.runs import group, place
from tools.report.section import Section, as_section, judged, markdown
from tools.report.tables import comparisons, noise_of, result_table
from tools.store import Store

KINDS = {
    "softmax": {"mixer": "softmax"},
    "lion_s": {},
    "lion_s forward": {"attention": {"direction": "forward"}},
    "lion_s multiscan": {"attention": {"scans": ["row_snake", "column_snake"]}},
}


def image_claims():
    return claims_about("image_classification")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train runs of every kind with two seeds; only the runs of Lion-S are evaluated on test."""
    folder = tmp_path_factory.mktemp("report")
    for name, model in KINDS.items():
        for seed in (0, 1):
            path = tiny_recipe(folder, f"{name.replace(' ', '_')}{seed}", model=model | {"position_embedding": None})
            metrics = trained(path, f"seed={seed}") / "metrics.jsonl"
            learned = re.sub(r'"above_chance": [-.\de]+', '"above_chance": 9.0', metrics.read_text())
            metrics.write_text(learned)  # six steps learn nothing, which a report says
    for seed in (0, 1):
        summary = {"value": 0.5 + seed / 10, "split": "test", "metric": "top1", "forms": {}, "best_step": 3}
        (folder / f"runs/lion_s{seed}/summary.json").write_text(json.dumps(summary))
    return folder / "runs"


def of(runs, *names):
    return [load(str(p)) for p in sorted(runs.iterdir()) if not names or p.name.rstrip("01") in names]


def section_of(groups, title="Vision"):
    return markdown([as_section(Section("", groups))], title, None)


@pytest.mark.slow
def test_runs_of_one_recipe_are_one_row(runs):
    groups = group(of(runs))
    assert list(groups) == list(KINDS)
    for some in groups.values():
        assert [run.recipe.seed for run in some] == [0, 1]


def best_of(run):
    return max(line["top1"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "val")


@pytest.mark.slow
def test_the_table_holds_what_the_runs_measured(runs):
    groups = group(of(runs))
    header, rows = result_table(groups)
    softmax, row = (dict(zip(header, cells)) for cells in rows[:2])
    values = [best_of(runs / f"lion_s{seed}") for seed in (0, 1)]
    assert row["val top-1 %"] == f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"
    assert (row["model"], row["test top-1 %"], row["n"]) == ("lion_s", "55.00 ± 7.07", "2")
    assert (softmax["model"], softmax["test top-1 %"]) == ("softmax", "-")
    assert softmax["parameters"] != row["parameters"]
    assert "paper" not in header, "no paper trains on these digits"
    assert {"val top-5 %", "val loss"} <= set(header)
    first, second = groups["lion_s"]
    header, (cells,) = result_table({"lion_s": [second, first._replace(test=None)]})
    assert cells[header.index("test top-1 %")] == "60.00 (n = 1)"
    lost = first._replace(beside=[(metric, None) for metric, _ in first.beside])
    assert "val top-5 %" not in result_table({"lion_s": [lost]})[0], "no value was finite"


@pytest.mark.parametrize(
    "name, number",
    {
        "cifar100_lion_s": "77.56",
        "deit_small_lion_s": "74.0",
        "deit_base_lion_s": "76.3",
        "mlm_large_lion_s": "69.16",
        "mlm_base_softmax": "67.70 / 67.23",  # Tables 10 and 11 differ in the training
        "lra_pathx_softmax": "fail",
        "lightnet_wikitext103": "23.09",
        "gpt2_small_lion_s": "18.16 ± 1.16",
        "cifar10_mini": "-",
        "quickstart": "-",  # a result of ours
        "shakespeare_char_softmax": "-",
    }.items(),
)
def test_a_papers_number_stands_beside_the_same_model_on_the_same_data(name, number):
    assert published(resolve(name)) == number


def test_other_data_shapes_and_settings_have_no_number_of_a_paper():
    others = "data.name=cifar100 model.dim=768 model.attention.direction=forward model.mixer=gla"
    others += " model.mlp_ratio=1 data.image_size=[64,64] data.limit=100 init_from=run"
    for other in others.split():
        assert published(resolve("deit_small_lion_s", [other])) == "-", other
    for same in ("model.attention.form=chunk", "data.root=here", "trainer.epochs=3", "seed=1"):
        assert published(resolve("deit_small_lion_s", [same])) == "74.0", same
    assert published(resolve("lra_listops_lion_s", ["data.min_length=10", "data.max_length=60"])) == "-"


@pytest.mark.slow
def test_claims_are_those_of_the_tables():
    """Check the names of rows at both scales, and that every pair is claimed or asked once, in one order."""
    claimed = {("lion_s", "lion_s forward"), ("lion_s multiscan", "lion_s"), ("lightnet", "lightnet without rotation")}
    assert claimed <= set(image_claims().claims)
    assert ("lion_s", "softmax") in image_claims().open
    assert ("lightnet patch 2", "lightnet patch 4") in claims_about("diffusion").claims
    assert ("lion_s_hippo", "lion_lit") in claims_about("lra").claims
    for task in TASKS:
        about = claims_about(task)
        pairs = [frozenset(pair) for pair in (*about.claims, *about.open)]
        assert len(pairs) == len(set(pairs))
        assert {len(pair) for pair in pairs} <= {2}


def compared(groups):
    return comparisons(groups, image_claims())


def pairs_of(groups, kind):
    return [each.pair for each in compared(groups) if each.kind == kind]


def test_the_noise_of_runs_is_that_of_the_rule(runs):
    first, *_ = of(runs, "lion_s")
    info = TokenLabelsInfo(classes=3, length=8, longest=8, vocabulary=9)
    other = dataclasses.replace(first.recipe.data, name="cifar10")
    config = dataclasses.replace(first.recipe, data=other)
    assert noise_of(first) == "pairs"
    assert noise_of(first._replace(info=info)) == "own"
    assert noise_of(first._replace(recipe=config)) == "frame"


def test_claims_compare_runs_of_one_seed(runs):
    groups = group(of(runs, "lion_s", "lion_s_forward", "softmax"))
    assert pairs_of(groups, CLAIM) == [("lion_s", "lion_s forward")]
    assert pairs_of(groups, QUESTION) == [("lion_s", "softmax")]  # the tables disagree
    gaps = [a.val - b.val for a, b in zip(groups["lion_s"], groups["lion_s forward"])]  # not all runs have a test value
    assert compared(groups)[0].found.mean == pytest.approx(100 * statistics.mean(gaps))
    groups = {name: [run._replace(test=run.test or 0.3) for run in some] for name, some in groups.items()}
    assert compared(groups)[0].found.mean == pytest.approx(25)
    first, second = groups["lion_s"]
    stuck = groups | {"lion_s": [first, second._replace(remark="stuck at chance")]}
    assert [each.missing for each in compared(stuck)] == [INCOMPLETE] * 2
    assert not compared(group(of(runs, "softmax")))
    renamed = {f"{name} with positions": some for name, some in groups.items()}
    assert pairs_of(renamed, CLAIM) == [("lion_s with positions", "lion_s forward with positions")]
    assert not pairs_of(renamed | {"lion_s vector": []}, QUESTION)[1:], "an ending is whole words"


def test_the_rule_of_verdicts_stands_where_verdicts_do(runs):
    assert "Holm" not in section_of(group(of(runs, "softmax")))
    assert "Holm" in section_of(group(of(runs, "lion_s", "lion_s_forward")))


def test_a_metric_that_falls(runs):
    """Check a metric for which lower is better: a curve's value is its minimum, and nothing is in percent."""
    metric = MetricOfMeans("perplexity", function=math.exp, of=("loss",), higher_is_better=False)
    curves = {"lion_s": [18.5, 17.25, 19.0], "softmax": [21.0, 20.0, 20.5]}
    groups = {}
    for name, some in group(of(runs, *curves)).items():
        groups[name] = []
        for seed, run in enumerate(some):
            above = 1e-4 * seed if name == "softmax" else 0
            curve = [(step, value + above) for step, value in enumerate(curves[name], 1)]
            groups[name].append(run._replace(metric=metric, curve=curve, test=None))
    header, rows = result_table(groups)
    assert header[:2] == ["model", "val perplexity"], "nothing was tested"
    assert [row[1] for row in rows] == ["20.00 ± 0.00", "17.25 ± 0.00"]
    (asked,) = (each for each in compared(groups) if each.kind == QUESTION)
    assert asked.found.mean == pytest.approx(2.75, abs=1e-3)
    assert asked.unit == "perplexity"
    assert verdicts([asked]) == (["yes"], 0.05)


def test_a_run_that_is_not_finished(runs, tmp_path):
    run = shutil.copytree(runs / "lion_s0", tmp_path / "run")
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[-1] == "val"
    first = kinds.index("val")
    lost = json.dumps(json.loads(lines[first]) | {"top1": None, "loss": None})  # not finite
    file.write_text("\n".join([*lines[:first], lost, *lines[first:]]))
    assert load(str(run)).curve == load(str(runs / "lion_s0")).curve
    for name, text in (("environment.json", "[1]"), ("summary.json", '{"value": "x", "split": "test"}')):
        whole = (run / name).read_text()
        (run / name).write_text(text)
        refused("run: its metrics cannot be read", load, str(run))
        (run / name).write_text(whole)
    file.write_text("\n".join(lines[: len(lines) // 2]))
    refused(r"run: stopped at step \d+, finish its training first", load, str(run))
    file.unlink()
    refused("run: no metrics.jsonl: it is not trained yet", load, str(run))


@pytest.mark.slow
def test_all_sections_are_corrected_together(runs, tmp_path):
    """Check that verdicts of a section depend on the other sections of the report, and are made from its JSON."""
    some = [runs / "lion_s0", runs / "lion_s1", runs / "softmax0", runs / "softmax1"]
    assert here("report", "--section", "a", *some, "--section", "b", *some, "--out", tmp_path, "--name", "two") == 0
    held = read_json(tmp_path / "two.json")["sections"]
    for row in held:
        (claim,) = row["comparisons"]
        claim["found"] |= {"mean": 2.17, "error": 1.0, "freedom": 1e9}  # p = 0.03
    for sections, level, verdict in ((held, 0.025, "undecided"), (held[:1], 0.05, "yes")):
        found, used = judged(sections)
        assert [each for ((_, each),) in found] == [verdict] * len(sections)
        assert used == level


def test_rows_stand_in_the_order_of_mixers():
    names = ["lion_s with positions", "gla", "lion_d", "softmax", "lion_s", "lion_s forward", "lion_lit"]
    ordered = ["softmax", "lion_lit", "lion_d", "lion_s", "lion_s forward", "lion_s with positions", "gla"]
    assert sorted(names, key=place) == ordered


@pytest.mark.slow
def test_the_command(runs, tmp_path, capsys):
    command = ["report", *sorted(runs.iterdir()), "--out", tmp_path, "--name", "tiny"]
    out = printed(capsys, *command)
    assert "lion_s multiscan > lion_s" in out
    assert "written: " in out
    assert "## Notes" not in (tmp_path / "tiny.md").read_text()
    (tmp_path / "why.md").write_text("Because.\n")
    assert here(*command, "--notes", tmp_path / "why.md") == 0
    text = (tmp_path / "tiny.md").read_text()
    assert text.endswith("## Notes\n\nBecause.\n")
    assert_in(
        text,
        "| lion_s | 55.00 ± 7.07 |",
        "digits",
        "`model.attention.direction`",
        "6 steps in batches of 64",
        "## Claims of the papers",
    )
    held = {(r["model"], r["seed"]): r for r in read_json(tmp_path / "tiny.json")["rows"]}
    assert held["lion_s", 1]["test"] == 0.6
    assert len(held["softmax", 0]["curve"]) == 2
    pytest.importorskip("matplotlib")
    assert "](tiny.png)" in text
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared(runs, tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    shorter = shutil.copytree(runs / "softmax0", tmp_path / "shorter")
    recipe = shorter / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 6", "steps: 5"))
    line = refuse(capsys, "report", runs / "softmax0", shorter, *out)
    assert "not comparable with" in line
    assert "they differ in trainer.steps" in line
    copy = shutil.copytree(runs / "softmax0", tmp_path / "copy")
    one, other = of(runs, "softmax")
    refused("a second run of 'softmax' with seed 0", group, [one, load(str(copy))])
    other = other._replace(info=dataclasses.replace(other.info, classes=other.info.classes[:9]))
    said = r"not comparable, .*softmax0 was trained on other data: number of classes was 10, and"
    refused(said, group, [one, other])
    for text, said in (("", "not validated yet"), ("{", "its metrics cannot be read")):
        (copy / "metrics.jsonl").write_text(text)
        assert said in refuse(capsys, "report", copy, *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_report_of_other_runs_is_not_lost(runs, tmp_path, capsys):
    page = tmp_path / "image_classification.md"
    first, second = runs / "softmax0", runs / "lion_s0"
    out = ("--out", tmp_path)
    assert here("report", first, *out) == 0
    assert here("report", first, second, *out) == 0
    before = page.read_text()
    line = refuse(capsys, "report", first, *out)
    said = "classification.json: holds lion_s0 (seed 0), missing here; --name NAME starts another report, --fresh"
    assert said in line
    assert page.read_text() == before
    namesake = shutil.copytree(runs / "lion_s1", tmp_path / "other/lion_s0")  # another run of this name
    assert here("report", second, namesake, *out, "--name", "both") == 0
    line = refuse(capsys, "report", second, *out, "--name", "both")
    assert "holds lion_s0 (seed 1), missing here" in line
    assert here("report", first, *out, "--fresh") == 0
    assert page.read_text() != before
    assert here("report", second, *out, "--name", "v1.2") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"v1.2.md", "v1.2.json"} <= names
    assert "v1.md" not in names


@pytest.mark.slow
def test_tables_of_other_runs_stay(runs, tmp_path):
    """Check that a report grows by sections, and needs only the runs of the sections in the command."""
    where = ("--out", tmp_path, "--name", "tiny")
    page = tmp_path / "tiny.md"

    def held():
        return read_json(tmp_path / "tiny.json")

    (tmp_path / "why.md").write_text("Because.")
    one, other = ("--section", "One", runs / "softmax0"), ("--section", "Other", runs / "lion_s0")
    assert here("report", *one, *other, *where, "--notes", tmp_path / "why.md") == 0
    text, first = page.read_text(), held()
    assert here("report", *other, *where) == 0
    assert page.read_text() == text
    assert first["sections"][0]["section"] == "One"
    assert sorted(first["rows"], key=str) == sorted(held()["rows"], key=str)
    assert here("report", *one, runs / "lion_s1", *where) == 0
    grown = page.read_text()
    assert grown.index("## One") < grown.index("| lion_s |") < grown.index("## Other")
    assert "Because." in grown
    assert sorted((row["section"], row["run"]) for row in held()["rows"]) == [
        ("One", "lion_s1"),
        ("One", "softmax0"),
        ("Other", "lion_s0"),
    ]


def test_a_task_of_which_the_paper_says_nothing(runs):
    groups = group(of(runs, "lion_s", "softmax"))
    header, rows = result_table(groups)
    assert header[-1] == "images/s"
    assert len(rows) == 2
    assert not comparisons(groups, claims_about("chess"))
    assert section_of(groups, "Chess").startswith("# Image classification: runs at one budget\n")


@pytest.mark.parametrize(
    "name, settings, line",
    [
        ("digits", {}, "digits"),
        ("cifar10", {"root": "/data", "limit": 10_000}, "cifar10, 10,000 training images"),
        ("hf", {"path": "some/set"}, "hf (some/set)"),
        ("hf", {"path": "/data/some/set"}, "hf"),
    ],
)
def test_data_say_which_they_are_in_a_line(name, settings, line):
    assert data.dataset(name).Config(**settings).describe() == line


def test_a_file_of_another_kind_is_not_written_over(runs, tmp_path, capsys):
    (tmp_path / "image_classification.json").write_text('{"softmax": []}')
    line = refuse(capsys, "report", runs / "softmax0", "--out", tmp_path)
    assert "image_classification.json: not a report of this command; delete it to start over" in line


@pytest.mark.slow
def test_reports_written_at_once_keep_each_other(runs, tmp_path, monkeypatch):
    """Another command adds a section between the first reading of the report and its lock."""
    alone = Store.alone

    def report(section, run):
        return here("report", "--section", section, runs / run, "--out", tmp_path, "--name", "both")

    def late(store):
        monkeypatch.setattr(Store, "alone", alone)
        assert report("B", "lion_s0") == 0
        return store.alone()

    monkeypatch.setattr(Store, "alone", late)
    assert report("A", "softmax0") == 0
    held = read_json(tmp_path / "both.json")
    for rows in (held["sections"], held["rows"]):
        assert set(column(rows, "section")) == {"A", "B"}


def test_labels_distinguish_merges_conventions_and_starts(runs):
    recipe = load(str(runs / "lion_s_multiscan0")).recipe
    recipe.model.attention.scan_merge = "outputs"
    assert recipe.model.label() == "lion_s multiscan (outputs)"
    recipe = load(str(runs / "lion_s_forward0")).recipe
    recipe.model.position_embedding = True
    recipe.model.attention.decay_convention = "source"
    assert recipe.model.label() == "lion_s forward with positions source decay convention"
    run, *_ = of(runs, "lion_s")
    started = run._replace(recipe=dataclasses.replace(run.recipe, init_from="elsewhere"))
    assert list(group([run, started])) == ["lion_s", "lion_s pre-trained"]


def test_a_stuck_run_is_reported(runs):
    first, *_ = of(runs, "lion_s")
    text = section_of(group([first._replace(remark="stuck at chance: .."), *of(runs, "softmax")]))
    assert "- lion_s, seed 0: stuck at chance: .." in text
    assert text.count("stuck at chance") == 1


def test_further_sets_are_measured_at_the_best_step(runs, tmp_path):
    run = shutil.copytree(runs / "lion_s0", tmp_path / "run")
    lines = read_lines(run / "metrics.jsonl")
    first, second = (line for line in lines if line["kind"] == "val")
    first["top1"] = 0.9
    second["top1"] = 0.5
    for line in (first, second):
        lines.append(line | {"kind": "val_far", "loss": float(line["step"])})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "summary.json").unlink()
    assert load(str(run)).more["far"]["loss"] == first["step"]
