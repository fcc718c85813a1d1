import dataclasses

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

GRID = grid_layout(3, 2)


@pytest.mark.parametrize("mixer", [SOFTMAX, *LINEAR])
@pytest.mark.parametrize("direction", ["both", "forward"])
def test_every_parameter_learns(mixer, direction):
    torch.manual_seed(0)
    settings = AttentionConfig(direction=direction, out_norm="rmsnorm", out_gate="sigmoid", out_gate_rank=2)
    layer = make_mixer(mixer, 12, 3, settings)
    layer(torch.randn(2, 7, 12), GRID).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("mixer", LINEAR)
def test_forms_share_weights_and_results(mixer):
    torch.manual_seed(0)
    layer, x = LionAttention(12, 3, mixer).double().eval(), torch.randn(2, 70, 12, dtype=torch.double)
    expected = layer(x)
    for form, size in (("full", None), ("chunk", 16), ("rnn", 1), ("rnn", 16)):
        set_form(layer, form, size)
        assert (layer(x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("mixer", [SOFTMAX, *LINEAR])
@pytest.mark.parametrize("direction", ["both", "forward"])
def test_padding_and_segments_equal_the_sequences_alone(mixer, direction):
    torch.manual_seed(0)
    layer = make_mixer(mixer, 12, 3, AttentionConfig(direction=direction)).double().eval()
    x = torch.randn(1, 9, 12, dtype=torch.double)
    bias = layer.proj.bias
    valid = torch.tensor([[False] * 2 + [True] * 5 + [False] * 2])
    alone = layer(x[:, 2:7])
    torch.testing.assert_close(layer(x, Layout.of(x, valid))[:, 2:7], alone)
    torch.testing.assert_close(layer(x, Layout.of(x, valid))[:, :2], bias.expand(1, 2, -1))  # 0 before the projection
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, -1]])
    poisoned = x.clone()
    poisoned[:, 7:] = torch.nan
    torch.testing.assert_close(layer(poisoned, Layout.of(x, valid))[:, 2:7], alone)
    packed = layer(x, Layout.of(x, segments=segments))
    torch.testing.assert_close(packed[:, :4], layer(x[:, :4]))
    torch.testing.assert_close(packed[:, 4:8], layer(x[:, 4:8]))


PADDED = torch.tensor([[False, True, True, True, False, True, True, False], [True] * 5 + [False] * 3])
PACKED = torch.tensor([[-1, 4, 4, 4, 4, 2, 2, 2], [0, 0, 1, 1, 1, -1, 1, 1]])


def check_padding(module, valid, segments, *gives) -> None:
    """Check outputs and all gradients with NaN and infinities in padding against every sequence separately."""
    x = torch.randn(2, 8, 12, dtype=torch.double)
    kept = torch.ones(2, 8, dtype=torch.bool) if valid is None else valid
    ids = torch.zeros(2, 8, dtype=torch.long) if segments is None else segments
    kept = kept & (ids >= 0)
    bad = x.masked_fill(~kept[..., None], torch.nan)
    bad[~kept, ::2] = torch.inf
    weight = torch.randn(2, 8, 12, dtype=torch.double)

    def gradients(run, x):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        return {name: p.grad for name, p in module.named_parameters()} | {"x": leaf.grad}

    def alone(x):
        total = 0
        for row in range(2):
            for i in ids[row][kept[row]].unique():
                own = kept[row] & (ids[row] == i)
                total = total + (weight[row, own] * module(x[row, own][None])).sum()
        return total

    want = gradients(alone, x)
    for give in gives or (lambda x: module(x, Layout.of(x, valid, segments)),):
        assert give(bad).isfinite().all()
        got = gradients(lambda x, give=give: (weight * give(x))[kept].sum(), bad)
        torch.testing.assert_close((weight * give(bad))[kept].sum(), alone(x))
        for name, grad in got.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        assert not got["x"][~kept].any()


