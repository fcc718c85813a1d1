"""FoX: the published formula token by token, both directions, padding, packing, streams and extreme gates."""

import math

import pytest
import torch

from lion.layers.mixers import ForgettingAttention, make_mixer
from lion.layers.mixers.config import AttentionConfig
from lion.ops import DIRECTIONS

from .helpers import DIM, HEADS, check_finite, check_oracle, close, invalid, of_rows, tokens


def layer(direction="forward", bias=0.0, **settings):
    torch.manual_seed(0)
    made = ForgettingAttention(DIM, HEADS, direction=direction, **settings).double().eval()
    with torch.no_grad():
        made.decay.gate.bias.fill_(bias)
    return made


def oracle(w, x, direction):
    """Compute FoX for one row x (L, dim) as printed: scores plus the sum of log forget gates between two tokens."""
    length = len(x)
    size = DIM // HEADS
    q, k, v = (x @ w["qkv.weight"].T + w.get("qkv.bias", 0)).unflatten(-1, (3, HEADS, size)).unbind(1)
    f = 1 / (1 + torch.exp(-(x @ w["decay.gate.weight"].T + w["decay.gate.bias"])))
    rows = []
    for i in range(length):
        heads = []
        for h in range(HEADS):
            seen = {"forward": range(i + 1), "backward": range(i, length), "both": range(length)}[direction]
            scores = []
            for j in seen:
                low = min(i, j)
                high = max(i, j)
                between = range(low, high) if direction == "backward" else range(low + 1, high + 1)
                gate = math.prod([f[l, h] for l in between], start=torch.ones((), dtype=x.dtype))
                scores.append(torch.exp(q[i, h] @ k[j, h] / math.sqrt(size)) * gate)
            total = sum(scores)
            heads.append(sum(s * v[j, h] for s, j in zip(scores, seen)) / total)
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ w["proj.weight"].T + w["proj.bias"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [0.0, 6.0, -6.0])
def test_values_and_gradients_are_those_of_the_formula(direction, bias):
    check_oracle(layer(direction, bias), of_rows(oracle, direction), tokens(9), [None], 1e-11)


@pytest.mark.parametrize("bias", [60.0, -60.0])
def test_saturated_gates(bias):
    """Gates of 1 are softmax attention; gates of 0 let every token see itself alone."""
    made = layer(bias=bias)
    x = tokens(300)
    if bias > 0:
        plain = make_mixer("softmax", DIM, HEADS, AttentionConfig(direction="forward")).double()
        plain.load_state_dict({n: p for n, p in made.state_dict().items() if not n.startswith("decay")})
        close(made(x), plain(x), 1e-12)
    else:
        own = torch.cat([made(x[:, t : t + 1]) for t in range(300)], 1)
        close(made(x), own, 1e-12)
    check_finite(made.float(), x.float())


def test_settings_of_linear_mixers_are_refused():
    for settings in ({"form": "chunk"}, {"normalize": "sum"}, {"scans": ("row_snake",)}):
        invalid("fox", ForgettingAttention, DIM, HEADS, **settings)


@torch.no_grad()
@pytest.mark.slow
def test_sums_lose_nothing_over_a_long_stream():
    """Check float32 against float64 after 2,000 tokens, and after others whose gates have summed up to -1e6."""
    made = layer()
    x = tokens(2000, batch=1)
    want = made(x)
    narrow = layer().float()
    close(narrow(x.float()).double(), want, 2e-6)
    state = narrow.prefill(x[:, :1990].float())[1]
    for before in (0, -1e6):
        y, _ = narrow.step(x[:, 1990:].float(), state._replace(sums=state.sums + before))
        close(y.double(), want[:, 1990:], 2e-6)
