"""Parts of published blocks around the heads of a mixer, which any attention layer can have: `AttentionConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import fill
from lion.layers.mixers.base import state_type
from lion.layers.norms import RMSNorm

if TYPE_CHECKING:
    from lion.layers.mixers.attention import AttentionConfig

NO_PART = "none"
BLOCKS = ("plain", "published")
# The settings of a plain block. Those of a published block override them by mixer (`LinearMixer.block`).
PLAIN_BLOCK: Mapping[str, Any] = {
    "token_shift": False,
    "conv_width": 0,
    "conv_first": False,
    "kv_shift": False,
    "qk_norm": NO_PART,
    "value_map": "identity",
    "value_ratio": 1,
    "skip": False,
    "head_norm": NO_PART,
    "bonus": False,
    "out_gate": NO_PART,
    "gate_first": False,
}
INNER_SIGMOID = "inner_sigmoid"  # RWKV-7's gate, `sigmoid(x W1) W2`
OUT_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    INNER_SIGMOID: lambda logits: logits,
}


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each head of y (B, H, L, E), with weights (E) that all heads share."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)


class HeadGroupNorm(nn.Module):
    """Layer norm of each head of y (B, H, L, E), with a weight and a bias for each channel: a group norm by heads."""

    def __init__(self, num_heads: int, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads * width))
        self.bias = nn.Parameter(torch.zeros(num_heads * width))

    def forward(self, y: Tensor) -> Tensor:
        y = y.to(torch.promote_types(y.dtype, self.weight.dtype))
        weight, bias = (p.view(y.shape[1], 1, -1) for p in (self.weight, self.bias))
        return F.layer_norm(y, y.shape[-1:], eps=self.eps) * weight + bias


HEAD_NORMS: Mapping[str, Callable[..., nn.Module]] = {"groupnorm": HeadGroupNorm, "rmsnorm": HeadRMSNorm}


def with_block(config: AttentionConfig, usual: Mapping[str, Any], published: Mapping[str, Any]) -> AttentionConfig:
    """Return `config` with the parts around the heads filled in, where they are None.

    Args:
        config: The settings.
        usual: Settings of a mixer that differ from `PLAIN_BLOCK` in every block.
        published: Settings of the mixer's published block that differ from these.

    Raises:
        ValueError: A rank or a place of a gate without a gate, or a first convolution that cannot be combined with
            other parts.
    """
    out = fill(config, {**PLAIN_BLOCK, **usual, **(published if config.block == "published" else {})})
    if out.conv_first and (out.token_shift or not out.conv_width or out.value_ratio != 1):
        raise ValueError("conv_first: expected a conv_width, no token_shift, and value_ratio 1")
    if out.out_gate == INNER_SIGMOID and out.out_gate_rank is None:
        return replace(out, out_gate_rank=0)
    if out.out_gate != NO_PART:
        return out
    for name, given in (("out_gate_rank", config.out_gate_rank is not None), ("gate_first", config.gate_first)):
        if given:
            raise ValueError(f"{name}: there is no gate, set out_gate to {' or '.join(OUT_GATES)}")
    return replace(out, out_gate_rank=None)


def make_gate(dim: int, width: int, rank: int | None, kind: str) -> nn.Sequential:
    """Return the logits of an output gate, (.., dim) -> (.., width); a rank of None is a full matrix."""
    sizes = (dim, width) if rank is None else (dim, rank, width)
    gate = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    return gate.insert(1, nn.Sigmoid()) if kind == INNER_SIGMOID else gate


@state_type
class BlockState(NamedTuple):
    """The state of a causal layer with a token shift, a convolution, or a shift of keys and values.

    Attributes:
        heads: State of the mixing of heads.
        shift: The last token, (B, 1, dim); empty without token shift.
        conv: The tokens (B, width - 1, C) that the next convolution reads; empty without convolution.
        kv: The last key and value before their shift, (B, 1, C); empty without a shift.
    """

    heads: Any
    shift: Tensor
    conv: Tensor
    kv: Tensor


def describe(block: Mapping[str, Any]) -> str:
    """Return the parts of a published block in words; "-" if there are none."""
    words = {
        "token_shift": "token shift",
        "key_heads": "q and k shared by heads",
        "value_ratio": f"values {block.get('value_ratio')} times as wide",
        "conv_width": f"convolution of width {block.get('conv_width')}",
        "conv_first": "before q and k, with a skip",
        "kv_shift": "shift of k and v",
        "qk_norm": f"{block.get('qk_norm')} of q and k",
        "value_map": f"{block.get('value_map')} on v",
        "skip": "skip D",
        "head_norm": f"head {block.get('head_norm')}",
        "bonus": "bonus",
        "out_norm": f"{block.get('out_norm')}",
        "out_gate": f"{str(block.get('out_gate')).replace('_', ' ')} gate",
    }
    return ", ".join(text for name, text in words.items() if name in block) or "-"
