"""Properties of every model."""

import copy
import pickle

import pytest
import torch

from lion.config import build
from lion.layers.mixers import MIXERS
from lion.models import MODELS

SIZES = {"dim": 12, "depth": 1, "num_heads": 3}
TOKENS = {"vocabulary": 7, "length": 9}
IMAGES = {"image_size": (32, 32), "channels": 1}
DATA = {
    "bert": TOKENS,
    "bert_classifier": {**TOKENS, "outputs": 2},
    "dit": {**IMAGES, "classes": ("a", "b")},
    "gpt": TOKENS,
    "lra": {**TOKENS, "classes": 2},
    "lra_masked": TOKENS,
    "token_classifier": {**TOKENS, "classes": 2},
    "vit": {**IMAGES, "num_classes": 2},
}


def settings(name, mixer):
    values = {"name": name, "mixer": mixer, **SIZES}
    return build(MODELS[name].Config, values, source=lambda key: "test", key="model")


@pytest.mark.parametrize("name", MODELS)
def test_models_are_copied_and_pickled(name):
    for mixer in {
        MIXERS[mixer].layer.Config: mixer for mixer in MIXERS
    }.values():  # one mixer for each kind of settings
        torch.manual_seed(0)
        model = MODELS[name](settings(name, mixer), **DATA[name])
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert copied.config == model.config and type(copied.config) is type(model.config)
            held = copied.state_dict()
            assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())
