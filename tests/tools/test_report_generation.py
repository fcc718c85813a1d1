"""`report` of runs that generate images: rows by patch size, and their measured distances."""

import json

import pytest

from lion.files import read_json
from tests.helpers import assert_in, here, refuse, tiny_recipe, trained
from tests.tools.test_sample import diffusion_recipe
from tools.finished import load
from tools.options import FIGURES
from tools.report.distance import distance_table, frechet
from tools.report.paper import claims_about
from tools.report.runs import group
from tools.report.tables import comparisons

pytest.importorskip("sklearn")
KINDS = {"patch_2": {"patch_size": 2}, "patch_4": {"patch_size": 4}, "bare": {"patch_size": 2, "tpe": 0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train LightNet with two patch sizes and without TPE, two seeds each; measure the distance of the first run."""
    folder = tmp_path_factory.mktemp("generation")
    judge = trained(tiny_recipe(folder, "judge", trainer={"steps": 3}))
    found = []
    for name, model in KINDS.items():
        for seed in (0, 1):
            mixer = {"mixer": "lightnet", "position_embedding": None}
            found.append(trained(diffusion_recipe(folder, f"{name}_{seed}", model=mixer | model), f"seed={seed}"))
    how = ["--samples", 24, "--steps", 2, "--guidance", 1.5]
    assert here("distance", found[0], "--features", judge, *how) == 0
    return found


@pytest.fixture(autouse=True)
def restore_files(runs):
    """Restore the distance files after each test, so that tests can run in any order."""
    first = (runs[0] / FIGURES).read_text()
    yield
    for run in runs:
        (run / FIGURES).unlink(missing_ok=True)
    (runs[0] / FIGURES).write_text(first)


def grouped(runs):
    return group([load(str(run)) for run in runs])


def figures_of(run):
    return read_json(run / FIGURES)


def store_values(runs, values):
    """Write distance files of runs with these values, as copies of the first run's file."""
    held = figures_of(runs[0])
    for run, value in zip(runs, values):
        held["rows"][0]["figures"]["FD-own"][0] = value
        (run / FIGURES).write_text(json.dumps(held))


@pytest.mark.slow
def test_figures_are_kept_in_the_run(runs):
    held = figures_of(runs[0])
    assert (held["reference"], held["steps"], held["guidance"]) == ("train", 2, 1.5)
    made, real = held["rows"]
    assert made["samples"] == real["samples"] == 24
    assert real["name"] == "real, test"
    header, (own, below) = distance_table(grouped(runs))
    assert header == ["model", "samples", "FD-own", "IS-own", "precision %", "recall %", "n"]
    scales = {"FD-own": 1, "IS-own": 1, "precision": 100, "recall": 100}
    shown = [f"{made['figures'][name][0] * scale:.2f}" for name, scale in scales.items()]
    assert own == ["lightnet patch 2", "24", *shown, "1"]
    assert below[:2] == ["real, test", "24"]


@pytest.mark.slow
def test_rows_by_patches_and_claims_by_distance(runs, tmp_path):
    store_values(runs, [3.0, 3.2, 5.0, 5.3, 2.0, 2.1])
    groups = grouped(runs)
    assert list(groups) == ["lightnet patch 2", "lightnet patch 4", "lightnet without TPE patch 2"]
    assert [row[2] for row in distance_table(groups)[1][:3]] == ["3.10 ± 0.14", "5.15 ± 0.21", "2.05 ± 0.07"]
    second, first = comparisons(groups, claims_about("diffusion"), frechet)
    assert first.pair == ("lightnet patch 2", "lightnet patch 4")
    assert first.unit == second.unit == "FD-own"
    assert first.found.mean == pytest.approx(2.05)
    assert second.found.mean == pytest.approx(-1.05)
    metric, values = frechet(groups["lightnet patch 4"])
    assert not metric.higher_is_better
    assert list(values.values()) == [5.0, 5.3]
    assert here("report", *runs, "--out", tmp_path) == 0
    text = (tmp_path / "diffusion.md").read_text()
    assert_in(
        text,
        "| lightnet patch 2 > lightnet patch 4 | +2.05 ± ",
        "Distance from real pictures",
        "patches of 2 x 2 or dim 16, depth 2, 2 heads, patches of 4 x 4",
    )
    assert "difference, loss" not in text  # the papers make no claims about the loss


@pytest.mark.slow
def test_distances_that_do_not_compare(runs, tmp_path, capsys):
    store_values(runs, [3.0, 3.2])
    path = runs[1] / FIGURES
    held = figures_of(runs[1])

    def refused(content):
        path.write_text(json.dumps(content))
        return refuse(capsys, "report", *runs[:2], "--out", tmp_path)

    changes = {"guidance": 4.0, "judge": "another", "checkpoint": "last", "raw": True, "reference": "test"}
    for name, value in changes.items():
        assert f"{path}: {name} is {value!r}, in {runs[0] / FIGURES}" in refused(held | {name: value})
    line = refused(held | {"step": 3})
    assert f"{path}: measured at step 3, the weights are of step 6: measure again" in line
    assert f"{path}: not a file of ./run.sh distance" in refused({})


def test_runs_of_another_task_are_another_table(runs, tmp_path, capsys):
    judge = runs[0].parent / "judge"
    said = refuse(capsys, "report", runs[0], judge, "--out", tmp_path)
    assert f"{judge}: task 'image_classification', but {runs[0]} has 'diffusion'; use --section" in said


@pytest.mark.slow
def test_features_from_a_file_have_no_class_probabilities(runs):
    """The row of real images has no score of classes either."""
    held = figures_of(runs[0])
    del held["rows"][1]["figures"]["IS-own"]
    for run in runs[:2]:
        (run / FIGURES).write_text(json.dumps(held))
    assert distance_table(grouped(runs[:2]))[1][-1][3] == "-"
