import contextlib
import dataclasses
import fcntl
import io
import logging
import os
import pickle
import re
import warnings
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torchvision.transforms import v2

import data
from data import pool
from data.base import DataConfig, DataSet, locked
from data.folders import DOWNLOADED, data_root
from data.hub import configuration
from data.splits import split_of
from data.vision import torchvision_sets
from data.vision.imagefolder import ClassFolders
from data.vision.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    TO_TENSOR,
    Channels,
    PictureConfig,
    open_picture,
)
from data.vision.images import (
    test_transform as transform_of_tests,
)
from data.vision.sources import split_indices
from lion.config import ConfigError
from lion.samples.base import Info
from lion.samples.images import ImageInfo, numbered
from lion.tasks import TASKS
from lion.tasks.image_classification import ImageClassification
from tests.helpers import assert_equal, column, picture, pictures, refuse, refused, tiny_recipe
from tools.compose import describe_data, resolve

from .helpers import counts, opened, samples_of


def make(name, **settings):
    return opened(name, **settings).build()


def published(name):
    kind = data.dataset(name)
    return kind(kind.Config()).published()


def class_folders(root):
    """Make the folders of two classes of images for training and validation, and return them."""
    places = [root / place for place in ("train/a", "train/b", "val/a", "val/b")]
    for place in places:
        place.mkdir(parents=True)
    return places


def folder(root, **settings):
    return make("imagefolder", **{"root": root, "image_size": [16, 24], **settings})


def hub(path, **settings):
    return make("hf", path=path, **settings)


TWO = {"train": {"cat": 3, "dog": 2}, "val": {"cat": 1, "dog": 1}}
ONE = {"": {"cat": 12, "dog": 8}}  # without splits


def test_digits_are_real_and_split_once():
    pytest.importorskip("sklearn")
    splits = make("digits")
    assert counts(splits) == [1078, 270, 449]
    indices = [part.indices for part in splits[:3]]
    assert sorted(i for part in indices for i in part) == list(range(1797))
    assert indices == [part.indices for part in make("digits")[:3]]
    images = torch.stack(column(samples_of(splits.train), "image"))
    assert images.dtype == torch.uint8
    pixels = (images / 255 - splits.info.mean[0]) / splits.info.std[0]
    assert pixels.shape == (1078, 1, 8, 8) and abs(pixels.mean()) < 0.02 and abs(pixels.std() - 1) < 0.02


def test_split_indices_is_a_partition():
    parts = split_indices(10, (0.2, 0.3))
    assert [len(part) for part in parts] == [5, 2, 3]
    assert sorted(i for part in parts for i in part) == list(range(10))


@pytest.mark.parametrize(
    "name, settings, samples",
    [
        ("cifar10", {}, 50_000),
        ("cifar10", {"limit": 10_000}, 10_000),
        ("cifar10", {"limit": 60_000, "val_split": 0.1}, 45_000),
        ("imagenet", {"limit": 1_000}, 1_000),
    ],
)
def test_published_samples_are_those_that_a_run_trains_on(name, settings, samples):
    assert opened(name, **settings).published()[1] == samples


def test_a_folder_of_images(tmp_path):
    pictures(tmp_path, TWO)
    splits = folder(tmp_path)
    assert splits.info == ImageInfo((16, 24), 3, ("cat", "dog"), IMAGENET_MEAN, IMAGENET_STD)
    assert splits.test is None
    sample = splits.train[4]
    assert sample["image"].shape == (3, 16, 24) and sample["image"].dtype == torch.uint8
    assert sample["label"] == 1
    assert torch.equal(splits.val[0]["image"], splits.val[0]["image"])


