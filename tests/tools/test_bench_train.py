"""`bench train`: built models, the timed step and reports. Times are not checked."""

import json
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from lion.config import ConfigError
from lion.layers.mixers import Attention
from tests.helpers import ROOT, here, refuse
from tools.bench import train
from tools.bench.plain import PLAIN, PlainGPT, plain_step
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
    against=None,
    command="x",
)
TEXT = replace(
    JOB,
    recipes=tuple(f"shakespeare_char_{m}" for m in ("softmax", "lion_s")),
    size=9,
    plain=True,
)


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
    diffusion = [f"dit_cifar10_{name}" for name in ("softmax_patch4", "softmax_patch8")]
    job = replace(JOB, recipes=tuple(diffusion[:1]))
    assert list(train.models(job)) == ["softmax", train.FLOOR]  # labels include the patch size
    with pytest.raises(ConfigError, match="patches of 8 x 8"):
        train.models(replace(job, recipes=tuple(diffusion)))


def test_the_papers_ratios_stand_beside_the_same_models():
    """Check ratios of Tables 2, 3 and 12."""
    row = {"model": "vit", "shape": "dim 384, depth 12, 6 heads, patches of 16 x 16", "size": 224}
    found = {name: train.published({**row, "mixer": name}) for name in ("lion_lit", "lion_d", "lion_s multiscan")}
    assert found == {"lion_lit": "0.74", "lion_d": "1.49", "lion_s multiscan": "2.72"}
    assert (
        train.published({**row, "mixer": "softmax"}) == "" == train.published({**row, "mixer": "lion_s", "size": 512})
    )
    assert train.published({"model": "bert", "shape": "dim 1024, depth 24, 16 heads", "size": 128, "mixer": "lion_s"})


def test_recipes_that_differ_in_more_than_the_mixer_are_rows_of_their_own():
    names = ("lion_lit", "linear", "linear_feature_map", "linear_positions", "softmax_no_positions", "lion_s_forward")
    models = train.models(replace(JOB, recipes=tuple(f"cifar100_{n}" for n in names)))
    assert len(models) == 2 + len(names)
    assert models["softmax without positions"][0].model.position_embedding is False


def test_a_model_of_other_parts_has_a_name():
    """Check that a model config needs no section `attention` here, which its contract does not require."""

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


GROWING = ["trainer.time=1h", "schedule.warmup=0", "trainer.batch_start=256", "trainer.batch_ramp=60%"]


@pytest.mark.parametrize("more", [[], GROWING])
def test_a_step_trains(more):
    recipe, task = train.models(replace(JOB, overrides=(*TINY, *more)))["lion_s"]
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
def test_a_model_of_another_shape_is_held_against_all():
    """Check that such a model is timed in the same rounds and has no row; its shape may differ."""
    other = str(ROOT / "recipes/cifar10_mini.yaml")
    job, sent = replace(JOB, recipes=JOB.recipes[:1], against=other), []
    shapes = {name: recipe.model.shape() for name, (recipe, _) in train.models(job).items()}
    assert shapes[other] != shapes["lion_s"] == shapes["softmax"]
    train.measure(job, sent.append)
    rows = [m for m in sent if m["kind"] == "row"]
    assert [r["mixer"] for r in rows] == ["softmax", train.FLOOR, "lion_s"]
    assert all(r["against"]["recipe"] == "cifar10_mini" and r["against"]["ratio"] > 0 for r in rows)
    assert len({r["against"]["ratio"] for r in rows}) == 3
    header, cells = train.columns(rows)
    assert header[2] == "against" and cells[2][2] == f"{rows[2]['against']['ratio']:.2f} x cifar10_mini"


def test_the_papers_ratio_of_hydra_is_that_to_deit():
    """Check that it stands beside our ratio to the same recipe, and nowhere else."""
    job = replace(JOB, recipes=("hydra_small",), overrides=(), size=224, against="deit_small_softmax")
    models = train.models(job)
    assert list(models) == ["softmax", train.FLOOR, "deit_small_softmax", "hydra"]
    row = {"model": "vit", "shape": models["hydra"][0].model.shape(), "size": 224, "mixer": "hydra"}
    assert train.published(row) == "" and train.published(row, "deit_small_softmax") == "2.50"
    assert train.published(row, "deit_base_softmax") == "" == train.published({**row, "mixer": "softmax"})
    base, large = (resolve(name).model.shape() for name in ("hydra_base", "mlm_large_hydra"))
    assert train.published({**row, "shape": base}, "deit_base_softmax") == "2.51"
    assert train.published({**row, "model": "bert", "shape": large, "size": 128}, "mlm_large_softmax") == "3.13"
    row |= {"ratio": 1.0, "ms": 9.0, "batch": 1, "tokens": 197, "peak_bytes": None}
    row |= {"against": {"recipe": "deit_small_softmax", "ratio": 1.987}}
    assert "1.99 x deit_small_softmax (paper: 2.50)" in train.cells(row)


