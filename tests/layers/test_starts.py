"""Starts of parameters and exemptions from weight decay, copied from the publications and their released code."""

import pytest
import torch
import torch.nn.functional as F

from lion.layers.mixers import MIXERS, make_mixer
from lion.trainer.optim import factors

from .helpers import close

DIM, HEADS, HEAD = 1024, 256, 4
RAMP = torch.linspace(0, 1, HEAD).repeat(HEADS)


def between(low, high, of=lambda p: p):
    """Return a check that `of(p)` lies between two numbers, and reaches both up to a tenth of their distance."""

    def check(p):
        found = of(p.detach())
        slack = (high - low) / 10
        assert low - 1e-5 <= found.min() <= low + slack and high - slack <= found.max() <= high + 1e-5

    return check


def normal(p):
    assert p.mean().abs() < 0.2 and 0.85 < p.std() < 1.15


def sized(*shape):
    def check(p):
        assert tuple(p.shape) == shape

    return check


STEPS = between(torch.tensor(1e-3).log(), torch.tensor(1e-1).log(), lambda p: F.softplus(p).log())
RATES = between(1, 16, torch.exp)
WIDE_RATES = between(0, 16, torch.exp)
LOW_RANKS = {
    f"decays.0.{name}_{way}.weight": shape for name in "wa" for way, shape in (("down", (64, DIM)), ("up", (DIM, 64)))
}
STARTS = {
    "lion_d": {"decays.0.a": normal},
    "mamba2": {"decays.0.step_bias": STEPS, "decays.0.a": RATES, "skip": 1, "conv.weight": between(-0.5, 0.5)},
    "mamba": {"decays.0.step_bias": STEPS, "decays.0.a": torch.arange(1, HEAD + 1).repeat(HEADS).log(), "skip": 1},
    "rwkv6": {
        "decays.0.w": -6 + 5 * RAMP,
        "decays.0.u": 1 - RAMP,
        "decays.0.down.weight": sized(64, DIM),
        "decays.0.up.weight": sized(DIM, 64),
        "token_shift.down": 0,
        "token_shift.mix": 0.5,
        "token_shift.first": 0.5,
    },
    "rwkv7": {
        "decays.0.w": -6 + 5 * RAMP,
        "decays.0.a": 0,
        "decays.0.k_k": 0.85,
        "decays.0.k_a": 1,
        "bonus": 0,
        "token_shift.mix": 0.5,
        "out_gate.0.weight": sized(128, DIM),
        **{name: sized(*shape) for name, shape in LOW_RANKS.items()},
    },
    "gla": {"decays.0.down.weight": sized(16, DIM)},
    "hgrn2": {"decays.0.bound": -2},
    "xlstm": {"decays.0.forget_bias": torch.linspace(3, 6, HEADS), "conv_skip": 1},
    "gated_deltanet": {"decays.0.decay.step_bias": STEPS, "decays.0.decay.a": WIDE_RATES},
    "deltaproduct": {"decays.0.decay.step_bias": STEPS, "decays.0.decay.a": WIDE_RATES},
    "comba": {"decays.0.decay.step_bias": STEPS, "decays.0.decay.a": WIDE_RATES, "decays.0.c": 1, "decays.0.d": 1},
    "kda": {
        "decays.0.decay.step_bias": STEPS,
        "decays.0.decay.a": RATES,
        "decays.0.decay.down.weight": sized(HEAD, DIM),
    },
    "gdn2": {"decays.0.decay.step_bias": STEPS, "decays.0.decay.a": RATES},
    "hydra": {"step_bias": STEPS, "a": 0, "skip": 1},
}


@pytest.mark.parametrize("mixer", STARTS)
def test_parameters_start_as_published(mixer):
    layer = make_mixer(mixer, DIM, HEADS, block="published")
    for name, start in STARTS[mixer].items():
        parameter = layer.get_parameter(name)
        if callable(start):
            start(parameter)
        else:
            want = torch.as_tensor(start, dtype=parameter.dtype).expand_as(parameter)
            close(parameter.detach(), want, msg=name)


# the matrices without weight decay; vectors have none
SPARED = {
    "rwkv6": {"token_shift.mix", "token_shift.down", "token_shift.up", "decays.0.down.weight", "decays.0.up.weight"},
    "rwkv7": {"token_shift.mix", "bonus", *LOW_RANKS},
    "vim": {"sides.0.a", "sides.1.a"},
}


@pytest.mark.parametrize("block", ["plain", "published"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_weight_decay_spares_what_the_publication_does(mixer, block):
    try:
        layer = make_mixer(mixer, 16, 2, block=block)
    except ValueError:
        pytest.skip("no settings of blocks")
    parameters = dict(layer.named_parameters())
    spared = {name for name, f in factors(layer, "gpt").items() if not f.weight_decay and parameters[name].dim() > 1}
    want = SPARED.get(mixer, set())
    assert spared == {name for name in want if block == "published" or name in parameters}
