"""Hydra: its published matrix in every form and direction, padding, packing, streams, sizes and extreme decays."""

import copy

import pytest
import torch

from lion.config import build, to_dict
from lion.layers.mixers import HydraAttention, make_mixer, resolve_mixer
from lion.layers.mixers.base import set_form
from lion.layers.mixers.config import AttentionConfig
from lion.models.encoder import EncoderConfig
from lion.trainer.optim import factors
from tests.ops.helpers import pairwise

from .helpers import (
    DIM,
    DIRECTIONS,
    HEADS,
    MASKS,
    check_finite,
    check_oracle,
    check_padding,
    invalid,
    near,
    of_rows,
    perturbed,
    tokens,
    weights,
)
from .oracle_parts import silu

STATE, EPS = 5, 1e-5
FORMS = (("full", None), ("chunk", 4), ("chunk", 64), ("rnn", 1), ("rnn", 4))
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def layer(direction="both", **settings):
    torch.manual_seed(0)
    return perturbed(HydraAttention(DIM, HEADS, direction=direction, **{"state": STATE, **settings}))


def oracle(w, u, direction, heads=HEADS):
    """Compute Hydra for one row u (L, dim) by the entries of its quasi-separable matrix (section 3 of the paper).

    With the shift of the released code, row i reads the query and the decays of its neighbour:
    `M_ij = C_{i-1} exp(A (dt_{j+1} + .. + dt_{i-1})) dt_j B_j` for j < i, and its mirror image for j > i.
    """
    sides = {"both": (-1, 1), "forward": (-1,), "backward": (1,)}[direction]
    inner = w["proj.weight"].shape[1]
    total = len(w["inputs.weight"])
    taps = len(w["convolution.weight"])
    z, wide = (u @ w["inputs.weight"].T).split([inner, total - inner], -1)
    state = (total - 2 * inner) // (2 * len(sides))
    x, *vectors = silu(convolved(w, wide, direction, taps)).split([inner] + [state] * 2 * len(sides), -1)
    dt = torch.log1p(torch.exp((u @ w["steps.weight"].T).unflatten(-1, (len(sides), heads)) + w["step_bias"]))
    A = -torch.exp(w["a"])
    own = x @ w["diagonal.weight"].T + w["skip"]
    x = x.unflatten(-1, (heads, -1))
    rows = []
    for i in range(len(u)):
        row = own[i, :, None] * x[i]
        for side, B, C, step in zip(sides, vectors[::2], vectors[1::2], dt.unbind(1)):
            reader = j = i + side
            log_decay = torch.zeros_like(A)
            while 0 <= j < len(u):
                row = row + (torch.exp(log_decay) * step[j] * (C[reader] @ B[j]))[:, None] * x[j]
                log_decay = log_decay + A * step[j]
                j = j + side
        rows.append(row.flatten())
    y = torch.stack(rows)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + EPS) * w["norm.weight"] * silu(z)
    return y @ w["proj.weight"].T


