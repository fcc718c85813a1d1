"""Lion-D and Lion-S on long sequences (sections 4.5 and C.2): decays with step sizes that start from HiPPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import fill, present, setting
from lion.layers.layout import Layout
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.decay import Decay, Gating
from lion.layers.mixers.linear import LinearMixer, LionAttention, resolve_linear
from lion.layers.mixers.lion import LION
from lion.layers.mixers.registry import MIXERS, Entry
from lion.layers.mixers.spectra import RANDOM, ROTATING, SPECTRA
from lion.layers.rotations import along_text
from lion.layers.weights import linear
from lion.ops import Gates, rotary_angles

USUAL_SPECTRUM = {"vector": "legs", "scalar": "s4d_real"}  # legs as in S5; a scalar decay cannot rotate
VALUE_STARTS = ("zoh", "zoh_per_step", "dense")
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}


class HippoDecay(Decay):
    """Lion-D on long sequences (Theorem B.1): `lambda = exp(B dt)`, B < 0 from HiPPO; log_decay (H, D) or (H,).

    The step sizes dt start log-uniform in `dt_min` .. `dt_max` (S5), so that some dimensions remember thousands of
    tokens. The printed formula has no step sizes, so its lambda is at most 0.61. Rates -B and steps dt are learned as
    logarithms, so that lambda stays below 1. A rotating spectrum (`SPECTRA`) has one rate and one dt per pair of
    dimensions, and rotates queries and keys.

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
        self.width, self.pairs = head_dim if shape == "vector" else 1, spectrum in ROTATING
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
        return rotary_angles(along_text(x, layout), (self.by_state(self.frequency, x) * steps)[:, None])

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        rates, steps = self.steps(x)
        return Gating(k, Gates(self.of_keys(rates), angles=self.angles(x, steps, layout)))

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
        special = layout.special_of_heads()
        if special is not None:
            log_decay = log_decay.masked_fill(special if self.width == 1 else special[..., None], 0)
        return Gating(k, Gates(log_decay, angles=self.angles(x, steps, layout)))


@dataclass
class HippoConfig(AttentionConfig):
    """Settings of decays that start from HiPPO (`HippoDecay`): the switches of Tables 5 and 6.

    `spectrum` is the start of the decays. None selects it by `decay_shape` from `USUAL_SPECTRUM`; `random` is for the
    rows of Table 5 without HiPPO.

    The rows of Table 6 are `feature_map: sigmoid` with `normalize: none` ([1]), `feature_map: relu` ([2]),
    `decay_shape: scalar` ([3]), `normalize: none` ([4]), `normalize: pre` ([5]), the mixer `lion_d_hippo` ([6]) and
    `decay_gate: softplus` ([7]).

    `value_start` is the start of W_v under the initialisation `lra`. `zoh` is the diagonal of zero-order hold, where
    the decay of each channel determines its entry (about as large as dt, 0.001 to 0.1). `zoh_per_step` divides this
    diagonal by dt (about 1). `dense` initialises W_v like every other projection. None selects `dense` for the spectrum
    `random`, otherwise `zoh`.
    """

    spectrum: str | None = setting(None, choices=(*SPECTRA, RANDOM))
    decay_shape: str | None = setting(None, choices=("vector", "scalar"))
    decay_gate: str | None = setting(None, choices=GATES)
    value_start: str | None = setting(None, choices=VALUE_STARTS)
    dt_min: float = setting(1e-3, above=0, max=1)
    dt_max: float = setting(0.1, above=0, max=1)


class HippoAttention(LionAttention):
    """Linear attention whose decays start from HiPPO."""

    Config = HippoConfig
    config: HippoConfig

    @staticmethod
    def resolve(name: str, config: HippoConfig) -> HippoConfig:
        shape = config.decay_shape or "vector"
        c = fill(config, {"decay_shape": shape, "spectrum": USUAL_SPECTRUM[shape]})
        if c.spectrum in ROTATING and c.decay_shape == "scalar":
            raise ValueError(
                f"spectrum: {c.spectrum!r} rotates pairs of key dimensions, a scalar decay has none: use s4d_real or "
                "random"
            )
        if c.dt_min > c.dt_max:
            raise ValueError(f"dt_min: {c.dt_min} is above dt_max {c.dt_max}")
        if issubclass(MIXERS[name].fields.decay, SelectiveHippoDecay):
            c = fill(c, {"decay_gate": "sigmoid"})
        elif c.decay_gate is not None:
            raise ValueError(f"decay_gate: mixer {name!r} has none, because its decays do not depend on the tokens")
        c = fill(c, {"value_start": "dense" if c.spectrum == RANDOM else "zoh"})
        return resolve_linear(name, c)

    def make_decays(self, dim: int) -> list[Decay]:
        c = self.config
        kind: Callable[..., Decay] = present(self.mixer.decay, "decay")
        if c.decay_gate is not None:
            kind = partial(kind, gate=c.decay_gate)
        return [kind(dim, self.num_heads, spectrum=c.spectrum, shape=c.decay_shape, dt_min=c.dt_min, dt_max=c.dt_max)]


FAMILY = {
    "lion_d_hippo": Entry(HippoAttention, LinearMixer(HippoDecay, **LION)),
    "lion_s_hippo": Entry(HippoAttention, LinearMixer(SelectiveHippoDecay, **LION)),
}
