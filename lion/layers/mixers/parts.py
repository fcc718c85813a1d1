"""Parts of published blocks around the heads of a mixer, which any attention layer can have: `AttentionConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.norms import RMSNorm

if TYPE_CHECKING:
    from lion.layers.mixers.config import AttentionConfig

C = TypeVar("C", bound="AttentionConfig")
NO_PART = "none"
BLOCKS = ("plain", "published")
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


HEAD_NORMS: Mapping[str, type[HeadGroupNorm | HeadRMSNorm]] = {"groupnorm": HeadGroupNorm, "rmsnorm": HeadRMSNorm}


@dataclass(frozen=True)
class Parts:
    """Parts around the heads of an attention layer, in the order of computation; by default none.

    Attributes:
        token_shift: Whether each token is mixed with the one before (`lion.layers.convolution.TokenShift`), with
            separate weights for q, k, v, the decay (RWKV-7: the decay and the erase) and the output gate. RWKV-6's
            depend on the token.
        key_heads: Number of heads of q and k, each of which serves a group of heads; None: all heads.
        value_ratio: Head dimension of v divided by that of q and k.
        conv_width: Width of a depthwise convolution of q, k and v (0: none), centred in both directions. It has a bias
            if the projections have one.
        conv_first: Whether the convolution is one of x: q and k read `c = silu(conv(x))`, v reads x, and `s * c` with
            learned s is added to the outputs after `head_norm`, as in xLSTM.
        kv_shift: Whether k and v are mixed with those before, by a gate (`lion.layers.convolution.KeyValueShift`).
        qk_norm: Norm of each head of q and k.
        value_map: Feature map of v.
        skip: Whether `D_h v_i` is added to the output of head h.
        head_norm: Norm of each head.
        bonus: Whether `(q_i . (r_h * k_i)) v_i` with learned r_h is added, from the q and k before their feature map.
        out_norm: Norm over the whole width; None: the model decides.
        out_gate: Gate that multiplies the outputs: `silu(x W)`, `sigmoid(x W)`, or `sigmoid(x W1) W2`
            ("inner_sigmoid").
        out_gate_rank: Columns between two matrices whose product is W (0: the head dimension); None: a full matrix.
        gate_first: Whether the gate comes before `out_norm`, and not after it.
    """

    token_shift: bool = False
    key_heads: int | None = None
    value_ratio: int = 1
    conv_width: int = 0
    conv_first: bool = False
    kv_shift: bool = False
    qk_norm: str = NO_PART
    value_map: str = "identity"
    skip: bool = False
    head_norm: str = NO_PART
    bonus: bool = False
    out_norm: str | None = None
    out_gate: str = NO_PART
    out_gate_rank: int | None = None
    gate_first: bool = False


PLAIN_BLOCK = Parts()


def parts_of(config: AttentionConfig, plain: Parts, published: Parts) -> Parts:
    """Return the parts of a layer: those of the chosen block, of which `config` overrides some.

    Args:
        config: The settings.
        plain: Parts of a mixer in every block.
        published: Parts of its published block.

    Raises:
        ValueError: A block whose convolution comes first, without a convolution.
    """
    parts = plain
    if config.block == "published":
        parts = published
    if config.conv_width is not None:
        parts = replace(parts, conv_width=config.conv_width)
    if config.out_norm is not None:
        parts = replace(parts, out_norm=config.out_norm)
    if config.out_gate is not None and config.out_gate != parts.out_gate:
        rank = 0 if config.out_gate == INNER_SIGMOID else None
        parts = replace(parts, out_gate=config.out_gate, out_gate_rank=rank)
    if parts.conv_first and not parts.conv_width:
        raise ValueError("conv_width: the convolution of this block comes before q and k, expected at least 1")
    return parts


def with_parts(config: C, parts: Parts) -> C:
    """Return settings in which those that choose parts are filled in."""
    return replace(config, conv_width=parts.conv_width, out_norm=parts.out_norm, out_gate=parts.out_gate)


def make_gate(dim: int, width: int, rank: int | None, kind: str) -> nn.Sequential:
    """Return the logits of an output gate, (.., dim) -> (.., width); a rank of None is a full matrix."""
    sizes = (dim, width) if rank is None else (dim, rank, width)
    gate = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    return gate.insert(1, nn.Sigmoid()) if kind == INNER_SIGMOID else gate


def describe(parts: Parts) -> str:
    """Return the parts of a published block in words; "-" if there are none."""
    words = {
        "token_shift": "token shift",
        "key_heads": "q and k shared by heads",
        "value_ratio": f"values {parts.value_ratio} times as wide",
        "conv_width": f"convolution of width {parts.conv_width}",
        "conv_first": "before q and k, with a skip",
        "kv_shift": "shift of k and v",
        "qk_norm": f"{parts.qk_norm} of q and k",
        "value_map": f"{parts.value_map} on v",
        "skip": "skip D",
        "head_norm": f"head {parts.head_norm}",
        "bonus": "bonus",
        "out_norm": f"{parts.out_norm}",
        "out_gate": f"{parts.out_gate.replace('_', ' ')} gate",
    }
    found = [text for name, text in words.items() if getattr(parts, name) != getattr(PLAIN_BLOCK, name)]
    return ", ".join(found) or "-"