def convolved(w, wide, direction, taps):
    """Compute the depthwise convolution of a row (L, C)."""
    before = {"both": taps // 2, "forward": taps - 1, "backward": 0}[direction]
    rows = []
    for i in range(len(wide)):
        seen = [t for t in range(taps) if 0 <= i - before + t < len(wide)]
        rows.append(w["convolution.bias"] + sum(w["convolution.weight"][t] * wide[i - before + t] for t in seen))
    return torch.stack(rows)


@every_direction
@pytest.mark.parametrize("length", [1, 2, 13])
def test_values_and_gradients_are_those_of_the_published_matrix(direction, length):
    check_oracle(layer(direction), of_rows(oracle, direction), tokens(length), FORMS, 1e-11, 5e-5)


@pytest.mark.parametrize(
    "direction, form, masks", pairwise(DIRECTIONS, (("full", None), ("chunk", 4), ("rnn", 2)), range(3))
)
def test_padding_and_packing_are_separate_rows(direction, form, masks):
    """Check that convolution, scans and shift let no token pass, which the released code does."""
    made = HydraAttention(12, 3, direction=direction, state=4).double()
    set_form(made, *form)
    check_padding(made, *MASKS[masks])


def test_parameters_of_the_published_sizes():
    for dim, heads, count in ((192, 6, 280_466), (384, 12, 1_010_468), (768, 24, 3_825_224), (1024, 32, 6_705_248)):
        with torch.device("meta"):
            made = make_mixer("hydra", dim, heads, AttentionConfig())
        assert sum(p.numel() for p in made.parameters()) == count


def test_steps_and_decays_have_no_weight_decay():
    decays = {name: factor.weight_decay for name, factor in factors(layer(), "deit").items()}
    assert [decays[name] for name in ("step_bias", "a", "skip", "inputs.weight")] == [0, 0, 0, 1]


@every_direction
@pytest.mark.parametrize("scale", [1e3, 1e-3, 0.0])
def test_extreme_inputs_stay_finite(direction, scale):
    made = layer(direction).float()
    for form, size in FORMS:
        set_form(made, form, size)
        check_finite(made, (scale * tokens(20)).float())


@torch.no_grad()
def test_saturated_decays():
    """Check decays of 0, where a token reads only its neighbours, and decays of nearly 1."""
    x = tokens(40)
    for bias, a in ((0.0, 12.0), (-12.0, -12.0)):
        made = layer()
        made.step_bias.fill_(bias), made.a.fill_(a)
        want = of_rows(oracle, "both")(weights(made), x)
        for like, tolerance in ((made, 1e-11), (copy.deepcopy(made).float(), 5e-5)):
            for form, size in FORMS:
                set_form(like, form, size)
                near(like(x.to(like.a.dtype)), want, tolerance)


@every_direction
@torch.no_grad()
def test_autocast_stays_near_float32(direction):
    made = layer(direction).float()
    x = tokens(40).float()
    for form, size in FORMS:
        set_form(made, form, size)
        want = made(x)
        with torch.autocast("cpu", torch.bfloat16):
            got = made(x)
        assert got.dtype == torch.bfloat16 and got.isfinite().all()
        assert (got - want).abs().max() < 0.05 * want.abs().max(), form


def test_settings():
    single = {"mixer": "hydra", "dim": 8, "depth": 1, "num_heads": 2}
    other = "a setting of attention layers, which state space mixers do not have"
    invalid(f"feature_map: {other}", make_mixer, "hydra", DIM, HEADS, feature_map="relu")
    invalid("score_dropout is not available", make_mixer, "hydra", DIM, HEADS, score_dropout=0.1)
    invalid(f"rotation: {other}", make_mixer, "hydra", DIM, HEADS, rotation="rope")
    invalid("expand", HydraAttention, DIM, HEADS, expand=0)
    invalid("conv_width: expected at least 1", HydraAttention, DIM, HEADS, conv_width=0)
    invalid("only 'forward' streams, this layer has 'both'", layer().initial_state, 2)
    invalid("'alternating' is for a model", HydraAttention, DIM, HEADS, direction="alternating")
    message = "unknown key 'attention.stat': did you mean 'state'"
    invalid(message, build, EncoderConfig, {**single, "attention": {"stat": 4}}, source=str)
    stored = {**to_dict(AttentionConfig()), "token_shift": None}  # by earlier versions
    assert build(EncoderConfig, {**single, "attention": stored}, source=str) == build(EncoderConfig, single, source=str)
    off = {"rotation": "none", "out_norm": "none", "qkv_bias": False, "scans": ("row_major",)}
    assert build(EncoderConfig, {**single, "attention": off}, source=str) == build(EncoderConfig, single, source=str)
    assert (
        make_mixer("hydra", DIM, HEADS, config=AttentionConfig(rotation="none")).config
        == HydraAttention(DIM, HEADS).config
    )
    message = "attention.rotation: a setting of attention layers, which state space mixers do not have"
    invalid(message, build, EncoderConfig, {**single, "attention": {"rotation": "rope"}}, source=str)
    config = build(EncoderConfig, {**single, "attention": {"state": 4, "expand": 1}}, source=str)
    assert resolve_mixer("hydra", config.attention).conv_width == 7
    assert config.label() == "hydra expand 1, state 4" and not config.resolved().position_embedding
    assert config.with_mixer("softmax").attention == AttentionConfig()