@pytest.mark.parametrize("mixer", [SOFTMAX, *LINEAR])
@pytest.mark.parametrize("direction", ["both", "forward"])
@pytest.mark.parametrize("valid, segments", [(PADDED, None), (None, PACKED), (PADDED, PACKED)])
def test_contents_of_padding_do_not_change_gradients(mixer, direction, valid, segments):
    torch.manual_seed(0)
    config = AttentionConfig(direction=direction, out_norm="layernorm", out_gate="sigmoid", out_gate_rank=2)
    layer = make_mixer(mixer, 12, 3, config).double()
    gives = [lambda x: layer(x, Layout.of(x, valid, segments))]
    if direction == "forward" and segments is None:
        gives.append(lambda x: layer.prefill(x, Layout.of(x, valid))[0])
    check_padding(layer, valid, segments, *gives)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s"])
def test_bad_masks(mixer):
    layer, x = make_mixer(mixer, 12, 3, AttentionConfig()), torch.randn(2, 8, 12)
    with pytest.raises(ValueError, match=r"valid: expected bool \(2, 8\), got float32 \(2, 8\)"):
        layer(x, Layout.of(x, torch.ones(2, 8)))
    with pytest.raises(ValueError, match=r"segments: expected integer \(2, 8\), got int64 \(8,\)"):
        layer(x, Layout.of(x, segments=torch.zeros(8, dtype=torch.long)))


@pytest.mark.parametrize("mixer", LINEAR)
def test_padding_inside_a_segment_moves_no_token(mixer):
    torch.manual_seed(0)
    layer, x = LionAttention(12, 3, mixer).double().eval(), torch.randn(1, 7, 12, dtype=torch.double)
    segments = torch.tensor([[4, 4, -1, 4, -1, -1, 4]])
    kept = segments[0] >= 0
    torch.testing.assert_close(layer(x, Layout.of(x, segments=segments))[:, kept], layer(x[:, kept]))


def test_cls_does_not_decay_in_lion_s_alone():
    layer = LionAttention(12, 3, "lion_s")
    k = torch.randn(2, 3, 7, 4)
    log_decay = layer.decays[0](torch.randn(2, 7, 12), k, GRID).log_decay
    assert log_decay.shape == (2, 3, 7) and (log_decay[..., 0] == 0).all() and (log_decay[..., 1:] < 0).all()
    fixed = LionAttention(12, 3, "lion_d").decays[0](torch.randn(2, 7, 12), k, GRID)
    assert fixed.log_decay.shape == (3,)


