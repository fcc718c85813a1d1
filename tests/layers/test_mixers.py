"""Mixers of `LINEAR` against their published recurrences (`oracles.py`): forms, directions, streaming, precision."""

import itertools

import pytest
import torch

import lion.layers.mixers.linear as linear_module
from lion.layers.mixers import LINEAR, AttentionConfig, LionAttention, make_mixer
from lion.layers.mixers.base import set_form
from lion.models.vit import ViT, ViTConfig
from tests.ops.helpers import error

from .helpers import DIM, DIRECTIONS, HEADS, check_finite, check_oracle, invalid, perturbed, stream, tokens
from .oracles import ORACLES, oracle

FORMS = (("full", None), ("chunk", 16), ("chunk", 64), ("rnn", 1), ("rnn", 16))
SMALL_FORMS = (("full", None), ("chunk", 16), ("rnn", 1), ("rnn", 16))
every_mixer = pytest.mark.parametrize("mixer", LINEAR)


def with_each(name: str, values):
    """Parametrize by the mixers, with one value each in turn."""
    return pytest.mark.parametrize(f"mixer, {name}", list(zip(LINEAR, itertools.cycle(values))))


def make(mixer: str, direction: str = "forward", spread: float = 0.3) -> LionAttention:
    """Make a float64 layer (including constants) with perturbed parameters."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        layer = LionAttention(DIM, HEADS, mixer, direction=direction)
    finally:
        torch.set_default_dtype(torch.float32)
    return perturbed(layer, spread)


def test_every_entry_is_published_and_has_an_oracle():
    missing = [name for name in LINEAR if name not in ORACLES]
    assert not missing, (
        f"no oracle in tests/layers/oracles.py for {missing}: write it from the paper, not from the code"
    )
    for name, entry in LINEAR.items():
        assert entry.source, name
        assert entry.left_out or entry.published or name.startswith("lion_"), f"{name}: what does its entry leave out?"


@every_mixer
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("length", [1, 40])
def test_values_and_gradients_are_those_of_the_published_recurrence(mixer, direction, length):
    layer = make(mixer, direction)
    check_oracle(layer, lambda w, x: oracle(mixer, w, x, HEADS, direction), tokens(length), SMALL_FORMS, 1e-10, 2e-5)


def test_decay_conventions():
    """Check "source" (a decay belongs to the token being left) of LION, and "between" of RWKV-6."""
    for mixer, entry in LINEAR.items():
        assert (entry.decay_convention == "source") == mixer.startswith("lion_"), mixer
        assert entry.causal_decay_convention == ("between" if mixer == "rwkv6" else "target"), mixer


def test_form_and_chunk_size_reach_the_operators(monkeypatch):
    """Check that form and chunk size reach the operators, because results of all forms agree."""
    seen = []
    for name in ("linear_attention", "prefill"):
        operator = getattr(linear_module, name)

        def spy(*tokens, operator=operator, settings, **arguments):
            seen.append((settings.form, settings.chunk_size))
            return operator(*tokens, settings=settings, **arguments)

        monkeypatch.setattr(linear_module, name, spy)
    layer = make("lion_s")
    x = tokens(5)
    for form, size in FORMS:
        set_form(layer, form, size)
        layer(x)
        layer.prefill(x)
    assert seen == [(form, size or 64) for form, size in FORMS for _ in range(2)]


# Streaming; test_streams.py checks what all mixers have in common


@torch.inference_mode()
def test_a_stream_loses_nothing_with_its_position():
    """Check that RetNet, which rotates by position, is as exact at token ten million as at the start."""
    x = tokens(30)
    want = None
    double = make("retnet")
    for position in (0, 100_000, 10_000_000):
        for layer, tolerance in ((double, 1e-8), (make("retnet").float(), 2e-5)):
            start = layer.initial_state(2)._replace(position=torch.tensor([position, position + 5]))
            y, state = stream(layer, x.to(layer.proj.weight.dtype), [1] * 10 + [20], start)
            want = y if want is None else want
            assert error(y, want) < tolerance, position  # only differences of positions matter
            assert state.position.tolist() == [position + 30, position + 35]


# Directions of a model (Table 16)


def test_alternating_is_of_models():
    invalid("direction: 'alternating' is for a model", LionAttention, DIM, HEADS, direction="alternating")


@with_each("direction", ["alternating", *DIRECTIONS])
def test_every_direction_of_blocks_trains(mixer, direction):
    config = ViTConfig(mixer, DIM, 2, HEADS, patch_size=2, attention=AttentionConfig(direction=direction))
    model = ViT(config, image_size=(6, 6), channels=1, num_classes=3)
    images = torch.randn(4, 1, 6, 6)
    labels = torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    optimizer.step()
    assert torch.nn.functional.cross_entropy(model(images), labels) < loss


# Precision


@with_each("direction", ["both", "both", "forward", "forward", "backward"])
def test_extreme_inputs_stay_finite(mixer, direction):
    layer = make(mixer, direction).float()
    for scale in (1e3, 1e-3, 0.0):
        for form, size in SMALL_FORMS:
            set_form(layer, form, size)
            check_finite(layer, (scale * tokens(30)).float())


@pytest.mark.parametrize("logit", [-200.0, 200.0])  # keep everything, forget everything
def test_rwkv6_has_a_double_exponential_that_stays_finite(logit):
    for form, size in SMALL_FORMS:
        layer = make("rwkv6", "both").float()
        x = tokens(40).float()
        set_form(layer, form, size)
        layer.decays[0].w.data.fill_(logit)
        check_finite(layer, x)


@with_each("direction", ("forward", "backward", "both"))
@pytest.mark.slow
def test_autocast_keeps_gates_and_stays_near_float32(mixer, direction):
    layer = make(mixer, direction).float()
    x = tokens(40).float()
    for form, size in SMALL_FORMS:
        set_form(layer, form, size)
        want = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x)
        assert got.dtype == torch.bfloat16
        assert error(got, want.double()) < 0.05, (form, size)
    if not layer.decays:
        return
    k = layer.heads(x)[1]
    want = layer.decays[0](x, k)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer.decays[0](x, k)
        narrow = layer.decays[0](x.bfloat16(), k.bfloat16())
    assert len(narrow.state) == len(got.state) == (1 if mixer == "lightnet" else 0)
    assert all(part.dtype == torch.float32 for part in (*narrow.state, *got.state))
    for name, gate in {"k": narrow.k, **narrow.gates._asdict()}.items():
        wanted = {"k": torch.bfloat16, "angles": torch.float64}.get(name, torch.float32)
        assert gate is None or gate.dtype == wanted, name
    for name, gate in {"k": got.k, **got.gates._asdict()}.items():
        wanted = want.k if name == "k" else getattr(want.gates, name)
        assert gate is None or torch.equal(gate, wanted), name


@every_mixer
@torch.inference_mode()
def test_states_are_float32_in_bf16(mixer):
    layer = make(mixer).float()
    x = tokens(20).float()
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        start, state = layer.prefill(x[:, :11])
        rest, end = stream(layer, x[:, 11:], [1] * 9, state)
        alone, _ = stream(layer, x, [1] * 20)
    for got in (torch.cat([start, rest], 1), alone):
        assert got.dtype == torch.bfloat16 and error(got, want.double()) < 0.05
    for held in (state, end, layer.bfloat16().initial_state(2)):
        assert held.S.dtype == held.z.dtype == torch.float32
        assert all(part.dtype.itemsize >= 4 for part in held.decay)


@pytest.mark.parametrize("mixer", ["softmax", "fox", "lion_s", "gated_deltanet"])
@torch.inference_mode()
def test_a_stream_goes_on_in_another_dtype(mixer):
    layer = make_mixer(mixer, 32, 2, direction="forward")
    x = torch.randn(2, 12, 32)
    want, (_, state) = layer(x), layer.prefill(x[:, :8])
    y, state = layer.bfloat16().step(x[:, 8:10].bfloat16(), state)
    assert y.dtype == torch.bfloat16
    rest, _ = layer.float().step(x[:, 10:], state)
    assert (torch.cat([y.float(), rest], 1) - want[:, 8:]).abs().max() < 0.05 * want.abs().max()


@every_mixer
@torch.inference_mode()
def test_long_sequences_stay_near_float32_in_bf16(mixer):
    """Check long sequences, because bf16 cannot represent positions above 256."""
    layer = make(mixer).bfloat16().float()
    x = tokens(300, batch=1).bfloat16().float()  # equal weights in both dtypes
    set_form(layer, "chunk", 64)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = {"forward": layer(x), "prefill": layer.prefill(x)[0]}
    found["all bf16"] = layer.bfloat16()(x.bfloat16())
    for name, got in found.items():  # for most tokens: the numerator of xLSTM cancels at single tokens
        wrong = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert wrong.quantile(0.9) < 0.05, name
