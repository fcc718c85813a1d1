"""`bench train` and `bench inference`: what they build, count and write. Times are not judged."""

import json
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lion.layers import Attention
from lion.layers.layout import Layout
from lion.runs import open_run
from tests.helpers import ROOT, here, refuse, tiny_recipe
from tools.bench import inference, probe, train
from tools.bench.plain import PLAIN, PlainGPT, plain_step
from tools.bench.probe import Variant
from tools.compose import resolve

TINY = ["model.dim=12", "model.depth=2", "model.num_heads=3"]
JOB = train.Job(
    recipes=tuple(str(ROOT / f"recipes/deit_tiny_{m}.yaml") for m in ("lion_s", "softmax", "lion_d_multiscan")),
    overrides=tuple(TINY),
    size=32,
    batch=3,
    matmul="highest",
    precision=None,
    rounds=2,
    seconds=60,
    threads=torch.get_num_threads(),
    eager=True,
    plain=False,
    command="x",
)
TEXT = replace(
    JOB,
    recipes=tuple(str(ROOT / f"recipes/shakespeare_char_{m}.yaml") for m in ("softmax", "lion_s")),
    size=9,
    plain=True,
)


# Training steps


def test_softmax_and_the_floor_stand_beside_the_recipes():
    models = train.models(JOB)
    assert list(models) == ["softmax", train.FLOOR, "lion_s", "lion_d multiscan"]
    assert {name: recipe.model.mixer for name, (recipe, _) in models.items()} == {
        "softmax": "softmax",
        train.FLOOR: "none",
        "lion_s": "lion_s",
        "lion_d multiscan": "lion_d",
    }
    softmax = models["softmax"][0].model.resolved()
    assert softmax.position_embedding and softmax.readout == "cls" and softmax.dim == 12
    assert all(task.info.size == (32, 32) for _, task in models.values())


def test_recipes_that_differ_in_more_than_the_mixer_are_rows_of_their_own():
    names = ("lion_lit", "linear", "linear_feature_map", "linear_positions", "softmax_no_positions", "lion_s_forward")
    models = train.models(replace(JOB, recipes=tuple(str(ROOT / f"recipes/cifar100_{n}.yaml") for n in names)))
    assert len(models) == 2 + len(names)
    assert models["softmax without positions"][0].model.position_embedding is False


def test_a_model_of_other_parts_has_a_name():
    """What a config must have here is in the contract; no section `attention` is."""

    @dataclass
    class Config:
        mixer: str = "conv"

        def label(self):
            return self.mixer

    assert train.name_of(SimpleNamespace(model=Config())) == "conv"
    recipe = resolve(JOB.recipes[0], ["model.attention.form=rnn"])
    assert train.name_of(recipe) == "lion_s rnn"


def test_the_floor_has_everything_but_the_mixing():
    recipe, task = train.models(JOB)[train.FLOOR]
    model = task.build_model(recipe.model).eval()
    layer = next(m for m in model.modules() if isinstance(m, Attention))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), layer.proj(layer.qkv(x)[..., 24:]))


def test_a_step_trains():
    recipe, task = train.models(JOB)["lion_s"]
    torch.manual_seed(0)
    model = task.build_model(recipe.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = train.training_step(model, task, recipe, task.example(3, "cpu"), "fp32", torch.device("cpu"))
    for _ in range(2):
        step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_rows_of_training_steps():
    sent = []
    train.measure(JOB, sent.append)
    rows = [m for m in sent if m["kind"] == "row"]
    assert [r["mixer"] for r in rows] == ["softmax", train.FLOOR, "lion_s", "lion_d multiscan"]
    assert rows[0]["ratio"] == 1 and all(r["ms"] > 0 and len(r["ratios"]) >= 2 for r in rows)
    assert all((r["batch"], r["tokens"], r["size"]) == (3, 5, 32) for r in rows)
    for row in rows:
        assert row["ratio"] == median(row["ratios"])
    assert rows[2]["parameters"] != rows[0]["parameters"]


@pytest.mark.slow
def test_the_train_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "in_a_process", lambda measure, job, receive: measure(job, receive))
    command = ["bench", "train", *JOB.recipes[:1], "--eager", "--size", "32", "--batch", "2", "--rounds", "2"]
    command += ["--out", tmp_path, "--set", *TINY]
    assert here(*command) == 0
    out = capsys.readouterr().out
    assert "lion_s" in out and train.FLOOR in out and "x softmax" in out
    assert here(*command, "model.attention.form=chunk") == 0
    plain = [part for part in command if part not in ("--size", "32")]
    assert here(*plain[:-4], "--out", tmp_path / "own", "--set", *TINY, "data.image_size=[48, 48]") == 0
    assert {r["size"] for r in json.loads((tmp_path / "own" / "train.json").read_text())["rows"]} == {48}
    held = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert sorted(r["mixer"] for r in held) == ["lion_s", "lion_s chunk", "softmax", train.FLOOR]
    text = (tmp_path / "train.md").read_text()
    assert "| lion_s chunk | " in text and "32 px (5 tokens), batch 2, vit, dim 12" in text
    (tmp_path / "train.json").write_text("[]")
    capsys.readouterr()
    assert "not a report of this command" in refuse(capsys, *command)