def test_gates_stay_float32_under_autocast():
    layer, x, k = LionAttention(12, 3, "lion_s"), torch.randn(2, 7, 12), torch.randn(2, 3, 7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        log_decay = layer.decays[0](x, k).log_decay
        assert layer(x).dtype == torch.bfloat16
    assert log_decay.dtype == torch.float32
    torch.testing.assert_close(log_decay, layer.decays[0](x, k).log_decay, rtol=0, atol=0)


def test_conventions_of_mixer_and_direction():
    def convention(direction):
        return LionAttention(12, 3, direction=direction).config.decay_convention

    assert (convention("both"), convention("forward"), convention("backward")) == ("source", "target", "target")
    assert resolve_mixer("lion_lit", AttentionConfig()).feature_map == "silu_shifted"


@pytest.mark.parametrize("mixer", ["lion_d", "lion_s", "lion_s_vector"])
def test_a_temperature_is_a_root_of_every_decay(mixer):
    """Check the mask of the decays' 4th roots in all forms, in steps and in several scans."""
    torch.manual_seed(0)
    x, snakes = torch.randn(2, 7, 12, dtype=torch.double), ("row_snake", "column_snake")
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
    state, outputs = layer.initial_state(2), []
    for i in range(7):
        y, state = layer.step(x[:, i : i + 1], state)
        outputs.append(y)
    assert (torch.cat(outputs, 1) - layer(x)).abs().max() < 1e-12


def rooted(gating: Gating) -> Gating:
    return gating._replace(gates=gating.gates._replace(log_decay=gating.log_decay / 4))


@pytest.mark.parametrize(
    "mixer", ["lion_lit", "gla", "gated_deltanet", "lightnet", "lion_s_hippo", SOFTMAX, FOX, "hydra"]
)
def test_other_mixers_have_no_temperature(mixer):
    with pytest.raises(ValueError, match="decay_temperature"):
        resolve_mixer(mixer, AttentionConfig(decay_temperature=4.0))


def test_gla_takes_the_16th_root_of_its_gates():
    """Check the decays that a layer computes, which start near 1 (2312.06635, section 4.4)."""
    torch.manual_seed(0)
    layer, x = LionAttention(12, 3, "gla").double(), torch.randn(2, 7, 12, dtype=torch.double)
    (decay,) = layer.decays
    k = layer.heads(x)[1]
    want = (decay.up(decay.down(x)).sigmoid() ** (1 / 16)).unflatten(-1, (3, 4)).transpose(1, 2)
    torch.testing.assert_close(decay(x, k).log_decay.exp(), want, rtol=0, atol=1e-12)
    assert want.min() > 0.9


def test_a_temperature_is_in_the_label():
    config = EncoderConfig(mixer="lion_s", dim=12, depth=1, num_heads=3)
    config.attention = AttentionConfig(decay_temperature=4.0)
    assert config.label() == "lion_s decay temperature 4"


@pytest.mark.parametrize("name", ["identity", "silu"])
def test_a_row_sum_needs_a_sign(name):
    with pytest.raises(ValueError, match="row sum"):
        LionAttention(12, 3, feature_map=name)
    LionAttention(12, 3, feature_map=name, normalize="none")


def test_feature_maps():
    x = torch.randn(2, 3, 5, 8) * 5
    for name, entry in FEATURE_MAPS.items():
        y = apply_feature_map(name, x.bfloat16())
        assert y.dtype == torch.bfloat16
        assert entry.positive == bool((apply_feature_map(name, x) >= 0).all()), name
    silu = x * torch.sigmoid(x) + 0.5
    torch.testing.assert_close(apply_feature_map("silu_shifted", x), silu / silu.norm(dim=-1, keepdim=True))


def test_score_dropout_is_for_training_in_full_form():
    layer, x = LionAttention(12, 3, score_dropout=0.5, form="full"), torch.randn(2, 7, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    set_form(layer, "chunk")
    layer(x)
    with pytest.raises(ValueError, match="full form only"):
        layer.train()(x)


def test_softmax_has_one_form():
    layer = SoftmaxAttention(12, 3)
    assert forms_of(layer) == ("full",)
    set_form(layer, "full")
    with pytest.raises(ValueError, match="SoftmaxAttention has only full, got 'rnn'"):
        set_form(layer, "rnn")
    with pytest.raises(ValueError, match="expected one of auto, full, chunk, rnn, got 'chunks', did you mean 'chunk'"):
        set_form(layer, "chunks")
    for other, form in ((layer, "rnn"), (make_mixer("vim", 12, 3), "full"), (make_mixer("lion_s", 12, 3), "chunks")):
        with pytest.raises(ValueError, match=f"has only .*, got '{form}'"):
            other.set_form(form)
    for other in (make_mixer("vim", 12, 3), make_mixer("lion_s", 12, 3)):
        with pytest.raises(ValueError, match="chunk_size: expected at least 1, got 0"):
            other.set_form("chunk", 0)


def test_a_layout_may_be_a_mask_or_nothing():
    """Check that a layout may be a mask or None, as in other attention layers; other types raise an error."""
    layer, x = LionAttention(16, 2, "lion_s"), torch.randn(2, 6, 16)
    valid = torch.arange(6) < torch.tensor([[6], [4]])
    assert torch.equal(layer(x, None), layer(x))
    assert torch.equal(layer(x, valid), layer(x, Layout.of(x, valid=valid)))
    assert not torch.allclose(layer(x, valid)[1, :4], layer(x)[1, :4])
    for bad, message in ((valid.float(), "valid: expected bool"), (valid[:, :3], "valid: expected"), ("x", "layout: ")):
        with pytest.raises(ValueError, match=f"^{message}"):
            layer(x, bad)


def test_help_names_every_mixer_and_setting():
    words = LionAttention.__doc__
    assert [m for m in LINEAR if f'"{m}"' not in words] == []
    assert [f.name for f in dataclasses.fields(AttentionConfig) if f"`{f.name}`" not in words] == []


def test_bad_arguments():
    with pytest.raises(ValueError, match=r'is_causal: unknown setting of mixer .lion_s., direction="forward"'):
        LionAttention(16, 2, "lion_s", is_causal=True)
    with pytest.raises(ValueError, match="chunk: unknown setting of mixer 'lion_s', did you mean 'chunk_size'"):
        LionAttention(16, 2, "lion_s", chunk=4)
    with pytest.raises(ValueError, match="mixer: expected one of lion_lit"):
        LionAttention(12, 3, "lion_x")
    with pytest.raises(ValueError, match="multiple of num_heads=5"):
        LionAttention(12, 5)
    for heads in (0, -3):
        with pytest.raises(ValueError, match=f"num_heads: expected at least 1, got {heads}"):
            LionAttention(12, heads)
    with pytest.raises(ValueError, match="dim: expected at least 1, got 0"):
        LionAttention(0, 3)
    with pytest.raises(ValueError, match="feature_map: 'zz' is not a choice, valid: elu1, identity"):
        LionAttention(12, 3, feature_map="zz")
    with pytest.raises(ValueError, match="form: 'chunks' is not a choice, did you mean 'chunk'"):
        SoftmaxAttention(12, 3, form="chunks")
    with pytest.raises(ValueError, match="chunk_size: expected at least 1, got 0"):
        LionAttention(12, 3, chunk_size=0)
    layer = LionAttention(12, 3, chunk_size=8)
    with pytest.raises(ValueError, match="chunk_size: expected at least 1, got 0"):
        set_form(layer, "chunk", 0)
    assert (layer.form, layer.chunk_size) == ("auto", 8)


@pytest.mark.parametrize("masks", [(None, None), (PADDED, None), (PADDED, PACKED)], ids=["plain", "padding", "packed"])
@pytest.mark.parametrize("mixer", [SOFTMAX, FOX])
def test_backward_softmax_is_forward_on_reversed_tokens(mixer, masks):
    layers = []
    for direction in ("forward", "backward"):
        torch.manual_seed(0)
        layers.append(make_mixer(mixer, 12, 3, AttentionConfig(direction=direction, conv_width=3)).double())
    layers[1].conv.weight.data = layers[0].conv.weight.data.flip(0)  # the offsets of both are in sequence order
    x, weight = torch.randn(2, 2, 8, 12, dtype=torch.double)
    turned = [None if mask is None else mask.flip(1) for mask in masks]
    given, own = (t.clone().requires_grad_() for t in (x.flip(1), x))
    want = layers[0](given, Layout.of(x, *turned)).flip(1)
    got = layers[1](own, Layout.of(x, *masks))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    (want * weight).sum().backward(), (got * weight).sum().backward()
    torch.testing.assert_close(own.grad, given.grad.flip(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mixer", [SOFTMAX, FOX])
@torch.no_grad()
def test_alternating_softmax_sees_the_past_then_the_future(mixer):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(mixer, 12, depth=2, num_heads=3, attention=AttentionConfig(direction="alternating")))
    x = torch.randn(1, 6, 12)
    other = x.clone()
    other[:, 3] += 1
    seen = [(block.attention(other) != block.attention(x)).any(-1)[0].tolist() for block in model.blocks]
    assert seen == [[False] * 3 + [True] * 3, [True] * 4 + [False] * 2]
    layout = Layout.of(x, torch.tensor([[True] * 5 + [False]]))
    assert torch.allclose(model(x, layout)[:, :5], model(x[:, :5]), atol=1e-5)


@torch.no_grad()
def test_norms_over_tokens_leave_the_direction_of_softmax():
    layer, x = SoftmaxAttention(12, 3, direction="forward", out_norm="batchnorm").eval(), torch.randn(1, 6, 12)
    assert torch.allclose(layer(x)[:, :4], layer(x[:, :4]), atol=1e-6)


def test_softmax_takes_a_feature_map_only_if_asked():
    torch.manual_seed(0)
    plain, mapped = (SoftmaxAttention(12, 3, feature_map=name) for name in (None, "silu_shifted"))
    mapped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 12)
    q, k, v = plain.heads(x)
    q, k = (apply_feature_map("silu_shifted", t) for t in (q, k))
    want = mapped.merge(x, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(mapped(x), want)
    assert not torch.allclose(mapped(x), plain(x), atol=1e-3)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "linear_transformer", "gla", "retnet"])
def test_a_rotation_goes_by_positions_alone(mixer):
    """Check that scores depend on differences of positions, so padding before the tokens changes nothing."""
    torch.manual_seed(0)
    layer = make_mixer(mixer, 12, 3, AttentionConfig(rotation="rope")).double().eval()
    plain = make_mixer(mixer, 12, 3, AttentionConfig(rotation="none")).double().eval()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 12, dtype=torch.double)
    assert (layer(x) - plain(x)).abs().max() > 1e-3
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, :3] = False
    torch.testing.assert_close(layer(x, Layout.of(x, valid))[:, 3:], layer(x[:, 3:]))


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
    x = torch.randn(1, 4, 12, dtype=torch.double)
    plain, both = (turning(**settings) for settings in ({}, {"rotation": "rope"}))
    heads = plain.heads(x)
    angles = [layer.arguments(x, *heads, Layout())["gates"].angles for layer in (plain, both)]
    torch.testing.assert_close(angles[1], angles[0] + both.rotation(x, Layout()))


