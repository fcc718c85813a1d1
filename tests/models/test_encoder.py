"""Tests of encoders: a causal encoder streams as a whole, and all blocks share one layout."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lion.config import build, setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import PreNorm
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import MIXERS, NONE, SOFTMAX, AttentionConfig, LionAttention
from lion.layers.mixers.base import MixerInfo
from lion.layers.mixers.registry import Entry
from lion.layers.norms import NORMS
from lion.layers.rotations import Rope
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.vit import ViT, ViTConfig
from tests.layers.helpers import close, doubles, invalid, saved

CAUSAL = AttentionConfig(direction="forward")


def encoder(mixer, attention=CAUSAL, depth=3):
    torch.manual_seed(0)
    config = EncoderConfig(mixer, 12, depth, 3, attention=attention, mlp_ratio=2, dropout=0.1)
    return Encoder(config.resolved()).double().eval()


ROTATED = AttentionConfig(direction="forward", rotation="rope")


STREAMED = [(mixer, CAUSAL) for mixer in (SOFTMAX, NONE, "lion_s", "retnet", "lightnet", "deltanet", "rwkv7")]
STREAMED += [(mixer, ROTATED) for mixer in (SOFTMAX, "gla", "lion_s")]


@pytest.mark.parametrize(("mixer", "attention"), STREAMED)  # every mixer streams in GPT
@torch.inference_mode()
def test_a_causal_encoder_streams(mixer, attention):
    model, x = encoder(mixer, attention, depth=2), doubles(2, 24, 12)
    assert model.causal
    whole = model(x)
    start, state = model.prefill(x[:, :10])
    close(start, whole[:, :10], 1e-10)
    for first, states in ((10, saved(state)), (0, model.initial_state(2))):
        for begin, end in ((first, first + 1), (first + 1, first + 4), (first + 4, 24)):
            y, states = model.step(x[:, begin:end], states)
            close(y, whole[:, begin:end], 1e-10)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "retnet", "deltanet"])
@torch.inference_mode()
def test_of_several_segments_the_last_goes_on(mixer):
    model, x, new = encoder(mixer), doubles(1, 9, 12), doubles(1, 2, 12)
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, 1, 1, -1]])
    y, _ = model.step(new, model.prefill(x, Layout.of(x, segments=segments))[1])
    alone = model(torch.cat([x[:, segments[0] == 1], new], 1))[:, -2:]
    close(y, alone, 1e-10)


def test_labels_name_tpe_rotation_and_parts():
    """Check that labels name what differs from the mixer's convention, but not its consequences."""

    def label(mixer, attention=None, **settings):
        return ViTConfig(mixer, 12, 2, 3, attention=AttentionConfig(**attention or {}), **settings).label()

    assert label(SOFTMAX, tpe=4) == "softmax with TPE" and label(SOFTMAX, tpe=0) == label(SOFTMAX) == "softmax"
    assert label(SOFTMAX, {"rotation": "lrpe"}) == "softmax lrpe rotation"
    assert label("retnet", {"rotation": "none"}) == "retnet without rotation"
    assert label("lion_s", {"normalize": "none", "rotation": "lrpe"}) == "lion_s without row sum lrpe rotation"
    assert label("gla", tpe=4, position_embedding=True) == "gla with positions with TPE"
    parts = {"block": "published", "conv_width": 3, "out_gate": "silu"}
    assert label("gla", parts) == "gla published block, conv width 3, out gate silu"


def test_a_mixer_may_bring_its_own_tpe(monkeypatch):
    """Check that None selects the TPE of a mixer's published models, and that another mixer does not inherit it."""
    monkeypatch.setattr(
        LionAttention, "info", staticmethod(lambda name: MixerInfo("here", tpe=5 * (name == "lion_lit")))
    )
    config = ViTConfig("lion_lit", 12, 2, 3)
    assert config.resolved().tpe == 5 and not config.resolved().position_embedding
    assert ViTConfig("lion_lit", 12, 2, 3, tpe=0).label() == "lion_lit without TPE"
    assert config.label() == "lion_lit" and config.with_mixer("lion_d").resolved().tpe == 0


