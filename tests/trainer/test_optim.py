import copy

import pytest
import torch
from torch import nn

from lion.layers.optim_factors import OptimFactors, optim_factors
from lion.models.vit import ViT, ViTConfig
from lion.trainer.optim import OptimConfig, factors, make_optimizer
from tests.layers.helpers import invalid


def model(mixer="lion_s", position_embedding=True):
    config = ViTConfig(mixer, 12, 1, 3, patch_size=2, position_embedding=position_embedding)
    return ViT(config, image_size=(4, 4), channels=1, num_classes=2)


def spared(model, no_decay):
    found = factors(model, no_decay)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert {f.weight_decay for f in found.values()} <= {0, 1} and {f.lr for f in found.values()} == {1}
    return {name for name, f in found.items() if f.weight_decay == 0}


def test_deit_spares_what_deit_spares():
    kept = spared(model(), "deit")
    assert {"cls", "position", "encoder.norm.weight", "encoder.blocks.0.attention.decays.0.gate.bias"} <= kept
    assert not {"patch.weight", "encoder.blocks.0.attention.decays.0.gate.weight", "head.weight"} & kept
    assert "encoder.blocks.0.attention.decays.0.a" in spared(model("lion_d"), "deit")
    assert "cls" in spared(model(position_embedding=False), "deit")


def test_other_rules():
    assert {"cls", "position", "patch.bias"} <= spared(model(), "gpt")
    assert not spared(model(), "none")


class Marked(nn.Module):
    """A module whose parameters have custom learning-rate and weight-decay factors."""

    def __init__(self):
        super().__init__()
        self.step = nn.Parameter(torch.ones(2, 2))
        self.rest = nn.Parameter(torch.ones(2, 2))
        self.absent = None
        self.optim_factors = {"step": OptimFactors(lr=0.1, weight_decay=0.5), "absent": OptimFactors(lr=3)}


class Tied(nn.Module):
    """A module whose second part marks a parameter that both parts share."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 2), Marked(), nn.Linear(2, 2)
        self.first.weight = self.second.step


def test_modules_mark_their_parameters():
    net = copy.deepcopy(nn.Sequential(nn.Linear(2, 2), Marked()))
    assert optim_factors(net) == {"1.step": OptimFactors(0.1, 0.5)}
    for rule in ("deit", "gpt"):
        found = factors(net, rule)
        assert found["1.step"] == (0.1, 0.5) and found["1.rest"] == found["0.weight"] == (1, 1)
        assert found["0.bias"] == (1, 0)
    assert factors(net, "none")["1.step"] == (0.1, 1)  # weight decay for all, same learning rates
    assert factors(Tied(), "deit")["first.weight"] == (0.1, 0.5)


@pytest.mark.parametrize("wrong", ["stepp", "gate", "gate.weigh", "rest.weight", "forward", "training", "tree.step"])
def test_marks_of_unknown_parameters_are_refused(wrong):
    net = nn.Sequential(nn.Linear(2, 2), Marked())
    net[1].gate = nn.Linear(2, 2, bias=False)
    net[1].optim_factors = {"gate.weight": OptimFactors(lr=2), "gate.bias": OptimFactors(lr=3)}
    assert optim_factors(net) == {"1.gate.weight": OptimFactors(lr=2)} and factors(net, "gpt")["1.gate.weight"].lr == 2
    net[1].optim_factors[wrong] = OptimFactors(lr=2)
    invalid(f"Marked.optim_factors: '{wrong}' is not one of its parameters", optim_factors, net)


def test_groups_by_factor():
    net = nn.Sequential(nn.Linear(2, 2), Marked())
    optimizer, rates = make_optimizer(net, OptimConfig(lr=1e-3, weight_decay=0.1))
    held = [(g["weight_decay"], rate, len(g["params"])) for g, rate in zip(optimizer.param_groups, rates)]
    assert held == [(0.1, 1, 2), (0.05, 0.1, 1), (0, 1, 1)]
    assert optimizer.param_groups[1]["params"][0] is net[1].step


def test_optimizer_groups_and_rate():
    optimizer, rates = make_optimizer(model(), OptimConfig(lr=1e-3, weight_decay=0.1))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0] and rates == [1, 1]
    optimizer = make_optimizer(model(), OptimConfig(lr=1e-3, betas=(0.8, 0.95), eps=1e-5))[0]
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.95), 1e-5)}
    assert OptimConfig(lr=5e-4, lr_batch=512).peak(1024) == pytest.approx(1e-3)
    assert OptimConfig(lr=5e-4).peak(1024) == 5e-4
    assert isinstance(make_optimizer(model(), OptimConfig(lr=1.0, no_decay="none"))[0], torch.optim.AdamW)
