"""Vim: its published recurrence in every form and direction, padding, packing, streams and extreme decays."""

import copy
import io
import math

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import VIM, VimMixer, make_mixer, resolve_mixer
from lion.layers.mixers.attention import AttentionConfig
from lion.layers.mixers.base import set_form
from lion.trainer.optim import factors
from tests.layers.test_attention import PACKED, PADDED, check_padding

DIM, STATE = 18, 3  # rank 2
DIRECTIONS = ("both", "forward", "backward")
FORMS = (("chunk", 4), ("chunk", 64), ("rnn", 1), ("rnn", 4))
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def layer(direction="both", **settings):
    torch.manual_seed(0)
    made = VimMixer(DIM, 3, direction=direction, **{"state": STATE, **settings}).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def tokens(length, batch=2, seed=1):
    return torch.randn(batch, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(made):
    return {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}


def silu(x):
    return x / (1 + torch.exp(-x))


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
    rank, state = w["step.weight"].shape[1], w["a"].shape[1]
    taps = w["convolution.weight"].flip(0) if reverse else w["convolution.weight"]  # the oldest token comes first
    A, h, rows = -torch.exp(w["a"]), torch.zeros_like(w["a"]), []
    for t in range(len(u)):
        seen = [(k, t - len(taps) + 1 + k) for k in range(len(taps))]
        v = silu(w["convolution.bias"] + sum(taps[k] * u[i] for k, i in seen if i >= 0))
        low, B, C = (v @ w["select.weight"].T).split([rank, state, state])
        dt = torch.log(1 + torch.exp(low @ w["step.weight"].T + w["step_bias"]))
        h = torch.exp(dt[:, None] * A) * h + (dt * v)[:, None] * B
        rows.append(h @ C + w["skip"] * v)
    return torch.stack(rows)


def close(got, want, tolerance=1e-11):
    torch.testing.assert_close(got.double(), want, atol=tolerance * max(1, want.abs().max().item()), rtol=0)


@every_direction
@pytest.mark.parametrize("length", [1, 3, 21])
def test_values_and_gradients_are_those_of_the_published_recurrence(direction, length):
    made, x = layer(direction), tokens(length)
    w, given = weights(made), x.clone().requires_grad_()
    want = torch.stack([oracle(w, row, direction) for row in given])
    projection = tokens(length, seed=2)
    (want * projection).sum().backward()
    for form, size in FORMS:
        set_form(made, form, size)
        made.zero_grad()
        own = x.clone().requires_grad_()
        got = made(own)
        close(got, want)
        with torch.no_grad():
            close(made(x), want)
        (got * projection).sum().backward()
        close(own.grad, given.grad)
        for name, p in made.named_parameters():
            close(p.grad, w[name].grad)
            assert length < 3 or w[name].grad.abs().max() > 1e-4, f"{name} does not matter"
        close(copy.deepcopy(made).float()(x.float()), want, 5e-5)


@every_direction
@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("valid, segments", [(PADDED, None), (None, PACKED), (PADDED, PACKED)])
def test_padding_and_packing_are_separate_rows(direction, size, valid, segments):
    torch.manual_seed(0)
    made = VimMixer(12, 3, direction=direction, state=4).double()
    set_form(made, "chunk", size)
    check_padding(made, valid, segments)


@torch.no_grad()
def test_steps_are_the_whole_sequence():
    made, x = layer("forward"), tokens(20)
    whole = made(x)
    for pieces in ([1] * 20, [3, 1, 9, 7], [20]):
        state, out = made.initial_state(2), []
        for piece in x.split(pieces, 1):
            y, state = made.step(piece, state)
            out.append(y)
        close(torch.cat(out, 1), whole)
    for prompt in (1, 7, 16):
        y, state = made.prefill(x[:, :prompt])
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        rest, _ = made.step(x[:, prompt:], torch.load(file, weights_only=True))
        close(torch.cat([y, rest], 1), whole)
        for part, first in zip(state, made.initial_state(2), strict=True):
            assert part.shape == first.shape and part.dtype == first.dtype


@torch.no_grad()
def test_a_stream_skips_padding_and_continues_the_last_segment():
    made, x = layer("forward"), tokens(14, batch=3)
    valid = torch.ones(3, 10, dtype=torch.bool)
    valid[0, 2:5], valid[1, :4], valid[1, 8:], valid[2] = False, False, False, False
    x[:, :10][~valid] = torch.nan
    prefilled = made.prefill(x[:, :10], Layout.of(x[:, :10], valid))
    state, out = made.initial_state(3), []
    for begin, end in ((0, 3), (3, 4), (4, 10)):
        y, state = made.step(x[:, begin:end], state, valid[:, begin:end])
        out.append(y)
    segments = torch.tensor([[0] * 5 + [1] * 5, [0] * 2 + [1] * 7 + [-1], [0] * 10])
    _, packed = made.prefill(x[:, :10].nan_to_num(), Layout.of(x[:, :10], segments=segments))
    for y, last in (prefilled, (torch.cat(out, 1), state)):
        rest, _ = made.step(x[:, 10:], last)
        for row, kept in enumerate(valid):
            alone = made(torch.cat([x[row, :10][kept], x[row, 10:]])[None])[0]
            close(torch.cat([y[row][kept], rest[row]]), alone)
    rest, _ = made.step(x[:, 10:], packed)
    for row, first, last in ((0, 5, 10), (1, 2, 9)):
        alone = made(torch.cat([x[row, first:last].nan_to_num(), x[row, 10:]])[None])[0, last - first :]
        close(rest[row], alone)


@every_direction
@pytest.mark.parametrize("bias", [-200.0, 200.0, 1e4])  # dt is 0, or so large that a token forgets all others
def test_extreme_decays_stay_exact(direction, bias):
    made, x = layer(direction), tokens(20)
    with torch.no_grad():
        for side in made.sides:
            side.step_bias.fill_(bias)
            side.convolution.weight.zero_()
            side.convolution.weight[-1 if not side.reverse else 0] = 1.0  # each token's own channel alone
    if bias > 0:
        close(made(x), torch.cat([made(x[:, t : t + 1]) for t in range(20)], 1))
    narrow, own = copy.deepcopy(made).float(), x.float().requires_grad_()
    y = narrow(own)
    y.sum().backward()
    assert all(part.isfinite().all() for part in (y, own.grad, *(p.grad for p in narrow.parameters())))


@every_direction
def test_autocast_keeps_steps_and_states_in_float32(direction):
    made, x = layer(direction).float(), tokens(40).float()
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
    made, x = layer(direction).float(), tokens(8).float()
    with torch.no_grad():
        for side in made.sides:
            side.a.fill_(200)
    valid = torch.arange(8) < torch.tensor([[8], [5]])
    y = made(x, Layout.of(x, valid))[valid]
    y.sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in made.parameters())
    with torch.no_grad():
        for side in made.sides:
            side.a.fill_(80)
    torch.testing.assert_close(made(x, Layout.of(x, valid))[valid], y)


