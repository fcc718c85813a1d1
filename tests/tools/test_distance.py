"""Tests of `./run.sh distance`: generated images against real ones, from all sources."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lion.runs import open_run
from lion.tasks.diffusion import Diffusion
from lion.trainer.runtime import Runtime
from tests.helpers import here, pictures, refuse, tiny_recipe
from tests.tools.test_sample import changed
from tools.compose import build_data, resolve
from tools.distance import ClassifierFeatures
from tools.image_sources import images_of_path, images_of_split

pytest.importorskip("sklearn")
CPU = Runtime(torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distance")


@pytest.fixture(scope="module")
def classifier(folder):
    assert here("train", tiny_recipe(folder, "judge"), "--no-eval") == 0
    return folder / "runs" / "judge"


@pytest.fixture(scope="module")
def generator(folder):
    path = tiny_recipe(folder, "makes", trainer={"ema": 0.9})
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": {"name": "diffusion", "shown": 0}}))
    assert here("train", path, "--no-eval") == 0
    return folder / "runs" / "makes"


@pytest.fixture(scope="module")
def real(classifier):
    """Return the digits of the training split and of the test split, uint8 (N, 1, 8, 8)."""
    splits = build_data(resolve(classifier / "recipe.yaml"))
    return [torch.stack([sample["image"] for sample in split]).numpy() for split in (splits.train, splits.test)]


def figures(capsys, *args):
    """Run the command, and return the heading, the rows by name as lists of numbers, and the notes."""
    assert here("distance", *args) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    rows = {}
    for line in lines[:2]:
        name, *cells = line.replace(",", "").replace(" ± ", "±").split("  ")
        rows[name.strip()] = [float(cell.split("±")[0]) for cell in cells if cell.strip(" -")]
    return heading, rows, lines[2:]


def test_the_distance_of_the_training_images_is_zero(classifier, real, tmp_path, capsys):
    file, data = tmp_path / "train.npz", tmp_path / "d.json"
    np.savez(file, np.flip(real[0], 0))
    heading, rows, notes = figures(capsys, file, "--features", classifier, "--out", data)
    assert heading.split() == "images samples reference FD-own IS-own precision % recall %".split()
    assert rows["train"][:3] == [len(real[0]), len(real[0]), 0] and rows["train"][4:] == [100, 100]
    floor = rows["real test"]
    assert floor[:2] == [len(real[1]), len(real[0])] and floor[2] > 0 and 50 < floor[4] < 100
    assert f"reference: train; features of {classifier}" in notes[0]
    held = json.loads(data.read_text())
    assert held["rows"][0]["figures"]["FD-own"][0] < 1e-9 and held["rows"][1]["figures"]["FD-own"][1] > 0


def test_fewer_real_images_are_read(classifier, real, tmp_path, capsys):
    np.savez(tmp_path / "test.npz", real[1])
    _, rows, _ = figures(capsys, tmp_path / "test.npz", "--features", classifier, "--real", 40)
    assert rows["test"][:2] == [len(real[1]), 40] and rows["real test"][1] == 40


def test_other_images_are_farther(classifier, real, tmp_path, capsys):
    """Compare noise (channels last), and one image repeated, with real images."""
    np.savez(tmp_path / "noise.npz", np.random.default_rng(0).integers(0, 256, (300, 8, 8, 1), dtype=np.uint8))
    np.savez(tmp_path / "same.npz", real[0][:1].repeat(60, 0))
    _, noise, _ = figures(capsys, tmp_path / "noise.npz", "--features", classifier)
    assert noise["noise"][:2] == [300, len(real[0])] and noise["real test"][0] == 300  # equally many real images
    assert noise["noise"][2] > 10 * noise["real test"][2]
    _, same, _ = figures(capsys, tmp_path / "same.npz", "--features", classifier)
    assert same["same"][5] < 20 < same["real test"][5] and same["same"][2] > 10 * same["real test"][2]
    assert same["same"][3] == 1


def test_features_are_the_inputs_of_the_head(classifier, real):
    model = open_run(classifier).model
    args = type("Args", (), {"features": classifier, "eager": True})
    own = ClassifierFeatures(args, CPU)
    for some in (real[1][:7], real[1][7:10]):
        images = torch.from_numpy(some)
        with torch.inference_mode():
            values, shares = own(images)
            torch.testing.assert_close(model.head(values).double().softmax(1), shares)
            torch.testing.assert_close(model(images).double().softmax(1), shares)
        assert values.shape == (len(some), model.head.in_features)


def test_training_images_are_read_without_augmentation(tmp_path):
    pictures(tmp_path, {"train": {"a": 4, "b": 4}, "val": {"a": 2, "b": 2}})
    changes = {"name": "imagefolder", "root": str(tmp_path), "image_size": [8, 8], "workers": 0}
    for more in ({}, {"pad": 2, "cache": "device"}):
        recipe = resolve(tiny_recipe(tmp_path, data={**changes, **more}))
        splits = build_data(recipe, cached=True)
        first, again = (
            torch.cat(list(images_of_split(recipe, splits, "train", 100, 3, seed).batches)) for seed in (0, 0)
        )
        assert first.shape == (8, 3, 8, 8) and torch.equal(first, again)
        held = {x["image"].numpy().tobytes() for x in splits.val}
        assert held < {x.numpy().tobytes() for x in first}  # the first images of the helper are the same in both splits
        assert images_of_split(recipe, splits, "train", 5, 3, 0).count == 5


def test_folders_and_arrays_hold_the_same(real, tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for i, picture in enumerate(real[0][:30]):
        place = tmp_path / "folder" / ("deep" if i % 2 else "")
        Image.fromarray(picture[0]).convert("RGB" if i % 3 else "L").save(place / f"{i}.png")
    np.savez(tmp_path / "first.npz", labels=np.arange(30), x=real[0][:30])
    np.savez(tmp_path / "last.npz", real[0][:30].transpose(0, 2, 3, 1))
    found = []
    for name in ("folder", "first.npz", "last.npz"):
        read = images_of_path(tmp_path / name, 100, 7, 0, channels=1)
        batches = list(read.batches)
        assert read.count == 30 and [len(b) for b in batches] == [7, 7, 7, 7, 2]
        found.append(sorted(x.numpy().tobytes() for x in torch.cat(batches)))
        assert len(set(found[-1])) > 25 and found[-1] == found[0]
        few = torch.cat(list(images_of_path(tmp_path / name, 20, 7, 0, channels=1).batches))
        assert len(few) == 20 and {x.numpy().tobytes() for x in few} <= set(found[0])


@pytest.mark.slow
def test_samples_of_a_run_are_made_once(classifier, generator, tmp_path, capsys, monkeypatch):
    made, sample = [], Diffusion.sample

    def counted(task, model, classes, keys, **how):
        made.append((classes.tolist(), how["steps"], how["guidance"]))
        return sample(task, model, classes, keys, **how)

    monkeypatch.setattr(Diffusion, "sample", counted)
    args = [generator, "--features", classifier, "--steps", 2, "--batch", 16, "--keep", tmp_path / "kept"]
    _, rows, _ = figures(capsys, *args, "--samples", 24)
    assert made == [([i % 10 for i in range(16)], 2, 1.0), ([i % 10 for i in range(16, 32)], 2, 1.0)]
    assert rows["makes"][0] == 24 == rows["real test"][0]
    batches = [generator, "--features", classifier, "--steps", 2, "--batch", 7, "--samples", 24]
    assert figures(capsys, *batches)[1]["makes"] == pytest.approx(rows["makes"], abs=0.03)  # for any batch size
    made.clear()
    assert figures(capsys, *args, "--samples", 24)[1] == rows and not made
    (tmp_path / "kept" / "00000016.npy").unlink()
    assert figures(capsys, *args, "--samples", 24)[1] == rows and len(made) == 1
    assert figures(capsys, *args, "--samples", 40)[1]["makes"][0] == 40 and len(made) == 2
    message = "holds other samples, guidance differs"
    assert message in refuse(capsys, "distance", *args, "--samples", 24, "--guidance", 2)
    (tmp_path / "kept" / "samples.json").write_text("[]")
    assert "holds other samples" in refuse(capsys, "distance", *args, "--samples", 24)
    (tmp_path / "note").touch()
    assert "holds other files" in refuse(capsys, "distance", *args[:-1], tmp_path, "--samples", 24)


def test_scores_of_other_settings_and_samples_of_other_weights(classifier, generator, tmp_path, capsys):
    """Check that scores of other settings are kept, that samples serve a moved run, and not one that was trained on."""
    run = shutil.copytree(generator, tmp_path / "made")
    names = [path.name for path in run.glob("distance.json*")]
    args = ["--features", classifier, "--steps", 1, "--samples", 20, "--keep", tmp_path / "kept"]
    figures(capsys, run, *args)
    figures(capsys, run, *args)
    first = (run / "distance.json").read_text()
    run = run.rename(tmp_path / "makes")
    args = [run, *args]
    figures(capsys, *args, "--real", 40)
    assert len([*run.glob("distance.json*")]) == len(names) + 2
    assert first in {path.read_text() for path in run.glob("distance.json.old*")}
    changed(run, lambda x: x.add_(0.1))  # the number of steps is the same
    assert "holds other samples, weights differs" in refuse(capsys, "distance", *args)


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().flatten(2).sum(2) + x[:, :, :4].double().flatten(2).sum(2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_features_of_torchscript_and_of_a_file(real, tmp_path, capsys):
    torch.jit.script(Sums()).save(str(tmp_path / "sums.pt"))
    for name, some in (("a", real[0][:90]), ("b", real[0][90:210])):
        np.savez(tmp_path / f"{name}.npz", some)
        values = some.astype(np.float64).sum((2, 3)) + some[:, :, :4].astype(np.float64).sum((2, 3))
        np.savez(tmp_path / f"{name}_features.npz", values.repeat(3, 1))
    out = []
    for kind in ("", "_features"):
        features = [] if kind else ["--features", tmp_path / "sums.pt"]
        heading, rows, _ = figures(
            capsys, tmp_path / f"a{kind}.npz", "--reference", tmp_path / f"b{kind}.npz", *features
        )
        assert f"FD-{'file' if kind else 'sums'}" in heading and "IS" not in heading
        assert rows["real in halves"][:2] == [60, 60]
        out.append([rows["a" + kind], rows["real in halves"]])
    assert out[0] == out[1] and out[0][0][2] > 0


def test_images_against_features_of_a_file(classifier, real, tmp_path, capsys):
    """Check that the row of images has one more score than the row of a features file, which has no classes."""
    own = ClassifierFeatures(type("Args", (), {"features": classifier, "eager": True}), CPU)
    with torch.inference_mode():
        values = own(torch.from_numpy(real[0][:90]))[0]
    np.savez(tmp_path / "seen.npz", values.numpy()), np.savez(tmp_path / "some.npz", real[0][:90])
    some, seen, judge = tmp_path / "some.npz", tmp_path / "seen.npz", ["--features", classifier]
    heading, rows, _ = figures(capsys, some, *judge, "--reference", seen)
    assert "IS-own" in heading and rows["some"][2] == 0
    assert here("distance", some, *judge, "--reference", seen) == 0
    assert " -  " in capsys.readouterr().out.splitlines()[3]
    assert "IS-own" in figures(capsys, seen, *judge, "--reference", some)[0]


def test_samples_that_cannot_be_compared_are_refused(classifier, generator, real, tmp_path, capsys):
    np.savez(tmp_path / "few.npz", real[0][:19])
    np.savez(tmp_path / "some.npz", real[0][:30])
    np.savez(tmp_path / "wide.npz", np.zeros((30, 1, 8, 9), np.uint8))
    np.savez(tmp_path / "labels.npz", np.zeros(30))
    np.savez(tmp_path / "a.npz", np.random.rand(30, 4)), np.savez(tmp_path / "b.npz", np.random.rand(30, 5))
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with open(tmp_path / "npy.npz", "wb") as file:
        np.save(file, real[0][:30])
    (tmp_path / "bad.pt").write_bytes(b"no module")
    (tmp_path / "empty").mkdir()
    some, judge = tmp_path / "some.npz", ["--features", classifier]
    for args, message in (
        ([tmp_path / "few.npz", *judge], "few: 19 images, expected at least 20"),
        ([tmp_path / "wide.npz", *judge], "wide: images of 1 x 8 x 9, but the classifier"),
        ([tmp_path / "labels.npz", *judge], "holds neither uint8 images (N, channels, height, width) nor features"),
        ([tmp_path / "bad.npz", *judge], "bad.npz: not a readable array"),
        ([tmp_path / "npy.npz", *judge], "npy.npz: not a readable array"),
        ([tmp_path / "empty", *judge], "empty: no images in this folder"),
        ([tmp_path / "none.npz", *judge], "none.npz: expected a run, a folder of images or FILE.npz"),
        ([some, "--reference", some], "--features: missing"),
        ([some, *judge, f"data.root={tmp_path}", "data.workers=x"], "data.workers"),
        ([some, *judge, "--reference", some, "data.workers=0"], "data.workers=0: no data set is read"),
        ([some, *judge, "--keep", tmp_path], "some.npz is not a run, nothing is generated"),
        ([some, *judge, "--steps", 7], "--steps: "),
        ([some, *judge, "--raw"], "some.npz is not a run, nothing is generated"),
        ([some, *judge, "--samples", 5], "--samples: expected at least 20, got 5"),
        ([some, "--features", tmp_path / "bad.pt", "--reference", some], "bad.pt is not a TorchScript module"),
        ([some, "--features", tmp_path / "bad.pt"], "bad.pt is not a TorchScript module"),
        ([some, "--features", generator], "is of task 'diffusion', expected a classifier"),
        ([classifier, *judge], "task 'image_classification' generates no images, expected a run of diffusion"),
        ([generator, *judge, "--steps", 2000, "--samples", 20], "--steps: expected 1 to 1000, got 2000"),
        ([some, *judge, "--out", tmp_path / "no" / "d.json"], "--out: no folder"),
        ([tmp_path / "a.npz", "--reference", tmp_path / "b.npz"], "a: 4 features per image, but the reference has 5"),
        ([tmp_path / "a.npz"], "there is no run whose data could be used"),
    ):
        assert message in refuse(capsys, "distance", *args), message
