"""Decays and other gates: modules from tokens x (B, L, dim) and keys k (B, H, L, D) to operator arguments.

All gates are computed in float32 or wider. A new decay is one class here and its line in `DECAYS`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.decay import Decay, Gating, fold, linear
from lion.layers.layout import Layout
from lion.layers.spectra import RANDOM, SPECTRA, TURNING
from lion.ops import logcumsumexp, rotary_angles


class FixedDecay(Decay):
    """Lion-D: `lambda = sigmoid(a)`, one learned `a ~ N(0, 1)` per head; log_decay (H,)."""

    per = "a head"
    scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.a = nn.Parameter(torch.randn(num_heads))

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, F.logsigmoid(self.a.to(x.dtype)))


class SelectiveDecay(Decay):
    """Lion-S: `lambda_i = sigmoid(W x_i + b)`; log_decay (B, H, L).

    Special tokens (cls) do not decay (lambda = 1), as in the released code.
    """

    scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        log_decay = F.logsigmoid(linear(self.gate, x)).mT  # (B, H, L)
        return Gating(k, log_decay if layout.special is None else log_decay.masked_fill(layout.special_of_heads(), 0))


class SelectiveVectorDecay(Decay):
    """Lion-S with vectors (Table 13): `lambda_i = sigmoid(W x_i + b)` per key dimension; log_decay (B, H, L, D)."""

    per = "a token and key dimension"
    scans = True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        log_decay = self.by_head(F.logsigmoid(linear(self.gate, x)))
        return Gating(
            k, log_decay if layout.special is None else log_decay.masked_fill(layout.special_of_heads()[..., None], 0)
        )


class RetentionDecay(Decay):
    """RetNet (arXiv 2307.08621, Eq. 8): `gamma_h = 1 - 2^(-5-h)`, not learned; log_decay (H,)."""

    per = "a head"

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        head = torch.arange(
            self.num_heads, device=x.device, dtype=x.dtype
        )  # not a buffer, because `.bfloat16()` would round it
        return Gating(k, torch.log1p(-(2.0 ** (-5 - head))))


class RandomFeatureGate(Decay):
    """Gated RFA (arXiv 2103.02143, section 3.2): `g_i = sigmoid(w x_i + b)`, `S = g S + (1 - g) k v^T`; z likewise."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        logits = linear(self.gate, x).mT  # (B, H, L)
        return Gating(fold(k, torch.sigmoid(-logits)), F.logsigmoid(logits))


class DiscreteDecay(Decay):
    """Mamba-2 (arXiv 2405.21060): step `dt_i = softplus(W x_i + b)`, `S = exp(A dt) S + dt k v^T` with a scalar A < 0.

    As published, A = -exp(a) starts in [-16, -1]. The bias b makes dt start in [0.001, 0.1].
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.step = nn.Linear(dim, num_heads, bias=False)
        dt = torch.exp(torch.empty(num_heads).uniform_(math.log(0.001), math.log(0.1)))
        self.step_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        self.a = nn.Parameter(self.start().log().flatten())  # one-dimensional: exempt from weight decay

    def start(self) -> Tensor:
        return torch.empty(self.num_heads, 1).uniform_(1, 16)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        dt = F.softplus(linear(self.step, x) + self.step_bias.to(x.dtype)).mT  # (B, H, L)
        A = -self.a.to(x.dtype).exp().view(self.num_heads, 1, -1)  # (H, 1, D or 1)
        log_decay = A * dt[..., None]
        return Gating(fold(k, dt), log_decay.squeeze(-1) if A.shape[-1] == 1 else log_decay)


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

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        w = self.w.to(x.dtype) + linear(self.up, torch.tanh(linear(self.down, x)))
        log_decay = -torch.exp(w.clamp(max=7))  # exp(-exp(7)) is 0 in float64
        return Gating(k, self.by_head(log_decay), bonus=self.u.view(self.num_heads, -1))


class LowRankDecay(Decay):
    """GLA (arXiv 2312.06635, section 4.4): the vector `lambda_i = sigmoid(x_i W1 W2 + b)^(1/16)`; W1 has rank 16."""

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int, rank: int = 16, temperature: float = 16.0) -> None:
        super().__init__(dim, num_heads)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim)
        self.temperature = temperature

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, self.by_head(F.logsigmoid(linear(self.up, linear(self.down, x)))) / self.temperature)


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
        return Gating((rest + F.logsigmoid(-logits)).exp().to(k.dtype), log_decay)


class InputAndForgetGate(Decay):
    """xLSTM's mLSTM (arXiv 2405.04517) with sigmoid gates: `S = f S + i k v^T`, `f_i`, `i_i = sigmoid(W x_i + b)`.

    The exponential input gate is left out, because it needs a running maximum over both directions.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gates = nn.Linear(dim, 2 * num_heads, bias=False)
        self.input_bias = nn.Parameter(torch.zeros(num_heads))
        self.forget_bias = nn.Parameter(torch.linspace(3, 6, num_heads))

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        i, f = linear(self.gates, x).chunk(2, -1)
        i, f = (i + self.input_bias.to(x.dtype)).mT, (f + self.forget_bias.to(x.dtype)).mT  # (B, H, L)
        return Gating(fold(k, torch.sigmoid(i)), F.logsigmoid(f))


