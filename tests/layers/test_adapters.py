"""Linear layers of mixers that are replaced (LoRA, quantisation) or hooked: they take part in the computation."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lion.layers.mixers import MIXERS, make_mixer, vim
from lion.layers.weights import linear
from lion.models.bert import Bert, BertConfig
from lion.models.gpt import GPT, GPTConfig

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
    layer = made(name, block)
    called = []
    merged = copy.deepcopy(layer)
    x = torch.randn(2, 9, 16)
    names = [name for name, part in layer.named_modules() if type(part) is nn.Linear]
    for place in names:
        parent, _, own = place.rpartition(".")
        parent = layer.get_submodule(parent)
        other = merged.get_submodule(place)
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


WRAPPED = [
    ("lion_s", "plain"),
    ("softmax", "plain"),
    ("rwkv6", "published"),
    ("rwkv7", "published"),
    ("fox", "published"),
]


class Halved(torch.Tensor):
    """A weight of another library: it stores half of its values."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype, requires_grad=False)

    def __init__(self, half):
        self.half = half

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            x, weight, *bias = args
            return function(x, 2 * weight.half, *bias, **(kwargs or {}))
        return super().__torch_function__(function, kinds, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].half)
        raise NotImplementedError(str(function))


@pytest.mark.parametrize(("name", "block"), WRAPPED)
@torch.no_grad()
def test_weights_of_another_library(name, block):
    torch.manual_seed(0)
    layer = make_mixer(name, 16, 2, direction="forward", block=block).eval()
    x = torch.randn(2, 9, 16)
    wrapped = copy.deepcopy(layer)
    for part in wrapped.modules():
        if type(part) is nn.Linear:
            part.weight = nn.Parameter(Halved(part.weight.detach() / 2), requires_grad=False)
    close(wrapped(x), layer(x), rtol=1e-4, atol=1e-5)
    state = wrapped.prefill(x[:, :8])[1]
    close(wrapped.step(x[:, 8:], state)[0], layer(x)[:, 8:], rtol=1e-4, atol=1e-5)
    assert wrapped.initial_state(2) is not None


@torch.no_grad()
def test_a_forward_of_an_instance_counts():
    layer = make_mixer("rwkv6", 16, 2, block="published")
    x = torch.randn(2, 9, 16)
    same = copy.deepcopy(layer)
    for part in layer.modules():
        if type(part) is nn.Linear:
            own = part.weight.detach().clone()
            nn.init.constant_(part.weight, torch.nan)  # as offloaded weights are not there
            part.forward = lambda x, own=own, bias=part.bias: torch.nn.functional.linear(x, own, bias)
    close(layer(x), same(x))


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@torch.no_grad()
def test_adapters_of_embeddings_reach_tied_heads_and_types(kind):
    class Shifted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.shift = base, nn.Parameter(torch.randn_like(base.weight))

        def forward(self, ids):
            return self.base(ids) + nn.functional.embedding(ids, self.shift)

    sizes = dict(vocabulary=50, length=16)
    if kind == "gpt":
        model = GPT(GPTConfig("lion_s", 16, 1, 2), **sizes)
    else:
        model = Bert(BertConfig("lion_s", 16, 1, 2, token_types=2), **sizes)
    merged = copy.deepcopy(model)
    ids = torch.arange(32).view(2, 16)
    for name in ("tokens", "types"):
        if getattr(model, name, None) is not None:
            adapted = Shifted(getattr(model, name))
            getattr(merged, name).weight += adapted.shift
            setattr(model, name, adapted)
    close(model(ids), merged(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lion_s", "gla", "rwkv6", "gated_deltanet"])
def test_dynamic_quantisation_of_gates(name):
    layer = make_mixer(name, 64, 4).eval()
    x = torch.randn(2, 9, 64)
    count = sum(type(part) is nn.Linear for part in layer.modules())
    with warnings.catch_warnings(action="ignore"):  # a newer library takes this one's place
        quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    assert sum("quantized.dynamic" in type(part).__module__ for part in quantised.modules()) == count > 2
    with torch.no_grad():
        known = layer(x)
        y = quantised(x)
    assert 1e-4 < (y - known).norm() / known.norm() < 0.1


@pytest.mark.parametrize("name", ["lion_s", "performer", "hydra", "softmax", "fox"])
def test_a_quantised_layer_streams(name):
    block = "published" if name == "fox" else "plain"
    layer = make_mixer(name, 64, 4, direction="forward", block=block).eval()
    with warnings.catch_warnings(action="ignore"):
        quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        y, _ = quantised.step(x, quantised.initial_state(2))
        assert 0 < (y - layer(x)).norm() / layer(x).norm() < 0.1


def test_adapters_with_dropout_have_the_gradients_of_their_outputs(monkeypatch):
    """Check Vim, whose backward pass computes a part again: with the masks of the forward pass."""
    layer = make_mixer("vim", 16, 2, direction="forward")
    x = torch.randn(2, 9, 16)
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
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    called = []
    known = linear(layer, x)
    layer.register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(linear(layer, x), known) and called == [1]
    y = linear(Adapted(nn.Linear(4, 3)).bfloat16(), x)
    assert y.dtype == torch.float32 and y.shape == (2, 3)
