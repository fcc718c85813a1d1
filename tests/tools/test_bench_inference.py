"""`bench inference`: built models, counted memory and reports. Times are not checked."""

from argparse import Namespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.transforms import v2

from lion.files import read_json
from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, Attention, LionAttention
from lion.runs import open_run
from tests.helpers import assert_equal, assert_in, column, here, refuse, tiny_recipe, trained
from tools import probe
from tools.bench import inference
from tools.bench.blockwise import mix_blockwise
from tools.image_sources import drawn
from tools.options import INFERENCE_FORMS
from tools.probe import Variant

SOFTMAX, FULL = Variant("softmax"), Variant("full")
JOB = {"batch": 2, "rounds": 1, "seconds": 60, "threads": 1, "eager": True, "samples": None, "against": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train a run of Lion-S on digits (8 px, patches of 4)."""
    return trained(tiny_recipe(tmp_path_factory.mktemp("inference")))


def measured(run, *variants, sizes=(8, 16), **changes):
    """Measure variants of a run, or of a recipe with random weights; return their rows and notes."""
    sent = []
    for size in sizes:
        job = Namespace(run=str(run), command="x", variants=variants, size=size, **JOB | changes)
        inference.measure(job, sent.append)
    rows = [message["row"] for message in sent if message["kind"] == "row"]
    notes = [message["text"] for message in sent if message["kind"] == "note"]
    return rows, [text for text in notes if "warming up" not in text]


def output(loaded, variant, images):
    """Return the output of a variant for square images."""
    _, model = inference.build(loaded, images.shape[-1], variant)
    with torch.inference_mode():
        return model(images)


@pytest.mark.slow
def test_a_model_at_another_size_keeps_its_weights(run):
    loaded = open_run(run)
    images = torch.randn(2, 1, 8, 8)
    with torch.inference_mode():
        expected = loaded.model(images)
    assert_equal(output(loaded, FULL, images), expected)
    task, larger = inference.build(loaded, 24, FULL)
    assert larger.patches == (6, 6)
    assert task.info.size == (24, 24)
    assert larger(torch.randn(1, 1, 24, 24)).shape == (1, 10)
    own, grown = loaded.model.state_dict(), larger.state_dict()
    own.pop("position")
    assert grown.pop("position").shape == (1, 37, 16)
    assert_equal(grown, own)
    assert inference.build(loaded, 8, SOFTMAX)[1].config.readout == "cls"


def test_sizes_of_text_are_not_its_tokens(tmp_path):
    """Check the column of sizes of a causal model, which reads one token less."""
    row = {"run": "r", "unit": "tokens", "size": 257, "tokens": 256, "form": "softmax", "chunk_size": None, "ms": 1.0}
    row |= {"ratio": 1.0, "peak_bytes": 0, "mixer_bytes": 0, "matrix_bytes": 1, "mixer": "softmax"}
    header, (cells,) = inference.InferenceReport(tmp_path).tabled([row])
    assert dict(zip(header, cells)) | {"size": "257", "tokens": "256"} == dict(zip(header, cells))


VARIANTS = (FULL, Variant("chunk", 8), Variant("rnn", 4), Variant("blockwise", 8))


@pytest.mark.slow
def test_rows_of_inference(run):
    rows, notes = measured(run, SOFTMAX, *VARIANTS)
    assert not notes
    forms = ["softmax", "full", "chunk", "rnn", "blockwise"]
    assert [(r["form"], r["size"], r["tokens"]) for r in rows] == [
        (form, size, tokens) for size, tokens in ((8, 5), (16, 17)) for form in forms
    ]
    for r in rows:
        softmax = r["form"] == "softmax"
        assert (r["ratio"] == 1) == softmax
        assert r["ratio"] > 0
        assert r["ms"] > 0
        assert r["matrix_bytes"] == 4 * 2 * 2 * r["tokens"] ** 2
        assert r["mixer"] == ("softmax" if softmax else "lion_s")


def test_every_variant_is_the_same_function(run):
    loaded = open_run(run)
    images = torch.randn(2, 1, 16, 16)
    expected = output(loaded, FULL, images)
    for variant in VARIANTS:
        torch.testing.assert_close(output(loaded, variant, images), expected)


def test_what_blockwise_cannot_measure(tmp_path):
    recipe = tiny_recipe(tmp_path, model={"mixer": "gla"})
    rows, (note,) = measured(recipe, Variant("blockwise", 8), sizes=(8,))
    assert not rows
    assert "blockwise 8: blockwise_attention: takes neither the delta rule nor decays" in note
    for layer in (LionAttention(8, 2, "lightnet"), LionAttention(8, 2, "lion_s", scans=("row_snake", "column_snake"))):
        with pytest.raises(ValueError, match="only for one scan"):
            mix_blockwise(layer, *[torch.zeros(1)] * 4, Layout())


def test_only_the_forms_of_the_mixer_are_measured(tmp_path):
    recipe = tiny_recipe(tmp_path, model={"mixer": "vim", "mlp": "none", "cls_place": "middle"})
    found = inference.variants(inference.open_model(str(recipe)), list(INFERENCE_FORMS), [4])
    assert found == [SOFTMAX, Variant("chunk", 4), Variant("rnn", 4)]
    rows, notes = measured(recipe, *found)
    assert not notes
    assert [(r["form"], r["size"]) for r in rows] == [(v.form, size) for size in (8, 16) for v in found]
    shown = [inference.mega_flops(row) == "-" for row in rows[:3]]
    assert shown == [False, True, True]  # the formulas are of attention


def test_lion_lit_under_decays_of_one(tmp_path):
    loaded = inference.open_model(str(tiny_recipe(tmp_path, model={"mixer": "lion_lit"})))
    full, quadratic = FULL, Variant("quadratic")
    assert inference.variants(loaded, ["full"], [8]) == [SOFTMAX, full, quadratic]

    def log_decay(variant):
        _, model = inference.build(loaded, 24, variant)
        layer = next(module for module in model.modules() if isinstance(module, Attention))
        x = torch.randn(2, 37, 16)
        return layer.operands(x, *layer.heads(x), Layout()).gates.log_decay

    assert log_decay(full) is None
    assert log_decay(quadratic).shape == (2,)
    assert (log_decay(quadratic).exp() == 1).all()
    images = torch.randn(2, 1, 24, 24)
    torch.testing.assert_close(output(loaded, full, images), output(loaded, quadratic, images))


@pytest.mark.parametrize("mixer", [name for name, entry in LINEAR.items() if entry.decay is None])
def test_every_variant_of_a_mixer_without_decay_is_the_model(mixer, tmp_path):
    loaded = inference.open_model(str(tiny_recipe(tmp_path, model={"mixer": mixer})))
    variants = inference.variants(loaded, ["full", "chunk"], [8])[1:]
    assert (Variant("quadratic") in variants) == (mixer != "performer")  # Lion-D has no random features
    images = torch.randn(2, 1, 8, 8)
    expected = output(loaded, FULL, images)
    for variant in variants:
        torch.testing.assert_close(output(loaded, variant, images), expected, msg=variant.form)


@pytest.mark.parametrize("form", ("full", "quadratic"))
def test_only_decays_are_filled_in(form, tmp_path, monkeypatch):
    """Check that a model with any other missing weight is refused."""
    loaded = inference.open_model(str(tiny_recipe(tmp_path, model={"mixer": "lion_lit"})))

    def less(self, weights, source):
        return {name: value for name, value in weights.items() if name != "head.bias"}

    monkeypatch.setattr(type(loaded.model), "adapt", less)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        inference.build(loaded, 8, Variant(form))


@pytest.mark.slow
def test_mixer_memory_counts_the_scores(run):
    """Check the memory of the mixing: L x L scores in full, and none in rnn."""
    full, rnn = measured(run, FULL, Variant("rnn", 64), sizes=(128,), batch=1)[0]
    assert full["tokens"] == 32 * 32 + 1
    if full["mixer_bytes"] is not None:
        assert full["mixer_bytes"] > full["matrix_bytes"]
        assert rnn["mixer_bytes"] < full["matrix_bytes"] / 10


def test_no_memory_is_a_note(run, monkeypatch):
    monkeypatch.setattr(probe, "free_bytes", lambda device: 1000.0)
    rows, notes = measured(run, SOFTMAX, FULL)
    assert column(rows, "form") == ["softmax"] * 2
    assert len(notes) == 2
    assert "do not fit in memory" in notes[0]


def rows_of(folder):
    return read_json(folder / "inference.json")["rows"]


@pytest.mark.slow
def test_the_inference_command(run, tmp_path, in_this_process, capsys):
    command = ["bench", "inference", run, "--sizes", "16,8", "--rounds", "1", "--out", tmp_path, "--eager"]
    command += ["--chunk-size", "4"]
    assert here(*command, "--form", "full", "chunk") == 0
    out, err = capsys.readouterr()
    assert "profiler" not in err
    assert "chunk 4" in out
    assert "softmax" in out
    assert here(*command, "--form", "rnn") == 0
    expected = {(form, size) for form in ("softmax", "full", "chunk", "rnn") for size in (8, 16)}
    assert {(row["form"], row["size"]) for row in rows_of(tmp_path)} == expected
    other = tiny_recipe(tmp_path, "other", model={"mixer": "softmax", "depth": 1})
    assert here(*command, "--form", "rnn", "--against", other) == 0  # a table of its own
    text = (tmp_path / "inference.md").read_text()
    assert text.count("\n## ") == 2
    assert_in(text, "; softmax is other\n", "| 16 | 17 | rnn 4 |", "](inference_tiny.png)")
    figures = pytest.importorskip("matplotlib.figure")
    assert (tmp_path / "inference_tiny.png").read_bytes().startswith(b"\x89PNG")
    own = [row for row in rows_of(tmp_path) if row["form"] in ("full", "chunk")]
    figure = figures.Figure()
    inference.curves(figure, own, "")
    for axes in figure.axes:
        lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
        assert lines["full"] == lines["chunk 4"] == [8, 16]


@pytest.mark.slow
def test_a_recipe_has_random_weights_without_its_data(tmp_path, in_this_process, capsys):
    recipe = tiny_recipe(tmp_path)
    command = ["bench", "inference", recipe, "--sizes", "8", "--rounds", "1", "--eager", "--out", tmp_path]
    assert here(*command, "--form", "full") == 0
    found = {(row["run"], row["form"]) for row in rows_of(tmp_path)}
    assert found == {("tiny_random_weights", "softmax"), ("tiny_random_weights", "full")}
    first, second = (inference.open_model(str(recipe)).model.state_dict() for _ in range(2))
    assert_equal(first, second)
    assert inference.open_model("vim_tiny").folder.name == "vim_tiny_random_weights"
    line = refuse(capsys, "bench", "inference", recipe, "--evaluate", "5")
    assert "is a recipe, whose weights are random; give a run" in line
    line = refuse(capsys, "bench", "inference", "vim_tinny")
    assert "run 'vim_tinny': no recipe.yaml" in line
    assert "no recipe of that name either: vim_tinny: no such recipe, did you mean 'vim_tiny'?" in line


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Train a run on a folder of images of 12 px, resized to 8 px."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 5)):
        for name, bright in (("dark", 60), ("light", 190)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = (bright + rng.integers(-60, 60, (12, 12, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    data = {"name": "imagefolder", "root": str(folder), "image_size": [8, 8], "workers": 0}
    return trained(tiny_recipe(folder, data=data, trainer={"batch_size": 8, "steps": 2, "eval_every": 1}))


@pytest.mark.parametrize("form", ("chunk", "rnn"))
@pytest.mark.slow
def test_the_metric_at_every_size(photos, tmp_path, in_this_process, form):
    """Compare the metric with images that are drawn from both classes, resized and classified one by one."""
    command = ["bench", "inference", photos, "--sizes", "8,16", "--rounds", "1", "--eager", "--out", tmp_path]
    assert here(*command, "--form", form, "--chunk-size", "4", "--evaluate", "7") == 0
    rows = rows_of(tmp_path)
    assert not any("value" in row for row in rows if row["form"] == "softmax")
    loaded = open_run(photos)
    files = sorted((photos.parents[1] / "val").glob("*/*.png"))
    files = [files[i] for i in drawn(10, 7, loaded.recipe.seed)]
    for size in (8, 16):
        resize = v2.Resize(int(size / 0.875), interpolation=v2.InterpolationMode.BICUBIC)
        task, _ = inference.build(loaded, size, FULL)
        right = 0
        for path in files:
            picture = v2.CenterCrop(size)(resize(Image.open(path)))
            logits = output(loaded, FULL, v2.functional.pil_to_tensor(picture)[None])
            right += task.info.classes[logits.argmax()] == path.parent.name
        (row,) = (row for row in rows if row["form"] == form and row["size"] == size)
        assert row["value"] == pytest.approx(right / 7)
        assert row["shown"] == f"{100 * right / 7:.2f}"
    assert "|mixer MiB|x SDPA|of a matrix|MFLOP, C.12|top-1 %|" in (tmp_path / "inference.md").read_text()


def test_a_metric_needs_the_data_before_anything_is_measured(run, photos, capsys):
    more = ("--sizes", "8", "--evaluate", "5")
    line = refuse(capsys, "bench", "inference", run, *more)
    assert "--evaluate: data set 'digits' has samples of one size only" in line
    folder = photos.parents[1] / "val/light"
    moved = folder.rename(folder.with_name("airy"))
    line = refuse(capsys, "bench", "inference", photos, *more)
    moved.rename(folder)
    assert "only val has class 'airy', only train has class 'light'" in line


def test_refusals(run, tmp_path, capsys):
    plain = tiny_recipe(tmp_path, "plain", model={"mixer": "softmax"})
    for words, message in {
        f"{run} --sizes 11": "--sizes: 11 px does not suit the run's model, nearest: 12",
        f"{tmp_path}/none": "no recipe.yaml",
        f"{run} --sizes 8,x": "--sizes: expected a whole number",
        "lra_listops_softmax --sizes 2050": "--sizes: 2050 tokens does not suit the run's model, nearest: 2048",
        f"{run} --against gpt2_tiny_softmax": "--against: expected a recipe of model 'vit' with softmax, "
        "gpt2_tiny_softmax has 'gpt' with softmax",
        f"{run} --against deit_tiny_softmax": "model.patch_size: 16 does not divide image height 8",
        f"{plain} --against deit_tiny_softmax": "plain.yaml is softmax itself, measure deit_tiny_softmax in a call",
    }.items():
        assert message in refuse(capsys, "bench", "inference", *words.split())


def test_softmax_may_be_a_recipe_of_another_shape(run, tmp_path):
    base = tiny_recipe(tmp_path, model={"mixer": "softmax", "depth": 3, "dim": 24, "num_heads": 4})
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({"extends": str(base)}))
    (row,), _ = measured(run, SOFTMAX, sizes=(8,), against=str(path))
    assert row["matrix_bytes"] == 4 * 2 * 4 * 5**2  # of the recipe's 4 heads
    assert row["dim"] == 24
    assert row["against"] == "other"
    assert inference.InferenceReport(tmp_path).title(row).endswith("eager; softmax is other")
    _, model = inference.build(open_run(run), 8, SOFTMAX, str(path))
    assert len(model.encoder.blocks) == 3
    assert model.config.mixer == "softmax"


def test_texts_longer_than_those_of_training_are_measured_without_padding():
    """Check a masked LM without positions: softmax beside it has positions for every size, and no mask."""
    loaded = inference.open_model("mlm_tiny_lion_s")
    _, model = inference.build(loaded, 600, SOFTMAX)
    assert model.config.max_positions == 600
    assert inference.build(loaded, 600, FULL)[0].info.length == 600
    (row,), _ = measured("mlm_tiny_lion_s", SOFTMAX, sizes=(128,), batch=1, seconds=0.0)
    assert row["mixer_bytes"] < row["matrix_bytes"]
