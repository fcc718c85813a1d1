"""`bench train`: built models, the timed step and reports. Times are not checked."""

from argparse import Namespace
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from lion.files import read_json
from lion.layers.mixers import Attention
from tests.helpers import ROOT, assert_in, column, here, printed, refuse, refused
from tools.bench import train
from tools.bench.engine import job_of
from tools.bench.plain import PLAIN, PlainGPT, plain_step
from tools.compose import resolve
from tools.tables import fill

CPU = torch.device("cpu")
TINY = ["model.dim=12", "model.depth=2", "model.num_heads=3"]
JOB = Namespace(
    recipes=tuple(str(ROOT / f"recipes/deit_tiny_{m}.yaml") for m in ("lion_s", "softmax", "lion_d_multiscan")),
    set=tuple(TINY),
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
TEXT = job_of(JOB, recipes=("shakespeare_char_softmax", "shakespeare_char_lion_s"), size=9, plain=True)


def rows_of(job):
    """Measure a job; return its rows."""
    sent = []
    train.measure(job, sent.append)
    return [message["row"] for message in sent if message["kind"] == "row"]


def test_softmax_and_the_floor_stand_beside_the_recipes():
    models = train.models(JOB)
    assert [(name, recipe.model.mixer) for name, (recipe, _) in models.items()] == [
        ("softmax", "softmax"),
        (train.FLOOR, "none"),
        ("lion_s", "lion_s"),
        ("lion_d multiscan", "lion_d"),
    ]
    softmax = models["softmax"][0].model.resolved()
    assert softmax.position_embedding
    assert softmax.readout == "cls"
    assert softmax.dim == 12
    for _, task in models.values():
        assert task.info.size == (32, 32)
    job = job_of(JOB, recipes=("dit_cifar10_softmax_patch4",))
    assert list(train.models(job)) == ["softmax", train.FLOOR]  # labels include the patch size
    refused("patches of 8 x 8", train.models, job_of(job, recipes=(*job.recipes, "dit_cifar10_softmax_patch8")))


def vit_row(mixer, shape="dim 384, depth 12, 6 heads, patches of 16 x 16", size=224, model="vit"):
    return {"model": model, "shape": shape, "size": size, "mixer": mixer}


def shape_of(recipe):
    return resolve(recipe).model.shape()


@pytest.mark.parametrize(
    "row, ratio",
    [
        (vit_row("lion_lit"), "0.74"),
        (vit_row("lion_d"), "1.49"),
        (vit_row("lion_s multiscan"), "2.72"),
        (vit_row("softmax"), None),
        (vit_row("lion_s", size=512), None),
    ],
)
def test_the_papers_ratios_stand_beside_the_same_models(row, ratio):
    """Check ratios of Tables 2, 3 and 12."""
    assert train.published(row) == ratio
    assert train.published(vit_row("lion_s", "dim 1024, depth 24, 16 heads", 128, "bert"))


def test_the_papers_ratio_of_hydra_is_that_to_deit():
    """Check that it stands beside our ratio to the same recipe, and nowhere else."""
    job = job_of(JOB, recipes=("hydra_small",), set=(), size=224, against="deit_small_softmax")
    models = train.models(job)
    assert list(models) == ["softmax", train.FLOOR, "deit_small_softmax", "hydra"]
    small = models["hydra"][0].model.shape()
    row = vit_row("hydra", small)
    base = vit_row("hydra", shape_of("hydra_base"))
    large = vit_row("hydra", shape_of("mlm_large_hydra"), 128, "bert")
    for found, against, ratio in (
        (row, None, None),
        (row, "deit_small_softmax", "2.50"),
        (row, "deit_base_softmax", None),
        (vit_row("softmax", small), None, None),
        (base, "deit_base_softmax", "2.51"),
        (large, "mlm_large_softmax", "3.13"),
    ):
        assert train.published(found, against) == ratio
    row |= {"ratio": 1.0, "ms": 9.0, "batch": 1, "tokens": 197, "peak_bytes": None}
    row |= {"against": {"recipe": "deit_small_softmax", "ratio": 1.987}}
    assert train.against_cell(row) == "1.99 x deit_small_softmax (paper: 2.50)"


@pytest.mark.parametrize("size, ratio", [("tiny", "9.48"), ("small", "14.95"), ("base", "10.86")])
def test_the_papers_ratios_of_vim_are_those_to_deit(size, ratio):
    model = resolve(f"vim_{size}").model
    row = vit_row(model.label(), model.shape())
    assert train.published(row, f"deit_{size}_softmax") == ratio
    assert train.published(row) is None


def test_recipes_that_differ_in_more_than_the_mixer_are_rows_of_their_own():
    names = ("lion_lit", "linear", "linear_feature_map", "linear_positions", "softmax_no_positions", "lion_s_forward")
    models = train.models(job_of(JOB, recipes=tuple(f"cifar100_{name}" for name in names)))
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
    assert train.name_of(resolve(JOB.recipes[0], ["model.attention.form=rnn"])) == "lion_s rnn"


def test_the_floor_has_everything_but_the_mixing():
    recipe, task = train.models(JOB)[train.FLOOR]
    model = task.build_model(recipe.model).eval()
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), layer.proj(layer.qkv(x)[..., 24:]))


