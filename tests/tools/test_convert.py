"""Tests of converted checkpoints: their logits are unchanged, and checkpoints that do not fit are refused."""

import argparse
import os
import zipfile

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import lion
from lion.files import read_json
from lion.runs import init_from, open_run
from lion.tasks.image_classification import LOSS, TOP1, ImageClassification
from tests.helpers import ROOT, here, printed, refuse, state_of
from tests.layers.oracle_parts import elu1, shifted
from tests.ops.helpers import oracle_mask
from tools import convert as converting

KINDS = {"Lit": "lion_lit", "Decay": "lion_d", "Selective": "lion_s"}
CASES = [  # kind, order, whether there are positions, readout
    ("Lit", "Normal", True, "mean"),
    ("Lit", "Normal", False, "cls"),
    ("Decay", "Normal", True, "cls"),
    ("Decay", "S", False, "mean"),
    ("Selective", "Normal", False, "cls"),
    ("Selective", "S", True, "mean"),
]
DIM, HEADS, DEPTH, SIDE, PATCH, CLASSES = 48, 3, 2, 5, 8, 7
SMALL = f"""
model.dim={DIM} model.num_heads={HEADS} model.depth={DEPTH}
model.patch_size={PATCH} data.image_size=[{SIDE * PATCH},{SIDE * PATCH}]
""".split()
TWO_SCANS = "model.attention.scans=[row_snake,column_snake]"