def test_models_must_be_alike(capsys):
    paths = [ROOT / f"recipes/deit_{size}_lion_s.yaml" for size in ("tiny", "small")]
    assert "dim 384, depth 12, 6 heads" in refuse(capsys, "bench", "train", *paths, "--eager")
    assert "no such file" in refuse(capsys, "bench", "train", "recipes/deit_tiny_lion_x.yaml", "--eager")
    line = refuse(capsys, "bench", "train", paths[0], "--eager", "--size", "30")
    assert "model.patch_size: 16 does not divide image height 30" in line
    twins = [ROOT / f"recipes/cifar100_lion_s{more}.yaml" for more in ("", "_multiscan")]
    line = refuse(capsys, "bench", "train", *twins, "--eager", "--set", "model.attention.scans=[row_major]")
    assert "cifar100_lion_s_multiscan.yaml: a second lion_s, by all that is timed here" in line
    assert "'bench op' is no command, did you mean 'bench ops'" in refuse(capsys, "bench", "op")


def gpt(mixer="softmax"):
    """A tiny GPT of 8 tokens, its recipe, task, and a batch."""
    torch.manual_seed(0)
    recipe, task = train.models(TEXT)[mixer]
    return task.build_model(recipe.model), recipe, task, task.example(2, "cpu")


def test_the_plain_model_is_ours():
    model, _, _, batch = gpt()
    tokens = batch["tokens"][:, :-1]
    torch.testing.assert_close(PlainGPT.of(model)(tokens), model(tokens))


def test_the_plain_step_is_ours():
    """From the same weights, on the same batch: forward, backward, clipping, AdamW and its groups."""
    model, recipe, task, batch = gpt()
    recipe = replace(recipe, trainer=replace(recipe.trainer, clip_grad=0.1))
    plain = PlainGPT.of(model)
    steps = (
        train.training_step(model, task, recipe, batch, "fp32", torch.device("cpu")),
        plain_step(plain, recipe, batch["tokens"]),
    )
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for _ in range(3):
        for step in steps:
            step()
    ours = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    torch.testing.assert_close(dict(plain.state_dict()), ours, rtol=1e-4, atol=1e-5)
    assert all((value - ours[name]).abs().max() > 1e-3 for name, value in before.items())


