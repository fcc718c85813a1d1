import dataclasses
import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from lion.layers.layout import Layout, grid_layout
from lion.layers.mixers import (
    LINEAR,
    MIXERS,
    SOFTMAX,
    AttentionConfig,
    HydraAttention,
    LionAttention,
    SoftmaxAttention,
    make_mixer,
    resolve_mixer,
)
from lion.layers.mixers.base import forms_of, set_form
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.fox import FOX
from lion.layers.mixers.hippo import HippoAttention, HippoConfig
from lion.layers.mixers.performer import PerformerAttention
from lion.models.encoder import Encoder, EncoderConfig
from lion.ops import Gates
from lion.ops.features import FEATURE_MAPS, apply_feature_map
from tests.helpers import ROOT

from .helpers import MASKS, PACKED, PADDED, check_padding, close, doubles, invalid, stream

GRID = grid_layout(3, 2)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "lightnet", "rwkv6", "deltaproduct"])
def test_every_parameter_learns(mixer):
    for direction in ("both", "forward"):
        settings = AttentionConfig(direction=direction, out_norm="rmsnorm", out_gate="inner_sigmoid")
        layer = make_mixer(mixer, 12, 3, settings)
        layer(torch.randn(2, 7, 12), GRID).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "mixer, direction, masks",
    list(zip([SOFTMAX, *LINEAR], itertools.cycle(["both", "forward"]), itertools.cycle(MASKS))),
)
def test_padding_and_segments_are_as_if_alone(mixer, direction, masks):
    config = AttentionConfig(direction=direction, out_norm="layernorm", out_gate="inner_sigmoid")
    layer = make_mixer(mixer, 12, 3, config).double()
    gives = [lambda x: layer(x, Layout.of(x, *masks))]
    if direction == "forward":
        gives.append(lambda x: layer.prefill(x, Layout.of(x, *masks))[0])
    check_padding(layer, *masks, *gives)
    plain = make_mixer(mixer, 12, 3, AttentionConfig(direction=direction))
    x = torch.randn(2, 8, 12)
    y = plain(x, Layout.of(x, PADDED))
    close(y[~PADDED], plain.proj.bias.expand(int((~PADDED).sum()), -1))  # 0 before the projection


def test_conventions_of_mixer_and_direction():
    for direction, convention in (("both", "source"), ("forward", "target"), ("backward", "target")):
        assert LionAttention(12, 3, direction=direction).config.decay_convention == convention
    assert resolve_mixer("lion_lit", AttentionConfig()).feature_map == "silu_shifted"


@pytest.mark.parametrize("mixer", ["lion_d", "lion_s", "lion_s_vector"])
def test_a_temperature_is_a_root_of_every_decay(mixer):
    """Check the mask of the decays' 4th roots in all forms, in steps and in several scans."""
    x = doubles(2, 7, 12)
    snakes = ("row_snake", "column_snake")
    for settings in ({}, {"direction": "forward"}, {"scans": snakes}):
        grid = grid_layout(3, 2, scans=snakes) if "scans" in settings else GRID
        config = AttentionConfig(**settings)
        layer = LionAttention(12, 3, mixer, config).double().eval()
        tempered = LionAttention(12, 3, mixer, config, decay_temperature=4.0).double().eval()
        tempered.load_state_dict(layer.state_dict())
        for decay in layer.decays:
            decay.gating = lambda *given, own=decay.gating: rooted(own(*given))
        want = layer(x, grid)
        for form, size in (("full", None), ("chunk", 2), ("rnn", 1)):
            set_form(tempered, form, size)
            assert (tempered(x, grid) - want).abs().max() < 1e-12
    layer = LionAttention(12, 3, mixer, direction="forward", decay_temperature=4.0).double().eval()
    assert (stream(layer, x, [1, 6])[0] - layer(x)).abs().max() < 1e-12


