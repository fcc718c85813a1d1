"""Performer's random features: their distribution, the estimate of softmax, and stability."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lion.layers.layout import Layout
from lion.layers.mixers import LionAttention, set_form
from lion.layers.mixers.performer import PerformerConfig, orthogonal_features
from tests.ops.helpers import error

from .helpers import DIM, DIRECTIONS, HEADS, invalid, tokens
from .test_mixers import FORMS

D = DIM // HEADS


def make(direction: str = "both", **settings) -> LionAttention:
    torch.manual_seed(0)
    return LionAttention(DIM, HEADS, "performer", direction=direction, **settings).double().eval()


def test_features_are_orthogonal_and_normal():
    features = orthogonal_features(20_000, 8).double()
    blocks = features.unflatten(0, (-1, 8))
    products = blocks @ blocks.mT
    assert (products - torch.diag_embed(products.diagonal(0, -2, -1))).abs().max() < 1e-4
    cosines = (features[:-8] * features[8:]).sum(-1)  # of different blocks
    assert abs(cosines.var().item() / 8 - 1) < 0.05
    assert (features.mean(0).abs() < 0.03).all() and (features.var(0) - 1).abs().max() < 0.05
    assert abs(features.square().sum(-1).var().item() / 16 - 1) < 0.1  # chi-squared with 8 degrees of freedom
    assert orthogonal_features(5, 4).shape == (5, 4)


@pytest.mark.parametrize("direction", ("both", "forward"))
@pytest.mark.slow
def test_the_estimate_converges_to_softmax(direction):
    """Check that the mean error over draws falls like 1 / sqrt(m), as that of a mean of m features."""
    layer = make(direction)
    x = tokens(30) / 2
    counts = (64, 1024, 16_384)  # larger keys have heavier tails
    q, k, v = layer.heads(x)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=direction == "forward")
    errors = []
    for layer.count in counts:
        squares = []
        for _ in range(12):
            layer.random_features = orthogonal_features(layer.count, D).double()
            with torch.no_grad():
                squares.append((layer.mix(x, q, k, v, Layout()) - exact).square().mean() / exact.square().mean())
        errors.append(torch.stack(squares).mean().sqrt().item())
    assert errors[-1] < 0.01
    assert all(2.5 < more / fewer < 6 for more, fewer in pairwise(errors))  # expected: 4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_keys_in_padded_segments(direction):
    """Check logits beyond the range of exp in float32, with a maximum for each segment, against float64."""
    wide = make(direction)
    x = tokens(40)
    place = torch.arange(40).expand(2, -1)
    with torch.no_grad():
        wide.qkv.weight.mul_(6)
    x[:, :17] *= 4
    layout = Layout.of(x, place % 7 != 3, place // 17)
    parts = [wide(x[:, cut], Layout.of(x[:, cut], layout.valid[:, cut])) for cut in (slice(17), slice(17, 34))]
    layer = make(direction).float()
    layer.load_state_dict(wide.state_dict())
    for form, size in FORMS:
        set_form(layer, form, size)
        set_form(wide, form, size)
        kept = layout.valid[..., None]
        assert error(wide(x, layout)[:, :34] * kept[:, :34], torch.cat(parts, 1) * kept[:, :34]) < 1e-10
        assert error(layer(x.float(), layout) * kept, wide(x, layout) * kept) < 2e-3, (form, size)


def test_features_are_saved_and_drawn_from_the_seed():
    first = make()
    same = make()
    assert torch.equal(first.random_features, same.random_features) and "random_features" in first.state_dict()
    assert first.count == math.ceil(D * math.log(D)) and make(features=7).count == 7


def test_settings():
    assert PerformerConfig(features=7).label() == "7 features" and not PerformerConfig().label()
    for wrong in ({"feature_map": "elu1"}, {"rotation": "rope"}, {"normalize": "none"}, {"decay_convention": "source"}):
        name, value = next(iter(wrong.items()))
        message = f"{name} '{value}': mixer 'performer' has random features, use"
        invalid(message, LionAttention, DIM, HEADS, "performer", **wrong)
    invalid("features", LionAttention, DIM, HEADS, "performer", features=0)
    invalid("score_dropout is not available", LionAttention, DIM, HEADS, "performer", score_dropout=0.1)


def test_features_in_half_precision_are_drawn_in_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        features = orthogonal_features(5, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert features.dtype == torch.bfloat16 and features.isfinite().all()
