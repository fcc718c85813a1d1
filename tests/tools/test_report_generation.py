"""`report` of runs that generate images: rows by patch size, and their measured distances."""

import json

import pytest
import yaml

from tests.helpers import here, refuse, tiny_recipe
from tools.distance import FIGURES
from tools.finished import load
from tools.report.distance import distance_table, frechet
from tools.report.paper import claims_about
from tools.report.runs import group
from tools.report.tables import comparisons

pytest.importorskip("sklearn")
ABOUT = claims_about("diffusion")
KINDS = {"patch 2": {"patch_size": 2}, "patch 4": {"patch_size": 4}, "bare": {"patch_size": 2, "tpe": 0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train LightNet with two patch sizes and without TPE, two seeds each; measure the distance of the first run."""
    folder = tmp_path_factory.mktemp("generation")
    assert here("train", tiny_recipe(folder, "judge"), "--no-eval") == 0
    found = []
    for name, model in KINDS.items():
        for seed in (0, 1):
            path = tiny_recipe(
                folder,
                f"{name.replace(' ', '_')}_{seed}",
                model={"mixer": "lightnet", "position_embedding": None, **model},
            )
            text = {**yaml.safe_load(path.read_text()), "task": {"name": "diffusion", "shown": 0}, "seed": seed}
            path.write_text(yaml.safe_dump(text))
            assert here("train", path, "--no-eval") == 0
            found.append(folder / "runs" / path.stem)
    how = ["--samples", 24, "--steps", 2, "--guidance", 1.5]
    assert here("distance", found[0], "--features", folder / "runs" / "judge", *how) == 0
    return found


@pytest.fixture(autouse=True)
def restore_files(runs):
    """Restore the distance files after each test, so that tests can run in any order."""
    first = (runs[0] / FIGURES).read_text()
    yield
    for run in runs:
        (run / FIGURES).unlink(missing_ok=True)
    (runs[0] / FIGURES).write_text(first)


def store_values(runs, values):
    """Write distance files of runs with these values, as copies of the first run's file."""
    held = json.loads((runs[0] / FIGURES).read_text())
    for run, value in zip(runs, values):
        held["rows"][0]["figures"]["FD-own"][0] = value
        (run / FIGURES).write_text(json.dumps(held))


@pytest.mark.slow
def test_figures_are_kept_in_the_run(runs):
    held = json.loads((runs[0] / FIGURES).read_text())
    assert (held["reference"], held["steps"], held["guidance"]) == ("train", 2, 1.5)
    made, real = held["rows"]
    assert made["samples"] == 24 == real["samples"] and real["name"] == "real, test"
    header, (own, below) = distance_table(group([load(str(run)) for run in runs]))
    assert header == ["model", "samples", "FD-own", "IS-own", "precision %", "recall %", "n"]
    figures = [made["figures"][name][0] for name in ("FD-own", "IS-own", "precision", "recall")]
    shown = [f"{x * scale:.2f}" for x, scale in zip(figures, (1, 1, 100, 100))]
    assert own == ["lightnet patch 2", "24", *shown, "1"] and below[:2] == ["real, test", "24"]


def test_rows_by_patches_and_claims_by_distance(runs, tmp_path, capsys):
    store_values(runs, [3.0, 3.2, 5.0, 5.3, 2.0, 2.1])
    groups = group([load(str(run)) for run in runs])
    assert list(groups) == ["lightnet patch 2", "lightnet patch 4", "lightnet without TPE patch 2"]
    assert [row[2] for row in distance_table(groups)[1][:3]] == ["3.10 ± 0.14", "5.15 ± 0.21", "2.05 ± 0.07"]
    second, first = comparisons(groups, ABOUT, frechet)
    assert first.pair == ("lightnet patch 2", "lightnet patch 4") and first.unit == second.unit == "FD-own"
    assert first.found.mean == pytest.approx(2.05) and second.found.mean == pytest.approx(-1.05)
    metric, _, values = frechet(groups["lightnet patch 4"])
    assert not metric.higher_is_better and list(values.values()) == [5.0, 5.3]
    assert here("report", *runs, "--out", tmp_path) == 0
    text = (tmp_path / "diffusion.md").read_text()
    assert "| lightnet patch 2 > lightnet patch 4 | +2.05 ± " in text and "Distance from real pictures" in text
    assert "patches of 2 x 2 or dim 16, depth 2, 2 heads, patches of 4 x 4" in text
    assert "difference, loss" not in text  # the papers make no claims about the loss
    capsys.readouterr()


@pytest.mark.slow
def test_distances_that_do_not_compare(runs, tmp_path, capsys):
    store_values(runs, [3.0, 3.2])
    path, call = runs[1] / FIGURES, ["report", *runs[:2], "--out", tmp_path]
    held = json.loads(path.read_text())
    changes = {"guidance": 4.0, "judge": "another", "checkpoint": "last", "raw": True, "reference": "test"}
    for name, value in changes.items():
        path.write_text(json.dumps({**held, name: value}))
        assert f"{path}: {name} is {value!r}, in {runs[0] / FIGURES}" in refuse(capsys, *call)
    path.write_text(json.dumps({**held, "step": 3}))
    assert f"{path}: measured at step 3, the weights are of step 6: measure again" in refuse(capsys, *call)
    path.write_text("{}")
    assert f"{path}: not a file of ./run.sh distance" in refuse(capsys, *call)


def test_runs_of_another_task_are_another_table(runs, tmp_path, capsys):
    judge = runs[0].parent / "judge"
    said = refuse(capsys, "report", runs[0], judge, "--out", tmp_path)
    assert f"{judge}: task 'image_classification', but {runs[0]} has 'diffusion'; use --section" in said


def test_features_from_a_file_have_no_class_probabilities(runs):
    """The row of real images has no score of classes either."""
    held = json.loads((runs[0] / FIGURES).read_text())
    del held["rows"][1]["figures"]["IS-own"]
    for run in runs[:2]:
        (run / FIGURES).write_text(json.dumps(held))
    assert distance_table(group([load(str(run)) for run in runs[:2]]))[1][-1][3] == "-"