@torch.inference_mode()
def test_a_decay_that_remembers_streams():
    layer, x = turning(), torch.randn(2, 12, 12, dtype=torch.double)
    whole = layer(x)
    for start, state in ((5, layer.prefill(x[:, :5])[1]), (0, layer.initial_state(2))):
        for i in range(start, 12):
            y, state = layer.step(x[:, i : i + 1], state)
            torch.testing.assert_close(y, whole[:, i : i + 1])
    torch.testing.assert_close(state.decay[0], torch.full((2, 1), 1.2, dtype=torch.double))


def test_special_tokens_may_differ_from_row_to_row():
    """Check as many rows as heads, where a mask of rows must not be applied to heads."""
    for name in ("lion_s", "lion_s_vector", "lion_s_hippo"):
        layer, x = make_mixer(name, 12, 3), torch.randn(3, 5, 12)
        special = torch.eye(3, 5, dtype=torch.bool)
        log_decay = layer.decays[0](x, layer.heads(x)[1], Layout(special=special)).log_decay
        kept = (log_decay == 0).view(3, 3, 5, -1).all(3)
        assert kept.equal(special[:, None].expand(-1, 3, -1)), name


def test_bad_rotations():
    with pytest.raises(ValueError, match="rotation needs pairs, got an odd head dimension 3"):
        make_mixer("lion_s", 9, 3, AttentionConfig(rotation="rope"))
    with pytest.raises(ValueError, match="rotation 'rope' needs one order of the tokens"):
        make_mixer("lion_s", 12, 3, AttentionConfig(rotation="rope", scans=("row_snake", "column_snake")))
    with pytest.raises(ValueError, match="rotation belongs to mixers with scores, 'none' has none"):
        make_mixer("none", 12, 3, AttentionConfig(rotation="rope"))


