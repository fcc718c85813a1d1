"""Settings of the mixers with a delta rule; their recurrences are tested with those of all mixers."""

import pytest
import torch

from lion.layers.mixers import LINEAR, MIXERS, LionAttention
from lion.layers.mixers.delta import DeltaAttention

from .test_mixers import DIM, HEADS, make, tokens


@pytest.mark.parametrize("mixer", [name for name in LINEAR if MIXERS[name].layer is DeltaAttention])
def test_negative_eigenvalues_double_beta(mixer):
    x, layer = tokens(65), make(mixer)
    layer.decays[0].strength = 2.0
    negative = LionAttention(DIM, HEADS, mixer, negative_eigenvalues=True, direction="forward").double()
    negative.load_state_dict(layer.state_dict())
    assert torch.equal(negative(x), layer(x))
    gates = negative.decays[0](50 * x, negative.heads(x)[1]).gates
    assert gates.beta.max() > 1.9 and not torch.equal(negative(x), make(mixer)(x))


@pytest.mark.parametrize("mixer", [name for name, entry in LINEAR.items() if entry.decay and entry.decay.delta])
def test_the_delta_rule_has_one_decay_convention(mixer):
    with pytest.raises(ValueError, match="decay_convention 'source' is not available with the delta rule, use 'tar"):
        LionAttention(DIM, HEADS, mixer, decay_convention="source")
    with pytest.raises(ValueError, match="normalize 'max' is not available with the delta rule"):
        LionAttention(DIM, HEADS, mixer, normalize="max")
