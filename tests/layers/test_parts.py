"""Published blocks: their formulas in plain code around the heads, whose recurrences `test_mixers` checks."""

from dataclasses import dataclass, field, fields, replace

import pytest
import torch
import torch.nn.functional as F

from lion.config import build
from lion.layers.convolution import AdaptiveTokenShift, TokenShift
from lion.layers.layout import Layout
from lion.layers.mixers import MIXERS, AttentionConfig, LionAttention, make_mixer, set_form
from lion.layers.mixers.delta import RWKV7Attention
from lion.layers.mixers.fox import FOX
from lion.layers.mixers.linear_transformers import RWKV6Attention
from lion.layers.mixers.parts import Parts
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.softmax import SoftmaxAttention

from .helpers import PACKED, PADDED, check_padding, close, doubles, invalid, perturbed
from .test_streams import check_padded_steps, check_steps

ALL = Parts(
    token_shift=True,
    key_heads=1,
    value_ratio=2,
    conv_width=3,
    kv_shift=True,
    qk_norm="rmsnorm",
    value_map="silu",
    skip=True,
    head_norm="groupnorm",
    bonus=True,
    out_norm="rmsnorm",
    out_gate="silu",
    out_gate_rank=2,
    gate_first=True,
)
PUBLISHED = [name for name, entry in MIXERS.items() if getattr(entry.fields, "published", None)] + [FOX]
every_case = pytest.mark.parametrize("mixer", [*PUBLISHED, "lion_s, all parts", "softmax, all parts"])
every_direction = pytest.mark.parametrize("direction", ["both", "forward"])


# What each publication has around its recurrence, copied from it (or from recipes.md, section 8.3), not from the code.
CONVOLVED = dict(feature_map="silu_unit", conv_width=4, value_map="silu", head_norm="rmsnorm")  # unit q and k
LOW_RANK = dict(out_gate="sigmoid", out_gate_rank=0)  # 0: the head dimension
NORM_AND_GATE = dict(head_norm="groupnorm", out_gate="silu")
PUBLICATIONS = {
    "deltanet": CONVOLVED,
    "gated_deltanet": dict(CONVOLVED, value_ratio=2, out_gate="silu"),
    "kda": CONVOLVED | LOW_RANK,
    "gdn2": CONVOLVED | LOW_RANK,
    "comba": dict(CONVOLVED, value_ratio=2, out_gate="sigmoid"),
    "deltaproduct": dict(CONVOLVED, value_ratio=2, out_gate="silu", householders=2, negative_eigenvalues=True),
    "rwkv7": dict(token_shift=True, head_norm="groupnorm", bonus=True, out_gate="inner_sigmoid", out_gate_rank=128),
    "fox": dict(kv_shift=True, qk_norm="rmsnorm", head_norm="rmsnorm", out_gate="sigmoid"),
    "mamba": dict(value_map="silu", skip=True, out_gate="silu"),
    "mamba2": dict(key_heads=1, value_ratio=2, conv_width=4, feature_map="silu", value_map="silu", skip=True)
    | dict(out_gate="silu", gate_first=True, out_norm="rmsnorm"),
    "retnet": dict(NORM_AND_GATE, value_ratio=2, rotation="rope"),
    "rwkv6": dict(NORM_AND_GATE, token_shift=True),
    "gla": NORM_AND_GATE,
    "hgrn2": dict(feature_map="silu", value_map="silu", out_norm="rmsnorm"),
    "xlstm": dict(conv_width=4, conv_first=True, head_norm="groupnorm", out_gate="sigmoid", normalize="max"),
}


class EveryPart(SoftmaxAttention):
    published = ALL


@pytest.fixture(autouse=True)
def mixers_with_all_parts(monkeypatch):
    lion_s = MIXERS["lion_s"]
    all_parts = lion_s._replace(fields=replace(lion_s.fields, published=ALL))
    monkeypatch.setitem(MIXERS, "lion_s, all parts", all_parts)
    monkeypatch.setitem(MIXERS, "softmax, all parts", Entry(EveryPart))


def test_published_blocks_have_the_settings_of_their_publication():
    names = {field.name for field in fields(Parts)}
    for mixer in PUBLISHED:
        layer = make_mixer(mixer, 12, 3, AttentionConfig(block="published"))
        wanted = PUBLICATIONS[mixer]
        assert layer.parts == Parts(**{name: value for name, value in wanted.items() if name in names}), mixer
        for name in wanted.keys() - names:
            assert getattr(layer.config, name) == wanted[name], (mixer, name)


def make(mixer, direction="both", block="published"):
    torch.manual_seed(0)
    return perturbed(make_mixer(mixer, 12, 3, AttentionConfig(direction=direction, block=block)), 0.1)