GROWING = ("trainer.time=1h", "schedule.warmup=0", "trainer.batch_start=256", "trainer.batch_ramp=60%")


@pytest.mark.parametrize("more", [(), GROWING])
def test_a_step_trains(more):
    recipe, task = train.models(job_of(JOB, set=(*TINY, *more)))["lion_s"]
    torch.manual_seed(0)
    model = task.build_model(recipe.model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = train.training_step(model, task, recipe, task.example(3, "cpu"), "fp32", CPU)
    step()
    step()
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
        assert p.grad is None


@pytest.mark.slow
def test_rows_of_training_steps():
    """Check that a CPU computes in float32 unless `--precision` says otherwise."""
    rows = rows_of(job_of(JOB, set=(*JOB.set, "trainer.precision=bf16")))
    assert column(rows, "mixer") == ["softmax", train.FLOOR, "lion_s", "lion_d multiscan"]
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert row["precision"] == "fp32"
        assert row["ms"] > 0
        assert len(row["ratios"]) >= 2
        assert row["ratio"] == median(row["ratios"])
        assert (row["batch"], row["tokens"], row["size"]) == (3, 5, 32)
    assert rows[2]["parameters"] != rows[0]["parameters"]


@pytest.mark.slow
def test_a_model_of_another_shape_is_held_against_all():
    """Check that such a model is timed in the same rounds and has no row; its shape may differ."""
    other = str(ROOT / "recipes/cifar10_mini.yaml")
    job = job_of(JOB, recipes=JOB.recipes[:1], against=other)
    shapes = {name: recipe.model.shape() for name, (recipe, _) in train.models(job).items()}
    assert shapes[other] != shapes["lion_s"] == shapes["softmax"]
    rows = rows_of(job)
    assert column(rows, "mixer") == ["softmax", train.FLOOR, "lion_s"]
    assert {row["against"]["recipe"] for row in rows} == {"cifar10_mini"}
    ratios = [row["against"]["ratio"] for row in rows]
    assert min(ratios) > 0
    assert len(set(ratios)) == 3
    header, cells = fill(train.COLUMNS, rows)
    assert header[2] == "against"
    assert cells[2][2] == f"{ratios[2]:.2f} x cifar10_mini"


@pytest.mark.slow
def test_the_train_command(tmp_path, in_this_process, capsys):
    common = ["bench", "train", *JOB.recipes[:1], "--eager", "--batch", "2", "--rounds", "2", "--out"]
    command = [*common, tmp_path, "--size", "32", "--set", *TINY]
    models = ["lion_s", "softmax", train.FLOOR]

    def rows_in(folder):
        return read_json(folder / "train.json")["rows"]

    out = printed(capsys, *command)
    assert_in(out, "lion_s", train.FLOOR, "x softmax")
    assert sorted(column(rows_in(tmp_path), "mixer")) == models
    own = tmp_path / "own"
    assert here(*common, own, "--set", *TINY, "data.image_size=[48, 48]") == 0
    assert set(column(rows_in(own), "size")) == {48}
    assert here(*command, "model.attention.form=chunk", "model.mlp_ratio=2") == 0
    found = sorted(column(rows_in(tmp_path), "mixer"))
    assert found == sorted([*models, *models[1:], "lion_s chunk"])
    text = (tmp_path / "train.md").read_text()
    assert text.count("\n## ") == 2
    assert_in(
        text,
        "model.attention.form=chunk model.mlp_ratio=2\n",
        "| lion_s chunk | ",
        "32 px (5 tokens), batch 2, vit, dim 12",
    )
    (tmp_path / "train.json").write_text("[]")
    assert "not a report of this command" in refuse(capsys, *command)


def test_models_must_be_alike(capsys):
    for words, message in {
        "deit_tiny_lion_s deit_small_lion_s": "dim 384, depth 12, 6 heads",
        "recipes/deit_tiny_lion_x.yaml": "no such file",
        "deit_tiny_lion_s --against lightnet_none": "no such recipe",
        "deit_tiny_lion_s --size 30": "model.patch_size: 16 does not divide image height 30",
        "cifar100_lion_s cifar100_lion_s_multiscan --set model.attention.scans=[row_major]": "cifar100_lion_s_multiscan"
        ": a second lion_s with the same timed settings",
        "mlm_tiny_softmax --plain --set data.length=65": "--plain: only a GPT without dropout",
        "shakespeare_char_softmax --plain --set data.length=65 model.dropout=0.1": "only a GPT without dropout",
    }.items():
        assert message in refuse(capsys, "bench", "train", "--eager", *words.split())
    assert "unknown command 'bench op', did you mean 'bench ops'" in refuse(capsys, "bench", "op")


def gpt(mixer="softmax"):
    """Return a tiny GPT for 8 tokens, its recipe, its task and a batch."""
    torch.manual_seed(0)
    recipe, task = train.models(TEXT)[mixer]
    return task.build_model(recipe.model), recipe, task, task.example(2, "cpu")


def clipped(recipe, norm):
    return replace(recipe, trainer=replace(recipe.trainer, clip_grad=norm))


def test_the_plain_model_and_its_step_are_ours():
    """Compare steps from equal weights on the same batch: forward, backward, clipping, AdamW and its groups."""
    model, recipe, task, batch = gpt()
    recipe = clipped(recipe, 0.1)
    plain = PlainGPT.of(model)
    tokens = batch["tokens"][:, :-1]
    torch.testing.assert_close(plain(tokens), model(tokens))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    step = train.training_step(model, task, recipe, batch, "fp32", CPU)
    other = plain_step(plain, recipe, batch["tokens"])
    for _ in range(3):
        step()
        other()
    ours = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    torch.testing.assert_close(dict(plain.state_dict()), ours, rtol=1e-4, atol=1e-5)
    for name, value in before.items():
        assert (value - ours[name]).abs().max() > 1e-3, name


def test_a_step_clips(monkeypatch):
    model, recipe, task, batch = gpt("lion_s")
    found = []
    take = torch.optim.AdamW.step

    def kept(self, *args):
        found.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        return take(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", kept)
    for norm in (None, 1e-3):
        train.training_step(model, task, clipped(recipe, norm), batch, "fp32", CPU)()
    assert found[0] > 1e-2
    assert found[1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "part, text",
    [("model.dropout", "heads, dropout 0.1,"), ("model.attention.score_dropout", "heads, score dropout 0.1,")],
)
def test_dropout_is_part_of_the_shape(part, text):
    assert text in resolve("cifar100_lion_s", [f"{part}=0.1"]).model.shape()


@pytest.mark.slow
def test_rows_of_text(tmp_path):
    """Check that the size of text is a length, and that the plain model has a separate ratio."""
    rows = {row["mixer"]: row for row in rows_of(TEXT)}
    assert list(rows) == ["softmax", PLAIN, train.FLOOR, "lion_s"]
    softmax, plain = rows["softmax"], rows[PLAIN]
    assert plain["plain_ratio"] == softmax["ratio"] == 1
    assert plain["ratio"] > 0
    for row in rows.values():
        assert (row["model"], row["tokens"], row["batch"]) == ("gpt", 8, 3)
    assert plain["parameters"] == softmax["parameters"] != rows["lion_s"]["parameters"]
    assert train.TrainReport(tmp_path).title(softmax).startswith("8 tokens, batch 3, gpt, dim 12")
    header, (cells, *_) = fill(train.COLUMNS, list(rows.values()))
    assert header[:5] == ["mixer", "x softmax", "x plain", "ms a step", "tokens/s"]
    assert float(cells[4].replace(",", "")) == pytest.approx(24e3 / softmax["ms"], rel=0.01)