def rooted(gating: Gating) -> Gating:
    return gating._replace(gates=gating.gates._replace(log_decay=gating.log_decay / 4))


def test_a_temperature_is_in_the_label():
    config = EncoderConfig(mixer="lion_s", dim=12, depth=1, num_heads=3)
    config.attention = AttentionConfig(decay_temperature=4.0)
    assert config.label() == "lion_s decay temperature 4"


def test_a_row_sum_needs_a_sign():
    for name in ("identity", "silu"):
        invalid("row sum", LionAttention, 12, 3, feature_map=name)
        LionAttention(12, 3, feature_map=name, normalize="none")


def test_feature_maps():
    x = torch.randn(2, 3, 5, 8) * 5
    for name, entry in FEATURE_MAPS.items():
        y = apply_feature_map(name, x.bfloat16())
        assert y.dtype == torch.bfloat16
        assert entry.positive == bool((apply_feature_map(name, x) >= 0).all()), name
    silu = x * torch.sigmoid(x) + 0.5
    close(apply_feature_map("silu_shifted", x), silu / silu.norm(dim=-1, keepdim=True))


def test_score_dropout_is_for_training_in_full_form():
    layer = LionAttention(12, 3, score_dropout=0.5, form="full")
    x = torch.randn(2, 7, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    set_form(layer, "chunk")
    layer(x)
    invalid("full form only", layer.train(), x)


def test_softmax_has_one_form():
    layer = SoftmaxAttention(12, 3)
    assert forms_of(layer) == ("full",)
    set_form(layer, "full")


def test_a_layout_may_be_a_mask_or_nothing():
    """Check that a layout may be a mask or None, as in other attention layers; other types raise an error."""
    layer = LionAttention(16, 2, "lion_s")
    x = torch.randn(2, 6, 16)
    valid = torch.arange(6) < torch.tensor([[6], [4]])
    assert torch.equal(layer(x, None), layer(x))
    assert torch.equal(layer(x, valid), layer(x, Layout.of(x, valid=valid)))
    assert not torch.allclose(layer(x, valid)[1, :4], layer(x)[1, :4])
    for bad, message in ((valid.float(), "valid: expected bool"), (valid[:, :3], "valid: expected"), ("x", "layout: ")):
        invalid(f"^{message}", layer, x, bad)


def test_the_mask_of_padding_of_pytorch_is_caught():
    """Check that a mask whose True is padding is not taken in silence, by its name or by position."""
    layer = LionAttention(16, 2)
    x = torch.randn(2, 4, 16)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with pytest.raises(TypeError, match=r"key_padding_mask: unknown argument.*layout=~key_padding_mask"):
        layer(x, key_padding_mask=padding)
    with pytest.raises(TypeError, match=r"^valid: unknown argument.*pass layout=mask"):
        layer(x, valid=~padding)
    with pytest.warns(UserWarning, match="no tokens.*layout=~key_padding_mask"):
        layer(x, padding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, ~padding)


@pytest.mark.parametrize("mixer", ["lion_s", "performer", "softmax"])
def test_layers_are_made_where_they_are_used(mixer):
    """Check device and dtype as in the layers of PyTorch."""
    layer = make_mixer(mixer, 16, 2, device="meta", dtype=torch.bfloat16)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert {(t.device.type, t.dtype) for t in tensors} == {("meta", torch.bfloat16)}


def test_a_layer_shows_its_settings():
    layer = LionAttention(16, 2, "lion_d", direction="forward")
    layer.set_form("rnn")
    assert "'lion_d', num_heads=2, direction='forward', form='rnn'" in repr(layer)
    settings = {field.name for field in dataclasses.fields(AttentionConfig)}
    for shown in (inspect.signature(LionAttention), inspect.signature(LionAttention.__init__)):
        assert set(shown.parameters) >= {"dim", "num_heads", "device"} | settings
        assert shown.parameters["direction"].default == "both"


def test_help_names_every_mixer_and_setting():
    words = LionAttention.__doc__
    assert [m for m in LINEAR if f'"{m}"' not in words] == []
    assert [f.name for f in dataclasses.fields(AttentionConfig) if f"`{f.name}`" not in words] == []


@pytest.mark.parametrize("masks", [(None, None), (PADDED, None), (PADDED, PACKED)], ids=["plain", "padding", "packed"])
@pytest.mark.parametrize("mixer", [SOFTMAX, FOX])
def test_backward_softmax_is_forward_on_reversed_tokens(mixer, masks):
    layers = []
    for direction in ("forward", "backward"):
        torch.manual_seed(0)
        layers.append(make_mixer(mixer, 12, 3, AttentionConfig(direction=direction, conv_width=3)).double())
    layers[1].conv.weight.data = layers[0].conv.weight.data.flip(0)  # the offsets of both are in sequence order
    x, weight = doubles(2, 2, 8, 12)
    turned = [None if mask is None else mask.flip(1) for mask in masks]
    given, own = (t.clone().requires_grad_() for t in (x.flip(1), x))
    want = layers[0](given, Layout.of(x, *turned)).flip(1)
    got = layers[1](own, Layout.of(x, *masks))
    close(got, want, 1e-12)
    (want * weight).sum().backward(), (got * weight).sum().backward()
    close(own.grad, given.grad.flip(1), 1e-12)


@pytest.mark.parametrize("mixer", [SOFTMAX, FOX, "lion_s"])
@torch.no_grad()
def test_alternating_blocks_see_the_past_then_the_future(mixer):
    model = Encoder(EncoderConfig(mixer, 12, depth=3, num_heads=3, attention=AttentionConfig(direction="alternating")))
    x = torch.randn(1, 6, 12)
    other = x.clone()
    other[:, 3] += 1
    seen = [(block.attention(other) != block.attention(x)).any(-1)[0].tolist() for block in model.blocks]
    past = [False] * 3 + [True] * 3
    future = [True] * 4 + [False] * 2
    assert seen == [past, future, past]
    layout = Layout.of(x, torch.tensor([[True] * 5 + [False]]))
    assert torch.allclose(model(x, layout)[:, :5], model(x[:, :5]), atol=1e-5)


@torch.no_grad()
def test_norms_over_tokens_leave_the_direction_of_softmax():
    layer = SoftmaxAttention(12, 3, direction="forward", out_norm="batchnorm").eval()
    x = torch.randn(1, 6, 12)
    assert torch.allclose(layer(x)[:, :4], layer(x[:, :4]), atol=1e-6)


def test_softmax_takes_a_feature_map_only_if_asked():
    plain, mapped = (SoftmaxAttention(12, 3, feature_map=name) for name in (None, "silu_shifted"))
    mapped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 12)
    q, k, v = plain.heads(x)
    q, k = (apply_feature_map("silu_shifted", t) for t in (q, k))
    want = mapped.merge(x, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    close(mapped(x), want)
    assert not torch.allclose(mapped(x), plain(x), atol=1e-3)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "linear_transformer", "gla", "retnet"])
