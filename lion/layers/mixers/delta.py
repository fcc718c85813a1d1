"""The delta rule: DeltaNet, and delta rules that decay, as published: Gated DeltaNet, KDA, Comba, GDN-2, RWKV-7.

The recurrences are those of `lion.ops.delta`; all gates are computed in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import present
from lion.layers.layout import Layout
from lion.layers.mixers.attention import Inputs
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.linear import LinearMixer, LionAttention
from lion.layers.mixers.linear_transformers import RWKV_EPS, DiscreteDecay, inverse_softplus_steps
from lion.layers.mixers.parts import Parts
from lion.layers.mixers.registry import Entry
from lion.layers.optim_factors import undecayed
from lion.layers.weights import linear
from lion.ops import Gates, no_autocast
from lion.ops.dtypes import wide_dtype


@dataclass
class DeltaConfig(AttentionConfig):
    """Settings of a delta rule with a writing strength beta.

    `negative_eigenvalues` is whether beta is in [0, 2] instead of [0, 1] (arXiv 2411.12537): `I - beta k k^T` then has
    eigenvalues from -1 to 1.
    """

    negative_eigenvalues: bool = False

    def label(self) -> str:
        return "with negative eigenvalues" if self.negative_eigenvalues else ""


class DeltaAttention(LionAttention):
    """Linear attention with a delta rule and a writing strength beta."""

    Config = DeltaConfig
    config: DeltaConfig

    def make_decays(self, dim: int) -> list[Decay]:
        kind: Callable[..., Decay] = present(self.mixer.decay, "decay")
        return [kind(dim, self.num_heads, strength=2.0 if self.config.negative_eigenvalues else 1.0)]


class DeltaRule(Decay):
    """DeltaNet (arXiv 2406.06484): `beta_i = strength sigmoid(W x_i)`, (B, H, L); the strength is 1 or 2."""

    per, delta = "delta rule", True

    def __init__(self, dim: int, num_heads: int, strength: float = 1.0) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads, bias=False)
        self.strength = strength

    def beta(self, x: Tensor) -> Tensor:
        return self.strength * torch.sigmoid(linear(self.gate, x)).mT

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, Gates(beta=self.beta(x)))


class ChannelDecay(Decay):
    """KDA's decay (arXiv 2510.26692): `lambda_i = exp(-exp(a) softplus(W2 W1 x_i + b))`, (B, H, L, D).

    W1 has the rank of the head dimension, a is a number per head, and b one per key dimension. Both start as in
    Mamba-2.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.down = nn.Linear(dim, dim // num_heads, bias=False)
        self.up = nn.Linear(dim // num_heads, dim, bias=False)
        self.step_bias = nn.Parameter(inverse_softplus_steps(dim))
        self.a = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())

    def log_decay(self, x: Tensor) -> Tensor:
        dt = F.softplus(linear(self.up, linear(self.down, x)) + self.step_bias.to(x.dtype))
        return -self.a.to(x.dtype).exp()[:, None, None] * self.by_head(dt)


class WideDiscreteDecay(DiscreteDecay):
    """The decay of Mamba-2, with -A uniform in [0, 16] at the start, as in the released code of Gated DeltaNet."""

    def start(self) -> Tensor:
        return torch.empty(self.num_heads, 1).uniform_(0, 16).clamp_min(1e-4)  # its logarithm is learned


class GatedDeltaRule(DeltaRule):
    """Gated DeltaNet (arXiv 2412.06464): `S = (I - beta k k^T) lambda S + beta k v^T`.

    lambda is that of Mamba-2, with A in [0, 16] at the start.
    """

    per = "a token and head, delta rule"
    Decaying: type[DiscreteDecay] | type[ChannelDecay] = WideDiscreteDecay

    def __init__(self, dim: int, num_heads: int, strength: float = 1.0) -> None:
        super().__init__(dim, num_heads, strength)
        self.decay = self.Decaying(dim, num_heads)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, Gates(self.decay.log_decay(x), beta=self.beta(x)))


class KimiDeltaRule(GatedDeltaRule):
    """Kimi Delta Attention (arXiv 2510.26692): `S = (I - beta k k^T) Diag(lambda) S + beta k v^T`."""

    per = "a token and key dimension, delta rule"
    Decaying = ChannelDecay


class CombaRule(GatedDeltaRule):
    """Comba (arXiv 2506.02475): `u = beta (v - S^T p)`, `S = lambda S + k u^T`, `y = (q - d p) S`.

    `p = sigmoid(c) k` reads what is erased from the undecayed state ("scalar plus low rank"), and corrects the query. c
    and d are numbers per head, which start at 1.
    """

    def __init__(self, dim: int, num_heads: int, strength: float = 1.0) -> None:
        super().__init__(dim, num_heads, strength)
        self.c, self.d = nn.Parameter(torch.ones(num_heads)), nn.Parameter(torch.ones(num_heads))

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        c, d = (t.to(x.dtype)[:, None, None] for t in (self.c, self.d))
        p = torch.sigmoid(c) * k
        gates = Gates(self.decay.log_decay(x), beta=self.beta(x), read=p)
        return Gating(k, gates, query_shift=-d * p)


