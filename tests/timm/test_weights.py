"""Tests of weights that go both ways between runs and models of timm: bit for bit, or refused with a line."""

import argparse

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import lion
from lion.layers.mixers import MIXERS
from lion.models.vit import ViTConfig
from lion.runs import open_run
from tests.helpers import ROOT, here, on_a_book, refuse, refused, state_of, tiny_recipe
from tests.layers.helpers import close
from tests.timm.test_vision_transformer import made, randomise

timm = pytest.importorskip("timm")
room = pytest.importorskip("lion.timm")
LionVisionTransformer, arguments = room.LionVisionTransformer, room.vision_transformer.arguments

SIDE, CLASSES = 32, 7
SMALL = ["model.depth=2", f"data.image_size=[{SIDE},{SIDE}]"]
RUNS = {  # recipe of each registered model
    "vit_lion_tiny_patch16_224": "deit_tiny_lion_s",
    "vit_lion_d_tiny_patch16_224": "deit_tiny_lion_d",
    "vit_lion_s_multiscan_tiny_patch16_224": "deit_tiny_lion_s_multiscan",
    "vit_lion_lightnet_tiny_patch16_224": "lightnet/lightnet_tiny",
    "vit_lion_lit_tiny_patch16_224": "deit_tiny_lion_lit",
    "vit_tiny_patch16_224": "deit_tiny_softmax",
}


def saved(folder, name, arguments=True, **settings):
    """Save a random model as timm's train.py does, and return it with the path of the file."""
    model = randomise(made(name, SIDE, num_classes=CLASSES, **settings))
    said = {"arch": name, "args": argparse.Namespace(model=name)} if arguments else {}
    torch.save({"epoch": 3, "state_dict": model.state_dict(), **said}, path := folder / "checkpoint.pth.tar")
    return model, path


def go_both_ways(model, path, recipe, folder, *settings):
    """Check that a run made of weights, and a model of timm made of the run, have the same logits and weights."""
    assert here("convert", path, ROOT / f"recipes/{recipe}.yaml", folder, *SMALL, *settings) == 0
    images, again = torch.randn(2, 3, SIDE, SIDE), room.from_run(folder)
    with torch.no_grad():
        expected = model(images)
        assert torch.equal(lion.load(folder, compile=False)(images), expected) and expected.isfinite().all()
        assert torch.equal(again(images), expected)
    assert not again.training
    close(again.state_dict(), model.state_dict(), 0)


@pytest.mark.parametrize("name", RUNS)
def test_weights_go_both_ways(name, tmp_path):
    go_both_ways(*saved(tmp_path, name), RUNS[name], tmp_path / "run")


@pytest.mark.parametrize("mixer", ["gated_deltanet", "rwkv7", "mamba2", "lion_s_hippo"])
def test_parts_of_published_blocks_go_both_ways(mixer, tmp_path):
    config = ViTConfig(mixer, 192, 2, 3, attention=MIXERS[mixer].layer.Config(block="published"))
    model = LionVisionTransformer(img_size=SIDE, num_classes=CLASSES, **arguments(config))
    path = tmp_path / "weights.pth"
    torch.save(randomise(model).state_dict(), path)
    settings = [f"model.mixer={mixer}", "model.attention.block=published"]
    go_both_ways(model, path, "deit_tiny_lion_s", tmp_path / "run", *settings)


@pytest.mark.slow
def test_a_trained_run_in_timm(tmp_path, capsys):
    """Check the logits, the data, the averaged weights, and the way back, for a run on grey images of 8 x 8."""
    pytest.importorskip("sklearn")
    recipe = tiny_recipe(tmp_path, trainer={"ema": 0.5})
    assert here("train", recipe, "--no-eval") == 0
    run, x = tmp_path / "runs/tiny", torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        for settings in ({}, {"checkpoint": "last"}, {"ema": True}):
            assert torch.equal(room.from_run(run, **settings)(x), lion.load(run, compile=False, **settings)(x))
    model, info = room.from_run(run), open_run(run).task.info
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (1, 8, 8) and data["interpolation"] == "bicubic"
    assert data["mean"] == pytest.approx(info.mean) and data["std"] == pytest.approx(info.std)
    picture = Image.effect_mandelbrot((8, 8), (-2, -1, 1, 1), 50)
    prepared = timm.data.create_transform(**data, is_training=False)(picture)
    mean, std = torch.tensor(info.mean)[:, None, None], torch.tensor(info.std)[:, None, None]
    close(prepared, (pil_to_tensor(picture) / 255 - mean) / std)  # as in the run, nothing is cut
    assert model.num_classes == 10 and model.pretrained_cfg["label_names"] == info.classes
    assert model.blocks[1].drop_path1.drop_prob == pytest.approx(0.1)

    torch.save(model.state_dict(), tmp_path / "weights.pth")
    assert here("convert", tmp_path / "weights.pth", recipe, tmp_path / "back") == 0
    out = capsys.readouterr().out
    assert "preset" not in out and "taken from the recipe: " in out and "model.attention.direction=both" in out
    held, back = (state_of(folder, "best")["model"] for folder in (run, tmp_path / "back"))
    close(back, held, 0)


