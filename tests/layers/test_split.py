"""Layers on rows that are split over 2, 3 and 4 real processes against whole rows in one process."""

import itertools

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, MIXERS, Mixer, make_mixer, resolve_mixer
from lion.layers.tpe import TPE
from lion.ops import Part
from tests.processes import in_processes

from .test_mixers import DIM, error, make, tokens

pytestmark = pytest.mark.process
LENGTH = 11  # divisible by none of the numbers of processes
VALID = torch.tensor([[t not in {0, 4, 10} for t in range(LENGTH)], [t < 5 for t in range(LENGTH)]])
SEGMENTS = torch.tensor([[4] * 2 + [7] * 7 + [1] * 2, [0, 0, 0, 3, -1, 3, 5, 5, 5, -1, -1]])
DIRECTIONS = ("both", "forward", "backward")
BY_HEADS = ("softmax", "fox", "performer", "deltaproduct")
WITH_NEIGHBOURS = {  # wider than the parts of 4 processes
    "lion_s": {"conv_width": 9},
    "rwkv6": {"token_shift": True, "conv_width": 2},
    "hydra": {"state": 4},
    "vim": {"state": 2, "chunk_size": 2},
}
MASKS = {"none": {}, "valid": {"valid": VALID}, "segments": {"segments": SEGMENTS}}


def cases() -> dict[str, tuple[Mixer, dict[str, torch.Tensor]]]:
    """Return every mixer in every direction, with each kind of masks in turn; rotations, and parts of blocks."""
    kinds, made = itertools.cycle(MASKS), {}
    for mixer, direction in itertools.product((m for m in LINEAR if m not in BY_HEADS), DIRECTIONS):
        made[f"{mixer} {direction}"] = make(mixer, direction), MASKS[next(kinds)]
        next(kinds) if direction == "backward" else None  # another kind for the next mixer
    for mixer, rotation in (("lion_s", "rope"), ("gla", "lrpe"), ("lightnet", "lrpe")):
        made[f"{mixer} {rotation}"] = layer(mixer, rotation=rotation), MASKS["segments"]
    for mixer in ("rwkv7", "xlstm"):
        made[f"{mixer} published"] = layer(mixer, block="published"), MASKS["segments"]
    for direction, masks in itertools.product(DIRECTIONS, MASKS):
        for mixer, settings in WITH_NEIGHBOURS.items():
            made[f"{mixer} {direction} {masks}"] = layer(mixer, direction=direction, **settings), MASKS[masks]
        exponential = layer("xlstm", direction=direction, input_gate="exp")
        with torch.no_grad():  # running maxima far from 0, that stem from many tokens
            exponential.decays[0].gates.weight.mul_(10)
        made[f"exponential xlstm {direction} {masks}"] = exponential, MASKS[masks]
    return made


def cases_by_heads() -> dict[str, tuple[Mixer, dict[str, torch.Tensor]]]:
    """Return layers of which each process mixes whole rows of its heads, so that 2 and 3 processes share them."""
    made = {}
    for mixer, direction, masks in itertools.product(BY_HEADS, DIRECTIONS, MASKS):
        made[f"{mixer} {direction} {masks}"] = layer(mixer, heads=6, direction=direction), MASKS[masks]
    made["fox published"] = layer("fox", heads=6, block="published"), MASKS["segments"]
    made["softmax rope"] = layer("softmax", heads=6, rotation="rope"), MASKS["segments"]
    made["deltaproduct rope"] = layer("deltaproduct", heads=6, rotation="rope"), MASKS["segments"]
    for masks in MASKS:
        made[f"tpe {masks}"] = TPE(DIM, 3).double(), MASKS[masks]
    return made


def layer(mixer: str, heads: int = 3, **settings) -> Mixer:
    """Return a layer in float64 with parameters that differ from their first values."""
    torch.manual_seed(0)
    config = MIXERS[mixer].layer.Config(**settings)
    made = make_mixer(mixer, DIM, heads, resolve_mixer(mixer, config)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def gradients(layer, x, layout, weights) -> tuple[torch.Tensor, ...]:
    """Return the output, and the gradients of a projection of it, of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = layout.clean(layer(x, layer.prepare(x, layout)))
    of_x, *of_parameters = torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()], allow_unused=True)
    return y.detach(), of_x, *of_parameters


def work(group, cases) -> dict[str, tuple[torch.Tensor, ...]]:
    part, x, weights = Part.of(group), tokens(LENGTH), tokens(LENGTH, seed=2)
    found = {}
    for name, (layer, masks) in cases.items():
        layout = Layout.of(x, **masks).split(x, part)
        found[name] = gradients(layer, part.own(x), layout, part.own(weights))
    return found


def test_every_mixer_in_every_direction(pytestconfig):
    by_parts, by_heads, x, weights = cases(), cases_by_heads(), tokens(LENGTH), tokens(LENGTH, seed=2)
    expected = {
        name: gradients(layer, x, Layout.of(x, **masks), weights)
        for name, (layer, masks) in {**by_parts, **by_heads}.items()
    }
    by_two = {**by_parts, **by_heads} if pytestconfig.getoption("--every") else by_heads
    for count, made in ((2, by_two), (3, {**by_parts, **by_heads}), (4, by_parts)):
        parts = in_processes(count, work, made)
        for name, (y, of_x, *of_parameters) in ((name, expected[name]) for name in made):
            for i, value in enumerate((y, of_x)):
                got = torch.cat([part[name][i] for part in parts], 1)[:, :LENGTH]
                assert error(got, value) < 1e-11, (count, name, i)
            for i, value in enumerate(of_parameters, 2):
                got = [part[name][i] for part in parts]
                assert (value is None) == (got[0] is None), (count, name, i)
                if value is not None and value.any():
                    assert error(sum(got), value) < 1e-11, (count, name, i)