class ChannelDeltaRule(Decay):
    """Gated DeltaNet-2 (arXiv 2605.22791): `S = (I - k (b * k)^T) Diag(lambda) S + k (w * v)^T`.

    `b = sigmoid(W_b x)` and `w = sigmoid(W_w x)` are vectors per head, lambda is KDA's.
    """

    per, delta, value_gates = "a token and key dimension, delta rule", True, True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.decay = ChannelDecay(dim, num_heads)
        self.read, self.write = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        b, w = (torch.sigmoid(self.by_head(linear(layer, x))) for layer in (self.read, self.write))
        return Gating(k, Gates(self.decay.log_decay(x), read=b * k), value_gate=w)


class GeneralizedDeltaRule(Decay):
    """RWKV-7 (arXiv 2503.14456): `S = (Diag(w) - (a * c) c^T) S + k' v^T`, with the erase on the undecayed state.

    `c = unit(k * k_k)`, `k' = k (1 + (a - 1) k_a)`, `a = sigmoid(a_0 + W2 W1 x)` and
    `w = exp(-exp(-1/2) sigmoid(w_0 + U2 tanh(U1 x)))` are vectors per head; W1 and U1 have rank 64. In the paper the
    state is transposed.
    """

    per, delta = "a token and key dimension, delta rule", True

    def __init__(self, dim: int, num_heads: int, rank: int = 64) -> None:
        super().__init__(dim, num_heads)
        self.w = nn.Parameter(-6 + 5 * torch.linspace(0, 1, dim // num_heads).repeat(num_heads))
        self.a = nn.Parameter(torch.zeros(dim))
        self.w_down, self.w_up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.a_down, self.a_up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.k_k, self.k_a = nn.Parameter(torch.full((dim,), 0.85)), nn.Parameter(torch.ones(dim))
        self.optim_factors = undecayed("w_down.weight", "w_up.weight", "a_down.weight", "a_up.weight")

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        w = self.w.to(x.dtype) + linear(self.w_up, torch.tanh(linear(self.w_down, x[..., : self.dim])))
        a = self.strength(x)
        read = F.normalize(k * self.k_k.to(x.dtype).view(self.num_heads, 1, -1), dim=-1)
        log_decay = -math.exp(-0.5) * torch.sigmoid(self.by_head(w))
        return Gating(self.written(k, a), Gates(log_decay, erase=a * read, read=read))

    def strength(self, x: Tensor) -> Tensor:
        """Return a (B, H, L, D); with a token shift, x (B, L, 2 dim) has tokens for w and for a."""
        return self.by_head(
            torch.sigmoid(self.a.to(x.dtype) + linear(self.a_up, linear(self.a_down, x[..., -self.dim :])))
        )

    def written(self, k: Tensor, a: Tensor) -> Tensor:
        """Return the keys k' (B, H, L, D)."""
        return (k * (1 + (a - 1) * self.k_a.to(a.dtype).view(self.num_heads, 1, -1))).to(k.dtype)


class RWKV7Attention(LionAttention):
    """RWKV-7 attention: the token shift has a sixth output, for a, and the bonus uses the keys that are written."""

    shifts, head_eps = 6, RWKV_EPS

    def bonus_keys(self, inputs: Inputs) -> Tensor:
        x = inputs.x
        with no_autocast(x):
            rule = cast("GeneralizedDeltaRule", self.first_decay())
            a = rule.strength(x.to(wide_dtype(x)))
            return rule.written(inputs.k, a)


BLOCK = Parts(conv_width=4, value_map="silu", head_norm="rmsnorm")
GATED_BLOCK = replace(BLOCK, out_gate="sigmoid", out_gate_rank=0)  # the rank is the head dimension
UNIT: dict[str, Any] = {"feature_map": "silu_unit"}
FAMILY = {
    "deltanet": Entry(
        DeltaAttention,
        LinearMixer(DeltaRule, **UNIT, scale=1.0, source="2406.06484", published=BLOCK),
    ),
    "gated_deltanet": Entry(
        DeltaAttention,
        LinearMixer(
            GatedDeltaRule, **UNIT, source="2412.06464", published=replace(BLOCK, out_gate="silu", value_ratio=2)
        ),
    ),
    "kda": Entry(
        DeltaAttention,
        LinearMixer(
            KimiDeltaRule,
            **UNIT,
            source="Kimi Linear, 2510.26692",
            published=GATED_BLOCK,
        ),
    ),
    "comba": Entry(
        DeltaAttention,
        LinearMixer(
            CombaRule,
            **UNIT,
            undecayed_erase=True,
            source="2506.02475",
            published=replace(BLOCK, out_gate="sigmoid", value_ratio=2),
            left_out="norm of the corrected q and of p (released kernels)",
        ),
    ),
    "gdn2": Entry(
        LionAttention,
        LinearMixer(
            ChannelDeltaRule,
            **UNIT,
            source="Gated DeltaNet-2, 2605.22791",
            published=GATED_BLOCK,
        ),
    ),
    "rwkv7": Entry(
        RWKV7Attention,
        LinearMixer(
            GeneralizedDeltaRule,
            scale=1.0,
            undecayed_erase=True,
            source="2503.14456",
            published=Parts(
                token_shift=True, head_norm="groupnorm", bonus=True, out_gate="inner_sigmoid", out_gate_rank=128
            ),
            left_out="values of the first layer",
        ),
    ),
}