def test_a_rotation_goes_by_positions_alone(mixer):
    """Check that scores depend on differences of positions, so padding before the tokens changes nothing."""
    layer = make_mixer(mixer, 12, 3, AttentionConfig(rotation="rope")).double().eval()
    plain = make_mixer(mixer, 12, 3, AttentionConfig(rotation="none")).double().eval()
    plain.load_state_dict(layer.state_dict())
    x = doubles(2, 9, 12)
    assert (layer(x) - plain(x)).abs().max() > 1e-3
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, :3] = False
    close(layer(x, Layout.of(x, valid))[:, 3:], layer(x[:, 3:]))


class Turning(Decay):
    """A decay with angles and a state, which is the total rotation so far and does not depend on positions."""

    def gating(self, x, k, layout, state=()):
        share = x.new_full((*x.shape[:2],), 0.1) if layout.valid is None else 0.1 * layout.valid.to(x.dtype)
        total = share.cumsum(1) + (state[0] if state else 0)  # (B, L)
        angles = total[:, None, :, None] * torch.arange(1, k.shape[-1] // 2 + 1)
        return Gating(k, Gates(F.logsigmoid(x[..., :3].mT), angles=angles), (total[:, -1:],))

    def initial_state(self, z):
        return (z.new_zeros(len(z), 1),)


def turning(**settings):
    torch.manual_seed(0)
    layer = make_mixer("gla", 12, 3, AttentionConfig(direction="forward", **settings)).double().eval()
    layer.decays[0] = Turning(12, 3)
    return layer


def test_angles_of_a_decay_and_a_rotation_add_up():
    x = doubles(1, 4, 12)
    plain, both = (turning(**settings) for settings in ({}, {"rotation": "rope"}))
    heads = plain.heads(x)
    angles = [layer.operands(x, *heads, Layout()).gates.angles for layer in (plain, both)]
    close(angles[1], angles[0] + both.rotation(x, Layout()))


@torch.inference_mode()
def test_a_decay_that_remembers_streams():
    layer = turning()
    x = doubles(2, 12, 12)
    whole = layer(x)
    close(stream(layer, x[:, 5:], [1, 6], layer.prefill(x[:, :5])[1])[0], whole[:, 5:])
    y, state = stream(layer, x, [1, 11])
    close(y, whole)
    close(state.decay[0], torch.full((2, 1), 1.2, dtype=torch.double))


@pytest.mark.parametrize("name", ["lion_s", "lion_s_vector", "lion_s_hippo"])
def test_special_tokens_do_not_decay_and_may_differ_from_row_to_row(name):
    """Check cls, and as many rows as heads, where a mask of rows must not be applied to heads."""
    layer = make_mixer(name, 12, 3)
    x = torch.randn(3, 7, 12)
    for special in (GRID.special, torch.eye(3, 7, dtype=torch.bool)):
        log_decay = layer.decays[0](x, layer.heads(x)[1], Layout(special=special)).log_decay
        kept = (log_decay == 0).view(3, 3, 7, -1).all(3)
        assert kept.equal(special.expand(3, 7)[:, None].expand(-1, 3, -1)) and (log_decay <= 0).all()


def test_settings_of_all_mixers_are_for_one():
    assert make_mixer("lion_s", 12, 3, HippoConfig(chunk_size=7)).chunk_size == 7


def test_a_class_with_one_mixer_needs_no_name():
    assert type(LionAttention(12, 3)) is LionAttention and LionAttention(12, 3).mixer is LINEAR["lion_s"]
    assert PerformerAttention(12, 3).mixer is LINEAR["performer"]


def test_a_class_may_be_derived():
    class Own(LionAttention):
        pass

    assert type(Own(12, 3, "lion_s")) is Own


def test_scans_may_be_a_list():
    assert LionAttention(12, 3, scans=["row_major"]).config.scans == ("row_major",)


SCANS = ("row_snake", "column_snake")
ROPE = AttentionConfig(rotation="rope")
UNKNOWN = r"mixer: unknown mixer 'sofmax', did you mean 'softmax'\?"
S4D = HippoConfig(spectrum="s4d_real")


def test_what_is_wrong_is_named():
    softmax, lion_s, vim = (make_mixer(name, 12, 3) for name in (SOFTMAX, "lion_s", "vim"))
    invalid(r'is_causal: unknown setting of mixer .lion_s., direction="forward"', LionAttention, 16, 2, is_causal=True)
    invalid("chunk: unknown setting of mixer 'lion_s', did you mean 'chunk_size'", LionAttention, 16, 2, chunk=4)
    invalid("dim: expected at least 1, got 0", LionAttention, 0, 3)
    invalid("feature_map: 'zz' is not a choice, valid: elu1, identity", LionAttention, 12, 3, feature_map="zz")
    invalid("form: 'chunks' is not a choice, did you mean 'chunk'", SoftmaxAttention, 12, 3, form="chunks")
    invalid("chunk_size: expected at least 1, got 0", LionAttention, 12, 3, chunk_size=0)
    invalid("SoftmaxAttention has only full, got 'rnn'", set_form, softmax, "rnn")
    invalid("expected one of auto, full, chunk, rnn, got 'chunks', did", set_form, softmax, "chunks")
    invalid("chunk_size: expected at least 1, got 0", set_form, lion_s, "chunk", 0)
    assert (lion_s.form, lion_s.chunk_size) == ("auto", 64)  # as before
    invalid("has only .*, got 'chunks'", lion_s.set_form, "chunks")
    invalid("chunk_size: expected at least 1, got 0", vim.set_form, "chunk", 0)
    message = r"segments: expected integer \(2, 8\), got int64 \(8,\)"
    invalid(message, Layout.of, torch.ones(2, 8, 12), segments=torch.zeros(8, dtype=torch.long))
    invalid(r"valid: expected bool \(2, 8\), got float32 \(2, 8\)", Layout.of, torch.ones(2, 8, 12), torch.ones(2, 8))
    invalid("model: Linear has no mixers of lion", set_form, torch.nn.Linear(2, 2), "rnn")
    invalid("rotation needs pairs, got an odd head dimension 3", make_mixer, "lion_s", 9, 3, ROPE)
    invalid("rotation 'rope' needs one order of the tokens", make_mixer, "lion_s", 12, 3, rotation="rope", scans=SCANS)
    invalid("rotation belongs to mixers with scores, 'none' has none", make_mixer, "none", 12, 3, ROPE)
    invalid(r"mixer: expected one of .*, got 'lightnt', did you mean 'lightnet'\?", LionAttention, 64, 2, "lightnt")
    invalid(r"got 'softmax', use lion\.make_mixer\('softmax', \.\.\)", LionAttention, 64, 2, "softmax")
    invalid(UNKNOWN, make_mixer, "sofmax", 12, 3, AttentionConfig())
    invalid(UNKNOWN, resolve_mixer, "sofmax", AttentionConfig())
    invalid(UNKNOWN, SoftmaxAttention, 12, 3, "sofmax")
    invalid(UNKNOWN, HydraAttention, 12, 3, "sofmax", None)
    invalid(UNKNOWN, EncoderConfig, "sofmax", 12, 1, 3)
    invalid("spectrum: unknown setting of mixer 'lion_s', valid: ", make_mixer, "lion_s", 12, 3, S4D)
    invalid("spectrum: unknown setting of mixer 'softmax'", resolve_mixer, SOFTMAX, S4D)
    message = "chunksize: unknown setting of mixer 'hydra', did you mean 'chunk_size'"
    invalid(message, HydraAttention, 12, 3, "hydra", None, chunksize=4)
    message = r"^chunk_sise: unknown setting of mixer 'gla', did you mean 'chunk_size'\?"
    invalid(message, make_mixer, "gla", 12, 3, chunk_sise=8)
    message = "config: expected a AttentionConfig, got dict; settings go by name"
    invalid(message, make_mixer, "lion_s", 12, 3, {"form": "full"})
    invalid("mixer: HippoAttention needs one of lion_d_hippo, lion_s_hippo$", HippoAttention, 12, 3)
    invalid(
        "mixer: expected softmax in SoftmaxAttention, got 'fox', a ForgettingAttention", SoftmaxAttention, 12, 3, FOX
    )
    message = "mixer: expected performer in PerformerAttention, got 'lion_s', a LionAttention"
    invalid(message, PerformerAttention, 12, 3, "lion_s")
    message = "mixer: expected hydra in HydraAttention, got 'softmax', a SoftmaxAttention"
    invalid(message, HydraAttention, 12, 3, SOFTMAX, None)
    message = r"scans: expected a list such as \[row_major, row_major\], got 'row_major'"
    invalid(message, LionAttention, 12, 3, scans="row_major")
    for kind in (LionAttention, SoftmaxAttention, HydraAttention):
        invalid("num_heads: expected a whole number, got 3.0", kind, 12, 3.0)
        invalid("dim: expected a whole number, got '12'", kind, "12", 3)
        invalid("num_heads: expected at least 1, got 0", kind, 12, 0)
        invalid("dim: expected a multiple of num_heads=3, got 13", kind, 13, 3)
    for name in ("lion_lit", "gla", "gated_deltanet", "lightnet", "lion_s_hippo", SOFTMAX, FOX, "hydra"):
        invalid("decay_temperature", resolve_mixer, name, AttentionConfig(decay_temperature=4.0))


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "none"])
def test_bad_tokens_and_states_are_named(mixer):
    layer = make_mixer(mixer, 12, 3, MIXERS[mixer].layer.Config(direction="forward"))
    for x in (torch.randn(4, 12), torch.randn(1, 4, 8), torch.randn(1, 0, 12)):
        invalid(r"x: expected tokens \(B, L >= 1, 12\), got shape", layer, x)
    invalid(r"state: expected a .*, which prefill returns, .* got NoneType", layer.step, torch.randn(1, 1, 12), None)
    invalid(r"state: made for 2 sequences, got 3", layer.step, torch.randn(3, 1, 12), layer.initial_state(2))
    for direction in ("backward", "both"):
        other = make_mixer(mixer, 12, 3, MIXERS[mixer].layer.Config(direction=direction))
        message = f"only 'forward' streams, this layer has '{direction}'"
        invalid(message, other.prefill, torch.randn(1, 4, 12))
        invalid(message, other.step, torch.randn(1, 4, 12), layer.initial_state(1))


