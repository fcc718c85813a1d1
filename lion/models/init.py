"""Initialisations by name: `model.init` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from lion.layers.mixers import Attention, HippoAttention, mixers_of
from lion.layers.mixers.decay import Decay
from lion.layers.mixers.hippo import HippoDecay

TRUNCATED = 0.8796  # standard deviation of a normal distribution that is cut at two standard deviations


def deit(model: nn.Module, std: float) -> None:
    """Initialise like DeiT: Linear truncated normal, biases 0; all other parameters keep their values."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=std)
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def xavier(model: nn.Module, std: float) -> None:
    """Initialise like DiT: Linear, and Conv2d like Linear, uniform by fan-in and fan-out (Glorot), biases 0."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(m.weight.flatten(1))  # a view, so that all pixels of a patch count as fan-in
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def bert(model: nn.Module, std: float) -> None:
    """Initialise like BERT: Linear and Embedding normal, biases 0; all other parameters keep their values."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=std)
            bias = getattr(m, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)


def gpt2(model: nn.Module, std: float) -> None:
    """Initialise like GPT-2 in nanoGPT: Linear and Embedding normal, biases 0.

    For layers that write into the residual stream, the standard deviation is divided by the square root of the number
    of such layers. All other parameters keep their values.
    """
    residual = [m for name, m in model.named_modules() if name.endswith((".attention.proj", ".mlp.fc2"))]
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            if m in residual:
                nn.init.normal_(m.weight, std=std / math.sqrt(len(residual)))
            else:
                nn.init.normal_(m.weight, std=std)
            bias = getattr(m, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)


@torch.no_grad()
def lra(model: nn.Module, std: float) -> None:
    """Initialise like LION on the Long Range Arena (C.2).

    W_q, W_k and the gates of decays are normal with `std`, and `value_start` determines W_v. All other layers are as in
    S5: Linear and Embedding normal with a standard deviation of 1/sqrt(fan-in) (LeCun), biases 0.
    """
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=m.in_features**-0.5)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=m.num_embeddings**-0.5)
    for m in model.modules():
        if not isinstance(m, Attention):
            continue
        query, key, value = m.qkv.weight.split(m.widths)
        nn.init.normal_(query, std=std)
        nn.init.normal_(key, std=std)
        for gate in gates_of(m):
            nn.init.normal_(gate.weight, std=std)
        if isinstance(m, HippoAttention) and m.config.value_start != "dense":
            per_step = m.config.value_start == "zoh_per_step"
            decay = m.decays[0]
            assert isinstance(decay, HippoDecay)
            held = decay.zero_order_hold(per_step=per_step)
            value.copy_(held.flatten().diag())


@torch.no_grad()
def vim(model: nn.Module, std: float) -> None:
    """Initialise like Vim: Linear truncated normal, Conv2d LeCun normal, Embedding normal, biases 0.

    The parameters of mixers keep their values, except that the layer which writes into the residual stream is divided
    by the square root of the number of mixers.
    """
    mixers = mixers_of(model)
    inside: set[nn.Module] = set()
    for mixer in mixers:
        inside.update(mixer.modules())
    for m in model.modules():
        if m in inside:
            continue
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=std)
        elif isinstance(m, nn.Conv2d):
            scale = m.weight[0].numel() ** -0.5 / TRUNCATED
            nn.init.trunc_normal_(m.weight, std=scale, a=-2 * scale, b=2 * scale)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=std)
        if isinstance(m, (nn.Linear, nn.Conv2d)) and m.bias is not None:
            nn.init.zeros_(m.bias)
    for mixer in mixers:
        mixer.proj.weight.div_(math.sqrt(len(mixers)))


def gates_of(attention: Attention) -> list[nn.Linear]:
    """Return the linear layers that make decays depend on tokens."""
    gates = []
    for decay in attention.modules():
        if isinstance(decay, Decay):
            gates += [m for m in decay.modules() if isinstance(m, nn.Linear) and m not in gates]
    return gates


INITS: dict[str, Callable[[nn.Module, float], None]] = {
    "bert": bert,
    "deit": deit,
    "gpt2": gpt2,
    "lra": lra,
    "vim": vim,
    "xavier": xavier,
}