def test_sizes_and_channels_come_from_the_data(tmp_path):
    pictures(tmp_path / "photos", TWO)
    info = folder(tmp_path / "photos", image_size=None).info
    assert (info.size, info.channels) == ((224, 224), 3)  # images of several sizes
    pictures(tmp_path / "grey", {"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}}, grey=True)
    info = folder(tmp_path / "grey", image_size=None).info
    assert (info.size, info.channels) == ((20, 30), 1) and len(info.mean) == len(info.std) == 1
    assert folder(tmp_path / "grey", channels=3).val[0]["image"].shape == (3, 16, 24)
    assert folder(tmp_path / "photos", channels=1, mean=[0.2], std=[0.3]).info.mean == (0.2,)
    assert folder(tmp_path / "photos", mean=[0.5]).info.mean == (0.5, 0.5, 0.5)


def test_images_of_more_than_eight_bits(tmp_path):
    """Pillow's conversion to 8 bits clips at 255."""
    ramp = np.arange(0, 65_536, 128, dtype=np.uint16).reshape(16, 32)[:, :24]
    for place in class_folders(tmp_path):
        Image.fromarray(ramp).save(place / "0.png")
    for cache in (None, "memory"):
        splits = folder(tmp_path, crop=1.0, cache=cache)
        assert splits.info.channels == 1
        assert torch.equal(splits.val[0]["image"][0], torch.from_numpy((ramp >> 8).astype(np.uint8)))
    for kind in (np.int32, np.float32):
        Image.fromarray(np.ones((8, 8), kind)).save(tmp_path / "0.tif")
        with pytest.raises(ValueError, match="pixels of 32 bits, whose range is unknown"):
            open_picture(tmp_path / "0.tif")


def test_the_middle_of_an_image_fills_the_frame(tmp_path):
    for place in class_folders(tmp_path):
        for i, shape in enumerate([(100, 100), (101, 100), (40, 90), (7, 90)]):
            Image.new("L", shape, 255).save(place / f"{i}.png")
    for size in ((64, 128), (32, 8), (30, 20)):
        for crop in (0.875, 1.0):
            for sample in folder(tmp_path, image_size=list(size), crop=crop).val:
                assert sample["image"].shape[1:] == size and sample["image"].min() == 255


def test_folders_for_training_and_test_alone(tmp_path):
    pictures(tmp_path, {"train": {"a": 8, "b": 8}, "test": {"a": 2, "b": 1}})
    assert counts(folder(tmp_path)) == [16, 3, None]
    assert counts(folder(tmp_path, val_split=0.25)) == [12, 4, 3]


@pytest.mark.parametrize("name", ["valid", "validation", "dev"])
def test_other_names_of_the_validation_images(tmp_path, name, caplog):
    pictures(tmp_path, {"train": {"a": 8, "b": 8}, name: {"a": 3, "b": 2}, "test": {"a": 2, "b": 1}})
    assert counts(folder(tmp_path)) == [16, 5, 3]
    for path in [*tmp_path.glob("test/*/*.png")]:  # as in the archive of ImageNet
        path.rename(tmp_path / "test" / path.name)
    for path in tmp_path.glob("test/*/"):
        path.rmdir()
    assert counts(folder(tmp_path)) == [16, 5, None]
    assert "is left out, its images have no class folders" in caplog.text


def test_one_folder_without_a_split(tmp_path):
    pictures(tmp_path, ONE)
    for limit, count in ((None, 15), (6, 6), (100, 15)):
        splits, again = (folder(tmp_path, val_split=0.25, limit=limit) for _ in range(2))
        assert counts(splits) == [count, 5, None]
        assert not set(splits.train.indices) & set(splits.val.indices)
        assert splits.train.indices == again.train.indices and splits.val.indices == again.val.indices
    assert splits.train.transform is not splits.val.transform


@pytest.mark.parametrize("settings", [{}, {"pad": 4}, {"rand_augment": "rand-m9-mstd0.5-inc1"}, {"val_split": 0.4}])
def test_decoding_once_changes_nothing(tmp_path, settings):
    pictures(tmp_path, {"": {"cat": 6, "dog": 5}} if settings.get("val_split") else TWO)
    plain, cached = (folder(tmp_path, cache=c, **settings) for c in (None, "memory"))
    assert cached.info == plain.info
    for a, b in zip(plain[:2], cached[:2]):
        assert len(a) == len(b)
        for i in range(len(a)):
            torch.manual_seed(i)
            want = a[i]
            torch.manual_seed(i)
            assert_equal(b[i], want)


def places_in(whole, part):
    """Return the places (y, x) of an image at which another one of 16 x 24 pixels stands."""
    height, width = whole.shape[1] - 15, whole.shape[2] - 23
    places = [(y, x) for y in range(height) for x in range(width)]
    return {(y, x) for y, x in places if torch.equal(part, whole[:, y : y + 16, x : x + 24])}


def test_images_that_stay_on_the_device(tmp_path):
    pictures(tmp_path, TWO)
    plain, kept = (folder(tmp_path, pad=3, flip=0.5, cache=c) for c in (None, "device"))
    assert kept.info == plain.info and counts(kept)[:2] == [5, 2]
    assert_equal(samples_of(kept.val), samples_of(plain.val))
    batch = kept.val.batch([1, 0, 1], "cpu")
    assert_equal(batch["image"], torch.stack([plain.val[i]["image"] for i in (1, 0, 1)]))
    assert batch["label"].tolist() == [1, 0, 1]

    def draw(seed, indices):
        return kept.train.batch(indices, "cpu", torch.Generator().manual_seed(seed))["image"]

    assert_equal(draw(1, [0] * 9), draw(1, [0] * 9))
    assert not torch.equal(draw(1, [0] * 9), draw(2, [0] * 9))
    whole = F.pad(kept.train.pixels[4], (3, 3, 3, 3))
    seen = set()
    for image in draw(0, [4] * 300):
        seen |= {(*place, False) for place in places_in(whole, image)}
        seen |= {(*place, True) for place in places_in(whole, image.flip(-1))}
    assert len(seen) > 90 and {m for *_, m in seen} == {True, False}  # of 98 possible crops


def resized(image):
    """Return an image of 16 x 24 pixels, uint8 (channels, 16, 24)."""
    return v2.functional.pil_to_tensor(v2.functional.resize(image, [16, 24], v2.InterpolationMode.BICUBIC))


def test_crops(tmp_path):
    pictures(tmp_path, TWO)
    whole = folder(tmp_path, pad=4, flip=0).train
    padded = F.pad(resized(picture(1, (31, 20))), (4, 4, 4, 4))
    shifts = set()
    for seed in range(40):
        torch.manual_seed(seed)
        found = places_in(padded, whole[1]["image"])
        assert found
        shifts |= found
    assert len(shifts) > 20
    want = resized(picture(0, (30, 20), "L").convert("RGB"))
    plain = folder(tmp_path, pad=4).val[0]["image"]  # a 30 x 20 image, resized to 24 x 16
    assert torch.equal(plain, want)
    middle = folder(tmp_path, image_size=[14, 14]).val[0]["image"]  # shorter side 14 / 0.875 = 16
    assert torch.equal(middle, want[:, 1:15, 5:19])


def test_augmentation_stands_between_crop_and_pixels(tmp_path, monkeypatch):
    pictures(tmp_path, TWO)
    train = folder(tmp_path, rand_augment="rand-m9-mstd0.5-inc1-p1.0").train
    kinds = [type(t).__name__ for t in train.transform.transforms]
    assert kinds == ["Channels", "RandomResizedCrop", "RandomHorizontalFlip", "RandAugment", "PILToTensor"]
    assert train.transform.transforms[3].fill == (124, 116, 104)
    crop = folder(tmp_path, random_scale=[0.5, 0.6]).train.transform.transforms[1]
    assert (crop.scale, crop.interpolation) == ((0.5, 0.6), v2.InterpolationMode.BICUBIC)
    assert not any("Rand" in type(t).__name__ for t in folder(tmp_path).val.transform.transforms)


CAT, BOTH = {"cat": 1}, {"cat": 1, "dog": 1}


@pytest.mark.parametrize(
    "layout, settings, message",
    [
        ({}, {}, r"no folder .*; expected ROOT/train/CLASS"),
        ({"train": BOTH}, {}, r"no folder .*/val"),
        ({"train": BOTH, "val": CAT}, {}, "train and val have different classes: only train has class 'dog'"),
        ({"train": {"cat": 1, "dog": 0}, "val": BOTH}, {}, "/train: no images of class dog; expected ROOT"),
        ({"train": {"cat": 2}, "val": CAT}, {}, r"only one class \(cat\), expected at least two"),
        (
            {"cat": {"x": 1}, "dog": {"x": 1}, "seg_test": {"x": 1}},
            {"val_split": 0.5},
            "seg_test: a split or a class?",
        ),
        (TWO, {"val_split": 0.5}, r"data.val_split: data set 'imagefolder' already has validation images"),
        (TWO, {"rand_augment": "rand-x9"}, r"data.rand_augment: .*rand-m9-mstd0.5-inc1"),
        (
            TWO,
            {"channels": 1, "mean": [0.5, 0.4, 0.3]},
            r"data.mean: expected one number per channel \(1\), got",
        ),
        (TWO, {"cache": "device", "pad": 0}, r"data.cache: on the device whole batches are cropped"),
        (
            TWO,
            {"cache": "device", "pad": 3, "rand_augment": "rand-m9-mstd0.5-inc1"},
            r"data.cache: on the device whole batches are cropped",
        ),
        (ONE, {}, r"no folder .*/train; expected ROOT/train/CLASS.*data.val_split=0.1"),
        (ONE, {"val_split": 0.001}, r"data.val_split: 0.001 of 20 images leaves val empty, one image is 0.05"),
    ],
)
def test_folders_and_settings_that_do_not_fit(tmp_path, layout, settings, message):
    pictures(tmp_path, layout)
    refused(message, folder, tmp_path, **settings)


def test_images_that_cannot_be_read_are_named(tmp_path):
    pictures(tmp_path, TWO)
    file = tmp_path / "train/dog/1.png"
    whole = file.read_bytes()
    file.write_bytes(whole[:200])
    assert len(folder(tmp_path, pad=3).train) == 5  # the trainer counts unreadable images
    for cache in ("memory", "device"):
        refused(r"data.cache: .*train/dog/1.png \(.*; without a cache", folder, tmp_path, pad=3, cache=cache)
    file.write_text("no picture")
    refused(r"not an image: .*train/dog/1.png \(UnidentifiedImageError", folder, tmp_path)
    file.write_bytes(whole)
    for path in tmp_path.glob("val/*/*.png"):
        path.write_bytes(path.read_bytes()[:80])
    refused(r"no image of val can be read, e.g. .*png \(", folder, tmp_path)


def test_folders_are_read_in_torchvisions_order(tmp_path):
    """The order of samples determines the splits and the next samples of a resumed run."""
    names = "b/2.png b/10.PNG a/x/z/1.png a/x-y/1.png a/x/1.png a/1.webp a-b/1.jpg a-b/text B/1.png".split()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b/gone.jpg").symlink_to("nowhere")  # the trainer reports and counts it
    (tmp_path / "b/one.png").symlink_to("2.png")
    want, got = torchvision.datasets.ImageFolder(str(tmp_path)), ClassFolders(tmp_path)
    assert (got.samples, got.classes) == (want.samples, want.classes) and len(got) == 10


def test_links_between_folders(tmp_path):
    """A loop of links once multiplied the images, with labels of other classes."""
    pictures(tmp_path / "root", TWO)
    pictures(tmp_path / "new", {"": {"eel": 3, "more": 1}})
    root, new = tmp_path / "root", tmp_path / "new"
    for split in ("train", "val"):
        (root / split / "eel").symlink_to(new / "eel")
    (root / "train/cat/more").symlink_to("../../../new/more")
    splits = folder(root)
    assert splits.info.classes == ("cat", "dog", "eel") and counts(splits)[:2] == [3 + 1 + 2 + 3, 1 + 1 + 3]
    for name, target, same in (
        ("train/cat/loop", "..", "train/cat/loop: the same folder as {root}/train,"),
        ("train/cat/loop", "/", "train/cat/loop: the same folder as /,"),
        ("train/eel2", new / "eel", "train/eel2: the same folder as {root}/train/eel,"),
        ("train/cat/dog", "../dog", "the same folder as {root}/train/"),
        ("train/fox", "fox", "train/fox: Too many levels of symbolic links"),
    ):
        (root / name).symlink_to(target)
        refused(re.escape(same.format(root=root)), folder, root)
        (root / name).unlink()
    assert counts(hub(root)) == counts(folder(root))
    (root / "train/metadata.csv").write_text("file_name,label\n")  # read by the `datasets` library
    refused(r"data.path: .*/(cat/more|eel) is a link to a folder", hub, root)


SPLIT_FOLDERS = [
    {"Training": BOTH, "Testing": BOTH},
    {"seg_train/seg_train": BOTH, "seg_test/seg_test": BOTH, "seg_pred": {"": 2}},
    {"train2017": BOTH, "valSet": BOTH},
]


@pytest.mark.parametrize("layout", SPLIT_FOLDERS)
@pytest.mark.parametrize("val_split", [None, 0.5])
def test_folders_of_splits_are_never_classes(tmp_path, layout, val_split):
    pictures(tmp_path, layout)
    for open_set in (folder, hub):
        if val_split and "valSet" in layout:
            refused("already has validation images", open_set, tmp_path, val_split=val_split)
        else:
            assert open_set(tmp_path, val_split=val_split).info.classes == ("cat", "dog")


def test_test_images_without_classes_are_left_out_also_in_a_folder_of_the_same_name(tmp_path, caplog):
    pictures(tmp_path, {"trainingSet/trainingSet": BOTH, "testSet/testSet": {"": 2}})
    splits = folder(tmp_path, val_split=0.5)
    assert splits.info.classes == ("cat", "dog") and splits.test is None
    assert "testSet/testSet is left out, its images have no class folders" in caplog.text


def test_a_class_may_be_called_train(tmp_path):
    pictures(tmp_path, {"": {"boat": 4, "train": 4}})
    splits = folder(tmp_path, val_split=0.5)
    assert splits.info.classes == ("boat", "train")
    pictures(tmp_path / "inner", {"boat/train": {"": 2}, "boat/test": {"": 2}, "car/train": {"": 2}})
    refused("boat/test: a folder of a split in that of a class", folder, tmp_path / "inner", val_split=0.5)
    pictures(tmp_path, {"train_2": BOTH, "Training": BOTH})
    refused("Training and train_2 both name the split train", folder, tmp_path)


def test_pictures_are_known_by_their_content(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lion")
    pictures(tmp_path, {"": {"cat": 4, "dog": 4}})
    cat = tmp_path / "cat"
    for name in ("a.gif", "b.jfif", "c.JPE", "d", "e.jpg_large", "f.data"):
        kind = "GIF" if name == "a.gif" else "JPEG"
        picture(1, (9, 7)).save(cat / name, format=kind)
    for name in ("notes.txt", "labels.xml", "Thumbs.db"):
        (cat / name).write_text("no picture")
    (cat / "@eaDir").mkdir()
    picture(1, (9, 7)).save(cat / "@eaDir/thumb.jpg")
    (tmp_path / "@eaDir").mkdir()
    for open_set in (folder, hub):
        splits = open_set(tmp_path, val_split=0.2)
        assert splits.info.classes == ("cat", "dog") and len(splits.train) + len(splits.val) == 14
    assert caplog.text.count("3 files are left out: 1 .db, 1 .xml, 1 .txt") == 1


def test_of_a_long_picture_the_middle_is_scaled():
    config, info = PictureConfig(), ImageInfo((32, 32), 3, ("a", "b"), (0.5,) * 3, (0.5,) * 3)
    long = Image.new("RGB", (20_000, 2))
    long.paste((255, 0, 0), (9_990, 0, 10_010, 2))
    covering = transform_of_tests(config, info).transforms[1]
    assert max(covering(long).size) <= 16 * 37
    made = transform_of_tests(config, info)(long)
    assert made.shape == (3, 32, 32) and made[0].min() > 200 and made[1].max() < 50
    ordinary = picture(3, (100, 60))
    assert covering(ordinary).size == (int(36 * 100 / 60), 36)


@pytest.mark.parametrize("mode", ["LAB", "P", "CMYK", "I;16"])
def test_every_mode_becomes_grey(mode, tmp_path):
    file = tmp_path / "x.tif"
    made = Image.new(mode, (9, 7))
    if mode == "P":
        file = tmp_path / "x.png"
        made.info["transparency"] = bytes(range(256))
    made.save(file)
    with warnings.catch_warnings(action="error"):
        assert Channels(1)(open_picture(str(file))).mode == "L"


def odd_files(folder):
    """Create files that are not images: a device, a pipe (opening it blocks), and hidden names."""
    (folder / "null.png").symlink_to("/dev/null")
    os.mkfifo(folder / "pipe.png")
    (folder / "._1.png").write_text("of macOS")
    pictures(folder, {"": {".ipynb_checkpoints": 1}})


@pytest.mark.parametrize("name, key", [("imagefolder", "root"), ("hf", "path")])
def test_only_files_are_images_and_hidden_folders_are_not_classes(tmp_path, name, key):
    pictures(tmp_path, TWO)
    odd_files(tmp_path / "train")
    odd_files(tmp_path / "val/cat")
    splits = make(name, **{key: str(tmp_path), "image_size": [8, 8]})
    assert splits.info.classes == ("cat", "dog") and counts(splits)[:2] == [5, 2]


# data sets with special file formats


def idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize("name, inner", [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_idx_files(tmp_path, name, inner):
    rng = np.random.default_rng(0)
    for part, n in (("train", 12), ("t10k", 5)):
        idx(tmp_path / inner / f"raw/{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28)))
        idx(tmp_path / inner / f"raw/{part}-labels-idx1-ubyte", np.arange(n) % 10)
    splits = make(name, root=tmp_path)
    assert (splits.info.size, splits.info.channels, len(splits.info.classes)) == ((28, 28), 1, 10)
    assert counts(splits) == [12, 5, None]
    held = make(name, root=tmp_path, val_split=0.25)
    assert counts(held) == [9, 3, 5]
    assert splits.info.mean == data.dataset(name).Config().mean


@pytest.mark.parametrize("name, classes", [("cifar10", 10), ("cifar100", 100)])
def test_cifar_as_torchvision_reads_it(tmp_path, monkeypatch, name, classes):
    kind = getattr(torchvision.datasets, name.upper())
    rng, base = np.random.default_rng(0), tmp_path / kind.base_folder
    base.mkdir()
    for file, n in {"data_batch_1": 6, "test_batch": 4, "train": 6, "test": 4}.items():
        labels = list(range(n))
        rows = {"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": labels, "fine_labels": labels}
        (base / file).write_bytes(pickle.dumps(rows))
    (base / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: [f"c{i}" for i in range(classes)]}))
    # it compares checksums of the real files
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *args: True)
    if name == "cifar10":
        monkeypatch.setattr(kind, "train_list", [["data_batch_1", ""]])
    splits = make(name, root=tmp_path)
    assert (splits.info.size, splits.info.channels, len(splits.info.classes)) == ((32, 32), 3, classes)
    assert counts(splits)[:2] == [6, 4] and splits.train[2]["label"] == 2
    assert splits.val[0]["image"].shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_files_that_are_not_there(tmp_path, monkeypatch, name):
    folder = tmp_path / DOWNLOADED[name]
    refused(f"data set '{name}': no folder {folder} .*data.download=true", make, name, root=tmp_path)
    folder.mkdir(parents=True)
    refused(f"data set '{name}': Dataset not found.* in {folder} .*data.download=true", make, name, root=tmp_path)
    kind, calls = getattr(torchvision.datasets, name.upper().replace("FASHION_", "Fashion")), []
    monkeypatch.setattr(kind, "download", lambda self: calls.append("download"))
    own = f"data.name={name}", f"data.root={tmp_path}", "data.download=true"
    assert "Dataset not found" in describe_data(resolve("cifar10_mini", own))[2] and not calls
    monkeypatch.setattr(
        torchvision_sets, "locked", lambda path: contextlib.nullcontext(calls.append(path.name.split(".")[-2:]))
    )
    with pytest.raises(ConfigError, match="Dataset not found") as raised:
        make(name, root=tmp_path, download=True)
    assert "data.download" not in str(raised.value), "it is set"
    assert calls == [["download", "lock"], "download"], "one process at a time"
    info, samples = published(name)
    assert samples in (50_000, 60_000) and len(info.classes) in (10, 100) and len(info.mean) == info.channels


# ImageNet


@pytest.mark.slow
def test_imagenet_is_known_by_its_folders_and_has_their_names(tmp_path):
    wnids = pytest.importorskip("timm.data").ImageNetInfo().label_names()
    picture(0, (8, 8)).save(tmp_path / "one.png")

    def folders(root, names):
        for split in ("train", "val"):
            for name in names:
                (tmp_path / root / split / name).mkdir(parents=True)
                os.link(tmp_path / "one.png", tmp_path / root / split / name / "0.png")
        return make("imagenet", root=tmp_path / root).info

    whole, known = folders("whole", wnids), published("imagenet")[0]
    assert whole == known and whole.classes[281] == "tabby" and whole.classes[::999] == ("tench", "toilet tissue")
    whole.check_same("a converted checkpoint", known.to_dict())
    unnamed = dataclasses.replace(known, classes=numbered(1000))
    whole.check_same("one converted before there were names", unnamed.to_dict())
    other = folders("other", [*wnids[:-1], "n15102894"])  # as many folders, one of them different
    assert other.classes[-1] == "n15102894"
    refused("class 0 was 'tench', and is 'n01440764' now", other.check_same, "it", known.to_dict())
    assert folders("part", wnids[:10]).classes == tuple(wnids[:10])


def test_the_lock_file_of_another_user_is_held_by_reading_it(tmp_path, monkeypatch):
    path, opened_as, own = tmp_path / "x.lock", [], os.open

    def of_another_user(path, flags, *mode):
        opened_as.append(flags)
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return own(path, flags, *mode)

    path.touch()
    monkeypatch.setattr(os, "open", of_another_user)
    with locked(path):
        assert opened_as[-1] == os.O_RDONLY
        with open(path) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_prepared_data_need_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "locked", lambda path: pytest.fail("prepared data are only read"))
    (tmp_path / "done").mkdir()
    pool.create(tmp_path / "done", fill=None)


# Hugging Face


def parquet(path, count, columns=("img", "label"), names=("cat", "dog"), labels=None, **more):
    label = datasets.ClassLabel(names=list(names)) if names else datasets.Value("string")
    rows = {columns[0]: [picture(i, (9, 7)) for i in range(count)]}
    rows[columns[1]] = labels or [i % 2 if names else ("yes", "no")[i % 2] for i in range(count)]
    features = {columns[0]: datasets.Image(), columns[1]: label} | {k: datasets.Image() for k in more}
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict({**rows, **more}, features=datasets.Features(features)).to_parquet(str(path))


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_hf_parquet_with_splits_found(tmp_path):
    parquet(tmp_path / "train.parquet", 7)
    parquet(tmp_path / "test-00000-of-00001.parquet", 3)
    splits = hub(tmp_path)
    assert counts(splits) == [7, 3, None]
    assert splits.info.classes == ("cat", "dog") and (splits.info.size, splits.info.channels) == ((7, 9), 3)
    assert torch.equal(hub(tmp_path, crop=1.0).val[1]["image"], TO_TENSOR(picture(1, (9, 7))))
    parquet(tmp_path / "validation.parquet", 4)
    splits = hub(tmp_path)
    assert counts(splits) == [7, 4, 3]
    splits = hub(tmp_path, val="test")
    assert counts(splits)[1:] == [3, None], "images that choose a checkpoint are no test"
    splits = hub(tmp_path / "train.parquet", val_split=0.3)
    assert counts(splits)[:2] == [5, 2]


def test_hf_parquet_in_split_folders(tmp_path):
    for split, count in (("train", 6), ("test", 4), ("validation", 2)):
        parquet(tmp_path / "default" / split / "0000.parquet", count)
        parquet(tmp_path / "default/.trash" / split / "0000.parquet", count)
    assert counts(hub(tmp_path)) == [6, 2, 4]


def test_hf_configurations_of_a_clone(tmp_path):
    for name, count in (("fold1", 6), ("fold2", 4)):
        for split in ("train", "test"):
            parquet(tmp_path / name / f"{split}-00000-of-00001.parquet", count)
    assert counts(hub(tmp_path, subset="fold2"))[:2] == [4, 4]
    for subset in (None, "fold3"):
        refused(r"data\.subset: .* has (fold1, fold2|no folder 'fold3')", hub, tmp_path, subset=subset)
    refused(r"data\.subset: .*fold1 has no folder 'fold1', leave it null", hub, tmp_path / "fold1", subset="fold1")


def test_splits_and_configurations_by_names_of_files():
    for file, split in {
        "train.parquet": "train",
        "data/train-00000-of-00002.parquet": "train",
        "train_sft-00000-of-00001.parquet": "train_sft",
        "validation_matched-00000-of-00001-0123456789abcdef.parquet": "validation_matched",
        "train-part-00000-of-00002.jsonl": "train",
        "default/test/0000.parquet": "test",
        "notes.txt": None,
    }.items():
        assert split_of(Path(file)) == split, file
    root = Path("root")
    files = list(map(Path, "README.md de/train.jsonl en/test.jsonl en/train.jsonl".split()))
    assert configuration(root, files, "train", None) == (root, files)
    clone = [Path("data/train-00000-of-00001.parquet"), Path("scripts/train.py")]
    assert configuration(root, clone, "train", "default") == (root, clone)
    assert configuration(root, files, "train", "en") == (root / "en", [Path("test.jsonl"), Path("train.jsonl")])
    said = r"data\.subset: root has de, en, did you mean 'en'\?; data\.subset=null reads all"
    refused(said, configuration, root, files, "train", "enn")


def test_hf_splits_of_other_names_are_not_for_training(tmp_path):
    for split, count in (("train", 6), ("extra", 9), ("test", 4)):
        parquet(tmp_path / f"set/{split}-00000-of-00001.parquet", count)
    assert counts(hub(tmp_path / "set"))[:2] == [6, 4]
    assert len(hub(tmp_path / "set", train="extra").train) == 9
    parquet(tmp_path / "one/values.parquet", 5)
    assert counts(hub(tmp_path / "one", val_split=0.2))[:2] == [4, 1]


def test_hf_labels_that_are_not_classes(tmp_path, caplog):
    parquet(tmp_path / "train.parquet", 6)
    parquet(tmp_path / "validation.parquet", 4)
    parquet(tmp_path / "test.parquet", 4, labels=[-1] * 4)
    assert counts(hub(tmp_path)) == [6, 4, None]
    assert "split 'test' is skipped, none of its labels is a class" in caplog.text
    refused("data.label_column: -1 in split 'test' is not a class of 'train'", hub, tmp_path, test="test")
    parquet(tmp_path / "train.parquet", 6, labels=[0, 1, None, 0, 1, 1])
    refused("data.label_column: None in split 'train' is not a class", hub, tmp_path)
    words, turned = tmp_path / "words", tmp_path / "turned"
    parquet(words / "train.parquet", 4, names=None)
    parquet(words / "val.parquet", 4, names=None, labels=["yes", "no", "maybe", "no"])
    refused("data.label_column: 'maybe' in split 'validation' is not a class of 'train'", hub, words)
    parquet(turned / "train.parquet", 4)
    parquet(turned / "test.parquet", 4, names=("dog", "cat"))  # of all files, `datasets` takes one's names
    refused("classes of column 'label' differ: .*dog, cat in .*test.parquet", hub, turned)


def test_hf_columns_named_and_labels_of_text(tmp_path):
    parquet(tmp_path / "train.parquet", 6, ("photo", "answer"), names=None, second=[picture(9)] * 6)
    own = {"val_split": 0.5, "image_column": "photo", "label_column": "answer"}
    refused("data.image_column: must be set, more than one of photo, second fits", hub, tmp_path, val_split=0.5)
    no_label = {**own, "label_column": None}
    refused("data.label_column: must be set, none of photo, answer, second fits", hub, tmp_path, **no_label)
    misspelt = {**own, "label_column": "answr"}
    refused("data.label_column: no column 'answr', did you mean 'answer'", hub, tmp_path, **misspelt)
    splits = hub(tmp_path, **own)
    assert splits.info.classes == ("no", "yes")
    assert {part[i]["label"] for part in splits[:2] for i in range(3)} == {0, 1}
    order = [*splits.train.indices, *splits.val.indices]
    labels = [splits.train.source[i][1] for i in sorted(order)]
    assert labels == [1, 0, 1, 0, 1, 0]


def test_hf_that_is_not_there(tmp_path):
    refused(r"data\.path: missing, expected a Hub id", make, "hf")
    refused(
        "data.path: 'no/such_set' is not a local file or folder and cannot be loaded from the Hub", hub, "no/such_set"
    )
    (tmp_path / "bad.parquet").write_text("no parquet")
    refused("data.path: .*bad.parquet' cannot be read", hub, tmp_path / "bad.parquet")
    parquet(tmp_path / "ok/train.parquet", 4)
    refused("data.val: .* has no split 'vall'", hub, tmp_path / "ok", val="vall")
    refused("has one split: data.val_split=0.1 holds out a tenth", hub, tmp_path / "ok")


SHARED = Path(__file__).parents[3] / "shared/data/images"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared pictures are not here")
@pytest.mark.slow
def test_real_sets():
    cifar = hub(SHARED / "cifar10_jpeg", val_split=0.1)
    assert counts(cifar) == [45_000, 5_000, 10_000] and cifar.info.size == (32, 32)
    assert cifar.info.classes[:3] == ("airplane", "automobile", "bird")
    tiny = make("imagefolder", root=SHARED / "tiny_imagenet_100")
    assert (tiny.info.size, tiny.info.channels, len(tiny.info.classes)) == ((64, 64), 3, 100)
    assert counts(tiny)[:2] == [6_000, 2_000]
    digits = make("mnist", root=SHARED / "mnist_t10k")
    assert counts(digits)[:2] == [8_000, 2_000]


def test_the_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("LION_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("LION_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    assert data_root() == tmp_path / "cache/lion"


# The table


@pytest.mark.parametrize("name", data.DATASETS)
def test_every_name_is_that_of_a_data_set(name):
    kind = data.dataset(name)
    config = kind.Config(**{"task": "rte"} if name == "glue" else {})
    assert issubclass(kind, DataSet) and config.name == name and issubclass(kind.Info, Info)
    assert any(issubclass(kind.Info, task.Info) for task in TASKS.values()), "a task learns from such data"
    source = kind(config)
    assert source.config == source.config.uncached() and source.workers in (0, 4)
    assert source.download >= 0 and isinstance(source.check.__doc__, str)
    if type(source).prepare is DataSet.prepare:  # no preparation
        assert source.prepare() is None and source.disk() == 0 and "needs no preparation" in source.check()


def test_another_name_is_refused():
    refused("unknown data set 'cifar', did you mean 'cifar10'", data.dataset, "cifar")


def test_predict_refuses_what_is_not_a_file(tmp_path):
    class Sums(DataSet):
        Config, Info = DataConfig, ImageInfo

        def build(self):
            raise AssertionError

    assert Sums(DataConfig("sums")).published() is None
    refused(r"x\.txt: a file cannot be a sample of data set 'sums'", Sums(DataConfig("sums")).load, "x.txt", None)


def test_files_to_predict_from(tmp_path):
    picture(0, (40, 20)).save(tmp_path / "a.png")
    info = published("cifar10")[0]
    for name, shape in (("cifar10", (3, 32, 32)), ("digits", (1, 8, 8))):
        kind = data.dataset(name)
        source = kind(kind.Config())
        sample = source.load(str(tmp_path / "a.png"), info)
        assert sample.keys() == {"image"} and sample["image"].shape == shape and sample["image"].dtype == torch.uint8
        assert source.collate([sample, sample])["image"].shape == (2, *shape)
        refused(r"gone\.png: no such file", source.load, str(tmp_path / "gone.png"), info)


@dataclasses.dataclass(frozen=True)
class TextInfo(Info):
    kind = "text"


class Reading(ImageClassification):
    Info = TextInfo


def test_a_task_that_is_given_another_kind_of_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TASKS, "reading", Reading)
    path = tiny_recipe(tmp_path, task={"name": "reading", "mixup": 0})
    line = refuse(capsys, "train", path)
    others = sorted(name for name, task in TASKS.items() if task.Info is ImageInfo)
    assert {"diffusion", "image_classification"} <= {*others}
    assert line == (
        f"error: {path}: data.name: 'digits' holds images, but task 'reading' needs text; "
        f"tasks that take images: {', '.join(others)}\n"
    )
    assert not (tmp_path / "runs").exists()


def test_hf_reads_raw_bytes_and_tables_saved_to_disk(tmp_path):
    rows = []
    for i in range(6):
        file = io.BytesIO()
        picture(i, (9, 7)).save(file, "PNG")
        rows.append({"img": file.getvalue(), "label": i % 2})
    (tmp_path / "raw").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "raw/train.parquet"))
    structs = [dict(row, img={"bytes": row["img"], "path": "x.png"}) for row in rows]
    (tmp_path / "structs").mkdir()
    datasets.Dataset.from_list(structs).to_parquet(str(tmp_path / "structs/my_train.parquet"))
    table = datasets.Dataset.from_list(rows).cast_column("img", datasets.Image())
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    for name in ("raw", "structs", "saved"):
        splits = hub(tmp_path / name, **({} if name == "saved" else {"val_split": 0.5}))
        assert splits.info.size == (7, 9) and len(splits.train) == (6 if name == "saved" else 3), name
