"""Layers on rows that are split over 2, 3 and 4 real processes against whole rows in one process."""

import pytest
import torch

from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import LINEAR, MIXERS, Mixer, make_mixer
from lion.layers.tpe import TPE
from lion.ops import Part
from lion.trainer.diagnostics import tensor_peak
from tests.ops.helpers import error
from tests.processes import in_processes
from tools.meta import Received

from .helpers import DIM, perturbed, tokens
from .test_mixers import make

pytestmark = pytest.mark.process
LENGTH = 11  # divisible by none of the numbers of processes
VALID = torch.tensor([[t not in {0, 4, 10} for t in range(LENGTH)], [t < 5 for t in range(LENGTH)]])
SEGMENTS = torch.tensor([[4] * 2 + [7] * 7 + [1] * 2, [0, 0, 0, 3, -1, 3, 5, 5, 5, -1, -1]])
BY_HEADS = ("softmax", "fox", "performer", "deltaproduct")
WITH_NEIGHBOURS = {  # wider than the parts of 4 processes
    "lion_s": {"conv_width": 9},
    "rwkv6": {"block": "published", "conv_width": 2},
    "hydra": {"state": 4},
    "vim": {"state": 2, "chunk_size": 2},
}
MASKS = {"none": {}, "valid": {"valid": VALID}, "segments": {"segments": SEGMENTS}}


ROUNDS = (  # in three rounds each direction meets each kind of masks
    (("both", "none"), ("forward", "valid"), ("backward", "segments")),
    (("both", "valid"), ("forward", "segments"), ("backward", "none")),
    (("both", "segments"), ("forward", "none"), ("backward", "valid")),
)
ROPE = {"rotation": "rope"}
ALL_WAYS = ("lion_s", "retnet", "gla", "lightnet", "gated_deltanet")  # scalars, rotations, vectors, sums, and rules

Cases = dict[str, tuple[Mixer, dict[str, torch.Tensor]]]


def cases() -> Cases:
    """Return every mixer in a direction in turn, some in all of them; rotations, and parts of blocks."""
    made = {}
    for turn, mixer in enumerate(name for name in LINEAR if name not in BY_HEADS):
        ways = ROUNDS[turn % 3]
        if mixer not in ALL_WAYS:
            ways = (ways[turn // 3 % 3],)
        for direction, masks in ways:
            made[f"{mixer} {direction}"] = make(mixer, direction), MASKS[masks]
    for mixer, rotation in (("lion_s", "rope"), ("gla", "lrpe"), ("lightnet", "lrpe")):
        made[f"{mixer} {rotation}"] = layer(mixer, rotation=rotation), MASKS["segments"]
    for mixer in ("rwkv7", "xlstm"):
        made[f"{mixer} published"] = layer(mixer, block="published"), MASKS["segments"]
    for turn, (mixer, settings) in enumerate(WITH_NEIGHBOURS.items()):
        for direction, masks in ROUNDS[turn % 3]:
            made[f"{mixer} {direction} with neighbours"] = layer(mixer, direction=direction, **settings), MASKS[masks]
    for direction, masks in ROUNDS[1]:
        exponential = layer("xlstm", direction=direction, input_gate="exp")
        with torch.no_grad():  # running maxima far from 0, that stem from many tokens
            exponential.decays[0].gates.weight.mul_(10)
        made[f"exponential xlstm {direction}"] = exponential, MASKS[masks]
    return made


def cases_by_heads() -> Cases:
    """Return layers of which each process mixes whole rows of its heads, so that 2 and 3 processes share them."""
    made = {}
    for turn, mixer in enumerate(BY_HEADS):
        for direction, masks in ROUNDS[turn % 3]:
            made[f"{mixer} {direction}"] = layer(mixer, heads=6, direction=direction), MASKS[masks]
    for mixer, settings in (("fox", {"block": "published"}), ("softmax", ROPE), ("deltaproduct", ROPE)):
        made[f"{mixer} {settings}"] = layer(mixer, heads=6, **settings), MASKS["segments"]
    for masks in MASKS:
        made[f"tpe {masks}"] = TPE(DIM, 3).double(), MASKS[masks]
    return made


def layer(mixer: str, heads: int = 3, **settings) -> Mixer:
    """Return a layer in float64 with parameters that differ from their first values."""
    torch.manual_seed(0)
    return perturbed(make_mixer(mixer, DIM, heads, MIXERS[mixer].layer.Config(**settings)), 0.1)


def gradients(layer, x, layout, weights) -> tuple[torch.Tensor, ...]:
    """Return the output, and the gradients of a projection of it, of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = layout.clean(layer(x, layer.prepare(x, layout)))
    of_x, *of_parameters = torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()], allow_unused=True)
    return y.detach(), of_x, *of_parameters


def work(group, cases) -> dict[str, tuple[torch.Tensor, ...]]:
    part = Part.of(group)
    x = tokens(LENGTH)
    weights = tokens(LENGTH, seed=2)
    found = {}
    for name, (layer, masks) in cases.items():
        layout = Layout.of(x, **masks).split(x, part)
        found[name] = gradients(layer, part.own(x), layout, part.own(weights))
    return found


def test_every_mixer_is_split_over_processes():
    by_parts = cases()
    by_heads = cases_by_heads()
    x = tokens(LENGTH)
    weights = tokens(LENGTH, seed=2)
    every = {**by_parts, **by_heads}
    expected = {}
    for name, (layer, masks) in every.items():
        expected[name] = gradients(layer, x, Layout.of(x, **masks), weights)
    for count, made in ((2, by_heads), (3, every), (4, by_parts)):
        parts = in_processes(count, work, made)
        for name in made:
            for i, value in enumerate(expected[name]):
                got = [part[name][i] for part in parts]
                if i < 2:  # the output, and the gradient of x
                    whole = torch.cat(got, 1)[:, :LENGTH]
                    assert error(whole, value) < 1e-11, (count, name, i)
                elif value is None:
                    assert got[0] is None, (count, name, i)
                else:
                    assert got[0] is not None, (count, name, i)
                    assert not value.any() or error(sum(got), value) < 1e-11, (count, name, i)


def memory_and_exchange(group, count: int) -> tuple[int, float]:
    """Return the largest memory of tensors in a pass of Lion-S, and the bytes received in its forward pass."""
    part = Part.of(group)
    mixer = make_mixer("lion_s", 64, 1)
    received = Received(count)

    def train(length: int) -> None:
        layout = PLAIN if count == 1 else Layout().split(torch.empty(1, length, 0), part)
        with received:
            y = mixer(torch.randn(1, part.size(length), 64), layout)
        y.sum().backward()

    train(128 * count)  # loads libraries
    received.bytes = 0
    peak = tensor_peak(lambda: train(16_384), torch.device("cpu"))
    return peak, received.bytes


def test_the_memory_of_a_part_falls_with_the_number_of_parts():
    """Check it against one process, and what two processes exchange: S, z and a decay in both directions."""
    ((one, alone),) = in_processes(1, memory_and_exchange, 1)
    for two, received in in_processes(2, memory_and_exchange, 2):
        assert 0.4 < two / one < 0.65
        assert received == 4 * (2 * 64**2 + 2 * 64 + 1)
    assert alone == 0
