"""Tests of `./run.sh sample`: grids of images by class, and errors."""

import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lion.runs import open_run
from lion.trainer.checkpoint_files import STATE, load_state, write_manifest
from tests.helpers import here, printed, refuse, tiny_recipe, trained

pytest.importorskip("sklearn")
QUICK = ["--steps", 3]


def diffusion_recipe(folder, name="tiny", **changes):
    path = tiny_recipe(folder, name, **changes)
    recipe = yaml.safe_load(path.read_text())
    recipe["task"] = {"name": "diffusion", "shown": 0}
    path.write_text(yaml.safe_dump(recipe))
    return path


def changed(run, change):
    """Change the weights in the best checkpoint of a run.

    After so few steps of training, all images would be plain bright or dark.
    """
    (file,) = run.glob(f"checkpoints/best-*/{STATE}")
    state = load_state(file)
    torch.manual_seed(0)
    for kind in ("model", "ema"):
        for weight in state[kind].values():
            change(weight)
    torch.save(state, file)
    write_manifest(file.parent, [file], sharded=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = trained(diffusion_recipe(tmp_path_factory.mktemp("sample"), trainer={"ema": 0.9, "device": "cpu"}))
    changed(run, lambda x: torch.nn.init.normal_(x, std=0.2))
    return run


def grid(capsys, out, run, *args):
    """Draw three steps; return the image (height, width, 3) and the printed classes."""
    assert here("sample", run, *QUICK, *args, "--out", out) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}, by row: ")
    return np.asarray(Image.open(out).convert("RGB")).astype(int), printed.out.partition(": ")[2].strip()


@pytest.mark.slow
def test_a_row_for_each_class(run, capsys, tmp_path):
    asked = [tmp_path / "a.png", run, "--classes", "3,7", "--count", 4]
    whole, said = grid(capsys, *asked)
    assert said == "3, 7" and whole.shape == (2 * 66 + 2, 4 * 66 + 2, 3)  # 8 pixels, enlarged eight times
    cell = whole[2:66, 2:66]
    assert (cell == cell[::8, ::8].repeat(8, 0).repeat(8, 1)).all() and len(np.unique(cell)) > 5
    for more in (["--batch", 3], ["--seed", 0]):
        assert np.abs(grid(capsys, *asked, *more)[0] - whole).max() <= 1
    assert np.abs(grid(capsys, *asked, "--seed", 1)[0] - whole).max() > 9


def test_forms_agree_and_options_matter(run, capsys, tmp_path):
    asked = [tmp_path / "a.png", run, "--classes", "3", "--count", 2]
    whole, _ = grid(capsys, *asked)
    for form in (["chunk", "--chunk-size", 2], ["rnn"]):
        assert np.abs(grid(capsys, *asked, "--form", *form)[0] - whole).max() <= 1
    for option in (["--raw"], ["--guidance", 4], ["--eta", 1], ["--steps", 4]):
        assert np.abs(grid(capsys, *asked, *option)[0] - whole).max() > 2, option


def test_it_goes_to_the_run_s_folder(run, capsys):
    assert (
        printed(capsys, "sample", run, *QUICK, "--count", 1)
        == f"{run / 'samples.png'}, by row: {', '.join(map(str, range(10)))}\n"
    )
    assert Image.open(run / "samples.png").size == (68, 10 * 66 + 2)


def test_the_average_is_taken_where_there_is_one(run, tmp_path, capsys):
    """Check runs with and without an average. (`test_forms_agree_and_options_matter` checks that --raw matters.)"""
    averaged = open_run(run, ema=True).model.state_dict()
    assert any(not torch.equal(v, averaged[k]) for k, v in open_run(run).model.state_dict().items())
    plain = shutil.copytree(run, tmp_path / "plain")
    recipe = plain / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("ema: 0.9", "ema: null"))
    asked = [tmp_path / "a.png", plain, "--classes", "3"]
    first, _ = grid(capsys, *asked)
    assert (grid(capsys, *asked, "--raw")[0] == first).all()


def test_bad_requests(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in {
        "--classes ten": "--classes: unknown class 'ten', valid: 0 to 9, or names such as '0'",
        "--classes 1,10": "--classes: unknown class '10'",
        "--steps 1001": "steps: expected 1 to 1000, got 1001",
        "--out none/a.png": "no folder",
        "--out a.gif": "images are written to FILE.png",
        "--chunk-size 4": "--chunk-size: add --form chunk or rnn",
        "--guidance -1": "--guidance",
        "--eta 2": "--eta",
        "--count 0": "--count",
        "--form fast": "--form",
    }.items():
        assert message in refuse(capsys, "sample", run, *words.split())


def test_a_run_that_makes_nothing(tmp_path, capsys):
    classifier = trained(tiny_recipe(tmp_path))
    said = refuse(capsys, "sample", classifier)
    assert "task 'image_classification' generates no images, expected a run of diffusion" in said
    assert "generates no text" in refuse(capsys, "generate", classifier, "--prompt", "a")


def test_predict_says_what_makes_images(run, capsys, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert "./run.sh sample RUN" in refuse(capsys, "predict", run, tmp_path / "a.png", "--eager")


def test_a_diverged_run_draws_nothing(run, capsys, tmp_path):
    broken = shutil.copytree(run, tmp_path / "broken")
    changed(broken, lambda x: x.fill_(torch.nan))
    line = refuse(capsys, "sample", broken, *QUICK, "--out", tmp_path / "a.png")
    assert "the outputs of its model are not finite, the run has diverged" in line
    assert not (tmp_path / "a.png").exists()


def test_compiled_where_it_is_asked(run, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("tools.sample.compile_blocks", asked.append)
    one = [tmp_path / "a.png", run, "--classes", "3", "--count", 1]
    grid(capsys, *one)
    assert not asked
    grid(capsys, *one, "--compile")
    assert len(asked) == 1


def test_a_run_is_evaluated_in_every_form(run, capsys):
    header, _, *rows = printed(capsys, "eval", run, "--eager").splitlines()
    assert header.split()[:2] == ["form", "loss"]
    losses = {row.replace(" (", "(").split()[1] for row in rows[:4]}
    assert len(losses) == 1
