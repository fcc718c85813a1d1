"""Hydra: its published matrix in every form and direction, padding, packing, streams, sizes and extreme decays."""

import copy
import io

import pytest
import torch

from lion.config import ConfigError, build
from lion.layers.layout import Layout
from lion.layers.mixers import HydraAttention, make_mixer, resolve_mixer
from lion.layers.mixers.attention import AttentionConfig
from lion.layers.mixers.base import set_form
from lion.models.encoder import Encoder, EncoderConfig
from lion.trainer.optim import factors
from tests.layers.test_attention import PACKED, PADDED, check_padding

DIM, HEADS, STATE, EPS = 8, 2, 5, 1e-5
DIRECTIONS = ("both", "forward", "backward")
FORMS = (("full", None), ("chunk", 4), ("chunk", 64), ("rnn", 1), ("rnn", 4))
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def layer(direction="both", **settings):
    torch.manual_seed(0)
    made = HydraAttention(DIM, HEADS, direction=direction, **{"state": STATE, **settings}).double().eval()
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


def oracle(w, u, direction, heads=HEADS):
    """Compute Hydra for one row u (L, dim) by the entries of its quasi-separable matrix (section 3 of the paper).

    With the shift of the released code, row i reads the query and the decays of its neighbour:
    `M_ij = C_{i-1} exp(A (dt_{j+1} + .. + dt_{i-1})) dt_j B_j` for j < i, and its mirror image for j > i.
    """
    sides = {"both": (-1, 1), "forward": (-1,), "backward": (1,)}[direction]
    inner, total, taps = w["proj.weight"].shape[1], len(w["inputs.weight"]), len(w["convolution.weight"])
    z, wide = (u @ w["inputs.weight"].T).split([inner, total - inner], -1)
    state = (total - 2 * inner) // (2 * len(sides))
    x, *vectors = silu(convolved(w, wide, direction, taps)).split([inner] + [state] * 2 * len(sides), -1)
    dt = torch.log1p(torch.exp((u @ w["steps.weight"].T).unflatten(-1, (len(sides), heads)) + w["step_bias"]))
    A, own = -torch.exp(w["a"]), x @ w["diagonal.weight"].T + w["skip"]
    x = x.unflatten(-1, (heads, -1))
    rows = []
    for i in range(len(u)):
        row = own[i, :, None] * x[i]
        for side, B, C, step in zip(sides, vectors[::2], vectors[1::2], dt.unbind(1)):
            reader = j = i + side
            log_decay = torch.zeros_like(A)
            while 0 <= j < len(u):
                row = row + (torch.exp(log_decay) * step[j] * (C[reader] @ B[j]))[:, None] * x[j]
                log_decay, j = log_decay + A * step[j], j + side
        rows.append(row.flatten())
    y = torch.stack(rows)
    y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + EPS) * w["norm.weight"] * silu(z)
    return y @ w["proj.weight"].T