def test_a_norm_over_tokens_lets_the_floor_see_later_tokens():
    assert make_mixer("none", 12, 3, AttentionConfig()).causal
    assert not make_mixer("none", 12, 3, AttentionConfig(out_norm="batchnorm")).causal


@pytest.mark.compiled
@pytest.mark.parametrize("mixer", ["lion_s", "softmax", "none"])
def test_graphs_read_the_same_direction(mixer):
    for direction in ("both", "forward"):
        settings = AttentionConfig(direction=direction, conv_width=3)
        layer = make_mixer(mixer, 12, 3, settings)
        read = torch.compile(lambda x, layer=layer: x + layer.causal, backend="eager", fullgraph=True)
        assert read(torch.zeros(())) == layer.causal == (direction == "forward")


def test_mixers_by_name_take_settings():
    layer = make_mixer("hydra", 12, 3, direction="forward", form="chunk")
    assert isinstance(layer, HydraAttention) and (layer.form, layer.config.direction) == ("chunk", "forward")
    config = AttentionConfig(direction="forward")
    assert make_mixer("gla", 12, 3, config, chunk_size=8).config.chunk_size == 8


def test_a_mixer_of_another_package():
    """Check the example of the README, in every form, in a model, in timm, and under a name that is taken."""
    timm = pytest.importorskip("lion.timm")
    text = (ROOT / "lion/layers/README.md").read_text().partition("## A mixer of your own")[2]
    code = text.partition("```python\n")[2].partition("```")[0]
    names = {}
    try:
        exec(code, names)
        layer = names["layer"].double()
        x = doubles(2, 70, 64)
        results = []
        for form in layer.forms:
            set_form(layer, form)
            results.append(layer(x))
        for y in results:
            close(y, results[0], rtol=1e-10, atol=1e-12)
        assert timm.attention("half_life")(64, 4)(x.float()).shape == x.shape
        encoder = Encoder(EncoderConfig(mixer="half_life", dim=64, depth=1, num_heads=4))
        assert encoder(x.float()).shape == x.shape
        invalid(r"^mixer: 'half_life' exists already$", exec, code, names)
    finally:
        MIXERS.pop("half_life", None)
        LINEAR.pop("half_life", None)