def test_a_step_clips(monkeypatch):
    model, recipe, task, batch = gpt("lion_s")
    found, take = [], torch.optim.AdamW.step

    def kept(self, *args):
        found.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        return take(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", kept)
    for norm in (None, 1e-3):
        own = replace(recipe, trainer=replace(recipe.trainer, clip_grad=norm))
        train.training_step(model, task, own, batch, "fp32", torch.device("cpu"))()
    assert found[0] > 1e-2 and found[1] == pytest.approx(1e-3, rel=1e-3)


def test_dropout_is_part_of_the_shape():
    parts = ("model.dropout", "model.attention.score_dropout")
    shapes = [resolve("cifar100_lion_s", [f"{part}=0.1"]).model.shape() for part in parts]
    assert "heads, dropout 0.1," in shapes[0] and "heads, score dropout 0.1," in shapes[1]


@pytest.mark.slow
def test_rows_of_text():
    """Another size is a length; what is timed plainly has a multiplier of its own."""
    sent = []
    train.measure(TEXT, sent.append)
    rows = {m["mixer"]: m for m in sent if m["kind"] == "row"}
    assert list(rows) == ["softmax", PLAIN, train.FLOOR, "lion_s"]
    assert rows[PLAIN]["plain_ratio"] == 1 == rows["softmax"]["ratio"] and rows[PLAIN]["ratio"] > 0
    assert {(r["model"], r["tokens"], r["batch"]) for r in rows.values()} == {("gpt", 8, 3)}
    assert rows[PLAIN]["parameters"] == rows["softmax"]["parameters"] != rows["lion_s"]["parameters"]
    assert train.title(rows["softmax"]).startswith("8 tokens, batch 3, gpt, dim 12")
    header, (cells, *_) = train.columns(list(rows.values()))
    assert header[:5] == ["mixer", "x softmax", "x plain", "ms a step", "tokens/s"]
    assert float(cells[4].replace(",", "")) == pytest.approx(24e3 / rows["softmax"]["ms"], rel=0.01)


@pytest.mark.parametrize("recipe", ("mlm_tiny_softmax", "shakespeare_char_softmax"))
def test_only_a_gpt_without_additions_is_written_plainly(capsys, recipe):
    more = ["model.dropout=0.1"] if recipe.startswith("shakespeare") else []
    line = refuse(capsys, "bench", "train", recipe, "--plain", "--eager", "--set", "data.length=65", *more)
    assert "--plain: only a GPT without dropout" in line


# Inference


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run of Lion-S on digits (8 px, patches of 4)."""
    folder = tmp_path_factory.mktemp("inference")
    assert here("train", tiny_recipe(folder), "--no-eval") == 0
    return folder / "runs" / "tiny"


def measured(run, *variants, sizes=(8, 16), **changes):
    """Rows and notes of some variants, eager."""
    sent = []
    for size in sizes:
        given = dict(variants=variants, size=size, batch=2, rounds=1, seconds=60, threads=1, eager=True, samples=None)
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


def test_lion_lit_under_decays_of_one(tmp_path):
    here("train", tiny_recipe(tmp_path, model={"mixer": "lion_lit"}), "--no-eval")
    loaded = open_run(tmp_path / "runs" / "tiny")
    assert inference.variants(loaded, ["full"], [8]) == [Variant(f) for f in ("softmax", "full", "quadratic")]
    images, found, shapes = torch.randn(2, 1, 24, 24), [], []
    for variant in (Variant("full"), Variant("quadratic")):
        _, model = inference.build(loaded, 24, variant)
        (layer, *_) = (m for m in model.modules() if isinstance(m, Attention))
        x = torch.randn(2, 37, 16)
        shapes.append(layer.arguments(x, *layer.heads(x), Layout()).get("log_decay"))
        with torch.inference_mode():
            found.append(model(images))
    assert shapes[0] is None and shapes[1].shape == (2,) and (shapes[1].exp() == 1).all()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("form", ("full", "quadratic"))
def test_only_decays_are_filled_in(form, tmp_path, monkeypatch):
    """A model of which another weight is missing is not measured."""
    here("train", tiny_recipe(tmp_path, model={"mixer": "lion_lit"}), "--no-eval")
    loaded = open_run(tmp_path / "runs" / "tiny")

    def less(self, weights, source):
        return {name: value for name, value in weights.items() if name != "head.bias"}

    monkeypatch.setattr(type(loaded.model), "adapt", less)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        inference.build(loaded, 8, Variant(form))


@pytest.mark.slow
def test_mixer_memory_counts_the_scores(run):
    """Shapes that the mixing allocates: L x L in full, none in the others."""
    rows = {v.form: measured(run, v, sizes=(256,), batch=1)[0][0] for v in (Variant("full"), Variant("rnn", 64))}
    assert rows["full"]["tokens"] == 64 * 64 + 1
    if rows["full"]["mixer_bytes"] is not None:
        assert rows["full"]["mixer_bytes"] > rows["full"]["matrix_bytes"]
        assert rows["rnn"]["mixer_bytes"] < rows["full"]["matrix_bytes"] / 10


def test_no_memory_is_a_note(run, monkeypatch):
    monkeypatch.setattr(probe, "free_bytes", lambda device: 1000.0)
    rows, notes = measured(run, Variant("full"))
    assert not rows and len(notes) == 2 and "do not fit in memory" in notes[0]
    assert len(measured(run, Variant("softmax"))[0]) == 2


def test_the_inference_command(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference, "in_a_process", lambda measure, job, receive: measure(job, receive))
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
    text = (tmp_path / "inference.md").read_text()
    assert "| 16 | 17 | rnn 4 |" in text and "](inference_tiny.png)" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "inference_tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A run on a folder of pictures of 12 px, seen at 8 px."""
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
    """Against pictures resized and classified one by one."""
    monkeypatch.setattr(inference, "in_a_process", lambda measure, job, receive: measure(job, receive))
    command = ["bench", "inference", photos, "--sizes", "8,16", "--rounds", "1", "--eager", "--out", tmp_path]
    assert here(*command, "--form", form, "--chunk-size", "4", "--evaluate", "7") == 0
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert not any("value" in row for row in rows if row["form"] == "softmax")
    loaded, files = open_run(photos), sorted((photos.parents[1] / "val").glob("*/*.png"))[:7]
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
    assert "|mixer MiB|x SDPA|of a matrix|top-1 %|" in (tmp_path / "inference.md").read_text()


def test_a_metric_needs_the_data_before_anything_is_measured(run, photos, capsys):
    assert "--evaluate: data set 'digits' has samples of one size only" in refuse(
        capsys, "bench", "inference", run, "--sizes", "8", "--evaluate", "5"
    )
    folder = photos.parents[1] / "val" / "light"
    folder.rename(folder.with_name("airy"))
    line = refuse(capsys, "bench", "inference", photos, "--sizes", "8", "--evaluate", "5")
    folder.with_name("airy").rename(folder)
    assert "val alone has class 'airy', train alone has class 'light'" in line


def test_refusals(run, tmp_path, capsys):
    line = refuse(capsys, "bench", "inference", run, "--sizes", "11")
    assert "--sizes: 11 px does not suit the run's model, nearest: 12" in line
    assert "no recipe.yaml" in refuse(capsys, "bench", "inference", tmp_path / "none")
    assert "--sizes: expected a whole number" in refuse(capsys, "bench", "inference", run, "--sizes", "8,x")