class Part(nn.Module):
    """A module of named modules and parameters, with the names of a checkpoint."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Theirs(nn.Module):
    """The authors' vision model as full attention, written from its description, with their names of weights."""

    def __init__(self, kind, order, *, position, readout):
        super().__init__()
        self.kind, self.order, self.readout = kind, order, readout
        self.patch_embed = Part(proj=nn.Conv2d(3, DIM, PATCH, PATCH))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        if position:
            self.pos_embed = nn.Parameter(torch.zeros(1, 1 + SIDE**2, DIM))
        self.blocks = nn.ModuleList(
            Part(
                norm1=nn.LayerNorm(DIM, eps=1e-6),
                attn=Part(qkv=nn.Linear(DIM, 3 * DIM), proj=nn.Linear(DIM, DIM), **self.decays()),
                norm2=nn.LayerNorm(DIM, eps=1e-6),
                mlp=Part(fc1=nn.Linear(DIM, 4 * DIM), fc2=nn.Linear(4 * DIM, DIM)),
            )
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, CLASSES)
        randomise(self)

    def decays(self):
        names = {"Normal": ["a_i"], "S": ["a_i", "a2_i"]}[self.order] if self.kind != "Lit" else []
        return {n: nn.Parameter(torch.zeros(HEADS)) if self.kind == "Decay" else nn.Linear(DIM, HEADS) for n in names}

    def forward(self, images):
        x = self.patch_embed.proj(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        if hasattr(self, "pos_embed"):
            x = x + self.pos_embed
        for block in self.blocks:
            x = x + self.attention(block.attn, block.norm1(x))
            x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
        x = self.norm(x)
        return self.head(x[:, 0] if self.readout == "cls" else x.mean(1))

    def attention(self, part, x):
        q, k, v = part.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        phi = elu1 if self.kind == "Lit" else shifted
        q, k = phi(q), phi(k)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        orders = {"a_i": snake(False), "a2_i": snake(True)} if self.order == "S" else {"a_i": range(1 + SIDE**2)}
        masks = [pairwise(self.decay(getattr(part, n), x), list(o)) for n, o in orders.items() if hasattr(part, n)]
        if masks:
            scores = scores * sum(masks) / len(masks)
        y = scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v
        return part.proj(y.transpose(1, 2).flatten(2))

    def decay(self, a, x):
        """Return the decay of each token (B, H, tokens)."""
        if self.kind == "Decay":
            return torch.sigmoid(a)[None, :, None].expand(len(x), -1, x.shape[1])
        decay = (1 - torch.sigmoid(a(x))).mT.clone()
        decay[..., 0] = 1  # token cls
        return decay


def snake(columns):
    """Return the order of tokens: cls, then the patches along curve 1 (rows) or curve 2 (columns)."""
    places = [(line, at if line % 2 == 0 else SIDE - 1 - at) for line in range(SIDE) for at in range(SIDE)]
    return [0, *(1 + (SIDE * at + line if columns else SIDE * line + at) for line, at in places)]


def pairwise(decay, order):
    """Return the masks (B, H, tokens, tokens) for tokens in this order, from their decays (B, H, tokens)."""
    masks = [oracle_mask(row, "source", "both") for row in decay[..., order].flatten(0, 1).tolist()]
    places = torch.tensor(order).argsort()
    return torch.stack(masks).float().view(*decay.shape, -1)[..., places, :][..., places]


def randomise(model):
    """Set random weights with which every part of a model affects the logits."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 4.0 if ".a_i" in name or ".a2_i" in name else 1.5
            nn.init.normal_(p, std=scale / p[0].numel() ** 0.5 if p.dim() > 1 and p.shape[0] > 1 else 0.5 * scale)
            if "norm" in name and name.endswith("weight"):
                p.add_(1)


def theirs(kind="Selective", order="Normal", position=False, readout="mean", seed=0):
    torch.manual_seed(seed)
    return Theirs(kind, order, position=position, readout=readout).eval()


def recipe_of(kind):
    return ROOT / f"recipes/deit_tiny_{KINDS.get(kind, kind)}.yaml"


LIT = recipe_of("Lit")


def convert(folder, held, *args, kind="Selective"):
    """Save the contents `held`, convert the file with the command, and return the run folder."""
    torch.save(held, folder / "their.pth")
    assert here("convert", folder / "their.pth", recipe_of(kind), folder / "run", *SMALL, *args) == 0
    return folder / "run"


def refused(capsys, folder, held, recipe, *args):
    """Save the contents `held`; return the line of a conversion that must fail, and leave the file alone."""
    torch.save(held, folder / "their.pth")
    line = refuse(capsys, "convert", folder / "their.pth", recipe, folder / "new/run", *SMALL, *args)
    assert os.listdir(folder) == ["their.pth"]
    return line


@torch.no_grad()
def apart(model, other, seed=0):
    """Return the largest difference of logits on random images."""
    images = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH, generator=torch.Generator().manual_seed(seed))
    a, b = model(images), other(images)
    assert a.shape == b.shape == (2, CLASSES) and b.std() > 0.3
    return (a - b).abs().max().item()


@pytest.mark.parametrize("kind, order, position, readout", CASES)
def test_the_logits_are_those_of_the_authors_model(kind, order, position, readout, tmp_path, capsys):
    model = theirs(kind, order, position, readout)
    settings = [f"model.readout={readout}"]
    if order == "S":
        settings.append(TWO_SCANS)
    run = convert(tmp_path, model.state_dict(), *settings, kind=kind)
    said = capsys.readouterr().out
    ours = lion.load(run, compile=False)
    assert apart(ours, model) < 1e-4
    for form in ("chunk", "rnn"):
        lion.set_form(ours, form)
        assert apart(ours, model) < 1e-4
    counted = f"{sum(p.numel() for p in model.parameters()):,} parameters, {CLASSES} classes"
    assert counted in said and ("with position" in said) is position and f"{HEADS} heads, readout {readout}" in said
    hidden = f"model.mixer=lion_lit, model.num_heads={HEADS}, " if kind == "Lit" else ""
    hidden += f"model.readout={readout}, data.mean, data.std"
    assert said.endswith(f"\nnot shown by the checkpoint, taken from the recipe: {hidden}\n")


@pytest.mark.slow
def test_weights_are_found_where_they_are_kept(tmp_path):
    averaged = theirs(seed=2)
    plain = theirs(seed=1)
    weights = plain.state_dict()
    state = {
        "model": weights,
        "model_ema": averaged.state_dict(),
        "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "epoch": 299,
        "args": argparse.Namespace(mask_type="Selective", output_dir="out"),
    }
    parallel = {f"module.{name}": value.half() for name, value in weights.items()}
    compiled = {f"module._orig_mod.{name}": value for name, value in weights.items()}
    blocks = {name.replace("blocks.0.", "blocks.0._orig_mod."): value for name, value in weights.items()}
    for name, content, right, wrong, limit, *more in (
        ("model", state, plain, averaged, 1e-4),
        ("ema", state, averaged, plain, 1e-4, "--ema"),
        ("parallel", {"state_dict": parallel}, plain, averaged, 0.05),
        ("compiled", compiled, plain, averaged, 1e-4),
        ("blocks", blocks, plain, averaged, 1e-4),
    ):
        folder = tmp_path / name
        folder.mkdir()
        run = convert(folder, content, *more)
        ours = lion.load(run, compile=False)
        assert apart(ours, right) < limit and apart(ours, wrong) > 0.1
        assert all(value.dtype == torch.float32 for value in state_of(run, "best")["model"].values())


@pytest.mark.slow
def test_the_run_serves_every_command(tmp_path, capsys):
    model = theirs()
    torch.save(model.state_dict(), tmp_path / "their.pth")
    data = tmp_path / "data"
    for number in range(CLASSES):
        for split in ("train", "val"):
            folder = data / split / f"n{number}"
            folder.mkdir(parents=True)
            Image.new("RGB", (50, 60), (30 * number, 90, 200)).save(folder / "0.png")
    settings = [*SMALL, "data.workers=0", f"data.root={data}", "trainer.precision=fp32"]
    run = tmp_path / "new/run"
    assert str(run) in printed(capsys, "convert", tmp_path / "their.pth", recipe_of("Selective"), run, *settings)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["run"]
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "environment.json", "recipe.yaml"]
    converted = read_json(run / "environment.json")["converted"]
    assert converted["from"] == str(tmp_path / "their.pth") and len(converted["sha256"]["their.pth"]) == 64

    loaded = open_run(run)
    assert loaded.task.info.classes == tuple(f"class {i}" for i in range(CLASSES))
    assert loaded.recipe.folder == run and loaded.recipe.model.preset == "released"
    fresh = loaded.task.build_model(loaded.recipe.model)
    init_from(fresh, run, loaded.task.info)
    assert apart(fresh.eval(), model) < 1e-4
    picture = data / "val/n3/0.png"
    assert printed(capsys, "predict", run, picture, "--top", CLASSES, "--eager").count("class ") == CLASSES
    assert "top-1 %" in printed(capsys, "eval", run, "--form", "full", "--eager")


def test_as_many_patches_in_another_shape_fit(tmp_path):
    model = theirs("Lit", position=True)
    ours = lion.load(convert(tmp_path, model.state_dict(), "data.image_size=[8,200]", kind="Lit"), compile=False)
    images = torch.randn(2, 3, 8, 200)
    with torch.no_grad():
        assert (ours(images) - model(images)).abs().max() < 1e-4


THEIR = "lion_tiny_patch16_224"
DEIT = "deit_tiny_patch16_224"
TOLD = [  # what a training recorded, the recipe and settings that contradict it, the expected message, what fits
    ("Selective", True, THEIR, "Selective", [], "cls_tok True: model.readout is cls, not mean; try model.readout"),
    ("Decay", False, THEIR, "Decay", ["model.readout=cls"], "cls_tok False: model.readout is mean, not cls"),
    ("Lit", False, THEIR, "softmax", [], "mask_type Lit: model.mixer is lion_lit, not softmax; try"),
    ("Lit", False, THEIR, "Lit", ["model.num_heads=6"], f"model {THEIR}: model.num_heads is 3, not 6; try"),
    ("Lit", None, DEIT, "Lit", [], f"{DEIT}: model.mixer is softmax, not lion_lit; try"),
    ("Lit", None, DEIT, "softmax", ["model.readout=mean"], f"{DEIT}: model.readout is cls, not mean"),
]


@pytest.mark.parametrize("kind, cls, name, recipe, settings, message", TOLD)
def test_recorded_settings_of_training_are_compared_with_the_recipe(
    kind, cls, name, recipe, settings, message, tmp_path, capsys
):
    args = {"model": name}
    if name == THEIR:
        args |= {"mask_type": kind, "cls_tok": cls}
    held = {"model": theirs(kind, position=True).state_dict(), "args": argparse.Namespace(**args)}
    assert message in refused(capsys, tmp_path, held, recipe_of(recipe), *settings)
    readout = "mean" if cls is False else "cls"
    convert(tmp_path, held, f"model.readout={readout}", kind=kind if name == THEIR else "softmax")
    assert capsys.readouterr().out.endswith("taken from the recipe: data.mean, data.std\n")


A, A2, GATE = "blocks.0.attn.a_i", "blocks.0.attn.a2_i", "blocks.0.attn.a_i.weight"
MISFITS = [  # kind and order of the checkpoint; recipe and settings; what a line says, and its hint
    ("Decay", "Normal", "Selective", "", f"{A} is (3,): model.mixer is lion_d, not lion_s; try", "tiny_lion_d.yaml"),
    ("Selective", "S", "Decay", "", f"{GATE} is (3, 48): model.mixer is lion_s, not lion_d; try", "tiny_lion_s.yaml"),
    ("Lit", "Normal", "Selective", "", f"there is no {A}: model.mixer is softmax or lion_lit", "tiny_softmax.yaml or"),
    ("Lit", "Normal", "Selective", "model.mixer=mamba2", "not mamba2", "try model.mixer=softmax or model.mixer=lion"),
    ("Decay", "S", "Decay", "", f"{A2} is (3,): model.attention.scans is", f"try {TWO_SCANS}"),
    ("Decay", "S", "Decay", "model.attention.scans=[column_snake,row_snake]", f"{A2} is (3,)", f"try {TWO_SCANS}"),
    ("Decay", "Normal", "Decay", TWO_SCANS, f"there is no {A2}", "try model.attention.scans=[row_major]"),
    ("Decay", "Normal", "Decay", "model.num_heads=6", f"{A} is (3,)", "try model.num_heads=3"),
]
OTHERS = [  # settings of a recipe of Lit; what a line says, and its hint
    ("model.dim=96 model.num_heads=6", "(48, 3, 8, 8)", "try model.dim=48 model.num_heads=3"),
    ("model.patch_size=4", "proj.weight is (48, 3, 8, 8)", "try model.patch_size=[8,8]"),
    ("data.channels=1", "patch_embed.proj.weight is (48, 3, 8, 8)", "try data.channels=3"),
    ("model.depth=3", "blocks.1.", "model.depth is 2, not 3; try model.depth=2"),
    ("data.image_size=[48,40]", "pos_embed is (1, 26, 48)", "try data.image_size=[40,40]"),
    ("model.mlp_ratio=2", "mlp.fc1.weight is (192, 48) there, (96, 48) by", "their.pth"),
    ("model.attention.qkv_bias=false", "qkv.bias is (144,) there, none", "their.pth"),
    ("--ema", "--ema", "the file holds no 'model_ema'"),
    ("model.dimm=3", "unknown key 'model.dimm'", "did you mean 'dim'?"),
]


@pytest.mark.parametrize(
    "kind, order, recipe, settings, seen, hint",
    MISFITS + [("Lit", "Normal", "Lit", *other) for other in OTHERS],
)
def test_a_recipe_of_another_model_is_refused(kind, order, recipe, settings, seen, hint, tmp_path, capsys):
    held = theirs(kind, order, position=True).state_dict()
    line = refused(capsys, tmp_path, held, recipe_of(recipe), *settings.split())
    assert seen in line and hint in line


DAMAGE = {
    "head.weight": (None, "no head.weight with 2 axes"),
    "cls_token": (torch.ones(DIM), "no cls_token with 3 axes"),
    "head.bias": (None, "head.bias is none there, (7,) by the recipe"),
    "blocks.1.attn.a_i": (None, "encoder.blocks.1.attention.decays.0.a is none there, (3,) by the recipe"),
    "blocks.0.attn.a_i": (torch.tensor(1.0), "no place for blocks.0.attn.a_i"),
    "head_dist.weight": (torch.ones(CLASSES, DIM), "no place for head_dist.weight: distilled"),
    "blocks.0.ls1.gamma": (torch.ones(DIM), "no place for blocks.0.ls1.gamma"),
    "blocks.0.attn.a3_i": (torch.ones(HEADS), "no place for blocks.0.attn.a3_i"),
    "epoch": (3, "no place for epoch"),
    "norm.bias": ("text", "no place for norm.bias"),
    "blocks.0.norm1.bias": (torch.ones(DIM, dtype=torch.int8), "no place for blocks.0.norm1.bias"),
    "blocks.1.norm2.weight": (torch.tensor([torch.nan] + [1.0] * (DIM - 1)), "blocks.1.norm2.weight holds NaN"),
    "blocks.1.norm2.bias": (torch.ones(DIM).div(0), "blocks.1.norm2.bias holds NaN or infinity: not a trained model"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_other_weights_are_refused(name, tmp_path, capsys):
    value, message = DAMAGE[name]
    held = theirs("Decay").state_dict()
    held[name] = value
    if value is None:
        del held[name]
    line = refused(capsys, tmp_path, held, recipe_of("Decay"))
    assert message in line and "their.pth" in line and "its recipe.yaml" not in line


def test_damaged_files_are_refused_by_their_checksums(tmp_path, capsys):
    weights = theirs("Lit").state_dict()
    torch.save(weights, tmp_path / "whole.pth")
    whole, their = (tmp_path / "whole.pth").read_bytes(), tmp_path / "their.pth"
    place = whole.index(weights["head.weight"].numpy().tobytes())
    with zipfile.ZipFile(tmp_path / "whole.pth") as file:
        contents = file.start_dir
    zeros = bytes(64)
    for begin, changed, message in (
        (place + 5, bytes([whole[place + 5] ^ 16]), "their.pth: damaged, its checksums do not match ("),
        (place, zeros, "checksums do not match (whole/data/"),
        (contents, bytes(byte ^ 255 for byte in whole[contents : contents + 40]), "damaged"),  # the table of contents
        (len(whole) - 22, zeros[:22], "their.pth"),  # the place of the table
    ):
        their.write_bytes(whole[:begin] + changed + whole[begin + len(changed) :])
        assert message in refuse(capsys, "convert", their, LIT, tmp_path / "run", *SMALL)
    assert sorted(os.listdir(tmp_path)) == ["their.pth", "whole.pth"]


def test_files_without_checksums_are_taken(tmp_path):
    model = theirs("Lit")
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    sums = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(model.state_dict(), tmp_path / "quick.pth")
    finally:
        torch.serialization.set_crc32_options(sums)
    for name in ("old", "quick"):
        assert here("convert", tmp_path / f"{name}.pth", LIT, tmp_path / name, *SMALL) == 0
        assert apart(lion.load(tmp_path / name, compile=False), model) < 1e-4


def test_files_that_cannot_be_used_are_refused(tmp_path, capsys):
    their, run = tmp_path / "their.pth", tmp_path / "run"

    def line(recipe=LIT, out=run):
        return refuse(capsys, "convert", their, recipe, out, *SMALL)

    assert "no such checkpoint" in line()
    their.write_text("not weights")
    assert "their.pth: not a readable checkpoint" in line()
    model = theirs("Lit")
    torch.save({"model": model}, their)  # a pickled module could execute code
    assert "their.pth: not a readable checkpoint" in line()
    torch.save(model.state_dict(), their)
    assert "x.yaml: no such file" in line(recipe=tmp_path / "x.yaml")
    assert "name: expected letters" in line(out=tmp_path / "a b")
    assert "cannot be written (" in line(out=their / "run")
    assert os.listdir(tmp_path) == ["their.pth"]
    run.mkdir()
    assert "run: exists already" in line()
    assert not list(run.iterdir())


def test_a_model_without_a_converter(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(converting, "CONVERTERS", {"bert": None})
    line = refused(capsys, tmp_path, {"head.weight": torch.zeros(1)}, LIT)
    assert "model.name: checkpoints can be converted for bert, not for 'vit'" in line


def test_training_on_replaces_the_converted_weights_whichever_way_is_better(tmp_path, monkeypatch):
    for name, metric in {"falls": LOSS, "rises": TOP1}.items():
        monkeypatch.setattr(ImageClassification, "metrics_of", staticmethod(lambda config, metric=metric: (metric,)))
        folder = tmp_path / name
        folder.mkdir()
        held = state_of(convert(folder, theirs().state_dict()), "best")["best"]
        assert held["step"] == 0 and metric.as_good(1.0, held["value"]) and not metric.as_good(held["value"], 1.0)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "save_text", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path, theirs().state_dict())
    assert os.listdir(tmp_path) == ["their.pth"]


@pytest.mark.slow
def test_timms_deit(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", pretrained=False).eval()
    randomise(model)
    torch.save({"model": model.state_dict()}, tmp_path / "deit.pth")
    run = tmp_path / "run"
    assert here("convert", tmp_path / "deit.pth", ROOT / "recipes/deit_tiny_softmax.yaml", run) == 0
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = model(images)
        ours = lion.load(run, compile=False)
        assert expected.std() > 0.3 and (ours(images) - expected).abs().max() < 1e-4
    info, classes = open_run(run).task.info, ours.classes
    assert info.classes == classes and len(classes) == 1000 and classes[281] == "tabby"
    assert info.size == (224, 224) and info.mean == (0.485, 0.456, 0.406)
