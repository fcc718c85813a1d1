import pytest
import torch
from PIL import Image

import data
from data.common import data_root, split_indices
from lion.config import ConfigError, build


def test_digits_are_real_and_split_once():
    pytest.importorskip("sklearn")
    digits = data.module("digits")
    splits = digits.build(digits.Config())
    sizes = [len(s) for s in (splits.train, splits.val, splits.test)]
    assert sum(sizes) == 1797 and sizes == [1078, 270, 449]
    parts = [set(s.indices) for s in (splits.train, splits.val, splits.test)]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    again = digits.build(digits.Config())
    assert [s.indices for s in splits[:3]] == [s.indices for s in again[:3]]
    pixels = torch.stack([splits.train[i]["image"] for i in range(1078)])
    assert pixels.shape == (1078, 1, 8, 8) and abs(pixels.mean()) < 0.02 and abs(pixels.std() - 1) < 0.02


def test_split_indices_is_a_partition():
    parts = split_indices(10, (0.2, 0.3))
    assert [len(p) for p in parts] == [5, 2, 3] and sorted(i for p in parts for i in p) == list(range(10))


def pictures(root, layout):
    for split, classes in layout.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB" if i % 2 else "L", (30 + i, 20), i * 40).save(root / split / name / f"{i}.png")


def folder(root, **settings):
    module = data.module("imagefolder")
    values = {"root": str(root), "image_size": [16, 24], **settings}
    return module.build(build(module.Config, values, source=lambda key: "r.yaml", key="data"))


def test_a_folder_of_pictures(tmp_path):
    pictures(tmp_path, {"train": {"cat": 3, "dog": 2}, "val": {"cat": 1, "dog": 1}})
    splits = folder(tmp_path)
    assert splits.info.classes == ("cat", "dog") and splits.info.size == (16, 24) and splits.test is None
    sample = splits.train[4]
    assert sample["image"].shape == (3, 16, 24) and sample["label"] == 1
    assert torch.equal(splits.val[0]["image"], splits.val[0]["image"])


def test_folders_that_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder .*; expected ROOT/train/CLASS"):
        folder(tmp_path / "gone")
    pictures(tmp_path / "a", {"train": {"cat": 1}})
    with pytest.raises(ConfigError, match=r"no folder .*/val"):
        folder(tmp_path / "a")
    pictures(tmp_path / "b", {"train": {"cat": 1, "dog": 1}, "val": {"cat": 1}})
    with pytest.raises(ConfigError, match="train and val differ in class folder 'dog'"):
        folder(tmp_path / "b")
    pictures(tmp_path / "c", {"train": {"cat": 1, "dog": 0}, "val": {"cat": 1, "dog": 1}})
    with pytest.raises(ConfigError, match="Found no valid file for the classes dog"):
        folder(tmp_path / "c")


def test_the_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("LION_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("LION_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "lion"


def test_names_are_the_modules_that_build():
    assert data.names() == ["digits", "imagefolder", "imagenet"]
    for name in data.names():
        module = data.module(name)
        assert module.Config().name == name and callable(module.build) and callable(module.load_picture)
