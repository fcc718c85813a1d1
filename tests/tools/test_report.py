"""`report`: groups of seeds, their numbers beside the paper's, and refused runs."""

import dataclasses
import json
import math
import shutil
import statistics

import pytest

import data
from lion.config import ConfigError
from lion.samples.labels import TokenLabelsInfo
from lion.tasks import TASKS
from lion.tasks.metrics import MetricOfMeans
from tests.helpers import here, refuse, tiny_recipe
from tools.claims import CLAIM, INCOMPLETE, QUESTION, verdicts
from tools.compose import resolve
from tools.finished import load
from tools.report.paper import claims_about, published
from tools.report.runs import group, place
from tools.report.section import Section, as_section, judged, markdown
from tools.report.tables import comparisons, noise_of, result_table
from tools.store import Store

ABOUT = claims_about("image_classification")
KINDS = {
    "softmax": {"mixer": "softmax"},
    "lion_s": {},
    "lion_s forward": {"attention": {"direction": "forward"}},
    "lion_s multiscan": {"attention": {"scans": ["row_snake", "column_snake"]}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train runs of every kind with two seeds; only the runs of Lion-S are evaluated on test."""
    folder = tmp_path_factory.mktemp("report")
    for name, model in KINDS.items():
        for seed in (0, 1):
            path = tiny_recipe(folder, f"{name.replace(' ', '_')}{seed}", model={**model, "position_embedding": None})
            assert here("train", path, f"seed={seed}", "--no-eval") == 0
    for seed in (0, 1):
        (folder / "runs" / f"lion_s{seed}" / "summary.json").write_text(
            json.dumps({"value": 0.5 + seed / 10, "split": "test", "metric": "top1", "forms": {}, "best_step": 3})
        )
    return folder / "runs"


def of(runs, *names):
    return [load(str(p)) for p in sorted(runs.iterdir()) if not names or p.name.rstrip("01") in names]


@pytest.mark.slow
def test_runs_of_one_recipe_are_one_row(runs):
    groups = group(of(runs))
    assert list(groups) == ["softmax", "lion_s", "lion_s forward", "lion_s multiscan"]
    assert all([run.recipe.seed for run in some] == [0, 1] for some in groups.values())


def test_the_table_holds_what_the_runs_measured(runs):
    groups = group(of(runs))
    header, rows = result_table(groups)
    by_name = {row[0]: dict(zip(header, row)) for row in rows}
    values = []
    for seed in (0, 1):
        lines = (runs / f"lion_s{seed}" / "metrics.jsonl").read_text().splitlines()
        values.append(max(line["top1"] for line in map(json.loads, lines) if line["kind"] == "val"))
    row = by_name["lion_s"]
    assert row["val top-1 %"] == f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"
    assert row["test top-1 %"] == "55.00 ± 7.07" and row["n"] == "2"
    assert by_name["softmax"]["test top-1 %"] == "-"
    assert "paper" not in header, "no paper trains on these digits"
    some = result_table({"lion_s": [groups["lion_s"][1], groups["lion_s"][0]._replace(test=None)]})
    assert dict(zip(some[0], some[1][0]))["test top-1 %"] == "60.00 (n = 1)"
    lost = groups["lion_s"][0]._replace(beside=[(metric, None) for metric, _ in groups["lion_s"][0].beside])
    assert "val top-5 %" not in result_table({"lion_s": [lost]})[0], "no value was finite"
    assert by_name["softmax"]["parameters"] != row["parameters"]
    assert "val top-5 %" in header and "val loss" in header


def test_a_papers_number_stands_beside_the_same_model_on_the_same_data(runs):
    """Check recipes of several sizes and data sets, and that other data, shapes and settings have no number."""
    for name, number in {
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
    }.items():
        assert published(resolve(name)) == number, name
    others = ["data.name=cifar100", "model.dim=768", "model.attention.direction=forward", "model.mixer=gla"]
    others += ["model.mlp_ratio=1", "data.image_size=[64,64]", "data.limit=100", "init_from=run"]
    for other in others:
        assert published(resolve("deit_small_lion_s", [other])) == "-", other
    for same in ("model.attention.form=chunk", "data.root=here", "trainer.epochs=3", "seed=1"):
        assert published(resolve("deit_small_lion_s", [same])) == "74.0", same
    assert published(resolve("lra_listops_lion_s", ["data.min_length=10", "data.max_length=60"])) == "-"


def test_claims_are_those_of_the_tables():
    """Check the names of rows at both scales, and that every pair is claimed or asked once, in one order."""
    assert ("lion_s", "lion_s forward") in ABOUT.claims and ("lion_s multiscan", "lion_s") in ABOUT.claims
    assert ("lion_s", "softmax") in ABOUT.open and ("lightnet", "lightnet without rotation") in ABOUT.claims
    assert ("lightnet patch 2", "lightnet patch 4") in claims_about("diffusion").claims
    assert ("lion_s_hippo", "lion_lit") in claims_about("lra").claims
    for task in TASKS:
        about = claims_about(task)
        pairs = [frozenset(pair) for pair in (*about.claims, *about.open)]
        assert len(pairs) == len({*pairs}) and all(len(pair) == 2 for pair in pairs)


def pairs_of(groups, kind):
    return [each.pair for each in comparisons(groups, ABOUT) if each.kind == kind]


def test_the_noise_of_runs_is_that_of_the_rule(runs):
    first, *_ = of(runs, "lion_s")
    info = TokenLabelsInfo(classes=3, length=8, longest=8, vocabulary=9)
    assert noise_of(first) == "pairs" and noise_of(first._replace(info=info)) == "own"
    other = dataclasses.replace(first.recipe.data, name="cifar10")
    config = dataclasses.replace(first.recipe, data=other)
    assert noise_of(first._replace(recipe=config)) == "frame"


def test_claims_compare_runs_of_one_seed(runs):
    groups = group(of(runs, "lion_s", "lion_s_forward", "softmax"))
    assert pairs_of(groups, CLAIM) == [("lion_s", "lion_s forward")]
    assert pairs_of(groups, QUESTION) == [("lion_s", "softmax")]  # the tables disagree
    gaps = [a.val - b.val for a, b in zip(groups["lion_s"], groups["lion_s forward"])]  # not all runs have a test value
    assert comparisons(groups, ABOUT)[0].found.mean == pytest.approx(100 * statistics.mean(gaps))
    groups = {name: [r._replace(test=r.test or 0.3) for r in some] for name, some in groups.items()}
    assert comparisons(groups, ABOUT)[0].found.mean == pytest.approx(25)
    stuck = {**groups, "lion_s": [groups["lion_s"][0], groups["lion_s"][1]._replace(remark="stuck at chance")]}
    assert [each.missing for each in comparisons(stuck, ABOUT)] == [INCOMPLETE] * 2
    assert not comparisons(group(of(runs, "softmax")), ABOUT)
    renamed = {f"{name} with positions": some for name, some in groups.items()}
    assert pairs_of(renamed, CLAIM) == [("lion_s with positions", "lion_s forward with positions")]
    assert not pairs_of({**renamed, "lion_s vector": []}, QUESTION)[1:], "an ending is whole words"


def test_a_metric_that_falls(runs):
    """Check a metric for which lower is better: a curve's value is its minimum, and nothing is in percent."""
    metric = MetricOfMeans("perplexity", function=math.exp, of=("loss",), higher_is_better=False)
    curves = {"lion_s": [(1.0, 18.5), (2.0, 17.25), (3.0, 19.0)], "softmax": [(1.0, 21.0), (2.0, 20.0), (3.0, 20.5)]}
    groups = {
        name: [
            r._replace(
                metric=metric, curve=[(x, y + 1e-4 * i * (name == "softmax")) for x, y in curves[name]], test=None
            )
            for i, r in enumerate(some)
        ]
        for name, some in group(of(runs, *curves)).items()
    }
    header, rows = result_table(groups)
    assert header[:2] == ["model", "val perplexity"], "nothing was tested"
    assert [row[1] for row in rows] == ["20.00 ± 0.00", "17.25 ± 0.00"]
    (asked,) = (each for each in comparisons(groups, ABOUT) if each.kind == QUESTION)
    assert asked.found.mean == pytest.approx(2.75, abs=1e-3) and asked.unit == "perplexity"
    assert verdicts([asked]) == (["yes"], 0.05)


def test_a_run_that_is_not_finished(runs, tmp_path):
    shutil.copytree(runs / "lion_s0", tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "val"
    first = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "val")
    lost = json.dumps({**json.loads(lines[first]), "top1": None, "loss": None})  # not finite
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines[:first], lost, *lines[first:]]))
    assert load(str(tmp_path / "run")).curve == load(str(runs / "lion_s0")).curve
    for name, text in (("environment.json", "[1]"), ("summary.json", '{"value": "x", "split": "test"}')):
        whole = (tmp_path / "run" / name).read_text()
        (tmp_path / "run" / name).write_text(text)
        with pytest.raises(ConfigError, match="run: its metrics cannot be read"):
            load(str(tmp_path / "run"))
        (tmp_path / "run" / name).write_text(whole)
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines[: len(lines) // 2]))
    with pytest.raises(ConfigError, match=r"run: stopped at step \d+, finish its training first"):
        load(str(tmp_path / "run"))


def test_all_sections_are_corrected_together(runs, tmp_path):
    """Check that verdicts of a section depend on the other sections of the report, and are made from its JSON."""
    where = ("--out", tmp_path, "--name", "two")
    sections = [x for title in "ab" for x in ("--section", title, runs / "lion_s0", runs / "lion_s1")]
    one = [*sections[:4], runs / "softmax0", runs / "softmax1", *sections[4:], runs / "softmax0", runs / "softmax1"]
    assert here("report", *one, *where) == 0
    held = json.loads((tmp_path / "two.json").read_text())["sections"]
    for row in held:
        (claim,) = row["comparisons"]
        claim["found"] |= {"mean": 2.17, "error": 1.0, "freedom": 1e9}  # p = 0.03
    (both, level), (one, alone) = judged(held), judged(held[:1])
    assert [verdict for ((_, verdict),) in both] == ["undecided", "undecided"] and level == 0.025
    assert [verdict for ((_, verdict),) in one] == ["yes"] and alone == 0.05


def test_rows_stand_in_the_order_of_mixers():
    names = ["lion_s with positions", "gla", "lion_d", "softmax", "lion_s", "lion_s forward", "lion_lit"]
    ordered = ["softmax", "lion_lit", "lion_d", "lion_s", "lion_s forward", "lion_s with positions", "gla"]
    assert sorted(names, key=place) == ordered


def test_the_command(runs, tmp_path, capsys):
    assert here("report", *sorted(runs.iterdir()), "--out", tmp_path, "--name", "tiny") == 0
    out = capsys.readouterr().out
    assert (
        "lion_s multiscan > lion_s" in out
        and "written: " in out
        and "## Notes" not in (tmp_path / "tiny.md").read_text()
    )
    (tmp_path / "why.md").write_text("Because.\n")
    assert (
        here("report", *sorted(runs.iterdir()), "--out", tmp_path, "--name", "tiny", "--notes", tmp_path / "why.md")
        == 0
    )
    text = (tmp_path / "tiny.md").read_text()
    assert text.endswith("## Notes\n\nBecause.\n")
    assert "| lion_s | 55.00 ± 7.07 |" in text and "digits" in text and "`model.attention.direction`" in text
    assert "6 steps in batches of 64" in text and "## Claims of the papers" in text
    held = {(r["model"], r["seed"]): r for r in json.loads((tmp_path / "tiny.json").read_text())["rows"]}
    assert held["lion_s", 1]["test"] == 0.6 and len(held["softmax", 0]["curve"]) == 2
    pytest.importorskip("matplotlib")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG") and "](tiny.png)" in text


