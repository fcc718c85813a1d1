"""Decays initialised from HiPPO: spectra, rotations, bounds, initial values, and settings."""

import math

import pytest
import torch

from lion.layers.mixers import HippoAttention, make_mixer
from lion.layers.mixers.base import set_form
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.hippo import HippoConfig
from lion.layers.mixers.spectra import ROTATING, SPECTRA, legs, s4d_lin, s4d_real

from .helpers import DIM, HEADS, PADDED, SHORT_FORMS, check_finite, check_padding, close, invalid, tokens, weights
from .oracles import oracle

MIXERS = ("lion_d_hippo", "lion_s_hippo")
both = pytest.mark.parametrize("mixer", MIXERS)


def make(mixer: str, spread: float = 0.3, **settings) -> HippoAttention:
    torch.manual_seed(0)
    layer = HippoAttention(DIM, HEADS, mixer, HippoConfig(**settings)).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "log_" not in name:  # rates and steps keep values for long sequences
                parameter.add_(spread * torch.randn_like(parameter))
    return layer.eval()


def test_spectra_are_the_published_ones():
    """Check the spectra; LegS: A_nk = -sqrt((2n+1)(2k+1)) below the diagonal, -(n+1) on it, P_n = sqrt(n + 1/2)."""
    size = 12
    A = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size):
        for k in range(n + 1):
            A[n, k] = -(n + 1) if n == k else -math.sqrt((2 * n + 1) * (2 * k + 1))
    P = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    eigenvalues = torch.linalg.eigvals(A + P[:, None] * P)
    rates, frequencies = legs(size)
    close(-eigenvalues.real, rates, 1e-9)
    close(eigenvalues.imag.sort().values[size // 2 :], frequencies, 1e-9)
    assert s4d_real(3)[0].tolist() == [1, 2, 3] and s4d_real(3)[1] is None
    rates, frequencies = s4d_lin(6)
    assert rates.tolist() == [0.5] * 6 and frequencies.tolist() == pytest.approx([0, math.pi, 2 * math.pi])


@both
@pytest.mark.parametrize("spectrum", ROTATING)
@torch.inference_mode()
def test_spectra_that_turn_are_complex_states_in_every_form(mixer, spectrum):
    layer = make(mixer, spectrum=spectrum)
    x = tokens(37)
    want = oracle(mixer, weights(layer), x, HEADS, "both")
    for form, size in (("full", None), ("chunk", 8), ("rnn", 1), ("rnn", 16)):
        set_form(layer, form, size)
        close(layer(x), want, atol=1e-9, rtol=1e-9)


@both
@pytest.mark.parametrize(
    ("spectrum", "shape"),
    [*((name, "vector") for name in (*SPECTRA, "random")), ("s4d_real", "scalar"), ("random", "scalar")],
)
def test_a_lambda_never_exceeds_one_however_far_it_is_learned(mixer, spectrum, shape):
    layer = make(mixer, spectrum=spectrum, decay_shape=shape).float()
    x = tokens(9).float()
    decay = layer.decays[0]
    for log_rate, log_dt in ((0.0, 0.0), (200.0, 200.0), (-200.0, -200.0), (200.0, -200.0), (-200.0, 200.0)):
        for form in ("full", "chunk", "rnn"):
            with torch.no_grad():
                decay.log_rate.fill_(log_rate), decay.log_dt.fill_(log_dt)
            set_form(layer, form, 4)
            check_finite(layer, x, unused=True)
            assert (decay(x, torch.zeros(2, HEADS, 9, DIM // HEADS)).log_decay <= 0).all()


def test_steps_start_log_uniform_and_let_some_remember():
    layer = HippoAttention(64, 2, "lion_d_hippo", dt_min=1e-4, dt_max=0.1)
    dt = layer.decays[0].log_dt.detach()
    assert dt.min() >= math.log(1e-4) and dt.max() <= math.log(0.1) and dt.min() < math.log(1e-3)
    assert abs(dt.mean() - math.log(1e-4 * 0.1) / 2) < 0.6
    log_decay = layer.decays[0](torch.zeros(1, 1, 64), torch.zeros(1, 2, 1, 32)).log_decay
    assert log_decay.shape == (2, 32) and (log_decay.exp() ** 1000).max() > 0.1  # memory of a thousand tokens


def test_a_random_start_has_no_steps():
    """Check the rows of Table 5 without HiPPO: lambda = sigmoid(a), a ~ N(0, 1)."""
    layer = HippoAttention(256, 2, "lion_d_hippo", spectrum="random")
    decay = layer.decays[0](torch.zeros(1, 1, 256), torch.zeros(1, 2, 1, 128)).log_decay.exp()
    a = torch.logit(decay)
    assert abs(a.mean()) < 0.2 and abs(a.std() - 1) < 0.2 and (layer.decays[0].log_dt == 0).all()
    assert layer.config.value_start == "dense"


def test_scalar_decays_have_one_lambda_a_head():
    x = tokens(5).float()
    k = torch.zeros(2, HEADS, 5, DIM // HEADS)
    for mixer, shape in zip(MIXERS, ((HEADS,), (2, HEADS, 5))):
        assert make(mixer, decay_shape="scalar").float().decays[0](x, k).log_decay.shape == shape


def test_what_is_selected_only_shortens_the_memory():
    layer = make("lion_s_hippo", spread=1.0, spectrum="s4d_real")
    x = tokens(30)
    rates, steps = layer.decays[0].steps(x)
    log_decay = layer.decays[0](x, x.new_zeros(2, HEADS, 30, DIM // HEADS)).log_decay
    assert (log_decay < -rates[:, None]).all() and (log_decay >= -(rates + steps)[:, None]).all()
    assert log_decay.std(2).min() > 0  # the decay depends on the token
    soft = make("lion_s_hippo", spread=1.0, spectrum="s4d_real", decay_gate="softplus").decays[0]
    soft = soft(x, x.new_zeros(2, HEADS, 30, DIM // HEADS)).log_decay
    assert not torch.allclose(soft, log_decay) and (soft < -rates[:, None]).all()


@pytest.mark.parametrize("spectrum", ["s4d_real", "s4d_lin", "legs"])
def test_zero_order_hold(spectrum):
    """Check Eq. 238 with complex eigenvalues, one for both dimensions of a pair."""
    decay = make("lion_d_hippo", spectrum=spectrum).decays[0]
    rate = decay.log_rate.detach().exp()
    dt = decay.log_dt.detach().exp()
    eigenvalue = torch.complex(-rate, torch.zeros_like(rate) if decay.frequency is None else decay.frequency.detach())
    wanted = (((eigenvalue * dt).exp() - 1) / eigenvalue).abs()
    wanted, dt = (torch.cat([x.view(HEADS, -1)] * (2 if decay.pairs else 1), -1) for x in (wanted, dt))
    close(decay.zero_order_hold(), wanted, rtol=1e-9, atol=0)
    close(decay.zero_order_hold(per_step=True), wanted / dt, rtol=1e-9, atol=0)


def test_a_scalar_decay_holds_all_dimensions_of_a_head():
    assert make("lion_s_hippo", decay_shape="scalar").decays[0].zero_order_hold().shape == (HEADS, DIM // HEADS)


@both
@pytest.mark.parametrize("spectrum", ["s4d_real", "legs"])
def test_padding_wherever_it_is(mixer, spectrum):
    layer = make(mixer, spectrum=spectrum)
    for form, size in SHORT_FORMS:
        set_form(layer, form, size)
        check_padding(layer, PADDED, None)


@both
def test_settings_of_any_attention_do(mixer):
    layer = make_mixer(mixer, DIM, HEADS, AttentionConfig(direction="forward"))
    assert (layer.config.spectrum, layer.config.decay_shape, layer.causal) == ("legs", "vector", True)
    assert make(mixer, decay_shape="scalar").config.spectrum == "s4d_real"  # a spectrum without rotation


def test_what_does_not_go_together():
    for settings, words in (
        ({"spectrum": "legs", "decay_shape": "scalar"}, "spectrum: 'legs' rotates pairs"),
        ({"decay_gate": "sigmoid"}, "decay_gate: mixer 'lion_d_hippo' has none"),
        ({"dt_min": 0.5}, "dt_min: 0.5 is above dt_max 0.1"),
        ({"spectrum": "hippo"}, "spectrum: 'hippo' is not a choice"),
    ):
        invalid(words, HippoAttention, DIM, HEADS, "lion_d_hippo", **settings)
    message = "spectrum: 's4d_lin' rotates pairs of key dimensions, a head has 3 dimensions: use s4d_real"
    invalid(message, HippoAttention, 9, 3, "lion_d_hippo", spectrum="s4d_lin")


@pytest.mark.parametrize("shape", ["vector", "scalar"])
def test_four_thousand_tokens(shape):
    """Check that a token acts over 4,000 tokens, with chunks in float32 against steps in float64."""
    layer = HippoAttention(DIM, HEADS, "lion_s_hippo", dt_min=1e-4, decay_shape=shape, form="chunk")
    with torch.no_grad():
        layer.decays[0].log_dt.fill_(math.log(1e-4))
    x = torch.randn(1, 4096, DIM, requires_grad=True)
    y = layer(x)
    y[0, -1].sum().backward()
    assert x.grad[0, 0].abs().max() > 1e-7 and x.grad.isfinite().all()
    double = layer.double()
    set_form(double, "rnn", 512)
    with torch.inference_mode():
        close(y.double(), double(x.double()), atol=2e-5, rtol=1e-3)