def test_unknown_mixers_are_named():
    with pytest.raises(ValueError, match=r"mixer: expected one of .*, got 'lightnt', did you mean 'lightnet'\?"):
        LionAttention(64, 2, "lightnt")
    with pytest.raises(ValueError, match=r"got 'softmax', use lion\.make_mixer\('softmax', \.\.\)"):
        LionAttention(64, 2, "softmax")
    for make in (
        lambda name: make_mixer(name, 12, 3, AttentionConfig()),
        lambda name: resolve_mixer(name, AttentionConfig()),
        lambda name: SoftmaxAttention(12, 3, name),
        lambda name: HydraAttention(12, 3, name, None),
        lambda name: EncoderConfig(mixer=name, dim=12, num_heads=3, depth=1),
    ):
        with pytest.raises(ValueError, match=r"mixer: unknown mixer 'sofmax', did you mean 'softmax'\?"):
            make("sofmax")


def test_settings_of_another_mixer_are_not_dropped():
    with pytest.raises(ValueError, match="spectrum: unknown setting of mixer 'lion_s', valid: "):
        make_mixer("lion_s", 12, 3, HippoConfig(spectrum="s4d_real"))
    with pytest.raises(ValueError, match="spectrum: unknown setting of mixer 'softmax'"):
        resolve_mixer("softmax", HippoConfig(spectrum="s4d_real"))
    with pytest.raises(ValueError, match="chunksize: unknown setting of mixer 'hydra', did you mean 'chunk_size'"):
        HydraAttention(12, 3, "hydra", None, chunksize=4)
    with pytest.raises(ValueError, match="config: expected a AttentionConfig, got dict; settings go by name"):
        make_mixer("lion_s", 12, 3, {"form": "full"})
    assert make_mixer("lion_s", 12, 3, HippoConfig(chunk_size=7)).chunk_size == 7


