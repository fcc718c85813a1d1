"""Vim: its published recurrence in every form and direction, padding, packing, streams and extreme decays."""

import math

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import VIM, VimMixer, make_mixer, resolve_mixer
from lion.layers.mixers.base import set_form
from lion.layers.mixers.config import AttentionConfig
from lion.trainer.optim import factors
from tests.ops.helpers import pairwise

from .helpers import (
    DIRECTIONS,
    MASKS,
    check_finite,
    check_oracle,
    check_padding,
    invalid,
    near,
    of_rows,
    perturbed,
    tokens,
)
from .oracle_parts import silu

DIM, STATE = 18, 3  # rank 2
FORMS = (("chunk", 4), ("chunk", 64), ("rnn", 1), ("rnn", 4))
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def layer(direction="both", **settings):
    torch.manual_seed(0)
    return perturbed(VimMixer(DIM, 3, direction=direction, **{"state": STATE, **settings}))


def oracle(w, x, direction):
    """Compute Vim's Algorithm 1 for one row x (L, dim): the backward direction scans the reversed sequence."""
    u, z = (x @ w["inputs.weight"].T).chunk(2, -1)
    ways = {"both": (False, True), "forward": (False,), "backward": (True,)}[direction]
    y = 0
    for number, reverse in enumerate(ways):
        side = {name.removeprefix(f"sides.{number}."): p for name, p in w.items()}
        y = y + (scan(side, u.flip(0), True).flip(0) if reverse else scan(side, u, False)) * silu(z)
    return (y / len(ways)) @ w["proj.weight"].T


def scan(w, u, reverse):
    """Compute Mamba's Algorithm 2 for one row u (L, E), token by token; the taps of the convolution are causal."""
    rank = w["step.weight"].shape[1]
    state = w["a"].shape[1]
    taps = w["convolution.weight"].flip(0) if reverse else w["convolution.weight"]  # the oldest token comes first
    A = -torch.exp(w["a"])
    h = torch.zeros_like(w["a"])
    rows = []
    for t in range(len(u)):
        seen = [(k, t - len(taps) + 1 + k) for k in range(len(taps))]
        v = silu(w["convolution.bias"] + sum(taps[k] * u[i] for k, i in seen if i >= 0))
        low, B, C = (v @ w["select.weight"].T).split([rank, state, state])
        dt = torch.log(1 + torch.exp(low @ w["step.weight"].T + w["step_bias"]))
        h = torch.exp(dt[:, None] * A) * h + (dt * v)[:, None] * B
        rows.append(h @ C + w["skip"] * v)
    return torch.stack(rows)


@every_direction
@pytest.mark.parametrize("length", [1, 3, 21])
def test_values_and_gradients_are_those_of_the_published_recurrence(direction, length):
    check_oracle(layer(direction), of_rows(oracle, direction), tokens(length, dim=DIM), FORMS, 1e-11, 5e-5)


@pytest.mark.parametrize("direction, size, masks", pairwise(DIRECTIONS, (1, 3, 64), range(3)))
def test_padding_and_packing_are_separate_rows(direction, size, masks):
    made = VimMixer(12, 3, direction=direction, state=4).double()
    set_form(made, "chunk", size)
    check_padding(made, *MASKS[masks])


@every_direction
@pytest.mark.parametrize("bias", [-200.0, 200.0, 1e4])  # dt is 0, or so large that a token forgets all others
def test_extreme_decays_stay_exact(direction, bias):
    made = layer(direction)
    x = tokens(20, dim=DIM)
    with torch.no_grad():
        for side in made.sides:
            side.step_bias.fill_(bias)
            side.convolution.weight.zero_()
            side.convolution.weight[-1 if not side.reverse else 0] = 1.0  # each token's own channel alone
    if bias > 0:
        near(made(x), torch.cat([made(x[:, t : t + 1]) for t in range(20)], 1))
    check_finite(made.float(), x.float())


@every_direction
def test_autocast_keeps_steps_and_states_in_float32(direction):
    made = layer(direction).float()
    x = tokens(40, dim=DIM).float()
    want = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = made(x)
        selection = made.sides[0].selection(torch.randn(2, 3, 2 * DIM).bfloat16(), Layout())
    assert got.dtype == torch.bfloat16 and (got - want).abs().max() < 0.05 * want.abs().max()
    assert selection.dt.dtype == torch.float32 and selection.x.dtype == torch.bfloat16
    if direction == "forward":
        with torch.autocast("cpu", torch.bfloat16):
            assert made.prefill(x)[1].h.dtype == torch.float32
        assert made.bfloat16().initial_state(2).h.dtype == torch.float32


@every_direction
def test_rates_beyond_the_range_of_float32_forget_everything(direction):
    made = layer(direction).float()
    x = tokens(8, dim=DIM).float()
    with torch.no_grad():
        for side in made.sides:
            side.a.fill_(200)
    valid = torch.arange(8) < torch.tensor([[8], [5]])
    y = check_finite(made, x, Layout.of(x, valid))[valid]
    with torch.no_grad():
        for side in made.sides:
            side.a.fill_(80)
    torch.testing.assert_close(made(x, Layout.of(x, valid))[valid], y)


@pytest.mark.every  # tests/ops/test_piecewise.py compiles a Vim layer of all batch sizes
@pytest.mark.compiled
def test_compiled_values_and_gradients_are_those_of_the_eager_layer():
    """Check the compiled steps inside a graph, with a last step that is filled up, segments and padding."""
    made = layer("backward", chunk_size=2).float()
    x = tokens(3, dim=DIM).float()
    segments = torch.tensor([[0, 1, 1], [0, -1, 1]])
    layout = Layout.of(x, segments=segments)
    projection = tokens(3, seed=2, dim=DIM).float()

    def results(run):
        made.zero_grad()
        y = run(x, layout).masked_fill((segments < 0)[..., None], 0)
        (y * projection).sum().backward()
        return [y, *(p.grad.clone() for p in made.parameters())]

    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    for got, want in zip(results(compiled), results(made)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_the_start_is_the_published_one():
    made = VimMixer(192, 3)
    for side in made.sides:
        torch.testing.assert_close(-side.rates(torch.float32), torch.arange(1.0, 17).expand(384, 16))
        dt = torch.nn.functional.softplus(side.step_bias)
        assert 1e-3 <= dt.min() < 2e-3 and 0.05 < dt.max() <= 0.1 + 1e-6
        assert side.step.weight.shape == (384, 12) and side.skip.eq(1).all()
        assert 0.95 < side.step.weight.abs().max() * math.sqrt(12) <= 1
    spared = {name for name, factor in factors(made, "deit").items() if not factor.weight_decay}
    names = ("convolution.bias", "step_bias", "a", "skip")
    assert spared == {f"sides.{side}.{name}" for side in (0, 1) for name in names}


def test_settings_of_other_mixers_are_refused():
    other = "a setting of attention layers, which state space mixers do not have"
    invalid(other, VimMixer, DIM, 3, scans=("row_snake",))
    invalid("form 'full' is not available with mixer 'vim', which has chunk, rnn", VimMixer, DIM, 3, form="full")
    invalid("form: VimMixer has only chunk, rnn, got 'full'", set_form, VimMixer(DIM, 3), "full")
    assert make_mixer(VIM, DIM, 3, AttentionConfig()).config == resolve_mixer(VIM, VimMixer.Config())
