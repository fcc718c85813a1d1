"""Linear Transformers with a decay, as published: RetNet, gated RFA, Mamba, RWKV-6, GLA, HGRN-2.

All gates are computed in float32 or wider.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.convolution import AdaptiveTokenShift
from lion.layers.layout import Layout
from lion.layers.mixers.decay import Decay, Gating, fold
from lion.layers.mixers.linear import LinearMixer, LionAttention
from lion.layers.mixers.parts import Parts
from lion.layers.mixers.registry import Entry
from lion.layers.optim_factors import undecayed
from lion.layers.weights import linear
from lion.ops import Gates

RWKV_EPS = 64e-5  # of the group norm in the released code: 1e-5 times the square of a divisor, which is 8


class RetentionDecay(Decay):
    """RetNet (arXiv 2307.08621, Eq. 8): `gamma_h = 1 - 2^(-5-h)`, not learned; log_decay (H,)."""

    per = "a head"

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        head = torch.arange(
            self.num_heads, device=x.device, dtype=x.dtype
        )  # not a buffer, because `.bfloat16()` would round it
        return Gating(k, Gates(torch.log1p(-(2.0 ** (-5 - head)))))


class RandomFeatureGate(Decay):
    """Gated RFA (arXiv 2103.02143, section 3.2): `g_i = sigmoid(w x_i + b)`, `S = g S + (1 - g) k v^T`; z likewise."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        logits = linear(self.gate, x).mT  # (B, H, L)
        return Gating(fold(k, torch.sigmoid(-logits)), Gates(F.logsigmoid(logits)))


def inverse_softplus_steps(count: int) -> Tensor:
    """Return biases (count,) whose softplus is log-uniform in [0.001, 0.1], as in Mamba."""
    dt = torch.exp(torch.empty(count).uniform_(math.log(0.001), math.log(0.1)))
    return dt + torch.log(-torch.expm1(-dt))