def test_a_mixer_that_is_not_linear_attention():
    """Check the second example of the README: it ignores padding, and trains in a model."""
    text = (ROOT / "lion/layers/README.md").read_text().partition("A mixer that is not linear attention")[2]
    try:
        exec(text.partition("```python\n")[2].partition("```")[0], {})
        layer = make_mixer("average", 12, 3)
        x = torch.randn(2, 5, 12)
        check_padding(layer.double(), PADDED, None)
        encoder = Encoder(EncoderConfig(mixer="average", dim=12, depth=1, num_heads=3))
        encoder(x).square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in encoder.parameters())
        invalid("form: Average has only full, got 'rnn'", set_form, layer, "rnn")
    finally:
        MIXERS.pop("average", None)


@pytest.mark.parametrize("mixer", ["lion_s_hippo", "gated_deltanet", "lion_s"])
def test_an_entry_decides_the_decay_of_its_layer(mixer):
    entry = MIXERS[mixer]

    class Own(entry.fields.decay):
        pass

    MIXERS["own"] = entry._replace(fields=dataclasses.replace(entry.fields, decay=Own))
    try:
        assert type(make_mixer("own", 12, 3).first_decay()) is Own
    finally:
        MIXERS.pop("own")


def test_a_block_without_a_mixer_streams_with_its_shifts():
    layer = make_mixer("none", 12, 3, direction="forward", conv_width=3).double()
    x = torch.randn(2, 7, 12).double()
    y, state = layer.prefill(x[:, :4])
    rest, _ = layer.step(x[:, 4:], state)
    close(torch.cat([y, rest], 1), layer(x))
    invalid("state: made for 2 sequences, got 1", layer.step, x[:1, 4:], state)


