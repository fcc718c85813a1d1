"""Tests of encoders: a causal encoder streams as a whole, and all blocks share one layout."""

import io
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lion.config import ConfigError, build, setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import PreNorm
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import LINEAR, MIXERS, NONE, SOFTMAX, AttentionConfig, LionAttention
from lion.layers.mixers.base import MixerInfo
from lion.layers.mixers.registry import Entry
from lion.layers.norms import NORMS
from lion.layers.rotations import Rope
from lion.models.base import Model
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.vit import ViT, ViTConfig

CAUSAL = AttentionConfig(direction="forward")


def encoder(mixer, attention=CAUSAL, depth=3):
    torch.manual_seed(0)
    config = EncoderConfig(mixer, 12, depth, 3, attention=attention, mlp_ratio=2, dropout=0.1)
    return Encoder(config.resolved()).double().eval()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ROTATED = AttentionConfig(direction="forward", rotation="rope")


@pytest.mark.parametrize(
    ("mixer", "attention"),
    [*((m, CAUSAL) for m in (SOFTMAX, NONE, *LINEAR)), (SOFTMAX, ROTATED), ("gla", ROTATED), ("lion_s", ROTATED)],
)
@torch.inference_mode()
def test_a_causal_encoder_streams(mixer, attention):
    model, x = encoder(mixer, attention), torch.randn(2, 24, 12, dtype=torch.double)
    assert model.causal
    whole = model(x)
    start, state = model.prefill(x[:, :10])
    torch.testing.assert_close(start, whole[:, :10], rtol=0, atol=1e-10)
    for first, states in ((10, saved(state)), (0, model.initial_state(2))):
        for begin in range(first, 24, 4):  # one token, then three at once
            for piece in (slice(begin, begin + 1), slice(begin + 1, min(begin + 4, 24))):
                if x[:, piece].shape[1]:
                    y, states = model.step(x[:, piece], states)
                    torch.testing.assert_close(y, whole[:, piece], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("mixer", "attention"), [*((m, CAUSAL) for m in (SOFTMAX, *LINEAR)), (SOFTMAX, ROTATED)])
@torch.inference_mode()
def test_ragged_prompts_go_on_as_they_would_alone(mixer, attention):
    model, x = encoder(mixer, attention), torch.randn(3, 12, 12, dtype=torch.double)
    valid = torch.ones(3, 12, dtype=torch.bool)
    valid[0, 7:], valid[1, :4], valid[2, 5] = False, False, False
    new = torch.randn(3, 2, 12, dtype=torch.double)
    y, _ = model.step(new, model.prefill(x, Layout.of(x, valid))[1])
    for row in range(3):
        alone = model(torch.cat([x[row, valid[row]], new[row]])[None])[:, -2:]
        torch.testing.assert_close(y[row : row + 1], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "retnet", "deltanet"])
@torch.inference_mode()
def test_of_several_segments_the_last_goes_on(mixer):
    model, x, new = encoder(mixer), torch.randn(1, 9, 12, dtype=torch.double), torch.randn(1, 2, 12, dtype=torch.double)
    segments = torch.tensor([[0, 0, 0, 1, 1, -1, 1, 1, -1]])
    y, _ = model.step(new, model.prefill(x, Layout.of(x, segments=segments))[1])
    alone = model(torch.cat([x[:, segments[0] == 1], new], 1))[:, -2:]
    torch.testing.assert_close(y, alone, rtol=0, atol=1e-10)


def test_labels_name_tpe_and_rotation():
    """Check that labels name TPE and rotation that differ from the mixer's convention, but not their consequences."""

    def label(mixer, attention=None, **settings):
        return ViTConfig(mixer, 12, 2, 3, attention=AttentionConfig(**attention or {}), **settings).label()

    assert label(SOFTMAX, tpe=4) == "softmax with TPE" and label(SOFTMAX, tpe=0) == label(SOFTMAX) == "softmax"
    assert label(SOFTMAX, {"rotation": "lrpe"}) == "softmax lrpe rotation"
    assert label("retnet", {"rotation": "none"}) == "retnet without rotation"
    assert label("lion_s", {"normalize": "none", "rotation": "lrpe"}) == "lion_s without row sum lrpe rotation"
    assert label("gla", tpe=4, position_embedding=True) == "gla with positions with TPE"


def test_a_mixer_may_bring_its_own_tpe(monkeypatch):
    """Check that None selects the TPE of a mixer's published models, and that another mixer does not inherit it."""
    monkeypatch.setattr(
        LionAttention, "info", staticmethod(lambda name: MixerInfo("here", tpe=5 * (name == "lion_lit")))
    )
    config = ViTConfig("lion_lit", 12, 2, 3)
    assert config.resolved().tpe == 5 and not config.resolved().position_embedding
    assert ViTConfig("lion_lit", 12, 2, 3, tpe=0).label() == "lion_lit without TPE"
    assert config.label() == "lion_lit" and config.with_mixer("lion_d").resolved().tpe == 0


