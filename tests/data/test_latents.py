import io
import json

import numpy as np
import pytest
import torch

from data.vision.latents import Latents, LatentsConfig
from lion.trainer.loader import SeededDataset
from tests.helpers import assert_equal, column, printed, refuse, refused, trained

CLASSES = ["ant", "bee", "cow"]


def folder(root, count=40, shape=(4, 8, 8), flipped=True):
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for split, size in (("train", count), ("val", 8)):
        np.save(root / f"{split}.npy", rng.normal(size=(size, *shape)).astype(np.float16))
        np.save(root / f"{split}_labels.npy", np.arange(size) % 3)
    if flipped:
        np.save(root / "train_flipped.npy", np.load(root / "train.npy") + 100)
    (root / "latents.json").write_text(json.dumps({"scale": 0.5, "classes": CLASSES}))
    return root


def build(root, **settings):
    return Latents(LatentsConfig(root=str(root), **settings)).build()


def test_samples_are_scaled_and_some_are_mirrored(tmp_path):
    splits = build(folder(tmp_path / "l"), flip=0.25)
    held = torch.from_numpy(np.load(tmp_path / "l/train.npy")).float()
    assert (splits.info.channels, splits.info.size, splits.info.classes) == (4, (8, 8), tuple(CLASSES))
    data = SeededDataset(splits.train, 0)
    samples = data.__getitems__([(epoch, i, i) for epoch in range(30) for i in range(40)])
    images = torch.stack(column(samples, "image"))
    mirrored = images.mean((1, 2, 3)) > 40
    assert mirrored.float().mean().item() == pytest.approx(0.25, abs=0.05)
    wanted = held.repeat(30, 1, 1, 1) + 100 * mirrored[:, None, None, None]
    torch.testing.assert_close(images, wanted / 2, rtol=0, atol=0.1)
    assert column(samples[:4], "label") == [0, 1, 2, 0] and images.dtype == torch.float32
    assert_equal(data.__getitems__([(29, i, i) for i in range(40)]), samples[-40:])
    for _ in range(9):
        assert_equal(splits.val[0]["image"], torch.from_numpy(np.load(tmp_path / "l/val.npy")[0]).float() / 2)
    assert build(tmp_path / "l", flip=0).train.flipped is None
    (tmp_path / "l/train_flipped.npy").unlink()
    assert build(tmp_path / "l").train.flipped is None


def test_other_latents_have_another_fingerprint(tmp_path):
    root = folder(tmp_path / "l", count=100)
    first = build(root).fingerprint
    assert first == build(folder(tmp_path / "same", count=100)).fingerprint
    for name, place in (("train", (-1, 0, 0, 0)), ("train_labels", 5), ("val_labels", 7)):
        values = np.load(root / f"{name}.npy")
        values[place] = 1 - values[place] if name == "train" else (values[place] + 1) % 3
        np.save(root / f"{name}.npy", values)
        changed, first = first, build(root).fingerprint
        assert changed != first
    np.save(root / "train_flipped.npy", np.load(root / "train.npy"))
    assert build(root).fingerprint != first


def test_what_is_not_such_a_folder(tmp_path):
    refused(r"no folder .*expected train\.npy, val\.npy", build, tmp_path / "none")
    root = folder(tmp_path / "l")

    def damaged(match, name, values):
        path = root / name
        before = path.read_bytes()
        path.write_bytes(values) if isinstance(values, bytes) else np.save(path, values)
        refused(match, build, root)
        path.write_bytes(before)

    damaged("not a manifest of latents", "latents.json", b"{}")
    damaged("not a manifest of latents", "latents.json", b'{"scale": NaN, "classes": ["a", "b", "c"]}')
    damaged("not a manifest of latents", "latents.json", b'{"scale": 1, "classes": "abc"}')
    damaged("not a NumPy array", "train.npy", b"text")
    np.savez(archive := io.BytesIO(), np.zeros(3))
    damaged("not a NumPy array", "train.npy", archive.getvalue())
    damaged(r"expected floating point \(N, C, H, W\), got float64 \(3,\)", "val.npy", np.zeros(3))
    damaged("3 channels are those of images", "train.npy", np.zeros((40, 3, 8, 8)))
    damaged(r"expected 8 integers, got int64 \(2,\)", "val_labels.npy", np.zeros(2, dtype=int))
    damaged("0 to 3 for 3 classes", "val_labels.npy", np.arange(8) % 4)
    damaged(r"train have shape \(4, 8, 8\), of val \(4, 4, 4\)", "val.npy", np.zeros((8, 4, 4, 4)))
    damaged("as in train.npy, got", "train_flipped.npy", np.zeros((2, 4, 8, 8)))
    damaged("as in train.npy, got int64", "train_flipped.npy", np.zeros((40, 4, 8, 8), dtype=int))
    (root / "train.npy").unlink()
    refused(r"train\.npy: no such file", build, root)


def test_a_run_of_latents_keeps_latents(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(f"""
task: {{name: diffusion, shown: 4, shown_steps: 3}}
data: {{name: latents, root: {folder(tmp_path / "l")}, workers: 0}}
model: {{mixer: lion_s, dim: 12, depth: 1, num_heads: 3}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: 2, eval_every: 2, save_every: 2, compile: false, device: cpu}}
run: {{root: {tmp_path / "runs"}}}
""")
    out = tmp_path / "a.npy"
    asked = ["sample", trained(path), "--classes", "bee, 2", "--count", 3, "--steps", 2]
    assert "latents are written to FILE.npy" in refuse(capsys, *asked, "--out", tmp_path / "a.png")
    assert printed(capsys, *asked, "--out", out) == f"{out}, by row: bee, cow\n"
    assert np.load(out).shape == (6, 4, 8, 8)
