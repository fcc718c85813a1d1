"""Linear layers of mixers that are replaced (LoRA, quantisation) or hooked: they take part in the computation."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lion.layers.mixers import MIXERS, make_mixer, vim
from lion.layers.weights import linear

from .helpers import close

CASES = [(name, block) for name in MIXERS if name != "none" for block in ("plain", "published")]


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as LoRA makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def made(name: str, block: str) -> nn.Module:
    torch.manual_seed(0)
    try:
        return make_mixer(name, 16, 2, block=block)
    except ValueError:
        pytest.skip("one block")


@pytest.mark.parametrize(("name", "block"), CASES)
def test_adapters_and_hooks_of_every_linear_layer(name, block):
    layer, called = made(name, block), []
    merged, x = copy.deepcopy(layer), torch.randn(2, 9, 16)
    names = [name for name, part in layer.named_modules() if type(part) is nn.Linear]
    for place in names:
        parent, _, own = place.rpartition(".")
        parent, other = layer.get_submodule(parent), merged.get_submodule(place)
        adapted = Adapted(getattr(parent, own))
        adapted.register_forward_hook(lambda *_, place=place: called.append(place))
        with torch.no_grad():
            other.weight += adapted.up.weight @ adapted.down.weight
        if isinstance(parent, nn.Sequential):
            parent[int(own)] = adapted
        else:
            setattr(parent, own, adapted)
    y = layer(x)
    close(y, merged(x), rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    assert set(called) == set(names)
    for place in names:
        assert layer.get_submodule(place).up.weight.grad.any(), place


@pytest.mark.parametrize("name", ["lion_s", "gla", "rwkv6", "gated_deltanet"])
def test_dynamic_quantisation_of_gates(name):
    layer, x = make_mixer(name, 64, 4).eval(), torch.randn(2, 9, 64)
    count = sum(type(part) is nn.Linear for part in layer.modules())
    with warnings.catch_warnings(action="ignore"):  # a newer library takes this one's place
        quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    assert sum("quantized.dynamic" in type(part).__module__ for part in quantised.modules()) == count > 2
    with torch.no_grad():
        known, y = layer(x), quantised(x)
    assert 1e-4 < (y - known).norm() / known.norm() < 0.1


@pytest.mark.parametrize("name", ["lion_s", "performer", "hydra", "softmax"])
def test_a_quantised_layer_streams(name):
    layer = make_mixer(name, 64, 4, direction="forward").eval()
    with warnings.catch_warnings(action="ignore"):
        quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        y, _ = quantised.step(x, quantised.initial_state(2))
        assert 0 < (y - layer(x)).norm() / layer(x).norm() < 0.1


def test_adapters_with_dropout_have_the_gradients_of_their_outputs(monkeypatch):
    """Check Vim, whose backward pass computes a part again: with the masks of the forward pass."""
    layer, x = make_mixer("vim", 16, 2, direction="forward"), torch.randn(2, 9, 16)
    (side,) = layer.sides
    side.select = nn.Sequential(side.select, nn.Dropout(0.5))
    grads = []
    for _ in range(2):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(layer(x).square().sum(), [*side.select.parameters()]))
        monkeypatch.setattr(vim, "checkpoint", lambda part, u, **_: part(u))
    for found, known in zip(*grads):
        close(found, known)


def test_a_hook_alone_and_weights_in_another_dtype():
    layer, x, called = nn.Linear(4, 3), torch.randn(2, 4), []
    known = linear(layer, x)
    layer.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(linear(layer, x), known) and called == [1]
    y = linear(Adapted(nn.Linear(4, 3)).bfloat16(), x)
    assert y.dtype == torch.float32 and y.shape == (2, 3)
