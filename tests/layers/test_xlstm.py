"""The exponential input gate of the mLSTM, against the paper's recurrence and, in both directions, its definition."""

import math

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import LionAttention, set_form
from lion.layers.mixers.xlstm import XLSTMConfig
from tests.ops.helpers import error

from .helpers import DIRECTIONS, MASKS, SHORT_FORMS, check_finite, check_oracle, check_padding, refused, weights
from .oracle_parts import apply, dot, linear, outer, project, sigmoid
from .test_mixers import DIM, FORMS, HEADS, tokens

WIDTH = DIM // HEADS


def make(direction: str = "forward", spread: float = 1.0, **settings) -> LionAttention:
    """Make a float64 layer with float32 weights, whose input gates range from exp(-10 spread) to exp(10 spread)."""
    torch.manual_seed(0)
    layer = LionAttention(DIM, HEADS, "xlstm", direction=direction, input_gate="exp", **settings)
    with torch.no_grad():
        layer.decays[0].gates.weight.normal_()[:HEADS].mul_(spread)
        layer.decays[0].forget_bias.sub_(3)
    return layer.double().eval()


def gates(w, x):
    i, f = linear(w, "decays.0.gates", x, False).chunk(2, -1)
    return i + w["decays.0.input_bias"], torch.log(sigmoid(f + w["decays.0.forget_bias"]))


def recurrence(w, x):
    """Compute the stabilised mLSTM as printed: C, n and m, with h = C q / max(|n q|, exp(-m)) per head."""
    C = n = m = None
    out = []
    for t in range(x.shape[1]):
        q, k, v = project(w, x[:, t], HEADS)
        k = k / math.sqrt(WIDTH)
        i, log_f = gates(w, x[:, t])
        before = torch.full_like(i, -torch.inf) if m is None else m
        m = torch.maximum(log_f + before, i)
        i, f = torch.exp(i - m)[..., None], torch.exp(log_f + before - m)[..., None]
        C, n = (
            (i[..., None] * outer(k, v), i * k)
            if C is None
            else (f[..., None] * C + i[..., None] * outer(k, v), f * n + i * k)
        )
        out.append(apply(q, C) / torch.maximum(dot(q, n).abs(), torch.exp(-m))[..., None])
    return linear(w, "proj", torch.stack(out, 1).flatten(2))


def definition(w, x, direction):
    """Compute each row from all tokens that it reads: weights exp(sum of log f + i~), divided by the largest one."""
    q, k, v = (t.transpose(1, 2) for t in project(w, x, HEADS))  # (B, H, L, D)
    i, log_f = (t.mT for t in gates(w, x))
    total, place = log_f.cumsum(-1), torch.arange(x.shape[1])
    later, earlier = place[:, None] >= place, place[:, None] <= place
    below = total[..., :, None] - total[..., None, :]
    exclusive = total - log_f
    above = exclusive[..., None, :] - exclusive[..., :, None]
    D = torch.where(later, below, above) + i[..., None, :]
    seen = {"forward": later, "backward": earlier, "both": later | earlier}[direction]
    D = D.masked_fill(~seen, -torch.inf)
    m = D.amax(-1, keepdim=True)
    scores = torch.exp(D - m) * (q @ k.mT) / math.sqrt(WIDTH)
    y = scores @ v / torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-m))
    return linear(w, "proj", y.transpose(1, 2).flatten(2))


def test_the_definition_is_the_recurrence():
    w, x = weights(make()), tokens(30)
    assert error(definition(w, x, "forward"), recurrence(w, x)) < 1e-12


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_forms_values_and_gradients(direction):
    check_oracle(make(direction), lambda w, x: definition(w, x, direction), tokens(65), FORMS, 1e-11)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("valid, segments", MASKS)
def test_padding_and_segments(direction, valid, segments):
    """Check segments with very different gates, between padding."""
    layer = make(direction, spread=10.0)
    for form, size in SHORT_FORMS:
        set_form(layer, form, size)
        check_padding(layer, valid, segments)


@pytest.mark.parametrize("direction", ("forward", "both"))
@pytest.mark.parametrize("spread", (0.0, 20.0, 1000.0))
def test_float32_with_extreme_gates(direction, spread):
    """Check gates far beyond exp(88), and constant gates, where m falls at every token.

    Scores are positive: a sum of signed scores near 0 would amplify rounding errors. The logits themselves are rounded
    in proportion to their size.
    """
    wide, x = make(direction, spread, feature_map="elu1"), tokens(80)
    layer = make(direction, spread, feature_map="elu1").float()
    for form, size in FORMS:
        set_form(layer, form, size)
        assert error(check_finite(layer, x.float()), wide(x)) < 5e-5 * max(1, spread), (form, size)


@pytest.mark.compiled
def test_one_graph():
    layer, x = make("both"), tokens(20)
    layout = Layout.of(x, torch.arange(20).expand(2, -1) % 7 != 3, torch.arange(20).expand(2, -1) // 9)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (20, 13):
        x, layout = x[:, :length], Layout.of(x[:, :length], layout.valid[:, :length])
        assert error(compiled(x, layout), layer(x, layout)) < 1e-13


def test_settings():
    assert XLSTMConfig(input_gate="exp").label() == "exponential input gate" and not XLSTMConfig().label()
    for wrong in ({"normalize": "none"}, {"decay_convention": "source"}, {"score_dropout": 0.1}):
        message = f"{next(iter(wrong))}: input_gate 'exp' takes"
        refused(message, LionAttention, DIM, HEADS, "xlstm", input_gate="exp", **wrong)
    refused("input_gate", LionAttention, DIM, HEADS, "xlstm", input_gate="softmax")