def test_widths_are_whole_numbers():
    for args, message in (
        ((12, 3.0), "num_heads: expected a whole number, got 3.0"),
        (("12", 3), "dim: expected a whole number, got '12'"),
        ((12, 0), "num_heads: expected at least 1, got 0"),
        ((13, 3), "dim: expected a multiple of num_heads=3, got 13"),
    ):
        for layer in (LionAttention, SoftmaxAttention, HydraAttention):
            with pytest.raises(ValueError, match=message):
                layer(*args)


def test_a_module_without_mixers_has_no_form():
    with pytest.raises(ValueError, match="model: Linear has no mixers of lion"):
        set_form(torch.nn.Linear(2, 2), "rnn")


def test_a_class_with_one_mixer_needs_no_name():
    assert type(LionAttention(12, 3)) is LionAttention and LionAttention(12, 3).mixer is LINEAR["lion_s"]
    assert PerformerAttention(12, 3).mixer is LINEAR["performer"]
    with pytest.raises(ValueError, match=r"^mixer: HippoAttention needs one of lion_d_hippo, lion_s_hippo$"):
        HippoAttention(12, 3)


def test_classes_refuse_mixers_of_other_classes():
    for make, name, expected in (
        (SoftmaxAttention, "lion_s", "softmax in SoftmaxAttention, got 'lion_s', a LionAttention"),
        (SoftmaxAttention, FOX, "softmax in SoftmaxAttention, got 'fox', a ForgettingAttention"),
        (PerformerAttention, "lion_s", "performer in PerformerAttention, got 'lion_s', a LionAttention"),
    ):
        with pytest.raises(ValueError, match=f"mixer: expected {expected}"):
            make(12, 3, name)
    with pytest.raises(ValueError, match="mixer: expected hydra in HydraAttention, got 'softmax', a SoftmaxAttention"):
        HydraAttention(12, 3, SOFTMAX, None)

    class Own(LionAttention):
        pass

    assert type(Own(12, 3, "lion_s")) is Own