def test_the_papers_ratios_of_vim_are_those_to_deit():
    for size, ratio in (("tiny", "9.48"), ("small", "14.95"), ("base", "10.86")):
        model = resolve(f"vim_{size}").model
        row = {"model": "vit", "shape": model.shape(), "size": 224, "mixer": model.label()}
        assert train.published(row, f"deit_{size}_softmax") == ratio and train.published(row) == ""


@pytest.mark.slow
def test_the_train_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "in_a_process", lambda measure, job, receive: measure(job, receive))
    command = ["bench", "train", *JOB.recipes[:1], "--eager", "--size", "32", "--batch", "2", "--rounds", "2"]
    command += ["--out", tmp_path, "--set", *TINY]
    assert here(*command) == 0
    out = capsys.readouterr().out
    assert "lion_s" in out and train.FLOOR in out and "x softmax" in out
    held = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert sorted(r["mixer"] for r in held) == ["lion_s", "softmax", train.FLOOR]
    assert here(*command, "model.attention.form=chunk", "model.mlp_ratio=2") == 0
    plain = [part for part in command if part not in ("--size", "32")]
    assert here(*plain[:-4], "--out", tmp_path / "own", "--set", *TINY, "data.image_size=[48, 48]") == 0
    assert {r["size"] for r in json.loads((tmp_path / "own" / "train.json").read_text())["rows"]} == {48}
    held = json.loads((tmp_path / "train.json").read_text())["rows"]
    models = ["lion_s", "softmax", train.FLOOR]
    assert sorted(r["mixer"] for r in held) == sorted([*models, *models[1:], "lion_s chunk"])
    text = (tmp_path / "train.md").read_text()
    assert text.count("\n## ") == 2 and "model.attention.form=chunk model.mlp_ratio=2\n" in text
    assert "| lion_s chunk | " in text and "32 px (5 tokens), batch 2, vit, dim 12" in text
    (tmp_path / "train.json").write_text("[]")
    capsys.readouterr()
    assert "not a report of this command" in refuse(capsys, *command)


def test_models_must_be_alike(capsys):
    paths = [ROOT / f"recipes/deit_{size}_lion_s.yaml" for size in ("tiny", "small")]
    assert "dim 384, depth 12, 6 heads" in refuse(capsys, "bench", "train", *paths, "--eager")
    assert "no such file" in refuse(capsys, "bench", "train", "recipes/deit_tiny_lion_x.yaml", "--eager")
    assert "no such recipe" in refuse(capsys, "bench", "train", paths[0], "--eager", "--against", "lightnet_none")
    line = refuse(capsys, "bench", "train", paths[0], "--eager", "--size", "30")
    assert "model.patch_size: 16 does not divide image height 30" in line
    twins = [ROOT / f"recipes/cifar100/cifar100_lion_s{more}.yaml" for more in ("", "_multiscan")]
    line = refuse(capsys, "bench", "train", *twins, "--eager", "--set", "model.attention.scans=[row_major]")
    assert "cifar100_lion_s_multiscan.yaml: a second lion_s with the same timed settings" in line
    assert "unknown command 'bench op', did you mean 'bench ops'" in refuse(capsys, "bench", "op")


def gpt(mixer="softmax"):
    """Return a tiny GPT for 8 tokens, its recipe, its task and a batch."""
    torch.manual_seed(0)
    recipe, task = train.models(TEXT)[mixer]
    return task.build_model(recipe.model), recipe, task, task.example(2, "cpu")


def test_the_plain_model_is_ours():
    model, _, _, batch = gpt()
    tokens = batch["tokens"][:, :-1]
    torch.testing.assert_close(PlainGPT.of(model)(tokens), model(tokens))


def test_the_plain_step_is_ours():
    """Compare steps from equal weights on the same batch: forward, backward, clipping, AdamW and its groups."""
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
    """Check that the size of text is a length, and that the plain model has a separate ratio."""
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
