"""Transforms of `torch.func`: gradients, gradients for each sample, and directional derivatives, right or refused."""

import itertools

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from lion.layers.mixers import MIXERS, make_mixer
from lion.ops import linear_attention

from .helpers import close, doubles, small

GRIDS = {"lion_s", "gla", "deltanet", "lightnet"}  # scalar and vector decays, a delta rule, and normalised keys


def cases() -> list[tuple[str, str, str]]:
    """Return every mixer in one form and direction in turn, and those of `GRIDS` in all forms and directions."""
    made = []
    turns = itertools.count()
    for name, entry in MIXERS.items():
        forms = entry.layer.forms or ("full",)
        turn = next(turns)
        ways = [(forms[turn % len(forms)], ("both", "forward")[turn // 3 % 2])]
        if name in GRIDS:
            ways = list(itertools.product(forms, ("both", "forward")))
        if name != "none":
            made += [(name, *way) for way in ways]
    return made


REFUSED = r"implement the jvp function|forward AD with _scaled_dot_product"


VECTOR_DECAYS = "lion_s_vector lion_d_hippo lion_s_hippo mamba rwkv6 gla hgrn2 kda gdn2 rwkv7".split()
DELTA_RULES = {"deltanet", "gated_deltanet", "comba", "deltaproduct"}


def no_forward_mode(mixer, form, direction):
    own = mixer in VECTOR_DECAYS or (mixer in DELTA_RULES and form == "chunk")
    return own or mixer == "softmax" or (mixer, direction) == ("lightnet", "forward")


@pytest.fixture(params=cases(), ids=lambda case: "-".join(case))
def case(request):
    """Return a layer, its parameters, three samples, and a loss of the parameters and one sample."""
    name, form, direction = request.param
    layer = small(name, form, direction)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = doubles(3, 9, 8)
    weights = doubles(9, 8)

    def loss(parameters, sample):
        return (functional_call(layer, parameters, (sample[None],))[0] * weights).sum()

    return parameters, x, loss


def test_gradients_of_each_sample(case):
    parameters, x, loss = case

    def known(sample):
        given = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        found = torch.autograd.grad(loss(given, sample), [*given.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(given, found))

    each = [known(sample) for sample in x]
    one = grad(loss)(parameters, x[0])
    every = vmap(grad(loss), (None, 0))(parameters, x)
    for name in parameters:
        close(one[name], each[0][name], rtol=1e-9, atol=1e-11)
        close(every[name], torch.stack([g[name] for g in each]), rtol=1e-9, atol=1e-11)


def test_directional_derivative(case, request):
    parameters, x, loss = case
    along = torch.randn_like(x[0])
    step = 1e-6

    def of(sample):
        return loss(parameters, sample)

    if no_forward_mode(*request.node.callspec.params["case"]):
        with pytest.raises(NotImplementedError, match=REFUSED):
            jvp(of, (x[0],), (along,))
        return
    found = jvp(of, (x[0],), (along,))[1]
    known = (of(x[0] + step * along) - of(x[0] - step * along)) / (2 * step)
    close(found, known, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["full", "chunk"])
@pytest.mark.parametrize("shape", [(2,), (1, 2, 9), (1, 2, 9, 4)])
def test_vmap_over_decays_without_gradients(shape, form):
    q, k, v = doubles(3, 1, 2, 9, 4)
    decays = -torch.rand(3, *shape, dtype=torch.float64)

    def run(log_decay):
        return linear_attention(q, k, v, log_decay, form=form, feature_map="elu1", chunk_size=4)

    with torch.no_grad():
        close(vmap(run)(decays), torch.stack([run(a) for a in decays]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["full", "chunk", "rnn"])
def test_vmap_over_segments(form):
    q, k, v = doubles(3, 3, 1, 2, 9, 4)
    segments = torch.tensor([[[0, 0, 0, 1, 1, 1, 2, 2, 2]], [[0] * 9], [[0] * 5 + [1] * 4]])

    def run(q, k, v, segments):
        return linear_attention(q, k, v, form=form, feature_map="elu1", chunk_size=4, segments=segments)

    each = torch.stack([run(*one) for one in zip(q, k, v, segments)])
    close(vmap(run)(q, k, v, segments), each, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixer", ["fox", "softmax", "lion_s"])
def test_samples_of_a_layer_whose_parameters_learn(mixer):
    layer = make_mixer(mixer, 8, 2).double()
    x = doubles(3, 9, 8)
    alone = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    together = torch.autograd.grad(vmap(lambda row: layer(row[None])[0])(x).square().sum(), list(layer.parameters()))
    for one, other in zip(together, alone, strict=True):
        close(one, other)
