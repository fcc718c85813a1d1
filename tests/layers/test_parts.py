"""Published blocks: their formulas in plain code around the heads, whose recurrences `test_mixers` checks."""

import pytest
import torch
import torch.nn.functional as F

from lion.layers.convolution import TokenShift
from lion.layers.layout import Layout
from lion.layers.mixers import MIXERS, AttentionConfig, LionAttention, make_mixer, set_form
from lion.layers.mixers.fox import FOX
from tests.layers.test_attention import PACKED, PADDED, check_padding

PARTS = {
    "token_shift": True,
    "key_heads": 1,
    "value_ratio": 2,
    "conv_width": 3,
    "value_map": "silu",
    "skip": True,
    "head_norm": "groupnorm",
    "out_norm": "rmsnorm",
    "out_gate": "silu",
    "out_gate_rank": 2,
    "gate_first": True,
}
PUBLISHED = [name for name, entry in MIXERS.items() if getattr(entry.fields, "block", None)] + [FOX]
CASES = [(name, {"block": "published"}) for name in PUBLISHED] + [("lion_s", PARTS), ("softmax", PARTS)]
NAMES = [name if "block" in settings else f"{name}, all parts" for name, settings in CASES]
every_case = pytest.mark.parametrize(("mixer", "settings"), CASES, ids=NAMES)
every_direction = pytest.mark.parametrize("direction", ["both", "forward"])


