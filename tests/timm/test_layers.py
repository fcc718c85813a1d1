"""Tests of the attention layers for timm: their values are those of our layers; masks that do not fit are refused."""

import abc
import copy
import importlib
import pickle
import re
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import lion
from lion.layers.layout import Layout
from lion.layers.mixers import LINEAR, set_form
from lion.timm.layers import TimmAttention
from tests.helpers import ROOT
from tests.layers.helpers import close, invalid

timm = pytest.importorskip("timm")
room = pytest.importorskip("lion.timm")

DIM, HEADS, LENGTH = 24, 3, 11
PUBLISHED = ("mamba2", "rwkv7", "gated_deltanet", "retnet")  # short convolution, token shift, head norm, ..
VALID = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
KEYS = VALID[:, None, None]  # as a mask of scores


def layers(mixer, direction="both", **settings):
    """Return a layer for timm and ours, with the same weights, and tokens for both."""
    torch.manual_seed(0)
    theirs = room.attention(mixer, **settings)(DIM, HEADS, qkv_bias=True)
    ours = lion.LionAttention(DIM, HEADS, mixer, direction=direction, **settings)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(2, LENGTH, DIM)


def valid_only(ours, x):
    """Return our layer's values of valid tokens."""
    return ours(x, Layout.of(x, VALID))[VALID]


@pytest.mark.parametrize(("mixer", "block"), [*((m, "plain") for m in LINEAR), *((m, "published") for m in PUBLISHED)])
def test_the_values_are_those_of_our_layer(mixer, block):
    theirs, ours, x = layers(mixer, block=block)
    assert torch.equal(theirs(x), ours(x))
    masked = theirs(x.masked_fill(~VALID[..., None], torch.nan), attn_mask=KEYS)
    assert torch.equal(masked[VALID], valid_only(ours, x))
    theirs, ours, x = layers(mixer, direction="forward", block=block)
    y = theirs(x, is_causal=True)
    assert torch.equal(y, ours(x)) and not torch.allclose(y, theirs(x))
    y = theirs(x, attn_mask=KEYS, is_causal=True)
    assert torch.equal(y[VALID], valid_only(ours, x))
    y.square().sum().backward()
    assert all(p.grad is not None for p in theirs.parameters())


def added(mask, least=-torch.inf):
    return torch.zeros(mask.shape).masked_fill(~mask, least)