def test_what_sees_later_tokens_does_not_stream():
    for mixer in (SOFTMAX, "lion_s"):
        model = encoder(mixer, AttentionConfig())
        assert not model.causal
        invalid("only 'forward' streams", model.prefill, doubles(1, 4, 12))
    vit = ViT(ViTConfig("lion_s", 12, 1, 3, patch_size=2), image_size=(4, 4), channels=1, num_classes=2)
    assert not vit.streams
    invalid("ViT does not stream", vit.prefill, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s"])
def test_the_layout_is_made_once(mixer, monkeypatch):
    """Check that no block computes again which tokens may see which."""
    model, x = encoder(mixer, AttentionConfig()), doubles(2, 6, 12)
    layout = Layout.of(x, torch.ones(2, 6, dtype=torch.bool), torch.tensor([[0, 0, 1, 1, 1, 2]] * 2))
    seen = []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    model(x, layout)
    assert len(seen) == 3 and all(found is seen[0] for found in seen)
    assert (seen[0].pairs is not None) == (mixer == SOFTMAX) and seen[0].causal_pairs is None


def test_angles_are_made_once(monkeypatch):
    calls, rope = [], Rope.forward
    monkeypatch.setattr(Rope, "forward", lambda self, *args: calls.append(self) or rope(self, *args))
    encoder("retnet")(doubles(2, 6, 12))
    assert len(calls) == 1


def test_what_may_be_read_depends_on_the_direction():
    """Check that a layout prepared for other directions shows a causal layer no later tokens."""
    x = doubles(1, 6, 12)
    valid = torch.ones(1, 6, dtype=torch.bool)
    prepared = Layout.of(x, valid).with_pairs("both").with_pairs("backward")
    layer = encoder(SOFTMAX).blocks[0].attention
    close(layer(x, prepared), layer(x))


class CountingNorm(nn.Module):
    """A norm that uses the layout, like a norm over valid tokens only."""

    def __init__(self, dim, eps=0.0):
        super().__init__()

    def forward(self, x, layout=PLAIN):
        return x / (x.shape[1] if layout.valid is None else layout.valid.sum(1)[:, None, None])


def test_norms_see_the_layout(monkeypatch):
    monkeypatch.setitem(NORMS, "counting", CountingNorm)
    config = EncoderConfig("lion_lit", 12, 2, 3)
    config.norm = "counting"
    model, x = Encoder(config.resolved()).double().eval(), doubles(2, 6, 12)
    valid = torch.tensor([[True] * 4 + [False] * 2] * 2)
    close(model(x, Layout.of(x, valid))[:, :4], model(x[:, :4]))


class Shifted(PreNorm):
    """A block that adds the context that its model passes to all blocks."""

    def before(self, x, layout, context):
        return super().before(x, layout, context) + (0 if context is None else context)


def test_a_context_reaches_every_block(monkeypatch):
    monkeypatch.setitem(BLOCKS, "shifted", Shifted)
    config = EncoderConfig("lion_s", 12, 2, 3, attention=CAUSAL)
    config.block = "shifted"
    torch.manual_seed(0)
    model, x = Encoder(config.resolved()).double().eval(), doubles(1, 6, 12)
    context = doubles(12)
    whole = model(x, context=context)
    assert (whole - model(x)).abs().max() > 1e-3
    y, state = model.prefill(x[:, :4], context=context)
    rest, _ = model.step(x[:, 4:], state, context=context)
    close(torch.cat([y, rest], 1), whole)


class Wide(LionAttention):
    """A mixer with a custom setting."""

    @dataclass
    class Config(AttentionConfig):
        reach: int = setting(3, min=1)

    @staticmethod
    def resolve(name, config):
        return LionAttention.resolve("lion_s", config)

    @staticmethod
    def info(name):
        return MixerInfo("here")

    @staticmethod
    def knows_order(name, config):
        return False

    def __init__(self, dim, num_heads, mixer, config):
        super().__init__(dim, num_heads, "lion_s", config)


@dataclass
class OfWide(EncoderConfig):
    mixer: str


def test_a_mixer_may_have_settings_of_its_own(monkeypatch):
    monkeypatch.setitem(MIXERS, "wide", Entry(Wide))
    values = {"mixer": "wide", "dim": 12, "depth": 1, "num_heads": 3, "attention": {"reach": 5}}
    config = build(OfWide, values, source=str)
    assert config.attention.reach == 5 and config.resolved().attention.feature_map == "silu_shifted"
    invalid(r"attention\.reach: expected at least 1", build, OfWide, {**values, "attention": {"reach": 0}}, source=str)
    message = r"unknown key .model\.attention\.reach|unknown key .attention\.reach"
    invalid(message, build, OfWide, {**values, "mixer": "lion_s"}, source=str)


def test_a_stream_has_one_state_for_each_block():
    model, x = encoder("lion_s"), doubles(1, 8, 12)
    invalid("state: expected 3 states of blocks, got 1", model.step, x, model.prefill(x)[1][:1])