def make(mixer, settings, direction="both"):
    torch.manual_seed(0)
    layer = make_mixer(mixer, 12, 3, AttentionConfig(direction=direction, **settings)).double().eval()
    for parameter in layer.parameters():  # norms and mixes start at numbers that hide faults
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def formula(layer, x, direction):
    """Compute a layer of x (B, L, dim) in plain code; only the mixing of heads is the layer's."""
    c, H = layer.config, 3
    width = layer.value_dim * H
    before, after = F.pad(x, (0, 0, 1, 0))[:, :-1], F.pad(x, (0, 0, 0, 1))[:, 1:]
    other = before if direction == "forward" else (before + after) / 2
    shifted = [x] * 5 if not c.token_shift else [x + mu * (other - x) for mu in layer.token_shift.mix]
    q, k, v = (F.linear(*part) for part in zip(shifted, layer.qkv.weight.split(layer.widths), biases(layer)))
    if c.conv_width:
        left = c.conv_width - 1 if direction == "forward" else c.conv_width // 2
        pad = (left, c.conv_width - 1 - left)
        channels = F.pad(torch.cat([q, k, v], -1).mT, pad)
        weight = layer.conv.weight.T[:, None]
        q, k, v = F.conv1d(channels, weight, layer.conv.bias, groups=len(weight)).mT.split(layer.widths, -1)
    if c.value_map == "silu":
        v = v * torch.sigmoid(v)
    shared = H // layer.key_heads
    q, k = (t.split(t.shape[-1] // layer.key_heads, -1) for t in (q, k))
    q, k = (torch.stack([t[h // shared] for h in range(H)], 1) for t in (q, k))
    v = torch.stack(v.chunk(H, -1), 1)
    heads = layer.mix(shifted[3], q, k, v, Layout())
    if c.skip:
        heads = torch.stack([heads[:, h] + layer.skip[h] * v[:, h] for h in range(H)], 1)
    if c.head_norm == "rmsnorm":
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.head_norm.weight
    y = heads.transpose(1, 2).reshape(*x.shape[:2], width)
    if c.head_norm == "groupnorm":
        y = F.group_norm(y.flatten(0, 1), H, layer.head_norm.weight, layer.head_norm.bias, 1e-5).view_as(y)
    gate = 1
    if c.out_gate != "none":
        logits = shifted[4]
        for matrix in layer.out_gate:
            logits = logits @ matrix.weight.T
        gate = logits.sigmoid() * (logits if c.out_gate == "silu" else 1)
    if c.gate_first:
        y, gate = y * gate, 1
    if c.out_norm == "rmsnorm":
        eps = torch.finfo(y.dtype).eps
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * layer.out_norm.weight
    return F.linear(y * gate, layer.proj.weight, layer.proj.bias)


def biases(layer):
    return layer.qkv.bias.split(layer.widths)


@every_case
@every_direction
@torch.no_grad()
def test_parts_are_their_formulas(mixer, settings, direction):
    layer, x = make(mixer, settings, direction), torch.randn(2, 9, 12, dtype=torch.double)
    torch.testing.assert_close(layer(x), formula(layer, x, direction), rtol=1e-11, atol=1e-12)


@every_case
@every_direction
def test_padding_and_segments(mixer, settings, direction):
    check_padding(make(mixer, settings, direction), PADDED, PACKED)


@every_case
@torch.no_grad()
def test_streams(mixer, settings):
    """Check a prompt and steps of one and several tokens, with padding, against the whole; and without a prompt."""
    layer, x = make(mixer, settings, "forward"), torch.randn(2, 9, 12, dtype=torch.double)
    whole = layer(x)
    start, state = layer.prefill(x[:, :3])
    first, state = layer.step(x[:, 3:4], state)
    valid = torch.tensor([[True, False, True, True, True], [True, True, True, False, True]])
    gap = torch.full((2, 5, 12), torch.nan, dtype=torch.double)
    gap[valid] = x[:, 4:8].flatten(0, 1)
    middle, state = layer.step(gap, state, valid)
    last, _ = layer.step(x[:, 8:], state)
    pieces = [start, first, middle[valid].view(2, 4, 12), last]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-11)
    state, outputs = layer.initial_state(2), []
    for token in x.split(1, 1):
        y, state = layer.step(token, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mixer", ["lion_s", "gated_deltanet"])
@torch.no_grad()
def test_forms_with_parts(mixer):
    layer, x = make(mixer, PARTS), torch.randn(2, 40, 12, dtype=torch.double)
    whole = layer(x)
    for form, size in (("full", None), ("chunk", 16), ("rnn", 1), ("rnn", 16)):
        set_form(layer, form, size)
        torch.testing.assert_close(layer(x), whole, rtol=1e-10, atol=1e-11)


def test_token_shift_starts_half_way():
    x = torch.arange(1.0, 4)[None, :, None]
    assert TokenShift(1, 1, "forward")(x).flatten().tolist() == [0.5, 1.5, 2.5]
    assert TokenShift(1, 1, "backward")(x).flatten().tolist() == [1.5, 2.5, 1.5]
    assert TokenShift(1, 2, "both")(x)[0].T.tolist() == [[1.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_every_mixer_has_both_blocks(mixer):
    """Check that a sweep over mixers can set `block`, which changes those alone that have parts to add."""
    plain, published = (make(mixer, {"block": block}, "forward") for block in ("plain", "published"))
    x = torch.randn(1, 5, 12, dtype=torch.double)
    assert torch.equal(plain(x), published(x)) == (mixer not in PUBLISHED)


def test_published_blocks_are_overridden_by_settings():
    layer = LionAttention(12, 3, "mamba2", block="published", value_ratio=1, out_gate="none")
    assert (layer.value_dim, layer.out_gate, layer.key_heads, layer.conv.offsets) == (4, None, 1, range(-2, 2))
    assert LionAttention(12, 3, "lion_s", block="published").config.conv_width == 0


@pytest.mark.parametrize("mixer", ["kda", "gdn2"])
def test_a_gate_has_the_rank_of_its_publication(mixer):
    def sizes(**settings):
        return [tuple(m.weight.shape) for m in LionAttention(12, 3, mixer, block="published", **settings).out_gate]

    assert sizes() == sizes(out_gate_rank=0) == [(4, 12), (12, 4)] and sizes(out_gate_rank=2) == [(2, 12), (12, 2)]


@pytest.mark.parametrize(
    ("mixer", "settings", "message"),
    [
        ("lion_s", {"out_gate_rank": 2}, "out_gate_rank: there is no gate, set out_gate to sigmoid or silu"),
        ("lion_s", {"key_heads": 2}, "key_heads: expected a divisor of num_heads=3, got 2"),
        ("gdn2", {"value_ratio": 2}, "value_ratio 2: mixer 'gdn2' has a gate for each value, use 1"),
        ("lion_s_hippo", {"value_ratio": 2}, "value_start 'zoh' makes a square matrix, use value_ratio 1 or 'dense'"),
        ("lion_s", {"conv_width": -1}, "conv_width: expected at least 0, got -1"),
        ("lion_s", {"block": "publishd"}, "block: 'publishd' is not a choice, did you mean 'published'"),
    ],
)
def test_bad_parts(mixer, settings, message):
    with pytest.raises(ValueError, match=message):
        LionAttention(12, 3, mixer, **settings)