class DiscreteDecay(Decay):
    """Mamba-2 (arXiv 2405.21060): step `dt_i = softplus(W x_i + b)`, `S = exp(A dt) S + dt k v^T` with a scalar A < 0.

    As published, A = -exp(a) starts in [-16, -1]. The bias b makes dt start in [0.001, 0.1].
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.step = nn.Linear(dim, num_heads, bias=False)
        self.step_bias = nn.Parameter(inverse_softplus_steps(num_heads))
        self.a = nn.Parameter(self.start().log().flatten())  # one-dimensional: exempt from weight decay

    def start(self) -> Tensor:
        return torch.empty(self.num_heads, 1).uniform_(1, 16)

    def steps(self, x: Tensor) -> Tensor:
        """Return the steps dt (B, H, L)."""
        return F.softplus(linear(self.step, x) + self.step_bias.to(x.dtype)).mT

    def log_decay(self, x: Tensor) -> Tensor:
        A = -self.a.to(x.dtype).exp().view(self.num_heads, 1, -1)  # (H, 1, D or 1)
        log_decay = A * self.steps(x)[..., None]
        return log_decay.squeeze(-1) if A.shape[-1] == 1 else log_decay

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(fold(k, self.steps(x)), Gates(self.log_decay(x)))


class DiscreteVectorDecay(DiscreteDecay):
    """Mamba (arXiv 2312.00752, Algorithm 2): Mamba-2 with an A for each state dimension, starting at -1, .., -D.

    Mamba has a step for each value channel. Here the channels of a head share one step.
    """

    per = "a token and key dimension"

    def start(self) -> Tensor:
        head_dim = self.dim // self.num_heads
        return torch.arange(1, head_dim + 1, dtype=torch.get_default_dtype()).expand(self.num_heads, -1)


class ReceptanceDecay(Decay):
    """RWKV-6 (arXiv 2404.05892): `lambda_i = exp(-exp(w + tanh(x_i A) B))` for each key dimension, and the bonus u.

    The state is read before its update, so the decay convention of this mixer is "between". A and B have rank 64.
    """

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int, rank: int = 64) -> None:
        super().__init__(dim, num_heads)
        ratio = torch.linspace(0, 1, dim // num_heads).repeat(num_heads)
        self.w = nn.Parameter(-6 + 5 * ratio)  # lambda in each head: from almost 1 down to exp(-exp(-1)) = 0.69
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)
        self.u = nn.Parameter(1 - ratio)
        self.optim_factors = undecayed("down.weight", "up.weight")

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        w = self.w.to(x.dtype) + linear(self.up, torch.tanh(linear(self.down, x)))
        log_decay = -torch.exp(w.clamp(max=7))  # exp(-exp(7)) is 0 in float64
        return Gating(k, Gates(self.by_head(log_decay), bonus=self.u.view(self.num_heads, -1)))


class LowRankDecay(Decay):
    """GLA (arXiv 2312.06635, section 4.4): the vector `lambda_i = sigmoid(x_i W1 W2 + b)^(1/16)`; W1 has rank 16."""

    per = "a token and key dimension"
    temperature = 16.0

    def __init__(self, dim: int, num_heads: int, rank: int = 16) -> None:
        super().__init__(dim, num_heads)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        log_decay = F.logsigmoid(linear(self.up, linear(self.down, x)))
        return Gating(k, Gates(self.by_head(log_decay)))


class BoundedDecay(Decay):
    """HGRN-2 (arXiv 2404.07904): the vector `lambda_i = b + (1 - b) sigmoid(f_i)`, and the key `1 - lambda_i`.

    The logits f are the output of the key projection. Each layer learns a separate lower bound b. In HGRN-2 the bounds
    of all layers come from one cumulative softmax, so that they rise with depth.
    """

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.bound = nn.Parameter(torch.full((dim,), -2.0))  # b = 0.12

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        bound = self.bound.to(x.dtype).view(self.num_heads, 1, -1)
        logits = k.to(x.dtype)
        rest = F.logsigmoid(-bound)  # log(1 - b)
        log_decay = torch.logaddexp(F.logsigmoid(bound).expand_as(logits), rest + F.logsigmoid(logits))
        return Gating((rest + F.logsigmoid(-logits)).exp().to(k.dtype), Gates(log_decay))


class RWKV6Attention(LionAttention):
    """RWKV-6, whose token shift has weights that depend on the token."""

    Shift, head_eps = AdaptiveTokenShift, RWKV_EPS


NORM_AND_GATE = Parts(head_norm="groupnorm", out_gate="silu")
LINEAR_TRANSFORMERS = {
    "linear_transformer": LinearMixer(
        None, feature_map="elu1", normalize="sum", source="Katharopoulos et al., 2006.16236", left_out="nothing"
    ),
    "retnet": LinearMixer(
        RetentionDecay,
        rotation="rope",
        source="2307.08621",
        published=replace(NORM_AND_GATE, value_ratio=2),
        left_out="normalised scores (without effect before a head groupnorm)",
    ),
    "gated_rfa": LinearMixer(
        RandomFeatureGate,
        feature_map="elu1",
        normalize="sum",
        source="2103.02143",
        left_out="random features (elu + 1 in their place)",
    ),
    "mamba2": LinearMixer(
        DiscreteDecay,
        feature_map="silu",
        scale=1.0,
        source="2405.21060",
        published=Parts(
            key_heads=1,
            value_ratio=2,
            conv_width=4,
            value_map="silu",
            skip=True,
            out_gate="silu",
            gate_first=True,
            out_norm="rmsnorm",
        ),
    ),
    "mamba": LinearMixer(
        DiscreteVectorDecay,
        scale=1.0,
        source="2312.00752",
        published=Parts(value_map="silu", skip=True, out_gate="silu"),
        left_out="convolution before the gates, A and step by channel, B and C of all heads (`vim` in one direction "
        "has them)",
    ),
    "rwkv6": LinearMixer(
        ReceptanceDecay,
        scale=1.0,
        decay_convention="between",
        causal_decay_convention="between",
        source="2404.05892",
        published=replace(NORM_AND_GATE, token_shift=True),
    ),
    "gla": LinearMixer(
        LowRankDecay, source="2312.06635", published=NORM_AND_GATE, left_out="q and k half as wide as v (here as wide)"
    ),
    "hgrn2": LinearMixer(
        BoundedDecay,
        feature_map="silu",
        key_map="identity",
        scale=1.0,
        source="2404.07904",
        published=Parts(value_map="silu", out_norm="rmsnorm"),
        left_out="bounds that rise over layers",
    ),
}
FAMILY = {name: Entry(LionAttention, fields) for name, fields in LINEAR_TRANSFORMERS.items()}
FAMILY["rwkv6"] = FAMILY["rwkv6"]._replace(layer=RWKV6Attention)
