"""`bench inference`: built models, counted memory and reports. Times are not checked."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.transforms import v2

from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, Attention, LionAttention
from lion.runs import open_run
from tests.helpers import here, refuse, tiny_recipe
from tools import probe
from tools.bench import collect, inference
from tools.bench.blockwise import mix_blockwise
from tools.image_sources import drawn
from tools.probe import Variant


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run of Lion-S on digits (8 px, patches of 4)."""
    folder = tmp_path_factory.mktemp("inference")
    assert here("train", tiny_recipe(folder), "--no-eval") == 0
    return folder / "runs" / "tiny"


def measured(run, *variants, sizes=(8, 16), **changes):
    """Measure variants, eager; return their rows and notes."""
    sent = []
    for size in sizes:
        given = dict(variants=variants, size=size, batch=2, rounds=1, seconds=60, threads=1, eager=True, samples=None)
        given |= {"against": None}
        inference.measure(inference.Job(run=str(run), command="x", **{**given, **changes}), sent.append)
    rows = [m for m in sent if m["kind"] == "row"]
    return rows, [m["text"] for m in sent if m["kind"] == "note" and "warming up" not in m["text"]]


def test_a_model_at_another_size_keeps_its_weights(run):
    loaded, full = open_run(run), Variant("full")
    _, same = inference.build(loaded, 8, full)
    images = torch.randn(2, 1, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(same(images), loaded.model(images), rtol=0, atol=0)
    task, larger = inference.build(loaded, 24, full)
    assert (
        larger.patches == (6, 6) and task.info.size == (24, 24) and larger(torch.randn(1, 1, 24, 24)).shape == (1, 10)
    )
    own, grown = loaded.model.state_dict(), larger.state_dict()
    assert all(torch.equal(own[name], grown[name]) for name in own if name != "position")
    assert grown["position"].shape == (1, 37, 16)
    assert inference.build(loaded, 8, Variant("softmax"))[1].config.readout == "cls"


@pytest.mark.parametrize(
    "variant", [Variant("softmax"), Variant("full"), Variant("chunk", 8), Variant("rnn", 4), Variant("blockwise", 8)]
)
def test_rows_of_inference(run, variant):
    rows, notes = measured(run, Variant("softmax"), variant)
    rows = [r for r in rows if r["form"] == variant.form]
    assert all((r["ratio"] == 1) == (variant.form == "softmax") and r["ratio"] > 0 for r in rows)
    assert not notes and [r["size"] for r in rows] == [8, 16] and [r["tokens"] for r in rows] == [5, 17]
    assert all(r["ms"] > 0 and r["matrix_bytes"] == 4 * 2 * 2 * r["tokens"] ** 2 for r in rows)
    assert all(r["mixer"] == ("softmax" if variant.form == "softmax" else "lion_s") for r in rows)


def test_every_variant_is_the_same_function(run):
    loaded = open_run(run)
    images, found = torch.randn(2, 1, 16, 16), {}
    for variant in (Variant("full"), Variant("chunk", 8), Variant("rnn", 4), Variant("blockwise", 8)):
        _, model = inference.build(loaded, 16, variant)
        with torch.inference_mode():
            found[variant] = model(images)
    for logits in found.values():
        torch.testing.assert_close(logits, found[Variant("full")])


def test_what_blockwise_cannot_measure(tmp_path):
    here("train", tiny_recipe(tmp_path, model={"mixer": "gla"}), "--no-eval")
    rows, (note,) = measured(tmp_path / "runs" / "tiny", Variant("blockwise", 8), sizes=(8,))
    assert not rows and "blockwise 8: blockwise_attention: takes neither the delta rule nor decays" in note
    for layer in (LionAttention(8, 2, "lightnet"), LionAttention(8, 2, "lion_s", scans=("row_snake", "column_snake"))):
        with pytest.raises(ValueError, match="only for one scan"):
            mix_blockwise(layer, *[torch.zeros(1)] * 4, Layout())


def test_only_the_forms_of_the_mixer_are_measured(tmp_path):
    model = {"mixer": "vim", "mlp": "none", "cls_place": "middle"}
    assert here("train", tiny_recipe(tmp_path, model=model), "--no-eval") == 0
    run = tmp_path / "runs" / "tiny"
    found = inference.variants(open_run(run), list(inference.FORMS), [4])
    assert found == [Variant("softmax"), Variant("chunk", 4), Variant("rnn", 4)]
    rows, notes = measured(run, *found)
    assert [(r["form"], r["size"]) for r in rows] == [(v.form, size) for size in (8, 16) for v in found] and not notes
    assert [inference.mega_flops(row) == "-" for row in rows[:3]] == [
        False,
        True,
        True,
    ]  # the formulas are of attention


def test_lion_lit_under_decays_of_one(tmp_path):
    here("train", tiny_recipe(tmp_path, model={"mixer": "lion_lit"}), "--no-eval")
    loaded = open_run(tmp_path / "runs" / "tiny")
    assert inference.variants(loaded, ["full"], [8]) == [Variant(f) for f in ("softmax", "full", "quadratic")]
    images, found, shapes = torch.randn(2, 1, 24, 24), [], []
    for variant in (Variant("full"), Variant("quadratic")):
        _, model = inference.build(loaded, 24, variant)
        (layer, *_) = (m for m in model.modules() if isinstance(m, Attention))
        x = torch.randn(2, 37, 16)
        shapes.append(layer.arguments(x, *layer.heads(x), Layout())["gates"].log_decay)
        with torch.inference_mode():
            found.append(model(images))
    assert shapes[0] is None and shapes[1].shape == (2,) and (shapes[1].exp() == 1).all()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mixer", [name for name, entry in LINEAR.items() if entry.decay is None])
def test_every_variant_of_a_mixer_without_decay_is_the_model(mixer, tmp_path):
    loaded = inference.open_model(str(tiny_recipe(tmp_path, model={"mixer": mixer})))
    images, found = torch.randn(2, 1, 8, 8), {}
    for variant in inference.variants(loaded, ["full", "chunk"], [8])[1:]:
        _, model = inference.build(loaded, 8, variant)
        with torch.inference_mode():
            found[variant.form] = model(images)
    assert ("quadratic" in found) == (mixer != "performer")  # Lion-D has no random features
    for form, values in found.items():
        torch.testing.assert_close(values, found["full"], msg=form)


@pytest.mark.parametrize("form", ("full", "quadratic"))
def test_only_decays_are_filled_in(form, tmp_path, monkeypatch):
    """Check that a model with any other missing weight is refused."""
    here("train", tiny_recipe(tmp_path, model={"mixer": "lion_lit"}), "--no-eval")
    loaded = open_run(tmp_path / "runs" / "tiny")

    def less(self, weights, source):
        return {name: value for name, value in weights.items() if name != "head.bias"}

    monkeypatch.setattr(type(loaded.model), "adapt", less)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        inference.build(loaded, 8, Variant(form))


@pytest.mark.slow
def test_mixer_memory_counts_the_scores(run):
    """Check the memory of the mixing: L x L scores in full, and none in rnn."""
    rows = {v.form: measured(run, v, sizes=(192,), batch=1)[0][0] for v in (Variant("full"), Variant("rnn", 64))}
    assert rows["full"]["tokens"] == 48 * 48 + 1
    if rows["full"]["mixer_bytes"] is not None:
        assert rows["full"]["mixer_bytes"] > rows["full"]["matrix_bytes"]
        assert rows["rnn"]["mixer_bytes"] < rows["full"]["matrix_bytes"] / 10


def test_no_memory_is_a_note(run, monkeypatch):
    monkeypatch.setattr(probe, "free_bytes", lambda device: 1000.0)
    rows, notes = measured(run, Variant("full"))
    assert not rows and len(notes) == 2 and "do not fit in memory" in notes[0]
    assert len(measured(run, Variant("softmax"))[0]) == 2


@pytest.mark.slow
def test_the_inference_command(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "in_a_process", lambda measure, job, receive: measure(job, receive))
    command = ["bench", "inference", run, "--sizes", "16,8", "--rounds", "1", "--out", tmp_path, "--eager"]
    command += ["--chunk-size", "4"]
    assert here(*command, "--form", "full", "chunk") == 0
    out, err = capsys.readouterr()
    assert "profiler" not in err
    assert "chunk 4" in out and "softmax" in out
    assert here(*command, "--form", "rnn") == 0
    held = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert {(r["form"], r["size"]) for r in held} == {
        (f, s) for f in ("softmax", "full", "chunk", "rnn") for s in (8, 16)
    }
    other = tiny_recipe(tmp_path, "other", model={"mixer": "softmax", "depth": 1})
    assert here(*command, "--form", "rnn", "--against", other) == 0  # a table of its own
    text = (tmp_path / "inference.md").read_text()
    assert text.count("\n## ") == 2 and "; softmax is other\n" in text
    assert "| 16 | 17 | rnn 4 |" in text and "](inference_tiny.png)" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "inference_tiny.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_has_random_weights_without_its_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "in_a_process", lambda measure, job, receive: measure(job, receive))
    recipe = tiny_recipe(tmp_path)
    command = ["bench", "inference", recipe, "--sizes", "8", "--rounds", "1", "--eager", "--out", tmp_path]
    assert here(*command, "--form", "full") == 0
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert {(row["run"], row["form"]) for row in rows} == {("tiny_random_weights", f) for f in ("softmax", "full")}
    (first, second) = (inference.open_model(str(recipe)).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    capsys.readouterr()
    line = refuse(capsys, "bench", "inference", recipe, "--evaluate", "5")
    assert "is a recipe, whose weights are random; give a run" in line
    assert inference.open_model("vim_tiny").folder.name == "vim_tiny_random_weights"
    line = refuse(capsys, "bench", "inference", "vim_tinny")
    assert "run 'vim_tinny': no recipe.yaml" in line
    assert "no recipe of that name either: vim_tinny: no such recipe, did you mean 'vim_tiny'?" in line


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Train a run on a folder of images of 12 px, resized to 8 px."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 5)):
        for name, bright in (("dark", 60), ("light", 190)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = (bright + rng.integers(-60, 60, (12, 12, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    data = {"name": "imagefolder", "root": str(folder), "image_size": [8, 8], "workers": 0}
    recipe = tiny_recipe(folder, data=data, trainer={"batch_size": 8, "steps": 2, "eval_every": 1})
    assert here("train", recipe, "--no-eval") == 0
    return folder / "runs" / "tiny"


@pytest.mark.parametrize("form", ("chunk", "rnn"))
def test_the_metric_at_every_size(photos, tmp_path, monkeypatch, form):
    """Compare the metric with images that are drawn from both classes, resized and classified one by one."""
    monkeypatch.setattr(collect, "in_a_process", lambda measure, job, receive: measure(job, receive))
    command = ["bench", "inference", photos, "--sizes", "8,16", "--rounds", "1", "--eager", "--out", tmp_path]
    assert here(*command, "--form", form, "--chunk-size", "4", "--evaluate", "7") == 0
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert not any("value" in row for row in rows if row["form"] == "softmax")
    loaded, files = open_run(photos), sorted((photos.parents[1] / "val").glob("*/*.png"))
    files = [files[i] for i in drawn(10, 7, loaded.recipe.seed)]
    for size in (8, 16):
        right = 0
        for path in files:
            resize = v2.Resize(int(size / 0.875), interpolation=v2.InterpolationMode.BICUBIC)
            picture = v2.CenterCrop(size)(resize(Image.open(path)))
            task, model = inference.build(loaded, size, Variant("full"))
            with torch.inference_mode():
                logits = model(v2.functional.pil_to_tensor(picture)[None])
            right += task.info.classes[logits.argmax()] == path.parent.name
        (row,) = (row for row in rows if row["form"] == form and row["size"] == size)
        assert row["value"] == pytest.approx(right / 7) and row["shown"] == f"{100 * right / 7:.2f}"
    assert "|mixer MiB|x SDPA|of a matrix|MFLOP, C.12|top-1 %|" in (tmp_path / "inference.md").read_text()


def test_a_metric_needs_the_data_before_anything_is_measured(run, photos, capsys):
    assert "--evaluate: data set 'digits' has samples of one size only" in refuse(
        capsys, "bench", "inference", run, "--sizes", "8", "--evaluate", "5"
    )
    folder = photos.parents[1] / "val" / "light"
    folder.rename(folder.with_name("airy"))
    line = refuse(capsys, "bench", "inference", photos, "--sizes", "8", "--evaluate", "5")
    folder.with_name("airy").rename(folder)
    assert "only val has class 'airy', only train has class 'light'" in line


def test_refusals(run, tmp_path, capsys):
    line = refuse(capsys, "bench", "inference", run, "--sizes", "11")
    assert "--sizes: 11 px does not suit the run's model, nearest: 12" in line
    assert "no recipe.yaml" in refuse(capsys, "bench", "inference", tmp_path / "none")
    assert "--sizes: expected a whole number" in refuse(capsys, "bench", "inference", run, "--sizes", "8,x")
    line = refuse(capsys, "bench", "inference", run, "--against", "gpt2_tiny_softmax")
    assert "--against: expected a recipe of model 'vit' with softmax, gpt2_tiny_softmax has 'gpt' with softmax" in line
    line = refuse(capsys, "bench", "inference", run, "--against", "deit_tiny_softmax")
    assert "model.patch_size: 16 does not divide image height 8" in line
    softmax = tiny_recipe(tmp_path, "plain", model={"mixer": "softmax"})
    line = refuse(capsys, "bench", "inference", softmax, "--against", "deit_tiny_softmax")
    assert "plain.yaml is softmax itself, measure deit_tiny_softmax in a call of its own" in line


def test_softmax_may_be_a_recipe_of_another_shape(run, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(
        yaml.safe_dump(
            {"extends": str(tiny_recipe(tmp_path, model={"mixer": "softmax", "depth": 3, "dim": 24, "num_heads": 4}))}
        )
    )
    (row,), _ = measured(run, Variant("softmax"), sizes=(8,), against=str(path))
    assert row["matrix_bytes"] == 4 * 2 * 4 * 5**2 and row["dim"] == 24  # of the recipe's 4 heads
    assert row["against"] == "other" and inference.title(row).endswith("eager; softmax is other")
    model = inference.build(open_run(run), 8, Variant("softmax"), str(path))[1]
    assert len(model.encoder.blocks) == 3 and model.config.mixer == "softmax"


def test_texts_longer_than_those_of_training_are_measured_without_padding():
    """Check a masked LM without positions: softmax beside it has positions for every size, and no mask."""
    loaded = inference.open_model("mlm_tiny_lion_s")
    _, model = inference.build(loaded, 600, Variant("softmax"))
    assert model.config.max_positions == 600 and inference.build(loaded, 600, Variant("full"))[0].info.length == 600
    rows = []
    job = inference.Job("mlm_tiny_lion_s", (Variant("softmax"),), 128, 1, 1, 0.0, 1, True, 0, None, "")
    inference.measure(job, rows.append)
    (row,) = [each for each in rows if each["kind"] == "row"]
    assert row["mixer_bytes"] < row["matrix_bytes"]


def test_texts_longer_than_the_positions_are_refused(tmp_path, capsys):
    held = {"name": "listops", "root": str(tmp_path / "made"), "workers": 1, "samples": 16}
    held |= {"min_length": 8, "max_length": 30, "length": 32}
    model = {"name": "lra", "mixer": "softmax", "dim": 16, "depth": 1, "num_heads": 2}
    trainer = {"batch_size": 4, "steps": 1, "compile": False}
    recipe = {"data": held, "task": {"name": "lra"}, "model": model, "optim": {"lr": 1e-3}, "trainer": trainer}
    path = tmp_path / "listops.yaml"
    path.write_text(yaml.safe_dump({**recipe, "run": {"root": str(tmp_path / "runs")}}))
    assert here("prepare", path) == here("train", path, "--no-eval") == 0
    capsys.readouterr()
    line = refuse(capsys, "bench", "inference", tmp_path / "runs" / "listops", "--sizes", "40")
    assert "--sizes: 40 tokens does not suit the run's model, nearest: 32" in line
