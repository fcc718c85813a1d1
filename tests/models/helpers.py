"""Helpers of tests of models."""

import torch

from lion.layers.mixers.base import set_form
from tests.layers.helpers import close


def adapted(model, source):
    """Return the position embeddings of `source` as `model` takes them."""
    weights = model.adapt(source.state_dict(), source)
    (name,) = {"position", "positions.weight"} & weights.keys()
    return weights[name]


@torch.no_grad()
def check_forms(model, *inputs, forms=(("chunk", 16), ("rnn", 1), ("rnn", 16))):
    """Check that a model computes the same in every form, with chunks of the given sizes."""
    want = model(*inputs)
    for form, size in forms:
        set_form(model, form, size)
        close(model(*inputs), want, 1e-12)
