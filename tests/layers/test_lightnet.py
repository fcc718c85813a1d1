"""LightNet: one scan with `both`, a vector decay in one direction, and their relation."""

import pytest
import torch

from lion.layers.layout import PLAIN, Layout, grid_layout
from lion.layers.mixers import AttentionConfig, LightNetAttention, make_mixer
from lion.layers.mixers.base import set_form
from lion.layers.mixers.lightnet import KeySoftmax, LightNetConfig
from lion.ops import linear_attention

from .helpers import (
    DIM,
    HEADS,
    PACKED,
    SHORT_FORMS,
    check_finite,
    check_oracle,
    check_padding,
    close,
    invalid,
    perturbed,
    tokens,
    weights,
)
from .oracles import oracle

FORMS = (("full", None), ("chunk", 8), ("rnn", 1), ("rnn", 16))
OWN = {"share": False}


def make(direction: str = "both", **settings) -> LightNetAttention:
    torch.manual_seed(0)
    return perturbed(LightNetAttention(DIM, HEADS, "lightnet", direction=direction, **settings))


def test_settings_of_the_paper():
    layer = LightNetAttention(384, 16, "lightnet")
    c = layer.config
    assert (c.feature_map, c.out_norm, layer.parts.out_gate_rank, c.share) == ("silu", "rmsnorm", 64, True)
    assert len(layer.decays) == 0
    # the 22.54 M of Table 12 without TPE: these, a GLU without biases, norms, patches and head (recipes.md 7.1)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 384**2 + 4 * 384 + 2 * 64 * 384 + 384
    bare = LightNetAttention(384, 16, "lightnet", out_norm="none", out_gate="none")
    assert sum(p.numel() for p in bare.parameters()) == 4 * 384**2 + 4 * 384


@torch.inference_mode()
def test_without_positions_the_order_makes_no_difference_to_both():
    x = tokens(19)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(2))
    both = make()
    forward = make("forward")
    for form, size in FORMS:
        set_form(both, form, size)
        close(both(x[:, order]), both(x)[:, order], atol=1e-13, rtol=1e-11)
    assert (forward(x[:, order]) - forward(x)[:, order]).abs().max() > 1e-2
    turned = make(rotation="rope")
    assert (turned(x[:, order]) - turned(x)[:, order]).abs().max() > 1e-2


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_decay_of_its_own(direction):
    """Check values and gradients of every form with a separate decay."""
    layer = make(direction, **OWN)
    x = tokens(30)
    check_oracle(layer, lambda w, x: oracle("lightnet", w, x, HEADS, direction), x, FORMS, 1e-10)
    w = weights(layer)
    other = {**w, "decays.0.gate.0.weight": w["qkv.weight"][: len(w["decays.0.gate.0.weight"])]}
    assert (oracle("lightnet", w, x, HEADS, direction) - oracle("lightnet", other, x, HEADS, direction)).any()


@pytest.mark.parametrize("settings", [{}, OWN])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_masks_of_one_direction(direction, settings):
    """Check that sums restart at segments, not at padding."""
    layer = make(direction, **settings)
    for form, size in SHORT_FORMS:
        set_form(layer, form, size)
        check_padding(layer, None, PACKED)


@pytest.mark.parametrize("settings", [{}, OWN])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_extreme_keys_and_first_tokens(direction, settings):
    """Check stepwise logits of +-10,000; the first token forgets everything before it, with finite gradients."""
    if direction == "both" and settings:
        return
    layer = make(direction, **settings).float()
    x = torch.randn(2, 40, DIM)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, :3], valid[1] = False, False
    with torch.no_grad():
        layer.qkv.weight[DIM : 2 * DIM] *= 1e4
        for decay in layer.decays:
            if decay.gate is not None:
                decay.gate[1].weight.mul_(1e4)
    for form, size in FORMS:
        for layout in (PLAIN, Layout.of(x, valid)):
            set_form(layer, form, size)
            check_finite(layer, x, layout)
    if direction != "both":
        gating = layer.decays[0](x, layer.heads(x)[1])
        first = 0 if direction == "forward" else -1
        assert (gating.k[:, :, first] == 1).all() and (gating.log_decay[:, :, first] == -torch.inf).all()
        assert (gating.log_decay <= 0).all() and (gating.k <= 1).all()


@torch.inference_mode()
def test_long_streams_lose_nothing():
    """Check decays within 1/4,000 of 1; a difference of two sums would change 1 - decay by up to a thousandth."""
    layer = make("forward", out_norm="none")
    x = tokens(4000, batch=1)
    want, _ = layer.prefill(x)
    layer = layer.float()
    set_form(layer, "chunk", 64)
    close(layer(x.float()).double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_by_sums_are_no_less_exact(turned):
    """Check float32 gradients by sums over 2,000 tokens with rising logits, against gradients through every decay."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 2000, 8, generator=rng).double()
    k += 5 * (torch.rand(2000, 1, generator=rng) < 0.01).cumsum(0)
    angles = torch.arange(2000).double()[:, None] * torch.tensor([1, 0.1, 0.01, 0.001]) if turned else None

    def gradient(dtype: torch.dtype, by_sums: bool) -> torch.Tensor:
        leaf = k.to(dtype).requires_grad_()
        gates = KeySoftmax(16, 2)(leaf, leaf)
        given = dict(log_decay=gates.log_decay, prefix=gates.gates.prefix if by_sums else None, angles=angles)
        how = dict(direction="forward", decay_convention="target", normalize="none", form="chunk")
        y = linear_attention(q.to(dtype), gates.k, v.to(dtype), **given, **how, feature_map=None)
        return torch.autograd.grad(y.square().sum(), leaf)[0].double()

    want = gradient(torch.float64, False)
    close(gradient(torch.float64, True), want, atol=1e-11, rtol=1e-9)
    errors = [((gradient(torch.float32, by_sums) - want).norm() / want.norm()).item() for by_sums in (False, True)]
    assert 0 < errors[1] < 1.5 * errors[0] < 1.5e-5, errors


def test_what_does_not_go_together():
    for settings, words in (
        (OWN, "share: direction 'both' has no decay, so share=false needs direction 'forward' or 'backward'"),
        (
            {"normalize": "sum", "rotation": "lrpe"},
            "normalize 'sum': mixer 'lightnet' has normalised keys, use 'none'",
        ),
        ({"score_dropout": 0.1}, "score_dropout is not available with mixer 'lightnet', which computes no scores"),
        ({"score_dropout": 0.1, "direction": "forward"}, "score_dropout is not available with mixer 'lightnet'"),
        ({"scans": ("row_snake", "column_snake")}, "scans: not available with mixer 'lightnet'"),
    ):
        invalid(words, LightNetAttention, DIM, HEADS, "lightnet", **settings)


def test_settings_of_any_attention_do():
    layer = make_mixer("lightnet", DIM, HEADS, AttentionConfig(direction="forward"))
    assert type(layer) is LightNetAttention and layer.config.share and layer.causal
    layer = make_mixer("lightnet", DIM, HEADS, LightNetConfig(direction="forward", share=False))
    assert layer.decays[0].gate is not None and len(layer.initial_state(2).decay) == 2
    message = "decay_convention .*: mixer 'lightnet' has normalised keys, use"
    invalid(message, make_mixer, "lightnet", DIM, HEADS, direction="forward", decay_convention="source")
    x = torch.randn(2, 7, DIM)
    assert layer(x, grid_layout(3, 2)).shape == x.shape