@pytest.mark.parametrize("scans", [(), ("row_snake", "column_snake")])
def test_a_map_of_keys_alone(scans):
    """Check a map of keys without a decay, and with several scans; the row sum before decays has a name."""
    entry = dataclasses.replace(LINEAR["lion_d" if scans else "lion_lit"], key_map="sigmoid", normalize="pre")
    MIXERS["mapped"] = MIXERS["lion_lit"]._replace(fields=entry)
    try:
        torch.manual_seed(0)
        layer = LionAttention(12, 3, "mapped", **({"scans": scans} if scans else {}))
        mapped = []
        plain = []
        x = torch.randn(2, 7, 12)
        layout = grid_layout(3, 2, scans or ("row_major",))
        for key_map, found in (("sigmoid", mapped), (None, plain)):
            layer.mixer = dataclasses.replace(entry, key_map=key_map)
            found.append(layer(x, layout))
        assert not torch.allclose(mapped[0], plain[0])
        assert "row sum before decays" in LionAttention.info("mapped")
    finally:
        MIXERS.pop("mapped")


@torch.no_grad()
def test_a_stream_under_autocast_keeps_its_cache_narrow():
    layer = SoftmaxAttention(12, 3, direction="forward")
    x = torch.randn(2, 3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer.step(x, layer.initial_state(2))
        assert state.k.dtype == layer.prefill(x)[1].k.dtype == torch.bfloat16


@pytest.mark.parametrize("mixer", ["lion_s", "softmax", "hydra", "vim"])
def test_nested_tensors_and_numbers_of_eight_bits_are_a_line(mixer):
    layer = make_mixer(mixer, 16, 2)
    rows = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    with pytest.raises(ValueError, match="x: a nested tensor, expected rows of one length: pad them"):
        layer(rows)
    with pytest.raises(ValueError, match="float8_e4m3fn, expected float16, bfloat16, float32 or float64"):
        layer(torch.randn(1, 3, 16).to(torch.float8_e4m3fn))