def convolved(w, wide, direction, taps):
    """Compute the depthwise convolution of a row (L, C)."""
    before, rows = {"both": taps // 2, "forward": taps - 1, "backward": 0}[direction], []
    for i in range(len(wide)):
        seen = [t for t in range(taps) if 0 <= i - before + t < len(wide)]
        rows.append(w["convolution.bias"] + sum(w["convolution.weight"][t] * wide[i - before + t] for t in seen))
    return torch.stack(rows)


def close(got, want, tolerance=1e-11):
    torch.testing.assert_close(got.double(), want, atol=tolerance * max(1, want.abs().max().item()), rtol=0)


@every_direction
@pytest.mark.parametrize("length", [1, 2, 13])
def test_values_and_gradients_are_those_of_the_published_matrix(direction, length):
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
        (got * projection).sum().backward()
        close(own.grad, given.grad)
        for name, p in made.named_parameters():
            expected = torch.zeros_like(p) if w[name].grad is None else w[name].grad
            close(torch.zeros_like(p) if p.grad is None else p.grad, expected)
            assert length < 3 or expected.abs().max() > 1e-4, f"{name} does not matter"
        close(copy.deepcopy(made).float()(x.float()), want, 5e-5)


@every_direction
@pytest.mark.parametrize("form, size", [("full", None), ("chunk", 4), ("rnn", 2)])
@pytest.mark.parametrize("valid, segments", [(PADDED, None), (None, PACKED), (PADDED, PACKED)])
def test_padding_and_packing_are_separate_rows(direction, form, size, valid, segments):
    """Check that convolution, scans and shift let no token pass, which the released code does."""
    torch.manual_seed(0)
    made = HydraAttention(12, 3, direction=direction, state=4).double()
    set_form(made, form, size)
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
            assert part.untyped_storage().nbytes() == part.nbytes  # not a view, which would keep the prompt in memory


@torch.no_grad()
def test_a_stream_skips_padding_and_continues_the_last_segment():
    made, x = layer("forward"), tokens(14, batch=3)
    valid = torch.ones(3, 10, dtype=torch.bool)
    valid[0, 2:5], valid[1, :4], valid[1, 8:], valid[2] = False, False, False, False
    x[:, :10][~valid] = torch.nan
    prefilled = made.prefill(x[:, :10], Layout.of(x[:, :10], valid))
    state, out = made.initial_state(3), []
    for piece, real in zip(x[:, :10].split([1, 3, 6], 1), valid.split([1, 3, 6], 1)):
        y, state = made.step(piece, state, real)
        out.append(y)
    for y, end in (prefilled, (torch.cat(out, 1), state)):
        assert y.isfinite().all()
        rest, _ = made.step(x[:, 10:], end)
        for row, kept in enumerate(valid):
            want = made(torch.cat([x[row, :10][kept], x[row, 10:]])[None])[0]
            close(torch.cat([y[row, kept], rest[row]]), want)
    x = tokens(9)
    segments = torch.tensor([[0] * 5 + [1] * 4, [0] * 3 + [1] * 5 + [-1]])
    _, state = made.prefill(x, Layout.of(x, segments=segments))
    for row, (first, last) in enumerate(((5, 9), (3, 8))):
        for part, alone in zip(state, made.prefill(x[row : row + 1, first:last])[1]):
            close(part[row], alone[0])


@every_direction
def test_only_a_forward_layer_streams(direction):
    made = layer(direction)
    assert made.causal == (direction == "forward")
    if made.causal:
        with pytest.raises(ValueError, match="state: expected a HydraState"):
            made.step(tokens(1), ())
        return
    for call in (made.prefill, lambda x: made.step(x, ()), lambda x: made.initial_state(2)):
        with pytest.raises(ValueError, match=f"only 'forward' streams, this layer has '{direction}'"):
            call(tokens(3))


def test_alternating_blocks_go_forward_and_backward():
    attention = AttentionConfig(direction="alternating")
    encoder = Encoder(EncoderConfig("hydra", DIM, 2, HEADS, mlp="none", attention=attention).resolved()).double()
    x, other = tokens(9), tokens(9, seed=3)
    other[:, :4], other[:, 5:] = x[:, :4], x[:, 5:]
    moved = [(b.attention(other) - b.attention(x)).abs().amax((0, 2)) > 0 for b in encoder.blocks]
    assert [m.tolist() for m in moved] == [[False] * 4 + [True] * 5, [True] * 5 + [False] * 4]


@pytest.mark.parametrize(
    "dim, heads, count", [(192, 6, 280_466), (384, 12, 1_010_468), (768, 24, 3_825_224), (1024, 32, 6_705_248)]
)
def test_parameters_of_the_published_sizes(dim, heads, count):
    with torch.device("meta"):
        made = make_mixer("hydra", dim, heads, AttentionConfig())
    assert sum(p.numel() for p in made.parameters()) == count


def test_start_and_weight_decay():
    """Check A = -1, D = 1, steps from 0.001 to 0.1; none of them decays, as released."""
    made = HydraAttention(64, 64)
    assert made.a.eq(0).all() and made.skip.eq(1).all()
    steps = torch.nn.functional.softplus(made.step_bias)
    assert 0.0009 < steps.min() < 0.004 and 0.03 < steps.max() < 0.11
    decays = {name: factor.weight_decay for name, factor in factors(made, "deit").items()}
    assert all(decays[name] == 0 for name in ("step_bias", "a", "skip")) and decays["inputs.weight"] == 1


@every_direction
@pytest.mark.parametrize("scale", [1e3, 1e-3, 0.0])
def test_extreme_inputs_stay_finite(direction, scale):
    made, x = layer(direction).float(), (scale * tokens(70)).float().requires_grad_()
    for form, size in FORMS:
        set_form(made, form, size)
        made.zero_grad()
        y = made(x)
        y.sum().backward()
        assert all(t.isfinite().all() for t in (y, x.grad, *(p.grad for p in made.parameters()))), form


@torch.no_grad()
def test_saturated_decays():
    """Check decays of 0, where a token reads only its neighbours, and decays of nearly 1."""
    x = tokens(40)
    for bias, a in ((0.0, 12.0), (-12.0, -12.0)):
        made = layer()
        made.step_bias.fill_(bias), made.a.fill_(a)
        want = torch.stack([oracle(weights(made), row, "both") for row in x])
        for like, tolerance in ((made, 1e-11), (copy.deepcopy(made).float(), 5e-5)):
            for form, size in FORMS:
                set_form(like, form, size)
                close(like(x.to(like.a.dtype)), want, tolerance)


@every_direction
@torch.no_grad()
def test_autocast_stays_near_float32(direction):
    made, x = layer(direction).float(), tokens(70).float()
    for form, size in FORMS:
        set_form(made, form, size)
        want = made(x)
        with torch.autocast("cpu", torch.bfloat16):
            got = made(x)
        assert got.dtype == torch.bfloat16 and got.isfinite().all()
        assert (got - want).abs().max() < 0.05 * want.abs().max(), form


def test_settings():
    for settings in ({"feature_map": "relu"}, {"normalize": "sum"}, {"score_dropout": 0.1}, {"rotation": "rope"}):
        with pytest.raises(
            ValueError, match=f"{next(iter(settings))}: not available with mixer 'hydra', which has exp"
        ):
            resolve_mixer("hydra", AttentionConfig(**settings))
    with pytest.raises(ValueError, match="scans: not available"):
        HydraAttention(DIM, HEADS, scans=("row_snake", "column_snake"))
    with pytest.raises(ValueError, match="expand"):
        HydraAttention(DIM, HEADS, expand=0)
    with pytest.raises(ValueError, match="conv_width: mixer 'hydra' has a convolution, expected at least 1"):
        HydraAttention(DIM, HEADS, conv_width=0)
    with pytest.raises(ValueError, match="a multiple of num_heads=3, got 8"):
        HydraAttention(DIM, 3)
    with pytest.raises(ValueError, match="'alternating' is for a model"):
        HydraAttention(DIM, HEADS, direction="alternating")
    with pytest.raises(ValueError, match=r"x: expected tokens \(B, L >= 1, 8\), got shape \(2, 3, 7\)"):
        layer()(tokens(3)[..., :7])
    values = {"mixer": "hydra", "dim": 8, "depth": 1, "num_heads": 2}
    with pytest.raises(ConfigError, match=r"unknown key 'attention.stat': did you mean 'state'"):
        build(EncoderConfig, {**values, "attention": {"stat": 4}}, source=lambda key: "recipe")
    config = build(EncoderConfig, {**values, "attention": {"state": 4, "expand": 1}}, source=lambda key: "recipe")
    assert resolve_mixer("hydra", config.attention).conv_width == 7
    assert config.label() == "hydra expand 1, state 4" and not config.resolved().position_embedding
    assert config.with_mixer("softmax").attention == AttentionConfig()
