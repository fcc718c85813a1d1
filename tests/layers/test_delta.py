"""Settings of the mixers with a delta rule; their recurrences are tested with those of all mixers."""

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, MIXERS, LionAttention, set_form
from lion.layers.mixers.delta import DeltaAttention
from lion.layers.mixers.delta_product import DeltaProductConfig
from tests.ops.helpers import error

from .helpers import DIM, DIRECTIONS, HEADS, invalid, tokens
from .test_mixers import FORMS, make


@pytest.mark.parametrize("mixer", [name for name in LINEAR if MIXERS[name].layer is DeltaAttention])
def test_negative_eigenvalues_double_beta(mixer):
    x = tokens(65)
    layer = make(mixer)
    layer.decays[0].strength = 2.0
    negative = LionAttention(DIM, HEADS, mixer, negative_eigenvalues=True, direction="forward").double()
    negative.load_state_dict(layer.state_dict())
    assert torch.equal(negative(x), layer(x))
    gates = negative.decays[0](50 * x, negative.heads(x)[1]).gates
    assert gates.beta.max() > 1.9 and not torch.equal(negative(x), make(mixer)(x))


@pytest.mark.parametrize("mixer", [name for name, entry in LINEAR.items() if entry.decay and entry.decay.delta])
def test_the_delta_rule_has_one_decay_convention(mixer):
    message = "decay_convention 'source' is not available with the delta rule, use 'tar"
    invalid(message, LionAttention, DIM, HEADS, mixer, decay_convention="source")
    invalid("normalize 'max' is not available with the delta rule", LionAttention, DIM, HEADS, mixer, normalize="max")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_deltaproduct_of_one_step_is_gated_deltanet(direction):
    one = LionAttention(DIM, HEADS, "deltaproduct", direction=direction, householders=1).double()
    gated = LionAttention(DIM, HEADS, "gated_deltanet", direction=direction, negative_eigenvalues=True).double()
    gated.load_state_dict(one.state_dict())
    assert error(one(tokens(40)), gated(tokens(40))) < 1e-13


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_forms_of_deltaproduct_agree_with_rotations_and_masks(direction):
    """Check three steps of each token, with angles, padding and segments that end inside of chunks."""
    layer = LionAttention(DIM, HEADS, "deltaproduct", direction=direction, householders=3, rotation="rope").double()
    x = tokens(40)
    place = torch.arange(40).expand(2, -1)
    layout = Layout.of(x, place % 7 != 3, place // 17)
    whole = layer(x, layout)
    for form, size in FORMS:
        set_form(layer, form, size)
        assert error(layer(x, layout), whole) < 1e-12, (form, size)
    alone = Layout.of(x[:, 17:34], layout.valid[:, 17:34])
    assert error(layer(x[:, 17:34], alone), whole[:, 17:34]) < 1e-12


def test_settings_of_deltaproduct():
    invalid("householders", LionAttention, DIM, HEADS, "deltaproduct", householders=0)
    assert DeltaProductConfig(householders=3).label() == "3 steps per token"
    layer = LionAttention(DIM, HEADS, "deltaproduct", negative_eigenvalues=False)
    assert layer.decays[0].strength == 1 and layer.config.label() == "without negative eigenvalues"


@pytest.mark.parametrize("mixer", [name for name, entry in LINEAR.items() if entry.feature_map == "silu_unit"])
def test_a_token_of_zeros_has_a_finite_gradient(mixer):
    """Check gradients at keys and queries of 0, at which a division by their norm alone has no derivative."""
    layer = LionAttention(16, 2, mixer, qkv_bias=False)
    x = torch.randn(1, 6, 16)
    x[:, 2] = 0
    layer(x.requires_grad_()).square().sum().backward()
    assert x.grad[0, 2].abs().max() < 1e4 * x.grad[0].abs().median()  # of a division by the norm: 1e10
