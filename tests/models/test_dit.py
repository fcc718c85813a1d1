import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lion.layers.mixers import SOFTMAX, AttentionConfig
from lion.models.dit import DiT, DiTConfig, position_embedding
from lion.models.gpt import GPTConfig
from lion.models.vit import ViTConfig
from tests.layers.helpers import close, invalid
from tests.models.helpers import check_forms

CLASSES = ("ant", "bee", "cow")
BLOCKS = ("adaln_zero", "pre_norm")  # time and class modulate blocks, or are tokens


def dit(mixer="lion_s", size=(8, 8), channels=3, moved=True, **settings):
    """Build a DiT; `moved` replaces the initial weights, with which the model predicts zero."""
    torch.manual_seed(0)
    config = DiTConfig(**{"mixer": mixer, "dim": 12, "depth": 2, "num_heads": 3, "patch_size": 2, **settings})
    model = DiT(config, image_size=size, channels=channels, classes=CLASSES)
    if moved:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def asked(size=(8, 8), channels=3, batch=2):
    x = torch.randn(batch, channels, *size)
    return x, torch.arange(batch) * 300, torch.arange(batch) % 3


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "lightnet", "gla", "deltanet"])
def test_shapes_and_gradients(mixer):
    for block, size, patch in (("adaln_zero", (8, 8), 2), ("pre_norm", (6, 10), (3, 2))):
        model, batch = dit(mixer, size, block=block, patch_size=patch), asked(size)
        noise = model(*batch)
        assert noise.shape == batch[0].shape
        noise.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_it_starts_by_finding_nothing(block):
    model, batch = dit(moved=False, block=block), asked()
    assert not model(*batch).any()
    if block == "adaln_zero":  # every block is the identity, whatever initialises the other weights
        for init in ("xavier", "deit"):
            model = dit(moved=False, init=init)
            x = torch.randn(2, 16, 12)
            assert torch.equal(model.encoder(x, model.layout, torch.randn(2, 12)), x)


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_it_is_conditioned_on_time_and_class(block):
    model, (x, times, labels) = dit(block=block), asked()
    told = model(x, times, labels)
    for other in (
        model(x, times + 1, labels),
        model(x, times, (labels + 1) % 3),
        model(x, times, labels * 0 + model.none),
    ):
        assert (other - told).abs().flatten(1).amax(1).min() > 1e-4
    assert model.length == 16 + 2 * (block == "pre_norm")


@torch.no_grad()
def test_a_patch_comes_back_where_it_was():
    """Check that a head that inverts the patch embedding returns the images unchanged."""
    model = dit(size=(4, 6), patch_size=(2, 3), dim=18, depth=1, num_heads=3, moved=False, position_embedding=False)
    model.patch.weight.copy_(torch.eye(18).view(18, 3, 2, 3)), model.patch.bias.zero_()
    model.head.weight.copy_(torch.eye(18))
    model.final_norm = torch.nn.Identity()
    x, times, labels = asked((4, 6))
    close(model(x, times, labels), x)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mixer", ["lion_lit", "lion_d", "lion_s"])
def test_forms_agree(block, mixer):
    x, times, labels = asked((20, 14))
    check_forms(dit(mixer, (20, 14), block=block).double().eval(), x.double(), times, labels)


@torch.no_grad()
def test_positions_are_those_of_dit():
    """Check the embedding: columns in the first half, rows in the second, sines before cosines."""
    found = position_embedding(2, 3, 8)
    frequencies = 10_000 ** -torch.tensor([0, 0.5])
    for place, (row, column) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]):
        parts = [f(at * frequencies) for at in (column, row) for f in (torch.sin, torch.cos)]
        close(found[place], torch.cat(parts))


def test_conventions_follow_the_mixer():
    known = {m: DiTConfig(m, 12, 1, 3).resolved().position_embedding for m in (SOFTMAX, "lion_lit", "lion_s")}
    assert known == {SOFTMAX: True, "lion_lit": True, "lion_s": False}
    turned = DiTConfig(SOFTMAX, 12, 1, 3, attention=AttentionConfig(rotation="rope"))
    assert turned.resolved().position_embedding is False
    assert "position" not in dit(SOFTMAX).state_dict() and dit("lion_s").position is None
    assert dit(SOFTMAX).position.shape == (16, 12)


@torch.no_grad()
def test_several_scans_visit_the_patches_alone():
    model = dit(size=(4, 6), attention=AttentionConfig(scans=("row_snake", "column_snake")))
    assert model.coords.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert model.orders.tolist() == [[0, 1, 2, 5, 4, 3], [0, 3, 4, 1, 2, 5]] and model.is_special is None
    assert dit(block="pre_norm").is_special.tolist() == [True] * 2 + [False] * 16


def test_what_does_not_fit_is_refused():
    alone = "block: 'adaln_zero' is conditioned on a class and a time, which only model 'dit' has"
    invalid(r"model\.patch_size: 3 does not divide image height 8, nearest: 2", dit, patch_size=3)
    invalid("patch_size must be at least 1", dit, patch_size=0)
    invalid("norm: 'batchnorm'", dit, norm="batchnorm")
    invalid(r"x: expected \(B, 3, 8, 8\), got \(2, 1, 8, 8\)", dit(), *asked(channels=1))
    invalid("multiple of 4, got 6", DiTConfig, SOFTMAX, 6, 1, 2)
    invalid(alone, ViTConfig, "lion_s", 12, 1, 3, block="adaln_zero")
    invalid(alone, GPTConfig, "lion_s", 12, 1, 3, block="adaln_zero")


@torch.no_grad()
def test_times_are_cosines_and_sines():
    times = dit(moved=False).times
    seen = []
    times.fc1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    times(torch.tensor([0, 7]))
    angles = 7 * 10_000 ** (-torch.arange(128) / 128)
    close(seen[0], torch.stack([F.pad(torch.ones(128), (0, 128)), torch.cat([angles.cos(), angles.sin()])]))


def test_shapes_identify_the_conditioning():
    """Check that models with different conditioning are not rows of one table."""
    config = DiTConfig(mixer="softmax", dim=8, depth=1, num_heads=2, patch_size=(2, 4))
    plain = "dim 8, depth 1, 2 heads, patches of 2 x 4"
    assert config.shape() == plain and config.label() == "softmax patch 2 x 4"
    assert dataclasses.replace(config, block="pre_norm").shape() == f"{plain}, time and class as tokens"
