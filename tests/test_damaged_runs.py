"""Runs with damaged or forged files: every command rejects them in one line, without running or changing anything."""

import io
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from lion.config import ConfigError, merge
from lion.trainer.checkpoint_files import MANIFEST, STATE, load_state, write_manifest
from tests.helpers import refuse, tiny_recipe
from tools import predict, train

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a recipe for two steps without evaluation; return the recipe and the run folder."""
    root = tmp_path_factory.mktemp("trained")
    path = tiny_recipe(root, trainer={"steps": 2, "eval_every": 2, "save_every": 2})
    train.main([str(path), "--no-eval"])
    return path, root / "runs" / "tiny"


@pytest.fixture
def refuse_run(trained, tmp_path, capsys):
    """Return a check that commands reject the run in `tmp_path/tiny`, name the run, and leave it unchanged."""
    recipe, run = trained
    shutil.copytree(run, tmp_path / "tiny")

    def files():
        return {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}

    def refuse_all(*commands):
        before, copy = files(), tmp_path / "tiny"
        again = ("train", recipe, f"run.root={tmp_path}")
        calls = {
            "eval": ("eval", copy, "--form", "full"),
            "predict": ("predict", copy, recipe),
            "again": again,
            "init": (*again, "run.name=new", f"init_from={copy}"),
        }
        for name in commands or calls:
            line = refuse(capsys, *calls[name])
            assert str(copy) in line or "init_from" in line
        assert files() == before

    return refuse_all


def by_file(path):
    shutil.rmtree(path)
    path.touch()


def by_folder(path):
    path.unlink()
    path.mkdir()


def cut(share):
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def flip(seed):
    def damage(file):
        content, dice = bytearray(file.read_bytes()), random.Random(seed)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content)

    return damage


def manifest(text):
    return lambda file: (file.parent / MANIFEST).write_text(text)


MANIFESTS = (
    "",
    "{",
    "[]",
    "null",
    "3",
    "\0",
    "[" * 9**5,
    '{"files": {}}',
    '{"sharded": false, "files": {"state.pt": 3}}',
)
DAMAGE = {
    **{f"cut to {share}": cut(share) for share in (0, 0.001, 0.3, 0.9, 0.9999)},
    **{f"flip {seed}": flip(seed) for seed in range(6)},
    **{f"manifest {text[:20]!r}": manifest(text) for text in MANIFESTS},
    "manifest of shards": manifest('{"sharded": true, "files": {"state.pt": {}}}'),
    "no state": lambda file: file.unlink(),
    "no manifest": lambda file: (file.parent / MANIFEST).unlink(),
    "a folder": by_folder,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.slow
def test_damaged_checkpoints(kind, refuse_run, tmp_path):
    for file in tmp_path.glob(f"tiny/checkpoints/*/{STATE}"):
        DAMAGE[kind](file)
    refuse_run()


class Touch:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def signed(file):
    """Write the manifest that fits a changed file."""
    write_manifest(file.parent, [file], sharded=False)


def other_shapes(file, _):
    state = load_state(file)
    torch.save({**state, "model": {k: v[..., None] for k, v in state["model"].items()}}, file)


FORGED = {
    "pickle": lambda file, touched: file.write_bytes(pickle.dumps(Touch(touched))),
    "torch pickle": lambda file, touched: torch.save({"model": Touch(touched)}, file),
    "text": lambda file, _: file.write_text("text"),
    "nothing": lambda file, _: file.write_bytes(b""),
    "a list": lambda file, _: torch.save([1], file),
    "a tensor": lambda file, _: torch.save(torch.ones(3), file),
    "no keys": lambda file, _: torch.save({}, file),
    "no weights": lambda file, _: torch.save({"model": [1], "info": {}, "step": 1}, file),
    "no tensors": lambda file, _: torch.save({"model": {"cls": 1}, "info": {}, "step": 1}, file),
    "other shapes": other_shapes,
}


@pytest.mark.parametrize("kind", FORGED)
def test_checkpoints_of_something_else(kind, refuse_run, tmp_path):
    for file in tmp_path.glob(f"tiny/checkpoints/*/{STATE}"):
        FORGED[kind](file, tmp_path / "touched")
        signed(file)
    refuse_run()
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "info",
    [{"size": [8]}, {"size": ["8", "8"]}, {"channels": None}, {"mean": [0.5, 0.5]}, {"std": ["x"]}],
    ids=str,
)
def test_data_that_are_none(info, refuse_run, tmp_path):
    (file,) = tmp_path.glob(f"tiny/checkpoints/best-*/{STATE}")
    state = load_state(file)
    torch.save({**state, "info": {**state["info"], **info}}, file)
    signed(file)
    refuse_run("eval", "predict", "init")


def model(**values):
    return lambda path: path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), {"model": values})))


RECIPES = {
    "another width": model(dim=32),
    "another depth": model(depth=3),
    "another mixer": model(mixer="softmax"),
    "no width": model(dim="many"),
    "cut": cut(0.5),
    "empty": cut(0),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "a list": lambda path: path.write_text("- a"),
    "missing": lambda path: path.unlink(),
    "a folder": by_folder,
}


@pytest.mark.parametrize("kind", RECIPES)
def test_runs_whose_recipe_is_not_theirs(kind, refuse_run, tmp_path):
    RECIPES[kind](tmp_path / "tiny" / "recipe.yaml")
    refuse_run("eval", "predict", "again")


def test_a_file_for_the_checkpoints(refuse_run, tmp_path):
    by_file(tmp_path / "tiny" / "checkpoints")
    refuse_run()


def test_a_folder_for_the_lock(refuse_run, tmp_path):
    by_folder(tmp_path / "tiny" / ".lock")
    refuse_run("again")


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json"])
def test_files_that_cannot_be_written(name, trained, tmp_path, capsys):
    recipe, run = trained
    place = tmp_path / "tiny" / name
    if name == "environment.json":  # in a run that has not started: a complete run keeps its file
        place.mkdir(parents=True)
    else:
        shutil.copytree(run, tmp_path / "tiny")
        by_folder(place)
    line = refuse(capsys, "train", recipe, f"run.root={tmp_path}", code=1)
    assert line.startswith(f"error: {place}: ")


@pytest.mark.slow
def test_weights_without_finite_outputs(trained, tmp_path, capsys):
    shutil.copytree(trained[1], tmp_path / "tiny")
    file, picture = next(tmp_path.glob(f"tiny/checkpoints/best-*/{STATE}")), tmp_path / "picture.png"
    state = load_state(file)
    state["model"]["head.weight"] *= torch.inf
    torch.save(state, file)
    signed(file)
    Image.new("L", (8, 8)).save(picture)
    assert "the outputs of its model are not finite" in refuse(capsys, "predict", tmp_path / "tiny", picture, "--eager")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", '{"forms": 3}', '{"value": "x", "split": "test"}', "\0"], ids=repr
)
def test_a_summary_that_is_none(text, refuse_run, tmp_path):
    (tmp_path / "tiny" / "summary.json").write_text(text)
    refuse_run("again")


@pytest.mark.slow  # a damaged size may be a very large one
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_damaged_images_are_classified_or_refused(kind, trained, tmp_path):
    path, dice, file = tmp_path / "picture", random.Random(kind), io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).save(file, kind)
    for i in range(20):
        content = bytearray(file.getvalue())
        for _ in range(3):
            content[dice.randrange(min(len(content), 64))] = dice.randrange(256)
        path.write_bytes(content[: dice.randrange(len(content))] if i % 3 == 0 else content)
        try:
            predict.main([str(trained[1]), str(path)])
        except ConfigError as error:
            assert str(error).startswith(f"{path}: not a readable image")
