"""Tests of `./run.sh distance`: generated images against real ones, from all sources."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lion.files import read_json
from lion.runs import open_run
from lion.tasks.diffusion import Diffusion
from lion.trainer.runtime import Runtime
from tests.helpers import column, pictures, printed, refuse, tiny_recipe, trained
from tests.tools.test_sample import changed, diffusion_recipe
from tools.compose import build_data, resolve
from tools.distance import ClassifierFeatures
from tools.image_sources import Drawing, images_of_path, images_of_split

pytest.importorskip("sklearn")
CPU = Runtime(torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distance")


@pytest.fixture(scope="module")
def classifier(folder):
    return trained(tiny_recipe(folder, "judge"))


@pytest.fixture(scope="module")
def generator(folder):
    return trained(diffusion_recipe(folder, "makes", trainer={"ema": 0.9}))


@pytest.fixture(scope="module")
def real(classifier):
    """Return the digits of the training split and of the test split, uint8 (N, 1, 8, 8)."""
    splits = build_data(resolve(classifier / "recipe.yaml"))
    return [torch.stack(column(split, "image")).numpy() for split in (splits.train, splits.test)]


def features_of(classifier):
    return ClassifierFeatures(SimpleNamespace(features=classifier, eager=True), CPU)


def figures(capsys, *args):
    """Run the command, and return the heading, the rows by name as lists of numbers, and the notes."""
    heading, _, *lines = printed(capsys, "distance", *args).splitlines()
    rows = {}
    for line in lines[:2]:
        name, *cells = line.replace(",", "").replace(" ± ", "±").split("  ")
        rows[name.strip()] = [float(cell.split("±")[0]) for cell in cells if cell.strip(" -")]
    return heading, rows, lines[2:]


@pytest.mark.slow
def test_the_distance_of_the_training_images_is_zero(classifier, real, tmp_path, capsys):
    file = tmp_path / "train.npz"
    data = tmp_path / "d.json"
    np.savez(file, np.flip(real[0], 0))
    heading, rows, notes = figures(capsys, file, "--features", classifier, "--out", data)
    assert heading.split() == "images samples reference FD-own IS-own precision % recall %".split()
    count = len(real[0])
    assert rows["train"][:3] == [count, count, 0]
    assert rows["train"][4:] == [100, 100]
    floor = rows["real test"]
    assert floor[:2] == [len(real[1]), count]
    assert floor[2] > 0
    assert 50 < floor[4] < 100
    assert f"reference: train; features of {classifier}" in notes[0]
    held, test = read_json(data)["rows"]
    assert held["figures"]["FD-own"][0] < 1e-9
    assert test["figures"]["FD-own"][1] > 0


def test_fewer_real_images_are_read(classifier, real, tmp_path, capsys):
    np.savez(tmp_path / "test.npz", real[1])
    _, rows, _ = figures(capsys, tmp_path / "test.npz", "--features", classifier, "--real", 40)
    assert rows["test"][:2] == [len(real[1]), 40]
    assert rows["real test"][1] == 40


def test_other_images_are_farther(classifier, real, tmp_path, capsys):
    """Compare noise (channels last), and one image repeated, with real images."""
    np.savez(tmp_path / "noise.npz", np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), dtype=np.uint8))
    np.savez(tmp_path / "same.npz", real[0][:1].repeat(60, 0))
    _, rows, _ = figures(capsys, tmp_path / "noise.npz", "--features", classifier)
    assert rows["noise"][:2] == [300, len(real[0])]
    assert rows["real test"][0] == 300  # equally many real images
    assert rows["noise"][2] > 10 * rows["real test"][2]
    _, rows, _ = figures(capsys, tmp_path / "same.npz", "--features", classifier)
    assert rows["same"][2] > 10 * rows["real test"][2]
    assert rows["same"][3] == 1
    assert rows["same"][5] < 20 < rows["real test"][5]


def test_features_are_the_inputs_of_the_head(classifier, real):
    model = open_run(classifier).model
    own = features_of(classifier)
    for some in (real[1][:7], real[1][7:10]):
        images = torch.from_numpy(some)
        with torch.inference_mode():
            values, shares = own(images)
            torch.testing.assert_close(model.head(values).double().softmax(1), shares)
            torch.testing.assert_close(model(images).double().softmax(1), shares)
        assert values.shape == (len(some), model.head.in_features)


@pytest.mark.parametrize("more", [{}, {"pad": 2, "cache": "device"}])
def test_training_images_are_read_without_augmentation(tmp_path, more):
    pictures(tmp_path, {"train": {"a": 4, "b": 4}, "val": {"a": 2, "b": 2}})
    data = {"name": "imagefolder", "root": str(tmp_path), "image_size": [8, 8], "workers": 0}
    recipe = resolve(tiny_recipe(tmp_path, data=data | more))
    splits = build_data(recipe, cached=True)

    def read(most):
        return images_of_split(recipe, splits, "train", Drawing(most, 3, 0))

    first = torch.cat(list(read(100).batches))
    assert first.shape == (8, 3, 8, 8)
    assert torch.equal(first, torch.cat(list(read(100).batches)))
    held = {sample["image"].numpy().tobytes() for sample in splits.val}
    assert held < {image.numpy().tobytes() for image in first}  # the first images are the same in both splits
    assert read(5).count == 5


def test_folders_and_arrays_hold_the_same(real, tmp_path):
    images = real[0][:30]
    (tmp_path / "folder/deep").mkdir(parents=True)
    for i, picture in enumerate(images):
        place = "folder/deep" if i % 2 else "folder"
        Image.fromarray(picture[0]).convert("RGB" if i % 3 else "L").save(tmp_path / place / f"{i}.png")
    np.savez(tmp_path / "first.npz", labels=np.arange(30), x=images)
    np.savez(tmp_path / "last.npz", images.transpose(0, 2, 3, 1))
    expected = sorted(image.tobytes() for image in images)
    assert len(set(expected)) > 25
    for name in ("folder", "first.npz", "last.npz"):
        read = images_of_path(tmp_path / name, Drawing(100, 7, 0), channels=1)
        batches = list(read.batches)
        assert read.count == 30
        assert [len(batch) for batch in batches] == [7, 7, 7, 7, 2]
        assert sorted(image.numpy().tobytes() for image in torch.cat(batches)) == expected
        few = torch.cat(list(images_of_path(tmp_path / name, Drawing(20, 7, 0), channels=1).batches))
        assert len(few) == 20
        assert {image.numpy().tobytes() for image in few} <= set(expected)


@pytest.mark.slow
def test_samples_of_a_run_are_made_once(classifier, generator, tmp_path, capsys, monkeypatch):
    made = []
    sample = Diffusion.sample

    def counted(task, model, classes, keys, **how):
        made.append((classes.tolist(), how["steps"], how["guidance"]))
        return sample(task, model, classes, keys, **how)

    monkeypatch.setattr(Diffusion, "sample", counted)
    kept = tmp_path / "kept"
    common = [generator, "--features", classifier, "--steps", 2]
    args = [*common, "--batch", 16, "--keep", kept]

    def rows_of(*args):
        made.clear()
        return figures(capsys, *args)[1]

    some = [*args, "--samples", 24]
    rows = rows_of(*some)
    classes = [*range(10)] * 4
    assert made == [(classes[:16], 2, 1.0), (classes[16:32], 2, 1.0)]
    assert rows["makes"][0] == rows["real test"][0] == 24
    other = rows_of(*common, "--batch", 7, "--samples", 24)
    assert other["makes"] == pytest.approx(rows["makes"], abs=0.03)  # for any batch size
    assert rows_of(*some) == rows
    assert not made
    there = rows_of(kept, "--features", classifier, "--reference", kept)["kept"]  # against themselves
    assert there[:2] == [32, 32] and there[2] == pytest.approx(0, abs=1e-3)
    (kept / "00000016.npy").unlink()
    assert rows_of(*some) == rows
    assert len(made) == 1
    assert rows_of(*args, "--samples", 40)["makes"][0] == 40
    assert len(made) == 1
    assert "holds other samples, guidance differs" in refuse(capsys, "distance", *some, "--guidance", 2)
    (kept / "samples.json").write_text("[]")
    assert "holds other samples" in refuse(capsys, "distance", *some)
    (tmp_path / "note").touch()
    assert "holds other files" in refuse(capsys, "distance", *some, "--keep", tmp_path)


@pytest.mark.slow
def test_scores_of_other_settings_and_samples_of_other_weights(classifier, generator, tmp_path, capsys):
    """Check that scores of other settings are kept, that samples serve a moved run, and not one that was trained on."""
    run = shutil.copytree(generator, tmp_path / "made")
    before = len(list(run.glob("distance.json*")))
    args = ["--features", classifier, "--steps", 1, "--samples", 20, "--keep", tmp_path / "kept"]
    figures(capsys, run, *args)
    figures(capsys, run, *args)
    first = (run / "distance.json").read_text()
    run = run.rename(tmp_path / "makes")
    figures(capsys, run, *args, "--real", 40)
    assert len(list(run.glob("distance.json*"))) == before + 2
    assert first in {path.read_text() for path in run.glob("distance.json.old*")}
    changed(run, lambda x: x.add_(0.1))  # the number of steps is the same
    assert "holds other samples, weights differs" in refuse(capsys, "distance", run, *args)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().flatten(2).sum(2) + x[:, :, :4].double().flatten(2).sum(2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_features_of_torchscript_and_of_a_file(real, tmp_path, capsys):
    torch.jit.script(Sums()).save(str(tmp_path / "sums.pt"))
    for name, some in (("a", real[0][:90]), ("b", real[0][90:210])):
        np.savez(tmp_path / f"{name}.npz", some)
        np.savez(tmp_path / f"{name}_features.npz", Sums()(torch.from_numpy(some)).numpy().repeat(3, 1))

    def rows_of(kind, called, *options):
        given = [tmp_path / f"a{kind}.npz", "--reference", tmp_path / f"b{kind}.npz"]
        heading, rows, _ = figures(capsys, *given, *options)
        assert f"FD-{called}" in heading
        assert "IS" not in heading
        assert rows["real in halves"][:2] == [60, 60]
        return rows["a" + kind], rows["real in halves"]

    found = rows_of("", "sums", "--features", tmp_path / "sums.pt")
    assert found == rows_of("_features", "file")
    assert found[0][2] > 0


def test_images_against_features_of_a_file(classifier, real, tmp_path, capsys):
    """Check that the row of images has one more score than the row of a features file, which has no classes."""
    some, seen = tmp_path / "some.npz", tmp_path / "seen.npz"
    np.savez(some, real[0][:90])
    with torch.inference_mode():
        np.savez(seen, features_of(classifier)(torch.from_numpy(real[0][:90]))[0].numpy())
    judge = ["--features", classifier]
    heading, rows, _ = figures(capsys, some, *judge, "--reference", seen)
    assert "IS-own" in heading
    assert rows["some"][2] == 0
    assert " -  " in printed(capsys, "distance", some, *judge, "--reference", seen).splitlines()[3]
    assert "IS-own" in figures(capsys, seen, *judge, "--reference", some)[0]


@pytest.mark.slow
def test_samples_that_cannot_be_compared_are_refused(classifier, generator, real, tmp_path, capsys, monkeypatch):
    arrays = {
        "few": real[0][:19],
        "some": real[0][:30],
        "wide": np.zeros((30, 1, 8, 9), np.uint8),
        "labels": np.zeros(30),
        "a": np.random.rand(30, 4),
        "b": np.random.rand(30, 5),
    }
    for name, array in arrays.items():
        np.savez(tmp_path / f"{name}.npz", array)
    for name in ("bad.npz", "bad.pt"):
        (tmp_path / name).write_bytes(b"neither")
    with open(tmp_path / "npy.npz", "wb") as file:
        np.save(file, real[0][:30])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, message in {
        "few.npz": "few: 19 images, expected at least 20",
        "wide.npz": "wide: images of 1 x 8 x 9, but the classifier",
        "labels.npz": "holds neither uint8 images (N, channels, height, width) nor features",
        "bad.npz": "bad.npz: not a readable array",
        "npy.npz": "npy.npz: not a readable array",
        "empty": "empty: no images in this folder",
        "none.npz": "none.npz: expected a run, a folder of images or FILE.npz",
        "some.npz data.root=. data.workers=x": "data.workers",
        "some.npz --reference some.npz data.workers=0": "data.workers=0: no data set is read",
        "some.npz --keep .": "some.npz is not a run, nothing is generated",
        "some.npz --steps 7": "--steps: ",
        "some.npz --raw": "some.npz is not a run, nothing is generated",
        "some.npz --samples 5": "--samples: expected at least 20, got 5",
        f"{classifier}": "task 'image_classification' generates no images, expected a run of diffusion",
        f"{generator} --steps 2000 --samples 20": "--steps: expected 1 to 1000, got 2000",
        "some.npz --out no/d.json": "--out: no folder",
    }.items():
        assert message in refuse(capsys, "distance", "--features", classifier, *words.split()), message
    for words, message in {
        "some.npz --reference some.npz": "--features: missing",
        "some.npz --features bad.pt --reference some.npz": "bad.pt is not a TorchScript module",
        "some.npz --features bad.pt": "bad.pt is not a TorchScript module",
        f"some.npz --features {generator}": "is of task 'diffusion', expected a classifier",
        "a.npz --reference b.npz": "a: 4 features per image, but the reference has 5",
        "a.npz": "there is no run whose data could be used",
    }.items():
        assert message in refuse(capsys, "distance", *words.split()), message
