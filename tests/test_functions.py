"""`lion.train` and `lion.evaluate` from Python, on data and models of the caller, and the examples of `help()`."""

import doctest
import json
import re
import sys

import pytest
import torch
from torch import Tensor, nn

import lion
from lion.config import ConfigError
from lion.distribution import clone_folder
from lion.models.base import ImageClassifier
from lion.samples.base import Splits
from lion.samples.images import ImageInfo
from tests.helpers import refused

SHORT = {"steps": 3, "epochs": None, "eval_every": 3, "save_every": 3, "batch_size": 8, "compile": False}


class Pixels(ImageClassifier):
    """A model of the caller, which is none of `MODELS`: one linear layer."""

    length = 1

    def __init__(self, info: ImageInfo) -> None:
        super().__init__(image_size=info.size, channels=1, classes=info.classes, mean=info.mean, std=info.std)
        self.head = nn.Linear(64, 2)

    def units(self) -> list[nn.Module]:
        return [self.head]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.normalise(images).flatten(1))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(**settings):
    return lion.train("quickstart", trainer=SHORT, **settings)


def own_splits() -> Splits:
    """Return images of two classes, dark and bright."""
    samples = []
    for i in range(32):
        samples.append({"image": torch.full((1, 8, 8), 200 * (i % 2), dtype=torch.uint8), "label": i % 2})
    info = ImageInfo(size=(8, 8), channels=1, classes=("dark", "bright"), mean=(0.5,), std=(0.5,))
    return Splits(train=samples, val=samples[:8], test=None, info=info)


def test_the_examples_of_help_run():
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("train", "evaluate", "load", "generate"):
        (example,) = finder.find(getattr(lion, name), name, globs={"lion": lion, "torch": torch})
        assert example.examples, f"lion.{name} has no example"
        runner.run(example)
    assert runner.failures == 0


def test_public_names_are_the_names_of_the_module():
    assert dir(lion) == sorted(lion.__all__)


def test_a_recipe_on_data_of_the_caller(capsys, caplog):
    """Check a run from the first step to its summary; the same call trains no further, another one is refused."""
    splits = own_splits()
    model = {"dim": 16, "depth": 1, "num_heads": 2, "mixer": "lion_d", "patch_size": 4}
    run = train(splits=splits, model=model, form="rnn")
    assert (run.recipe.model.mixer, run.recipe.trainer.steps, run.model.classes) == ("lion_d", 3, ("dark", "bright"))
    assert json.loads((run.folder / "summary.json").read_text())["split"] == "val"
    (row,) = lion.evaluate(run, splits, "chunk", 2, eager=True)
    assert (row["form"], row["chunk_size"], row["split"]) == ("chunk", 2, "val")
    capsys.readouterr()
    again = train(splits=splits, model=model)
    assert again.checkpoint["step"] == run.checkpoint["step"] == 3
    assert "the run is complete, at step 3: nothing to train" in caplog.text
    with pytest.raises(ConfigError, match="the training samples have changed since step 3"):
        train(splits=splits._replace(train=splits.train[:16]), model=model)
    with pytest.raises(ConfigError, match=r"holds a run of another recipe, differing in model\.depth: 1 -> 2"):
        train(splits=splits, model={**model, "depth": 2})
    train(splits=splits, model={**model, "depth": 2}, fresh=True)
    assert "the earlier run is kept as" in capsys.readouterr().out


def tuples(samples) -> list:
    return [(sample["image"], sample["label"]) for sample in samples]


def renamed(samples) -> list:
    return [{"img": sample["image"], "label": sample["label"]} for sample in samples]


def relabelled(samples) -> list:
    return [sample | {"label": 7} for sample in samples]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tuples, r"splits\.train: the loss of its first samples cannot be computed \(TypeError.*image, label"),
        (
            renamed,
            r"splits\.train: .* \(KeyError: 'image'\); task 'image_classification' reads batches of image, label",
        ),
        (relabelled, r"splits\.train: .*Target 7 is out of bounds"),
    ],
)
def test_data_that_the_task_cannot_read_are_refused(change, message, tmp_path):
    splits = own_splits()
    refused(message, lion.train, "quickstart", splits=splits._replace(train=change(splits.train)), trainer=SHORT)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_data_and_no_model_is_refused():
    splits = own_splits()
    for settings, message in (
        ({"splits": {"train": []}}, "splits: expected a lion.samples.base.Splits, got dict"),
        ({"splits": splits._replace(val=[])}, "splits.val: no samples"),
        ({"splits": splits, "model": nn.Linear(3, 3)}, "model: expected a lion.models.base.Model, got Linear"),
    ):
        refused(message, train, **settings)


def test_a_model_and_a_recipe_of_the_caller():
    """Check that the weights that come back are those of the best checkpoint, in the model of the caller."""
    splits = own_splits()
    recipe = lion.load_recipe(clone_folder() / "recipes" / "quickstart.yaml")
    model = Pixels(splits.info)
    before = model.head.weight.detach().clone()
    run = lion.train(recipe, splits=splits, model=model, trainer=SHORT, run={"name": "pixels"})
    assert run.model is model and not model.training and not torch.equal(model.head.weight, before)
    assert run.folder.name == "pixels" and run.recipe.run.name == "pixels"
    stored = lion.open_run  # the recipe's model is another one
    refused("does not match its recipe", stored, "pixels")


def test_modules_of_the_program_are_not_taken_for_ours(monkeypatch, tmp_path):
    (tmp_path / "tools.py").write_text("")
    monkeypatch.delitem(sys.modules, "tools", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("tools")
    with pytest.raises(
        ImportError, match=r"the module 'tools' of this program, .*tools\.py, hides that of lion; rename it"
    ):
        lion.train("quickstart")


def test_bad_input_is_named():
    for call, message in (
        (lambda: lion.train("quickstrat"), "did you mean 'quickstart"),
        (lambda: lion.train("quickstart", trainer={"epoch": 3}), "unknown key 'trainer.epoch': did you mean 'epochs'?"),
        (lambda: lion.train("quickstart", trainer={"epochs": "many"}), "trainer.epochs: expected"),
        (lambda: lion.train(3), "recipe: expected a name, a file or a Recipe, got int"),
        (lambda: lion.evaluate("nothing"), "run 'nothing': no recipe.yaml"),
    ):
        refused(re.escape(message), call)
