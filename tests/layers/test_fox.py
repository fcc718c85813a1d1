"""FoX: the published formula token by token, both directions, padding, packing, streams and extreme gates."""

import math

import pytest
import torch

from lion.layers.layout import Layout
from lion.layers.mixers import ForgettingAttention, make_mixer
from lion.layers.mixers.attention import AttentionConfig
from lion.ops import DIRECTIONS

DIM, HEADS = 24, 3


def layer(direction="forward", bias=0.0, **settings):
    torch.manual_seed(0)
    made = ForgettingAttention(DIM, HEADS, direction=direction, **settings).double().eval()
    with torch.no_grad():
        made.decay.gate.bias.fill_(bias)
    return made


def tokens(length, batch=2, seed=1):
    return torch.randn(batch, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def oracle(w, x, direction):
    """Compute FoX for one row x (L, dim) as printed: scores plus the sum of log forget gates between two tokens."""
    length, size = len(x), DIM // HEADS
    q, k, v = (x @ w["qkv.weight"].T + w.get("qkv.bias", 0)).unflatten(-1, (3, HEADS, size)).unbind(1)
    f = 1 / (1 + torch.exp(-(x @ w["decay.gate.weight"].T + w["decay.gate.bias"])))
    rows = []
    for i in range(length):
        heads = []
        for h in range(HEADS):
            seen = {"forward": range(i + 1), "backward": range(i, length), "both": range(length)}[direction]
            scores = []
            for j in seen:
                low, high = min(i, j), max(i, j)
                between = range(low, high) if direction == "backward" else range(low + 1, high + 1)
                gate = math.prod([f[l, h] for l in between], start=torch.ones((), dtype=x.dtype))
                scores.append(torch.exp(q[i, h] @ k[j, h] / math.sqrt(size)) * gate)
            total = sum(scores)
            heads.append(sum(s * v[j, h] for s, j in zip(scores, seen)) / total)
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ w["proj.weight"].T + w["proj.bias"]


def weights(made):
    return {name: p.detach().clone() for name, p in made.named_parameters()}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [0.0, 6.0, -6.0])
def test_values_and_gradients_are_those_of_the_formula(direction, bias):
    made, x = layer(direction, bias), tokens(9)
    w = {name: p.requires_grad_() for name, p in weights(made).items()}
    given, own = (x.clone().requires_grad_() for _ in range(2))
    want = torch.stack([oracle(w, row, direction) for row in given])
    got = made(own)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    projection = tokens(9, seed=2)
    (want * projection).sum().backward()
    (got * projection).sum().backward()
    torch.testing.assert_close(own.grad, given.grad, atol=1e-11, rtol=0)
    for name, p in made.named_parameters():
        torch.testing.assert_close(p.grad, w[name].grad, atol=1e-11, rtol=0)
        assert p.grad.abs().max() > 0 or name == "qkv.bias"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_and_packing_are_separate_rows(direction):
    made, x = layer(direction), tokens(12)
    segments = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [-1] * 2 + [0] * 7 + [1] * 3])
    x = x.masked_fill((segments < 0)[..., None], float("nan"))
    y = made(x, Layout.of(x, segments=segments))
    for row in range(2):
        for segment in (0, 1):
            own = segments[row] == segment
            torch.testing.assert_close(y[row, own], made(x[row : row + 1, own])[0], atol=1e-12, rtol=0)


def test_steps_are_the_whole_sequence():
    made, x = layer(), tokens(14)
    whole = made(x)
    y, state = made.prefill(x[:, :5])
    outputs = [y]
    for start, end in ((5, 6), (6, 9), (9, 14)):
        y, state = made.step(x[:, start:end], state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=0)
    state, first = made.initial_state(2), []
    for t in range(14):
        y, state = made.step(x[:, t : t + 1], state)
        first.append(y)
    torch.testing.assert_close(torch.cat(first, 1), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [60.0, -60.0])
def test_saturated_gates(bias):
    """Gates of 1 are softmax attention; gates of 0 let every token see itself alone."""
    made, x = layer(bias=bias), tokens(300)
    if bias > 0:
        plain = make_mixer("softmax", DIM, HEADS, AttentionConfig(direction="forward")).double()
        plain.load_state_dict({n: p for n, p in made.state_dict().items() if not n.startswith("decay")})
        torch.testing.assert_close(made(x), plain(x), atol=1e-12, rtol=0)
    else:
        own = torch.cat([made(x[:, t : t + 1]) for t in range(300)], 1)
        torch.testing.assert_close(made(x), own, atol=1e-12, rtol=0)
    x = x.float().requires_grad_()
    made.float()(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in made.parameters()) and x.grad.isfinite().all()


def test_settings_of_linear_mixers_are_refused():
    for settings in ({"form": "chunk"}, {"normalize": "sum"}, {"scans": ("row_snake",)}):
        with pytest.raises(ValueError, match="fox"):
            ForgettingAttention(DIM, HEADS, **settings)


@torch.no_grad()
def test_sums_lose_nothing_over_a_long_stream():
    """Check float32 against float64 after 2,000 tokens, and after others whose gates have summed up to -1e6."""
    made, x = layer(), tokens(2000, batch=1)
    want, narrow = made(x), layer().float()
    torch.testing.assert_close(narrow(x.float()).double(), want, atol=2e-6, rtol=0)
    state = narrow.prefill(x[:, :1990].float())[1]
    for before in (0, -1e6):
        y, _ = narrow.step(x[:, 1990:].float(), state._replace(sums=state.sums + before))
        torch.testing.assert_close(y.double(), want[:, 1990:], atol=2e-6, rtol=0)
