"""Properties of every model."""

import copy
import itertools
import pickle

import pytest
import torch

from lion.config import build
from lion.layers.constants import Constants
from lion.layers.mixers import MIXERS
from lion.models import MODELS
from tests.helpers import refused
from tests.layers.helpers import close

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
    mixers = {MIXERS[mixer].layer.Config: mixer for mixer in MIXERS}  # one mixer for each kind of settings
    for mixer in mixers.values():
        torch.manual_seed(0)
        model = MODELS[name](settings(name, mixer), **DATA[name])
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert copied.config == model.config and type(copied.config) is type(model.config)
            close(copied.state_dict(), model.state_dict(), 0)


@pytest.mark.parametrize("mixer, name", list(zip(MIXERS, itertools.cycle(MODELS))))
def test_models_leave_the_meta_device_with_their_constants(mixer, name):
    """Check buffers that are not in checkpoints, in all ways to give new memory to a model."""
    config = settings(name, mixer)
    config.drop_path = 0.1
    config.attention.direction = "forward" if name == "gpt" else config.attention.direction
    want = MODELS[name](config, **DATA[name])
    for device, assign in (("meta", False), ("meta", True), ("cpu", False)):
        with torch.device(device):
            got = MODELS[name](config, **DATA[name])
        if not assign:
            got = got.to_empty(device="cpu")
        got.load_state_dict(want.state_dict(), assign=assign)
        close(dict(got.named_buffers()), dict(want.named_buffers()), 0)
        assert all(part.makers for part in got.modules() if isinstance(part, Constants))


@pytest.mark.parametrize("norm", ["norm", "attention.out_norm"])
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.Config.token_outputs])
def test_tokens_of_one_direction_do_not_see_the_others_through_a_norm(name, norm):
    def config(direction, kind):
        values = {"name": name, "mixer": "lion_s", **SIZES, "norm": "layernorm"}
        values |= {"block": "pre_norm"} if name == "dit" else {}  # the usual one fits to no batch norm at all
        values["attention"] = {"direction": direction, "out_norm": "none"}
        section = values["attention"] if "." in norm else values
        section[norm.rpartition(".")[2]] = kind
        return build(MODELS[name].Config, values, source=lambda key: "test", key="model")

    for direction in ("forward",) if name == "gpt" else ("forward", "backward"):
        config(direction, "layernorm")
        refused(rf"model.*{norm}: 'batchnorm' averages over all tokens", config, direction, "batchnorm")
    if name != "gpt":
        config("both", "batchnorm")


def test_models_with_outputs_of_tokens_say_so():
    for name, sizes in DATA.items():
        if "vocabulary" in sizes:
            ids = torch.zeros(2, 9, *[1] * (name == "token_classifier"), dtype=torch.long)
            out = MODELS[name](settings(name, "lion_s"), **sizes)(ids)
            assert (out.shape[:2] == (2, 9)) == MODELS[name].Config.token_outputs
