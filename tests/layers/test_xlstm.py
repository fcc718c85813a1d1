"""The exponential input gate of the mLSTM, against the paper's recurrence."""

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import LionAttention, set_form
from lion.layers.mixers.xlstm import XLSTMConfig
from tests.ops.helpers import error

from .helpers import (
    DIM,
    DIRECTIONS,
    HEADS,
    MASKS,
    SHORT_FORMS,
    check_finite,
    check_oracle,
    check_padding,
    invalid,
    tokens,
)
from .oracles import oracle
from .test_mixers import FORMS


def make(direction: str = "forward", spread: float = 1.0, **settings) -> LionAttention:
    """Make a float64 layer with float32 weights, whose input gates range from exp(-10 spread) to exp(10 spread)."""
    torch.manual_seed(0)
    layer = LionAttention(DIM, HEADS, "xlstm", direction=direction, input_gate="exp", **settings)
    with torch.no_grad():
        layer.decays[0].gates.weight.normal_()[:HEADS].mul_(spread)
        layer.decays[0].forget_bias.sub_(3)
    return layer.double().eval()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_forms_values_and_gradients(direction):
    def published(w, x):
        return oracle("xlstm, exponential", w, x, HEADS, direction)

    check_oracle(make(direction), published, tokens(65), FORMS, 1e-11)


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
    wide = make(direction, spread, feature_map="elu1")
    x = tokens(80)
    layer = make(direction, spread, feature_map="elu1").float()
    for form, size in FORMS:
        set_form(layer, form, size)
        assert error(check_finite(layer, x.float()), wide(x)) < 5e-5 * max(1, spread), (form, size)


@pytest.mark.compiled
def test_one_graph():
    layer = make("both")
    x = tokens(20)
    layout = Layout.of(x, torch.arange(20).expand(2, -1) % 7 != 3, torch.arange(20).expand(2, -1) // 9)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for length in (20, 13):
        x, layout = x[:, :length], Layout.of(x[:, :length], layout.valid[:, :length])
        assert error(compiled(x, layout), layer(x, layout)) < 1e-13


def test_settings():
    assert XLSTMConfig(input_gate="exp").label() == "exponential input gate" and not XLSTMConfig().label()
    for wrong in ({"normalize": "none"}, {"decay_convention": "source"}, {"score_dropout": 0.1}):
        message = f"{next(iter(wrong))}: input_gate 'exp' takes"
        invalid(message, LionAttention, DIM, HEADS, "xlstm", input_gate="exp", **wrong)
    invalid("input_gate", LionAttention, DIM, HEADS, "xlstm", input_gate="softmax")
