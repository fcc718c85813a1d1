import pytest
import torch

from lion.models.vit import ViT, ViTConfig
from lion.trainer.optim import OptimConfig, make_optimizer, split_decay


def model(mixer="lion_s"):
    config = ViTConfig(mixer, 12, 1, 3, patch_size=2, position_embedding=True)
    return ViT(config, image_size=(4, 4), channels=1, num_classes=2)


def test_deit_spares_what_deit_spares():
    decayed, spared = split_decay(model(), "deit")
    assert {"cls", "position", "encoder.norm.weight", "encoder.blocks.0.attention.decays.0.gate.bias"} <= spared.keys()
    assert {"patch.weight", "encoder.blocks.0.attention.decays.0.gate.weight", "head.weight"} <= decayed.keys()
    assert "encoder.blocks.0.attention.decays.0.a" in split_decay(model("lion_d"), "deit")[1]
    everything = dict(model().named_parameters()).keys()
    assert decayed.keys() | spared.keys() == everything and not decayed.keys() & spared.keys()


def test_other_rules():
    decayed, spared = split_decay(model(), "gpt")
    assert {"cls", "position"} <= decayed.keys() and "patch.bias" in spared
    assert not split_decay(model(), "none")[1]


def test_optimizer_groups_and_rate():
    groups = make_optimizer(model(), OptimConfig(lr=1e-3, weight_decay=0.1)).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert OptimConfig(lr=5e-4, lr_batch=512).peak(1024) == pytest.approx(1e-3)
    assert OptimConfig(lr=5e-4).peak(1024) == 5e-4
    assert isinstance(make_optimizer(model(), OptimConfig(lr=1.0, no_decay="none")), torch.optim.AdamW)