@torch.inference_mode()
def test_only_softmax_grows():
    x = torch.randn(1, 40, 12, dtype=torch.double)

    def size(state):
        return sum(part.nbytes for layer in state for part in layer if torch.is_tensor(part))

    for mixer, grows in ((SOFTMAX, True), ("lion_s", False)):
        model = encoder(mixer)
        assert (size(model.prefill(x)[1]) > size(model.prefill(x[:, :20])[1])) == grows


def test_what_sees_later_tokens_does_not_stream():
    for mixer in (SOFTMAX, "lion_s"):
        model = encoder(mixer, AttentionConfig())
        assert not model.causal
        with pytest.raises(ValueError, match="only 'forward' streams"):
            model.prefill(torch.randn(1, 4, 12, dtype=torch.double))
    vit = ViT(ViTConfig("lion_s", 12, 1, 3, patch_size=2), image_size=(4, 4), channels=1, num_classes=2)
    assert not vit.streams
    with pytest.raises(ValueError, match="ViT does not stream"):
        vit.prefill(torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s"])
def test_the_layout_is_made_once(mixer, monkeypatch):
    """Check that no block computes again which tokens may see which."""
    model, x = encoder(mixer, AttentionConfig()), torch.randn(2, 6, 12, dtype=torch.double)
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
    encoder("retnet")(torch.randn(2, 6, 12, dtype=torch.double))
    assert len(calls) == 1


def test_what_may_be_read_depends_on_the_direction():
    """Check that a layout prepared for other directions shows a causal layer no later tokens."""
    x = torch.randn(1, 6, 12, dtype=torch.double)
    valid = torch.ones(1, 6, dtype=torch.bool)
    prepared = Layout.of(x, valid).with_pairs("both").with_pairs("backward")
    layer = encoder(SOFTMAX).blocks[0].attention
    torch.testing.assert_close(layer(x, prepared), layer(x))


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
    model = Encoder(config.resolved()).double().eval()
    x = torch.randn(2, 6, 12, dtype=torch.double)
    valid = torch.tensor([[True] * 4 + [False] * 2] * 2)
    torch.testing.assert_close(model(x, Layout.of(x, valid))[:, :4], model(x[:, :4]))


class Shifted(PreNorm):
    """A block that adds the context that its model passes to all blocks."""

    def before(self, x, layout, context):
        return super().before(x, layout, context) + (0 if context is None else context)


def test_a_context_reaches_every_block(monkeypatch):
    monkeypatch.setitem(BLOCKS, "shifted", Shifted)
    config = EncoderConfig("lion_s", 12, 2, 3, attention=CAUSAL)
    config.block = "shifted"
    torch.manual_seed(0)
    model, x = Encoder(config.resolved()).double().eval(), torch.randn(1, 6, 12, dtype=torch.double)
    context = torch.randn(12, dtype=torch.double)
    whole = model(x, context=context)
    assert (whole - model(x)).abs().max() > 1e-3
    y, state = model.prefill(x[:, :4], context=context)
    rest, _ = model.step(x[:, 4:], state, context=context)
    torch.testing.assert_close(torch.cat([y, rest], 1), whole)


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
    with pytest.raises(ConfigError, match=r"attention\.reach: expected at least 1"):
        build(OfWide, {**values, "attention": {"reach": 0}}, source=str)
    with pytest.raises(ConfigError, match=r"unknown key .model\.attention\.reach|unknown key .attention\.reach"):
        build(OfWide, {**values, "mixer": "lion_s"}, source=str)


class Tagger(Model):
    """The smallest model that streams: an encoder and a head with logits per token."""

    def __init__(self, config):
        super().__init__()
        self.encoder, self.head = Encoder(config.resolved()), nn.Linear(config.dim, 5)

    def units(self):
        return list(self.encoder.blocks)

    def forward(self, x):
        return self.head(self.encoder(x))

    @property
    def streams(self):
        return self.encoder.causal

    def initial_state(self, batch):
        return self.encoder.initial_state(batch)

    def prefill(self, x, valid=None):
        x, state = self.encoder.prefill(x, Layout.of(x, valid))
        return self.head(x), state

    def step(self, x, state):
        x, state = self.encoder.step(x, state)
        return self.head(x), state


@torch.inference_mode()
def test_a_causal_model_streams_as_a_whole():
    torch.manual_seed(0)
    model = Tagger(EncoderConfig("lion_s", 12, 2, 3, attention=CAUSAL)).double().eval()
    x = torch.randn(1, 8, 12, dtype=torch.double)
    assert model.streams
    y, state = model.prefill(x[:, :5])
    rest, _ = model.step(x[:, 5:], saved(state))
    torch.testing.assert_close(torch.cat([y, rest], 1), model(x), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="state: expected 2 states of blocks, got 1"):
        model.encoder.step(x, state[:1])
