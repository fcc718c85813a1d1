"""Tests of Crammed BERT (2212.14034), against a second implementation by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from lion.layers.positions import ScaledSinusoidal
from lion.models.bert import Bert, BertConfig
from lion.trainer.optim import factors
from tests.layers.helpers import close, invalid

SHAPE = {"block": "pre_norm", "mlp": "glu_gelu", "mlp_ratio": 2, "bias": False, "head_transform": False}
SHAPE |= {"position_kind": "scaled_sinusoidal"}
DIM, HEADS, VOCABULARY = 12, 3, 40


def crammed(mixer="softmax", dim=DIM, depth=2, heads=HEADS, vocabulary=VOCABULARY, **settings):
    torch.manual_seed(0)
    config = BertConfig(mixer, dim, depth, heads, **{**SHAPE, "max_positions": 32, **settings})
    return Bert(config, vocabulary=vocabulary, length=16)


def by_hand(w, tokens):
    """Compute logits (B, L, vocabulary) from weights `w` by name."""

    def norm(x, name):
        return F.layer_norm(x, (DIM,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    length, size = tokens.shape[1], DIM // HEADS
    angles = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(0, DIM, 2).double() / DIM)
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)  # sines and cosines by turns
    x = norm(w["tokens.weight"][tokens] + w["positions.scale"] * waves, "norm")
    for n in range(2):
        b = f"encoder.blocks.{n}"
        qkv = norm(x, f"{b}.norm1") @ w[f"{b}.attention.qkv.weight"].T
        q, k, v = qkv.unflatten(-1, (3, HEADS, size)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / math.sqrt(size)).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{b}.attention.proj.weight"].T
        gate, value = (norm(x, f"{b}.norm2") @ w[f"{b}.mlp.fc1.weight"].T).chunk(2, -1)
        x = x + (F.gelu(gate) * value) @ w[f"{b}.mlp.fc2.weight"].T
    return norm(x, "encoder.norm") @ w["tokens.weight"].T


@torch.inference_mode()
def test_it_is_what_the_paper_says():
    model = crammed(init_std=0.3).double().eval()
    weights = model.state_dict()
    for value in weights.values():  # initial norms and scale would have no effect
        if value.dim() == 1:
            value += 0.3 * torch.randn_like(value)
    tokens = torch.randint(VOCABULARY, (2, 9))
    close(model(tokens), by_hand(weights, tokens), 1e-10)


def test_nothing_but_norms_has_a_bias_and_weight_decay_spares_what_it_should():
    model = crammed()
    assert all(".norm" in f".{name}" for name, _ in model.named_parameters() if name.endswith("bias"))
    assert model.positions.scale.item() == pytest.approx(DIM**-0.5)
    spared = {name for name, factor in factors(model, "deit").items() if not factor.weight_decay}
    assert spared == {name for name, p in model.named_parameters() if ".norm" in f".{name}"} | {"positions.scale"}
    gates = [name for name, _ in crammed("lion_s").named_parameters() if name.endswith("bias") and "norm" not in name]
    assert gates and all("decay" in name for name in gates)


@torch.inference_mode()
def test_positions_begin_anew_with_each_document():
    model = crammed(init_std=0.3).double().eval()
    tokens = torch.randint(VOCABULARY, (1, 9))
    packed = model(tokens, torch.tensor([[-1, 0, 0, 0, 0, 1, 1, 1, -1]]))
    close(packed[:, 1:5], model(tokens[:, 1:5]), 1e-10)
    close(packed[:, 5:8], model(tokens[:, 5:8]), 1e-10)
    invalid("33 in one row, this model has only 32 position embeddings", model, torch.zeros(1, 33, dtype=torch.long))


def test_waves_of_half_precision_are_those_of_float32_rounded():
    model = ScaledSinusoidal(512, 16)
    places = torch.arange(512)[None]
    expected, got = model(places), model.bfloat16()(places)
    assert got.dtype == torch.bfloat16
    close(got.float(), expected, rtol=0.01, atol=0)


def test_waves_of_an_odd_width_end_with_a_sine():
    waves = ScaledSinusoidal(8, 5)(torch.tensor([[3]])) * math.sqrt(5)
    assert waves.shape == (1, 1, 5) and waves[0, 0, 4].item() == pytest.approx(math.sin(3 / 10_000**0.8), rel=1e-4)