def test_scans_are_a_list_or_a_tuple():
    assert LionAttention(12, 3, scans=["row_major"]).config.scans == ("row_major",)
    with pytest.raises(ValueError, match=r"scans: expected a list such as \[row_major, row_major\], got 'row_major'"):
        LionAttention(12, 3, scans="row_major")


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "none"])
def test_bad_tokens_and_states_are_named(mixer):
    layer = make_mixer(mixer, 12, 3, MIXERS[mixer].layer.Config(direction="forward"))
    for x in (torch.randn(4, 12), torch.randn(1, 4, 8), torch.randn(1, 0, 12)):
        with pytest.raises(ValueError, match=r"x: expected tokens \(B, L >= 1, 12\), got shape"):
            layer(x)
    with pytest.raises(ValueError, match=r"state: expected a .*, which prefill returns, .* got NoneType"):
        layer.step(torch.randn(1, 1, 12), None)
    with pytest.raises(ValueError, match=r"state: made for 2 sequences, got 3"):
        layer.step(torch.randn(3, 1, 12), layer.initial_state(2))


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
    with pytest.raises(ValueError, match=r"^chunk_sise: unknown setting of mixer 'gla', did you mean 'chunk_size'\?"):
        make_mixer("gla", 12, 3, chunk_sise=8)
    with pytest.raises(ValueError, match=r"got 'hydra', use lion.make_mixer\('hydra', ..\)$"):
        LionAttention(12, 3, "hydra")


def test_a_mixer_of_another_package():
    """Check the example of the README, in every form, in a model, in timm, and under a name that is taken."""
    timm = pytest.importorskip("lion.timm")
    text = (ROOT / "lion/layers/README.md").read_text().partition("## A mixer of your own")[2]
    code, names = text.partition("```python\n")[2].partition("```")[0], {}
    try:
        exec(code, names)
        layer, x = names["layer"].double(), torch.randn(2, 70, 64, dtype=torch.float64)
        results = []
        for form in layer.forms:
            set_form(layer, form)
            results.append(layer(x))
        for y in results:
            torch.testing.assert_close(y, results[0], rtol=1e-10, atol=1e-12)
        assert timm.attention("half_life")(64, 4)(x.float()).shape == x.shape
        encoder = Encoder(EncoderConfig(mixer="half_life", dim=64, depth=1, num_heads=4))
        assert encoder(x.float()).shape == x.shape
        with pytest.raises(ValueError, match=r"^mixer: 'half_life' exists already$"):
            exec(code, names)
    finally:
        MIXERS.pop("half_life", None)
        LINEAR.pop("half_life", None)


def test_a_block_without_a_mixer_streams_with_its_shifts():
    layer, x = make_mixer("none", 12, 3, direction="forward", token_shift=True).double(), torch.randn(2, 7, 12).double()
    y, state = layer.prefill(x[:, :4])
    rest, _ = layer.step(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([y, rest], 1), layer(x))
    with pytest.raises(ValueError, match="state: made for 2 sequences, got 1"):
        layer.step(x[:1, 4:], state)


@pytest.mark.parametrize("scans", [(), ("row_snake", "column_snake")])
def test_a_map_of_keys_alone(scans):
    """Check a map of keys without a decay, and with several scans; the row sum before decays has a name."""
    entry = dataclasses.replace(LINEAR["lion_d" if scans else "lion_lit"], key_map="sigmoid", normalize="pre")
    MIXERS["mapped"] = MIXERS["lion_lit"]._replace(fields=entry)
    try:
        torch.manual_seed(0)
        layer = LionAttention(12, 3, "mapped", **({"scans": scans} if scans else {}))
        mapped, plain = [], []
        x, layout = torch.randn(2, 7, 12), grid_layout(3, 2, scans or ("row_major",))
        for key_map, found in (("sigmoid", mapped), (None, plain)):
            layer.mixer = dataclasses.replace(entry, key_map=key_map)
            found.append(layer(x, layout))
        assert not torch.allclose(mapped[0], plain[0])
        assert "row sum before decays" in LionAttention.info("mapped")
    finally:
        MIXERS.pop("mapped")


@torch.no_grad()
def test_a_stream_under_autocast_keeps_its_cache_narrow():
    layer, x = SoftmaxAttention(12, 3, direction="forward"), torch.randn(2, 3, 12)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer.step(x, layer.initial_state(2))
        assert state.k.dtype == layer.prefill(x)[1].k.dtype == torch.bfloat16