@pytest.mark.compiled
def test_compiled_values_and_gradients_are_those_of_the_eager_layer():
    """Check the compiled steps inside a graph, with a last step that is filled up, segments and padding."""
    made, x = layer(chunk_size=2).float(), tokens(7).float()
    segments = torch.tensor([[0] * 3 + [1] * 4, [0] * 2 + [-1] * 2 + [1] * 3])
    layout, projection = Layout.of(x, segments=segments), tokens(7, seed=2).float()

    def results(run):
        made.zero_grad()
        y = run(x, layout).masked_fill((segments < 0)[..., None], 0)
        (y * projection).sum().backward()
        return [y, *(p.grad.clone() for p in made.parameters())]

    for got, want in zip(
        results(torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)), results(made)
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_the_start_is_the_published_one():
    torch.manual_seed(0)
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
    for settings in ({"feature_map": "elu1"}, {"scans": ("row_snake",)}, {"score_dropout": 0.1}, {"rotation": "rope"}):
        with pytest.raises(
            ValueError, match="not available with mixer 'vim', which has expand, state, block, conv_width, direction"
        ):
            VimMixer(DIM, 3, **settings)
    with pytest.raises(ValueError, match="form 'full' is not available with mixer 'vim', which has chunk, rnn"):
        VimMixer(DIM, 3, form="full")
    with pytest.raises(ValueError, match="form: VimMixer has only chunk, rnn, got 'full'"):
        set_form(VimMixer(DIM, 3), "full")
    with pytest.raises(ValueError, match=r"x: expected tokens \(B, L >= 1, 18\), got shape \(2, 18\)"):
        VimMixer(DIM, 3)(torch.randn(2, 18))
    with pytest.raises(ValueError, match=r"x: expected tokens \(B, L >= 1, 18\), got shape \(2, 0, 18\)"):
        VimMixer(DIM, 3)(torch.randn(2, 0, 18))
    with pytest.raises(ValueError, match="only 'forward' streams, this layer has 'both'"):
        VimMixer(DIM, 3).prefill(torch.randn(2, 3, 18))
    assert make_mixer(VIM, DIM, 3, AttentionConfig()).config == resolve_mixer(VIM, VimMixer.Config())