@pytest.mark.parametrize("name", ["vit_lion_lit_tiny_patch16_224", "vit_lion_lightnet_tiny_patch16_224"])
@torch.no_grad()
def test_models_are_saved_and_loaded_by_timm(name, tmp_path):
    """Check a folder for the Hub: the classes are kept, or changed with new positions and a new head."""
    model, _ = saved(tmp_path, name)
    model.set_input_size((48, 48))
    model.reset_classifier(3)
    timm.models.save_for_hf(model, tmp_path / "hub")
    hub = {"model_name": f"local-dir:{tmp_path / 'hub'}", "pretrained": True, "depth": 2}
    again = timm.create_model(**hub, img_size=(48, 48)).eval()
    images = torch.randn(2, 3, 48, 48)
    assert torch.equal(again(images), model(images))
    other = timm.create_model(**hub, img_size=64, num_classes=5)
    assert other(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert torch.equal(other.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


def test_plain_weights_of_lion_lit_name_their_preset(tmp_path, capsys):
    """Check that weights without their training's arguments are read as the authors', unless the preset is given."""
    model, path = saved(tmp_path, "vit_lion_lit_tiny_patch16_224", arguments=False)
    recipe, images = ROOT / "recipes/deit_tiny_lion_lit.yaml", torch.randn(2, 3, SIDE, SIDE)
    for preset, settings in {"released": [], "paper": ["model.preset=paper"]}.items():
        assert here("convert", path, recipe, tmp_path / preset, *SMALL, *settings) == 0
        assert f"readout mean, preset {preset}\n" in capsys.readouterr().out
        with torch.no_grad():
            assert torch.equal(room.from_run(tmp_path / preset)(images), model(images)) is (preset == "paper")


def test_weights_that_do_not_fit_a_recipe_are_refused(tmp_path, capsys):
    lion_s, lightnet = "vit_lion_s_tiny_patch16_224", "vit_lion_lightnet_tiny_patch16_224"
    normed = {"attn_layer": room.attention("lion_s"), "qk_norm": True}
    for model, changes, recipe, message in (
        (lion_s, {}, "deit_tiny_lion_d", "blocks.0.attention.decays.0.a is none there"),
        (lion_s, {}, "deit_tiny_lion_s_multiscan", "attention.decays.1.gate.weight is none there"),
        (lightnet, {}, "deit_tiny_lion_s", "there is no cls_token: model.cls is False, not True"),
        (lion_s, {"embed_dim": 96}, "deit_tiny_lion_s", "model.dim is 96, not 192; try model.dim=96 model.num_heads=1"),
        ("vit_tiny_patch16_224", normed, "deit_tiny_lion_s", "our model has no place for blocks.0.attn.q_norm.weight"),
    ):
        path = saved(tmp_path, model, **changes)[1]
        assert message in refuse(capsys, "convert", path, ROOT / f"recipes/{recipe}.yaml", tmp_path / "run", *SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_runs_without_a_place_in_timm_are_refused(tmp_path):
    refused(r"run 'nowhere': no recipe.yaml in nowhere or", room.from_run, "nowhere")
    pytest.importorskip("sklearn")
    changes = {"model": {"attention": {"direction": "alternating"}}, "trainer": {"steps": 1, "eval_every": 1}}
    assert here("train", tiny_recipe(tmp_path, **changes), "--no-eval") == 0
    refused(
        r"runs/tiny: model.attention.direction: timm's VisionTransformer has no", room.from_run, tmp_path / "runs/tiny"
    )
    assert here("train", "gpt2_tiny_lion_s", "--no-eval", *on_a_book(tmp_path)) == 0
    refused("gpt2_tiny_lion_s: a run of model 'gpt', expected 'vit'", room.from_run, tmp_path / "runs/gpt2_tiny_lion_s")