PAIRS = KEYS & VALID[:, None, :, None]
MASKS = {  # of timm's models, and of PyTorch's SDPA
    "keys": KEYS,
    "keys for each query": KEYS.expand(-1, 1, LENGTH, -1),
    "pairs": PAIRS,
    "added keys": added(KEYS),
    "added pairs": added(PAIRS, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("kind", MASKS)
def test_every_form_of_a_padding_mask(kind):
    theirs, ours, x = layers("lion_s")
    y = theirs(x, attn_mask=MASKS[kind])
    assert torch.equal(y[VALID], valid_only(ours, x)) and y.isfinite().all()
    close(y[1:, :7], theirs(x[1:, :7]), 1e-6)
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    close(theirs(x, attn_mask=everything), ours(x), 1e-6)


def test_the_mask_of_timms_naflex_model():
    naflex = pytest.importorskip("timm.models.naflexvit")
    theirs, ours, x = layers("lion_d")
    for symmetric in (True, False):
        mask = naflex.create_attention_mask(VALID, symmetric=symmetric)
        assert torch.equal(theirs(x, attn_mask=mask)[VALID], valid_only(ours, x))


REFUSED = [
    (torch.ones(2, HEADS, LENGTH, LENGTH).bool(), "expected (B, 1, 1, L) or (B, 1, L, L) with B=2 and L=11, got (2, 3"),
    (torch.ones(2, HEADS, LENGTH, LENGTH).bool(), "got (2, 3, 11, 11); linear attention has one mask for"),
    (torch.ones(2, 1, LENGTH, 9).bool(), "with B=2 and L=11, got (2, 1, 11, 9)"),
    (torch.ones(2, LENGTH, LENGTH).bool(), "with B=2 and L=11, got (2, 11, 11)"),
    (torch.randn(LENGTH, LENGTH), "attn_mask: a bias of scores, which linear attention cannot express"),
    (torch.randn(LENGTH, LENGTH), "cannot express; expected padding, or is_causal=True"),
    (torch.ones(LENGTH, LENGTH).bool().tril(), "attn_mask: different keys for different queries, which linear"),
    (torch.eye(LENGTH).bool(), "attn_mask: different keys for different queries"),
    (KEYS.long(), "attn_mask: expected boolean or floating point, got int64"),
]


def test_a_mask_that_linear_attention_cannot_express_is_refused():
    theirs, _, x = layers("lion_s")
    for mask, message in REFUSED:
        invalid(re.escape(message), theirs, x, attn_mask=mask)


def test_bad_arguments_are_refused():
    for message, made in {
        "mixer: unknown linear mixer 'lion_q', did you mean 'lion_": lambda: room.attention("lion_q"),
        "got 'softmax'": lambda: room.attention("softmax"),
        "chunk_sise: unknown setting of mixer 'gla'": lambda: room.attention("gla", chunk_sise=3)(DIM, HEADS),
        "scale_norm: use the setting out_norm": lambda: room.LionAttention(DIM, HEADS, scale_norm=True),
        "qk_norm: needs norm_layer": lambda: room.LionAttention(DIM, HEADS, qk_norm=True),
        "dim: expected a multiple of num_heads=5": lambda: room.LionAttention(DIM, 5),
        "qkv_bias: timm passes it to the layer, as qkv_bias": lambda: room.attention("gla", qkv_bias=True),
        "score_dropout: timm passes it to the layer, as attn_drop": lambda: room.attention("gla", score_dropout=0.1),
        "score_dropout is not available": lambda: room.attention("deltanet")(DIM, HEADS, attn_drop=0.1),
    }.items():
        invalid(re.escape(message), made)
    x = torch.randn(1, LENGTH, DIM)
    for message, settings in {
        "is_causal: not available with direction 'backward'": {"direction": "backward"},
        "is_causal: not available with several scans": {"scans": ("row_snake", "column_snake")},
        "out_norm: 'batchnorm' averages over all tokens": {"out_norm": "batchnorm"},
    }.items():
        invalid(re.escape(message), room.attention("lion_s", **settings)(DIM, HEADS), x, is_causal=True)


def test_the_arguments_of_timms_attention():
    torch.manual_seed(0)
    layer = room.attention("lion_lit")(DIM, HEADS, qk_norm=True, norm_layer=nn.LayerNorm, proj_bias=False)
    names = {"qkv.weight", "proj.weight", *(f"{n}_norm.{kind}" for n in "qk" for kind in ("weight", "bias"))}
    assert set(layer.state_dict()) == names
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(2, LENGTH, DIM)
    q, k, v = layer.qkv(x).view(2, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    expected = lion.linear_attention(layer.q_norm(q), layer.k_norm(k), v, feature_map="silu_shifted", form="full")
    close(layer(x), expected.transpose(1, 2).flatten(2) @ layer.proj.weight.T)

    layer = room.LionAttention(DIM, HEADS, proj_drop=1.0, attn_drop=0.5)
    assert layer.config.score_dropout == 0.5 and layer.qkv.bias is None
    assert not layer(x).any() and layer.eval()(x).any()
    layer = room.LionAttention(DIM, HEADS, device="meta", dtype=torch.float64, qkv_bias=True)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


def test_the_class_of_a_mixer_is_one_class_that_is_copied_and_pickled():
    assert room.attention("lion_s") is room.LionAttention
    assert room.attention("gla", form="chunk") is room.attention("gla", form="chunk") is not room.attention("gla")
    scans = ["row_snake", "column_snake"]
    assert room.attention("lion_s", scans=scans) is room.attention("lion_s", scans=tuple(scans))
    for kind in (room.attention("gla", form="chunk"), room.LionAttention, TimmAttention):
        assert pickle.loads(pickle.dumps(kind)) is kind  # timm keeps the class in a model

    class Abstract(room.LionAttention, abc.ABC):
        """Check that a subclass may be abstract."""

    layer = room.attention("gla", form="chunk")(DIM, HEADS)
    x = torch.randn(1, LENGTH, DIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and other.form == "chunk" and torch.equal(other(x), layer(x))
        assert torch.equal(other(x, is_causal=True), layer(x, is_causal=True))
        other.eval()
        set_form(other, "rnn", 2)
        close(other(x, is_causal=True), layer(x, is_causal=True))
        assert not other.causal_twin.training and other.causal_twin.form == "rnn"
        nn.init.zeros_(other.qkv.weight)
        assert layer.qkv.weight.any() and not other(x, is_causal=True).std(1).any()


@pytest.mark.parametrize("mixer", ["lion_s", "lightnet"])
def test_a_model_of_timm_with_our_layers(mixer):
    """Check forms, directions and gradients in timm's ViT, with padding patches that change nothing."""
    torch.manual_seed(0)
    settings = dict(img_size=48, embed_dim=DIM, num_heads=HEADS, depth=2, num_classes=5, qk_norm=True)
    model = timm.create_model("vit_small_patch16_224", attn_layer=room.attention(mixer), **settings).double()
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    expected = model(images)
    expected.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    for form in ("chunk", "rnn"):
        set_form(model, form, 4)
        close(model(images), expected, 1e-11)
    changed = torch.cat([images[..., :32, :], torch.randn(2, 3, 16, 48)], 2)  # the last row of patches
    keys = (torch.arange(10) < 7)[None, None, None]
    tokens, others = (model.forward_features(x, attn_mask=keys) for x in (images, changed))
    assert torch.equal(tokens[:, :7], others[:, :7])
    tokens, others = (model.forward_features(x, is_causal=True) for x in (images, changed))
    close(tokens[:, :7], others[:, :7], 1e-11)
    assert not torch.allclose(tokens[:, 7:], others[:, 7:])


@pytest.mark.compiled
def test_weights_of_softmax_keep_the_decays_of_the_start(tmp_path):
    """Check timm's two ways to load weights without decays, one warning a model, and that half of them is an error."""
    name = "vit_tiny_patch16_224"
    small = {"depth": 2, "embed_dim": DIM, "num_heads": HEADS, "img_size": 32}
    softmax = timm.create_model(name, **small)
    file = tmp_path / "softmax.pth"
    torch.save(softmax.state_dict(), file)
    for how in ({"checkpoint_path": str(file)}, {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file)}}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            model = timm.create_model(name, attn_layer=room.attention("lion_s"), **small, **how)
        (said,) = [str(each.message) for each in caught if "softmax attention" in str(each.message)]
        assert said.startswith("these weights of softmax attention have no decays of 'lion_s', which keep their init")
        own = model.state_dict()
        for key, value in softmax.state_dict().items():
            assert torch.equal(own[key], value)
        gates = [value for key, value in own.items() if key.endswith("gate.weight")]
        assert len(gates) == 2
        assert all(gate.std() > 0 for gate in gates)
    key = next(key for key in own if key.endswith("gate.weight"))
    del own[key]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(own)


def test_one_compiled_graph_serves_masks_and_causality():
    layer, _, x = layers("lion_s")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for arguments in ({"is_causal": True}, {"attn_mask": KEYS}, {"attn_mask": PAIRS}):
        assert torch.equal(compiled(x, **arguments), layer(x, **arguments))


def test_threads_call_one_layer():
    layer, _, x = layers("lion_s")
    expected, found = layer(x, is_causal=True), []

    def call_again():
        for _ in range(20):
            found.append(layer(x, is_causal=True))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=call_again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert len(found) == 80 and all(torch.allclose(y, expected) for y in found)


def test_without_timm_one_line_names_the_package(monkeypatch):
    for name in [n for n in sys.modules if n == "lion.timm" or n.startswith("lion.timm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm.layers", None)
    with pytest.raises(ImportError, match=r"^lion.timm needs timm 1.0.26 or newer: pip install -U 'timm>=1.0.26'$"):
        importlib.import_module("lion.timm")
    assert (ROOT / "setup.py").read_text().count("timm>=1.0.26") == 1


def test_hooks_and_adapters_count_in_causal_calls():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)
            self.in_features = base.in_features

        def forward(self, x):
            return self.base(x) + self.low(x)

    layer, same, x = layers("lion_s", direction="forward")
    layer.qkv = Adapted(layer.qkv)
    with torch.no_grad():
        same.qkv.weight += layer.qkv.low.weight
    nn.utils.parametrizations.weight_norm(layer.proj)
    called = []
    layer.proj.register_forward_hook(lambda *_: called.append(1))
    close(layer(x, is_causal=True), same(x))
    assert called == [1] and layer(x).shape == x.shape
    layer.proj_drop.p = 1.0
    assert not layer(x, is_causal=True).any()
    layer.decays[0] = nn.ModuleList([layer.decays[0]])
    invalid(r"is_causal: decays.0.0.* was added; adapters .* qkv, proj", layer, x, is_causal=True)
