"""Tests of converted checkpoints of Vim, against a model written from its description, with the published names."""

import pytest
import torch
from torch import nn

import lion
from tests.helpers import ROOT, printed, refuse
from tests.layers.test_vim import oracle
from tests.tools.test_convert import Part

DIM, DEPTH, SIDE, PATCH, CLASSES, STATE, RANK = 48, 2, 5, 8, 7, 16, 3
SMALL = f"""
model.dim={DIM} model.num_heads=3 model.depth={DEPTH}
model.patch_size={PATCH} data.image_size=[{SIDE * PATCH},{SIDE * PATCH}]
""".split()
PARTS = ("conv1d{}", "x_proj{}", "dt_proj{}", "D{}", "A{}_log")
RECIPE = ROOT / "recipes/vim/vim_tiny.yaml"


class Theirs(nn.Module):
    """Vim in the published names: blocks of a norm and a mixer, learned positions, cls after half of the patches."""

    def __init__(self):
        super().__init__()
        self.patch_embed = Part(proj=nn.Conv2d(3, DIM, PATCH, PATCH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + SIDE**2, DIM))
        self.layers = nn.ModuleList(Part(mixer=Part(**mixer()), norm=nn.RMSNorm(DIM, eps=1e-5)) for _ in range(DEPTH))
        self.norm_f = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patch_embed.proj(images).flatten(2).mT
        x = torch.cat([x[:, :12], self.cls_token.expand(len(x), -1, -1), x[:, 12:]], 1) + self.pos_embed
        for layer in self.layers:
            x = x + mixed(layer.mixer, layer.norm(x))
        return self.head(self.norm_f(x)[:, 12])


def mixer():
    inner = 2 * DIM
    parts = {"in_proj": nn.Linear(DIM, 2 * inner, bias=False), "out_proj": nn.Linear(inner, DIM, bias=False)}
    for end in ("", "_b"):
        parts[f"conv1d{end}"] = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        parts[f"x_proj{end}"] = nn.Linear(inner, RANK + 2 * STATE, bias=False)
        parts[f"dt_proj{end}"] = nn.Linear(RANK, inner)
        parts[f"A{end}_log"] = nn.Parameter(torch.randn(inner, STATE))
        parts[f"D{end}"] = nn.Parameter(torch.randn(inner))
    return parts


def mixed(mixer, x):
    """Mix tokens x (B, L, dim) by Vim's algorithm."""
    weights = {"inputs.weight": mixer.in_proj.weight, "proj.weight": mixer.out_proj.weight}
    for side, end in enumerate(("", "_b")):
        conv1d, x_proj, dt_proj, D, A = (getattr(mixer, name.format(end)) for name in PARTS)
        taps = conv1d.weight[:, 0].T
        weights |= {
            f"sides.{side}.convolution.weight": taps.flip(0) if end else taps,
            f"sides.{side}.convolution.bias": conv1d.bias,
            f"sides.{side}.select.weight": x_proj.weight,
            f"sides.{side}.step.weight": dt_proj.weight,
            f"sides.{side}.step_bias": dt_proj.bias,
            f"sides.{side}.a": A,
            f"sides.{side}.skip": D,
        }
    return torch.stack([oracle(weights, row, "both") for row in x])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Theirs().eval()


def test_the_logits_are_those_of_the_published_model(model, tmp_path, capsys):
    torch.save({"model": model.state_dict()}, tmp_path / "their.pth")
    said = printed(capsys, "convert", tmp_path / "their.pth", RECIPE, tmp_path / "run", *SMALL)
    counted = f"{sum(p.numel() for p in model.parameters()):,} parameters, {CLASSES} classes, 2 blocks of width 48"
    assert f"run: vim, {counted}" in said
    assert said.endswith("from the recipe: model.cls_place=middle, data.mean, data.std\n")
    ours, images = lion.load(tmp_path / "run", compile=False), torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH)
    with torch.no_grad():
        expected = model(images)
        assert expected.std() > 0.3
        for form in ("chunk", "rnn"):
            lion.set_form(ours, form)
            assert (ours(images) - expected).abs().max() < 1e-4


A, CONV = "layers.0.mixer.A_log", "layers.0.mixer.conv1d.weight"
MISFITS = {
    "model.dim=96": "another size of Vim: width 48, 2 blocks, the recipe has width 96, 2 blocks",
    "model.depth=24": "another size of Vim: width 48, 2 blocks, the recipe has width 48, 24 blocks",
    "model.attention.state=8": f"{A} is (96, 16): model.attention.state is 16, not 8; try model.attention.state=16",
    "model.attention.expand=3": f"{A} is (96, 16): model.attention.expand is 2, not 3; try",
    "model.attention.conv_width=3": f"{CONV} is (96, 1, 4): model.attention.conv_width is 4, not 3; try",
    "model.patch_size=4": "patch_embed.proj.weight is (48, 3, 8, 8): model.patch_size is [8,8], not [4,4]",
    "data.image_size=[48,40]": "pos_embed is (1, 26, 48): data.image_size is [40,40], not [48,40]",
    "data.channels=1": "patch_embed.proj.weight is (48, 3, 8, 8): data.channels is 3, not 1",
    "model.attention.direction=forward": "none by the recipe",
}


@pytest.mark.parametrize("setting, message", MISFITS.items())
def test_another_size_is_refused(setting, message, model, tmp_path, capsys):
    torch.save(model.state_dict(), tmp_path / "their.pth")
    line = refuse(capsys, "convert", tmp_path / "their.pth", RECIPE, tmp_path / "run", *SMALL, setting)
    assert message in line and "their.pth" in line and not (tmp_path / "run").exists()


def test_the_recipe_of_a_published_size_is_named(tmp_path, capsys):
    with torch.device("meta"):
        shapes = Theirs().state_dict()
    weights = {name: torch.zeros(w.shape) for name, w in shapes.items()}
    weights["patch_embed.proj.weight"] = torch.zeros(384, 3, 16, 16)
    weights["layers.23.norm.weight"] = torch.zeros(384)
    torch.save(weights, tmp_path / "their.pth")
    line = refuse(capsys, "convert", tmp_path / "their.pth", RECIPE, tmp_path / "run")
    assert "width 384, 24 blocks, the recipe has width 192, 24 blocks; try vim_small" in line


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("layers.0.mixer.A_b_log", None, "no layers.0.mixer.A_b_log with 2 axes: not a classifier of Vim with two"),
        ("layers.1.mixer.gamma", torch.ones(DIM), "no place for layers.1.mixer.gamma"),
        ("layers.1.mixer.D_b", torch.full((2 * DIM,), torch.nan), "layers.1.mixer.D_b holds NaN"),
        ("layers.1.mixer.D", None, "encoder.blocks.1.attention.sides.0.skip is none there, (96,) by the recipe"),
    ],
)
def test_other_weights_are_refused(name, value, message, model, tmp_path, capsys):
    held = {**model.state_dict(), name: value}
    torch.save({k: v for k, v in held.items() if v is not None}, tmp_path / "their.pth")
    assert message in refuse(capsys, "convert", tmp_path / "their.pth", RECIPE, tmp_path / "run", *SMALL)