def formula(layer, x, direction):
    """Compute a layer of x (B, L, dim) in plain code; only the mixing of heads is the layer's."""
    c = layer.parts
    H = 3
    width = layer.value_dim * H
    other = neighbours(x, direction)
    shifted = [x] * 5 if not c.token_shift else [x + mu * (other - x) for mu in mixes(layer.token_shift, x, other)]
    for_decay = torch.cat(shifted[3:-1], -1)
    if c.conv_first:
        convolved = F.silu(convolve(layer, x, direction))
        shifted[:2] = convolved, convolved
    biases = layer.qkv.bias.split(layer.widths)
    q, k, v = (F.linear(*part) for part in zip(shifted, layer.qkv.weight.split(layer.widths), biases))
    if c.conv_width and not c.conv_first:
        q, k, v = convolve(layer, torch.cat([q, k, v], -1), direction).split(layer.widths, -1)
    if c.kv_shift:
        for_k, for_v = (x @ layer.kv_shift.share.weight.T).sigmoid().split((layer.key_heads, H), -1)
        k = data_shift(k, for_k, direction)
        v = data_shift(v, for_v, direction)
    if c.value_map == "silu":
        v = v * torch.sigmoid(v)
    shared = H // layer.key_heads
    q, k = (t.split(t.shape[-1] // layer.key_heads, -1) for t in (q, k))
    q, k = (torch.stack([t[h // shared] for h in range(H)], 1) for t in (q, k))
    v = torch.stack(v.chunk(H, -1), 1)
    if c.qk_norm == "rmsnorm":
        q, k = (rms(t) * norm.weight for t, norm in zip((q, k), layer.qk_norm))
    heads = layer.mix(for_decay, q, k, v, Layout())
    if c.skip:
        heads = torch.stack([heads[:, h] + layer.skip[h] * v[:, h] for h in range(H)], 1)
    if c.head_norm == "rmsnorm":
        heads = rms(heads) * layer.head_norm.weight
    y = heads.transpose(1, 2).reshape(*x.shape[:2], width)
    if c.head_norm == "groupnorm":
        eps = 64e-5 if isinstance(layer, (RWKV6Attention, RWKV7Attention)) else 1e-5
        y = F.group_norm(y.flatten(0, 1), H, layer.head_norm.weight, layer.head_norm.bias, eps).view_as(y)
    if c.conv_first:
        y = y + layer.conv_skip * convolved
    if c.bonus:
        keys = torch.stack([k[:, h] * rwkv7_factor(layer, for_decay, h) for h in range(H)], 1)
        score = torch.stack([(q[:, h] * keys[:, h]) @ layer.bonus[h] for h in range(H)], 1)
        y = y + (score[..., None] * v).transpose(1, 2).flatten(2)
    gate = 1
    if c.out_gate != "none":
        logits = shifted[-1]
        matrices = [part.weight.T for part in layer.out_gate if hasattr(part, "weight")]
        for i, matrix in enumerate(matrices):
            logits = (logits.sigmoid() if i and c.out_gate == "inner_sigmoid" else logits) @ matrix
        gate = {"silu": logits * logits.sigmoid(), "sigmoid": logits.sigmoid(), "inner_sigmoid": logits}[c.out_gate]
    if c.gate_first:
        y = y * gate
        gate = 1
    if c.out_norm == "rmsnorm":
        y = rms(y) * layer.out_norm.weight
    return F.linear(y * gate, layer.proj.weight, layer.proj.bias)


def neighbours(x, direction):
    """Return the token before each token of x (B, L, C), or the mean of both neighbours."""
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    after = F.pad(x, (0, 0, 0, 1))[:, 1:]
    return before if direction == "forward" else (before + after) / 2


def mixes(shift, x, other):
    """Compute the weights of a token shift: numbers, or RWKV-6's mu + tanh((x + mu_x (x' - x)) A) B."""
    if isinstance(shift, AdaptiveTokenShift):
        first = x + shift.first * (other - x)
        return [mu + torch.tanh(first @ shift.down[:, m]) @ shift.up[m] for m, mu in enumerate(shift.mix)]
    return shift.mix


def convolve(layer, x, direction):
    width = layer.parts.conv_width
    weight = layer.conv.weight.T[:, None]
    left = width - 1 if direction == "forward" else width // 2
    return F.conv1d(F.pad(x.mT, (left, width - 1 - left)), weight, layer.conv.bias, groups=len(weight)).mT


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def data_shift(x, share, direction):
    """Compute FoX's shift, `share` (B, L, heads) of the other token of x (B, L, C)."""
    share = share.repeat_interleave(x.shape[-1] // share.shape[-1], -1)
    return share * neighbours(x, direction) + (1 - share) * x


def rwkv7_factor(layer, x, head):
    """Compute `1 + (a - 1) k_a` of RWKV-7, with which the keys of its bonus are multiplied; 1 for other mixers."""
    if not isinstance(layer, RWKV7Attention):
        return 1
    rule = layer.decays[0]
    own = slice(4 * head, 4 * head + 4)
    a = (rule.a + x[..., -12:] @ rule.a_down.weight.T @ rule.a_up.weight.T).sigmoid()
    return (1 + (a - 1) * rule.k_a)[..., own]


@every_case
@every_direction
def test_parts_are_their_formulas(mixer, direction):
    """Check outputs and the gradients of the input and of all parameters."""
    layer = make(mixer, direction)
    x = torch.randn(2, 9, 12, dtype=torch.double, requires_grad=True)
    weight = doubles(2, 9, 12)
    leaves = [x, *layer.parameters()]
    found = []
    for form in ("full", "chunk", "rnn") if mixer == "lion_s, all parts" else ("auto",):
        set_form(layer, form, 4)
        y = layer(x)
        found.append((y, *torch.autograd.grad((y * weight).sum(), leaves)))
    y = formula(layer, x, direction)
    wanted = (y, *torch.autograd.grad((y * weight).sum(), leaves))
    for each in found:
        for got, want in zip(each, wanted):
            close(got, want, rtol=1e-10, atol=1e-11)


@torch.no_grad()
def test_decay_and_erase_of_rwkv7_read_their_own_mix():
    layer, x, y = make("rwkv7"), *doubles(2, 1, 5, 12)
    rule = layer.decays[0]
    k = doubles(1, 3, 5, 4)
    both, of_x, of_y = (rule(t, k) for t in (torch.cat([x, y], -1), x, y))
    assert layer.token_shift.mix.shape == (6, 12) and not torch.equal(of_x.k, of_y.k)
    assert torch.equal(both.log_decay, of_x.log_decay) and torch.equal(both.gates.erase, of_y.gates.erase)
    assert torch.equal(both.k, of_y.k)


@every_case
@every_direction
def test_padding_and_segments(mixer, direction):
    check_padding(make(mixer, direction), PADDED, PACKED)


@every_case
@torch.no_grad()
def test_streams(mixer):
    check_steps(make(mixer, "forward"), grows=mixer in (FOX, "softmax, all parts"))
    check_padded_steps(make(mixer, "forward"))


def test_token_shift_starts_half_way():
    x = torch.arange(1.0, 4)[None, :, None]
    assert torch.equal(AdaptiveTokenShift(1, 2)(x), TokenShift(1, 2)(x))
    assert type(make("rwkv6").token_shift) is AdaptiveTokenShift
    assert TokenShift(1, 1, "forward")(x).flatten().tolist() == [0.5, 1.5, 2.5]
    assert TokenShift(1, 1, "backward")(x).flatten().tolist() == [1.5, 2.5, 1.5]
    assert TokenShift(1, 2, "both")(x)[0].T.tolist() == [[1.0, 2.0, 2.0]] * 2


@torch.no_grad()
def test_every_mixer_has_both_blocks():
    """Check that a sweep over mixers can set `block`, which changes those alone that have parts to add."""
    x = doubles(1, 5, 12)
    for mixer in [name for name in MIXERS if "all parts" not in name]:
        plain, published = (make(mixer, "forward", block) for block in ("plain", "published"))
        assert torch.equal(plain(x), published(x)) == (mixer not in PUBLISHED), mixer


def test_published_blocks_are_overridden_by_settings():
    layer = LionAttention(12, 3, "mamba2", block="published", out_gate="none", conv_width=3)
    assert (layer.value_dim, layer.out_gate, layer.key_heads, layer.conv.offsets) == (8, None, 1, range(-1, 2))
    assert LionAttention(12, 3, "lion_s", block="published").config.conv_width == 0


def test_a_gate_has_the_rank_of_its_publication():
    def sizes(mixer, **settings):
        gate = LionAttention(12, 3, mixer, block="published", **settings).out_gate
        return [tuple(part.weight.shape) for part in gate if hasattr(part, "weight")]

    assert sizes("lion_s", out_gate="inner_sigmoid") == [(4, 12), (12, 4)]  # such a gate has some rank
    for mixer in ("kda", "gdn2"):
        assert sizes(mixer) == sizes(mixer, out_gate="sigmoid") == [(4, 12), (12, 4)]
        assert sizes(mixer, out_gate="silu") == [(12, 12)]


def test_parts_of_published_blocks_are_not_settings():
    """Check that a part that is set names what replaces it; stored recipes hold null for each."""
    invalid("token_shift: a part of published blocks", LionAttention, 12, 3, "rwkv6", token_shift=True)
    assert build(Holder, {"attention": {"token_shift": None}}, source=str).attention == AttentionConfig()
    message = "attention.token_shift: a part of published blocks"
    invalid(message, build, Holder, {"attention": {"token_shift": "true"}}, source=str)


@dataclass
class Holder:
    attention: AttentionConfig = field(default_factory=AttentionConfig)


def test_bad_parts():
    for mixer, settings, message in (
        ("xlstm", {"block": "published", "conv_width": 0}, "conv_width: the convolution of this block comes before"),
        ("lion_s", {"conv_width": -1}, "conv_width: expected at least 0, got -1"),
        ("lion_s", {"conv_width": "3"}, "conv_width: expected 3, got '3'"),
        ("lion_s", {"conv_width": 2.5}, "conv_width: expected a whole number, got 2.5"),
        ("lion_s", {"qkv_bias": "false"}, "qkv_bias: expected true or false, got 'false'"),
        ("lion_s", {"score_dropout": float("nan")}, "score_dropout: expected a number, got nan"),
        ("lion_s", {"block": "publishd"}, "block: 'publishd' is not a choice, did you mean 'published'"),
    ):
        invalid(message, LionAttention, 12, 3, mixer, **settings)