def test_what_cannot_be_compared(runs, tmp_path, capsys):
    assert here("train", tiny_recipe(tmp_path, "longer", trainer={"steps": 8}), "--no-eval") == 0
    capsys.readouterr()
    line = refuse(capsys, "report", runs / "softmax0", tmp_path / "runs" / "longer", "--out", tmp_path / "out")
    assert "not comparable with" in line and "they differ in trainer.steps" in line
    shutil.copytree(runs / "softmax0", tmp_path / "copy")
    with pytest.raises(ConfigError, match="a second run of 'softmax' with seed 0"):
        group([load(str(runs / "softmax0")), load(str(tmp_path / "copy"))])
    one, other = of(runs, "softmax")
    other = other._replace(info=dataclasses.replace(other.info, classes=other.info.classes[:9]))
    with pytest.raises(
        ConfigError, match=r"not comparable, .*softmax0 was trained on other data: number of classes was 10, and"
    ):
        group([one, other])
    (tmp_path / "copy" / "metrics.jsonl").write_text("")
    assert "not validated yet" in refuse(capsys, "report", tmp_path / "copy", "--out", tmp_path / "out")
    (tmp_path / "copy" / "metrics.jsonl").write_text("{")
    assert "its metrics cannot be read" in refuse(capsys, "report", tmp_path / "copy", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_report_of_other_runs_is_not_lost(runs, tmp_path, capsys):
    assert here("report", runs / "softmax0", "--out", tmp_path) == 0
    assert here("report", runs / "softmax0", runs / "lion_s0", "--out", tmp_path) == 0
    before = (tmp_path / "image_classification.md").read_text()
    capsys.readouterr()
    line = refuse(capsys, "report", runs / "softmax0", "--out", tmp_path)
    assert (
        "classification.json: holds lion_s0 (seed 0), missing here; --name NAME starts another report, --fresh" in line
    )
    assert (tmp_path / "image_classification.md").read_text() == before
    (tmp_path / "other").mkdir()  # another run of this name
    shutil.copytree(runs / "lion_s1", tmp_path / "other" / "lion_s0")
    both = runs / "lion_s0", tmp_path / "other" / "lion_s0"
    assert here("report", *both, "--out", tmp_path, "--name", "both") == 0
    assert "holds lion_s0 (seed 1), missing here" in refuse(
        capsys, "report", both[0], "--out", tmp_path, "--name", "both"
    )
    assert here("report", runs / "softmax0", "--out", tmp_path, "--fresh") == 0
    assert (tmp_path / "image_classification.md").read_text() != before
    assert here("report", runs / "lion_s0", "--out", tmp_path, "--name", "v1.2") == 0
    assert {p.name for p in tmp_path.iterdir()} >= {"v1.2.md", "v1.2.json"} and not (tmp_path / "v1.md").exists()


@pytest.mark.slow
def test_tables_of_other_runs_stay(runs, tmp_path):
    """Check that a report grows by sections, and needs only the runs of the sections in the command."""
    where = ("--out", tmp_path, "--name", "tiny")
    (tmp_path / "why.md").write_text("Because.")
    one, other = ("--section", "One", runs / "softmax0"), ("--section", "Other", runs / "lion_s0")
    assert here("report", *one, *other, *where, "--notes", tmp_path / "why.md") == 0
    text, held = (tmp_path / "tiny.md").read_text(), (tmp_path / "tiny.json").read_text()
    assert here("report", *other, *where) == 0
    assert (tmp_path / "tiny.md").read_text() == text and json.loads(held)["sections"][0]["section"] == "One"
    assert sorted(json.loads(held)["rows"], key=str) == sorted(
        json.loads((tmp_path / "tiny.json").read_text())["rows"], key=str
    )
    assert here("report", "--section", "One", runs / "softmax0", runs / "lion_s1", *where) == 0
    grown = (tmp_path / "tiny.md").read_text()
    assert grown.index("## One") < grown.index("| lion_s |") < grown.index("## Other") and "Because." in grown
    rows = json.loads((tmp_path / "tiny.json").read_text())["rows"]
    assert sorted((r["section"], r["run"]) for r in rows) == [
        ("One", "lion_s1"),
        ("One", "softmax0"),
        ("Other", "lion_s0"),
    ]


def test_a_task_of_which_the_paper_says_nothing(runs):
    groups = group(of(runs, "lion_s", "softmax"))
    header, rows = result_table(groups)
    assert header[-1] == "images/s" and len(rows) == 2 and not comparisons(groups, claims_about("chess"))
    text = markdown([as_section(Section("", groups))], "Chess", None)
    assert text.startswith("# Image classification: runs at one budget\n")


def test_data_say_which_they_are_in_a_line():
    for name, settings, line in (
        ("digits", {}, "digits"),
        ("cifar10", {"root": "/data", "limit": 10_000}, "cifar10, 10,000 training images"),
        ("hf", {"path": "some/set"}, "hf (some/set)"),
        ("hf", {"path": "/data/some/set"}, "hf"),
    ):
        assert data.dataset(name).Config(**settings).describe() == line


def test_a_file_of_another_kind_is_not_written_over(runs, tmp_path, capsys):
    (tmp_path / "image_classification.json").write_text('{"softmax": []}')
    line = refuse(capsys, "report", runs / "softmax0", "--out", tmp_path)
    assert "image_classification.json: not a report of this command; delete it to start over" in line


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
    held = json.loads((tmp_path / "both.json").read_text())
    assert {row["section"] for row in held["sections"]} == {"A", "B"} == {row["section"] for row in held["rows"]}


def test_labels_distinguish_merges(runs):
    recipe = load(str(runs / "lion_s_multiscan0")).recipe
    recipe.model.attention.scan_merge = "outputs"
    assert recipe.model.label() == "lion_s multiscan (outputs)"
    recipe = load(str(runs / "lion_s_forward0")).recipe
    recipe.model.position_embedding, recipe.model.attention.decay_convention = True, "source"
    assert recipe.model.label() == "lion_s forward with positions source decay convention"


def test_what_started_from_another_run_is_a_row_of_its_own(runs):
    run = of(runs, "lion_s")[0]
    started = run._replace(recipe=dataclasses.replace(run.recipe, init_from="elsewhere"))
    assert list(group([run, started])) == ["lion_s", "lion_s pre-trained"]


def test_a_stuck_run_is_reported(runs):
    remarked = [run._replace(remark="stuck at chance: ..") for run in of(runs, "lion_s", "softmax")[:1]]
    groups = group([*remarked, *of(runs, "softmax")])
    text = markdown([as_section(Section("", groups))], "Vision", None)
    assert "- lion_s, seed 0: stuck at chance: .." in text and text.count("stuck at chance") == 1


def test_further_sets_are_measured_at_the_best_step(tmp_path):
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    file = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    found = [json.loads(text) for text in file.read_text().splitlines()]
    val = [line for line in found if line["kind"] == "val"]
    for line, value in zip(val, (0.9, 0.5)):
        line["top1"] = value
    far = [{**line, "kind": "val_far", "loss": float(line["step"])} for line in val]
    file.write_text("".join(json.dumps(line) + "\n" for line in (*found, *far)))
    assert load(str(file.parent)).more["far"]["loss"] == val[0]["step"]