class DeltaRule(Decay):
    """DeltaNet (arXiv 2406.06484): `beta_i = sigmoid(W x_i)`, (B, H, L)."""

    per, delta = "delta rule", True

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, num_heads, bias=False)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        return Gating(k, beta=torch.sigmoid(linear(self.gate, x)).mT)


class KeySoftmax(Decay):
    """LightNet in one direction (arXiv 2405.21022, Eq. 5): keys that are normalised over the tokens so far.

    The state is `S = (1 - p) S + p v^T` with the vector `p_i = exp(k_i - LSE_i)`, where LSE_i is the logarithm of the
    sum of `exp(k_j)` over j <= i. The decay is `1 - p_i = exp(LSE_{i-1} - LSE_i)`. Its logarithm is a difference of
    neighbours, so over any range of tokens the log decays sum to the difference between the two ends. The first token
    has no LSE before it: p = 1 and 1 - p = 0. The state of this decay is the last LSE.

    Args:
        share: Whether the decay uses the p of the key. Otherwise the decay uses the p of separate logits `W2 W1 x_i` of
            rank dim / 8. This rank matches the 6 M parameters of Table 4; the paper does not define the logits.
    """

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int, *, share: bool = True) -> None:
        super().__init__(dim, num_heads)
        self.gate = None
        if not share:  # no bias: a constant added to all logits does not change p
            self.gate = nn.Sequential(*(nn.Linear(*n, bias=False) for n in pairwise((dim, max(1, dim // 8), dim))))

    def initial_state(self, z: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(z, -torch.inf) for _ in range(1 if self.gate is None else 2))

    def gating(self, x: Tensor, k: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()) -> Gating:
        logits = [k.to(x.dtype)]
        if self.gate is not None:
            logits.append(self.by_head(linear(self.gate[1], linear(self.gate[0], x))))
        given = zip(logits, *((state,) if state else ()))
        keys, log_decays, totals, last = zip(*(self.shares(y, layout, *before) for y, *before in given))
        return Gating(keys[0].to(k.dtype), log_decays[-1], prefix=None if state else -totals[-1], state=last)

    def shares(self, logits: Tensor, layout: Layout, before: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return p, log(1 - p) and LSE, all (B, H, L, D), and the last LSE (B, H, D), of tokens after `before`.

        `before` is the last LSE of earlier tokens. At a first token log(1 - p) is minus infinity.
        """
        valid, index = layout.valid, layout.segment_index
        if self.reverse:
            logits = logits.flip(2)
            valid, index = (None if mask is None else mask.flip(1) for mask in (valid, index))
        invalid = None if valid is None else ~valid[:, None, :, None]
        kept = logits if invalid is None else logits.masked_fill(invalid, -torch.inf)
        if before is None:
            total = logcumsumexp(kept, index)
            earlier = F.pad(total[:, :, :-1], (0, 0, 1, 0), value=-torch.inf)
        else:
            total = logcumsumexp(torch.cat([before[:, :, None], kept], 2))
            earlier, total = total[:, :, :-1], total[:, :, 1:]
        if index is not None:
            first = index.diff(dim=1, prepend=index[:, :1]) != 0
            earlier = earlier.masked_fill(first[:, None, :, None], -torch.inf)
        share, log_decay = (logits - total).clamp_max(0).exp(), earlier - total
        if invalid is not None:
            share, log_decay = share.masked_fill(invalid, 0), log_decay.masked_fill(invalid, 0)
        last = total[:, :, -1].clone()
        if self.reverse:
            share, log_decay, total = share.flip(2), log_decay.flip(2), total.flip(2)
        return share, log_decay, total, last


class HippoDecay(Decay):
    """Lion-D on long sequences (Theorem B.1): `lambda = exp(B dt)`, B < 0 from HiPPO; log_decay (H, D) or (H,).

    The step sizes dt start log-uniform in `dt_min` .. `dt_max` (S5), so that some dimensions remember thousands of
    tokens. The printed formula has no step sizes, so its lambda is at most 0.61. Rates -B and steps dt are learned as
    logarithms, so that lambda stays below 1. A rotating spectrum (`lion.layers.spectra`) has one rate and one dt per
    pair of dimensions, and rotates queries and keys.

    Args:
        spectrum: An entry of `SPECTRA`, or `random`: exp(B dt) = sigmoid(a), a ~ N(0, 1), with steps of 1.
        shape: "vector", a lambda for each key dimension, or "scalar", one lambda per head (s4d_real: of rate 1).
    """

    per = "a key dimension"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        spectrum: str = "legs",
        shape: str = "vector",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
    ) -> None:
        super().__init__(dim, num_heads)
        head_dim, frequencies = dim // num_heads, None
        self.width, self.pairs = head_dim if shape == "vector" else 1, spectrum in TURNING
        if self.pairs and (shape == "scalar" or head_dim % 2):
            have = (
                "a scalar decay has none"
                if shape == "scalar"
                else f"a head has {head_dim} dimensions: use s4d_real or random"
            )
            raise ValueError(f"spectrum: {spectrum!r} rotates pairs of key dimensions, {have}")
        if spectrum == RANDOM:
            rates, dt = F.softplus(torch.randn(num_heads, self.width)), torch.ones(num_heads, self.width)
        else:
            rates, frequencies = SPECTRA[spectrum](self.width)
            states = self.width // 2 if self.pairs else self.width
            rates = rates[:states].expand(num_heads, -1)
            dt = torch.empty(num_heads, states).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        # one-dimensional: exempt from weight decay
        self.log_rate, self.log_dt = (nn.Parameter(x.to(dt).log().flatten()) for x in (rates, dt))
        self.frequency = None
        if frequencies is not None:
            each = frequencies.to(self.log_dt.dtype).expand(num_heads, -1).flatten()
            self.frequency = nn.Parameter(each.clone())

    def by_state(self, x: Tensor, like: Tensor) -> Tensor:
        """Return a parameter as (H, states), in the dtype of `like`."""
        return x.to(like.dtype).view(self.num_heads, -1)

    def steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rates times steps, and steps, both (H, states).

        Both are clamped against overflow; lambda is 0 long before that.
        """
        log_rate, log_dt = self.by_state(self.log_rate, x), self.by_state(self.log_dt, x)
        return (log_rate + log_dt).clamp(max=7).exp(), log_dt.clamp(max=7).exp()

    def of_keys(self, rates: Tensor) -> Tensor:
        """Return log lambda (.., D) of all key dimensions from rates (.., states); (..) if a head has one lambda."""
        return -torch.cat([rates, rates], -1) if self.pairs else -(rates.squeeze(-1) if self.width == 1 else rates)

    def angles(self, x: Tensor, steps: Tensor, layout: Layout) -> Tensor | None:
        """Return angles (H, L, D/2), or (B, H, L, D/2) where positions differ between rows; None without rotation."""
        if self.frequency is None:
            return None
        positions = layout.positions_of(x)  # (B or 1, L)
        positions = positions[:, None] if positions.shape[0] > 1 else positions
        return rotary_angles(positions, (self.by_state(self.frequency, x) * steps)[:, None])

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        rates, steps = self.steps(x)
        return Gating(k, self.of_keys(rates), angles=self.angles(x, steps, layout))

    @torch.no_grad()
    def zero_order_hold(self, *, per_step: bool = False) -> Tensor:
        """Return `|A^-1 (exp(A dt) - 1)|` of each key dimension, (H, D), for the eigenvalue `A = B + i frequency`.

        This is the modulus of the input factor under zero-order hold (Eq. 238). `per_step` divides it by dt.

        C.2 prints `Lambda^-1 (Lambda - I)`. If Lambda holds eigenvalues, exp and dt are missing. If Lambda holds
        decays, the result is `1 - exp(-A dt)`, which is negative for B < 0.
        """
        rates, steps = self.steps(self.log_dt)  # -B dt, dt
        turns = torch.zeros_like(rates) if self.frequency is None else self.by_state(self.frequency, steps) * steps
        # |exp(x + iy) - 1|^2 = (exp(x) - 1)^2 + 4 exp(x) sin(y / 2)^2
        held = torch.hypot(torch.expm1(-rates), 2 * (-rates / 2).exp() * (turns / 2).sin()) / torch.hypot(rates, turns)
        held = held if per_step else held * steps
        held = torch.cat([held, held], -1) if self.pairs else held
        return held.expand(-1, self.dim // self.num_heads)


class SelectiveHippoDecay(HippoDecay):
    """Lion-S on long sequences: `lambda_i = exp((B - sigmoid(W x_i + b)) dt)`.

    The selective part is added to the rate.

    The printed `exp(sigmoid(A_i) + B)` is not offered. It exceeds 1 wherever B > -sigmoid(A_i), and with a step size it
    is about 1.6 per token.

    Args:
        gate: Function of the selective part: "sigmoid", or "softplus" (Table 6, [7]).
    """

    per = "a token and key dimension"

    def __init__(self, dim: int, num_heads: int, *, gate: str = "sigmoid", **settings) -> None:
        super().__init__(dim, num_heads, **settings)
        self.gate, self.selects = nn.Linear(dim, self.log_dt.numel()), GATES[gate]

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        rates, steps = self.steps(x)
        selected = self.by_head(self.selects(linear(self.gate, x)))  # (B, H, L, states)
        log_decay = self.of_keys(rates[:, None] + selected * steps[:, None])
        if layout.special is not None:
            special = layout.special_of_heads()
            log_decay = log_decay.masked_fill(special if self.width == 1 else special[..., None], 0)
        return Gating(k, log_decay, angles=self.angles(x, steps, layout))


GATES = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
DECAYS = {
    "fixed": FixedDecay,
    "selective": SelectiveDecay,
    "selective_vector": SelectiveVectorDecay,
    "retention": RetentionDecay,
    "random_feature_gate": RandomFeatureGate,
    "discrete": DiscreteDecay,
    "discrete_vector": DiscreteVectorDecay,
    "receptance": ReceptanceDecay,
    "low_rank": LowRankDecay,
    "bounded": BoundedDecay,
    "input_and_forget": InputAndForgetGate,
    "delta": DeltaRule,
    "key_softmax": KeySoftmax,
    "hippo": HippoDecay,
    "selective_hippo": SelectiveHippoDecay,
}
