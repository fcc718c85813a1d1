"""xLSTM's mLSTM (arXiv 2405.04517): `S_t = f_t S_{t-1} + i_t k_t v_t^T`, with `y_t = q_t S_t / max(|q_t z_t|, 1)`.

The forget gate is `f = sigmoid(.)`. The input gate i is a sigmoid, or, as published, the exponential of a logit i~.
That exponential overflows, so S and z are divided by `exp(m_t)`, with a running maximum m_t >= 0:

    m_t = max(log f_t + m_{t-1}, i~_t, 0)      f'_t = exp(log f_t + m_{t-1} - m_t)      i'_t = exp(i~_t - m_t)
    y_t = q_t S'_t / max(|q_t z'_t|, exp(-m_t))

No exponent is positive. The paper's m_t lacks the 0, so that its `exp(-m_t)` can overflow; m_t cancels in y_t, so the
function is the same. Gradients treat m_t as a constant for the same reason.

In both directions, the two scans have running maxima m^F and m^B. A row is divided by `exp(m_t)` with the larger one:

    Y_t = e^(m^F_t - m_t) Y'^F_t + e^(m^B_t - m_t) Y'^B_t - e^(i~_t - m_t) (q_t k_t) v_t        m_t = max(m^F_t, m^B_t)

The row sum is Y_t with v = 1, and `y_t = Y_t / max(|row sum|, exp(-m_t))` (in LION's Eq. 196 without the absolute
value). A token itself is counted once.

If rows are split over processes, an exchange of two numbers per head and direction gives each of them the m that enters
its part. The states then follow in one exchange per direction, since the decays f' differ between the directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.layout import Layout
from lion.layers.mixers.config import AttentionConfig
from lion.layers.mixers.decay import Decay, Gating, fold
from lion.layers.mixers.linear import LinearMixer, LionAttention, resolve_linear
from lion.layers.mixers.parts import Parts
from lion.layers.mixers.registry import Entry
from lion.layers.mixers.running import entering_maximum, running_maximum
from lion.layers.weights import linear
from lion.ops import Gates, Settings, linear_attention_parts, no_autocast, split_attention_parts
from lion.ops.dtypes import wide_dtype
from lion.ops.features import apply_feature_map

SIGMOID, EXP = "sigmoid", "exp"
SLACK = 1e-6  # added to m at every token: no f' is exactly 1, where a clamped log f' has no gradient
LARGEST = 60.0  # largest m in exp(-m): a row of no scores is divided by a number that is not 0


@dataclass
class XLSTMConfig(AttentionConfig):
    """Settings of an mLSTM: `input_gate` is a sigmoid, or the published exponential."""

    input_gate: str = setting(SIGMOID, choices=(SIGMOID, EXP))

    def label(self) -> str:
        return "" if self.input_gate == SIGMOID else "exponential input gate"


class InputAndForgetGate(Decay):
    """Sigmoid gates of the mLSTM, `f_i`, `i_i = sigmoid(W x_i + b)`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gates = nn.Linear(dim, 2 * num_heads, bias=False)
        self.input_bias = nn.Parameter(torch.zeros(num_heads))
        self.forget_bias = nn.Parameter(torch.linspace(3, 6, num_heads))

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logit of the input gate and log f, both (B, H, L)."""
        i, f = linear(self.gates, x).chunk(2, -1)
        return (i + self.input_bias.to(x.dtype)).mT, F.logsigmoid((f + self.forget_bias.to(x.dtype)).mT)

    def gating(self, x: Tensor, k: Tensor, layout: Layout) -> Gating:
        i, log_f = self.logits(x)
        return Gating(fold(k, torch.sigmoid(i)), Gates(log_f))


class Stabilised(NamedTuple):
    """Gates of one scan: log f' and i' (B, H, L), the running maximum m (B, H, L), and the last m (B, H)."""

    log_decay: Tensor
    key: Tensor
    m: Tensor
    last: Tensor


class ExponentialGate(InputAndForgetGate):
    """Exponential input gate of the mLSTM; its state is the running maximum m (B, H), in float64."""

    def initial_state(self, z: Tensor) -> tuple[Tensor, ...]:
        return (z[..., 0].double().clone(),)

    def gating(self, x: Tensor, k: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()) -> Gating:
        gates = stabilised(*self.logits(x), layout, self.reverse, *state)
        return Gating(fold(k, gates.key), Gates(gates.log_decay, floor=least(gates.m).to(x.dtype)), (gates.last,))


def least(m: Tensor) -> Tensor:
    """Return the smallest divisor of rows that are divided by `exp(m)`."""
    return (-m.clamp_max(LARGEST)).exp()


def stabilised(i: Tensor, log_f: Tensor, layout: Layout, reverse: bool, before: Tensor | None = None) -> Stabilised:
    """Return the gates of a scan, from the logit of the input gate and log f (B, H, L).

    `before` (B, H) is the running maximum of earlier tokens, by default 0, or that of other processes which hold tokens
    of the same rows. A running maximum starts at 0 in each segment, and padding does not change it.
    """
    valid, index = layout.valid, layout.segment_index
    with torch.no_grad():
        logit, step = i.double().clamp_min(0), log_f.double() + SLACK
        if valid is not None:
            logit, step = (t.masked_fill(~valid[:, None], 0) for t in (logit, step))
        if layout.part is not None:
            before = entering_maximum(logit, step, index, reverse, layout.part)
        m, earlier, last = running_maximum(logit, step, index, before, reverse)
    return Stabilised(shifted(log_f, earlier - m), shifted(i, -m).exp(), m, last)


def shifted(x: Tensor, constant: Tensor) -> Tensor:
    """Return x plus a constant in float64, at most 0, in the dtype of x; the gradient of x is that of the sum."""
    return (x.detach().double() + constant).clamp_max(0).to(x.dtype) + (x - x.detach())


class MLSTMAttention(LionAttention):
    """The mLSTM, with a sigmoid or an exponential input gate."""

    Config = XLSTMConfig
    config: XLSTMConfig

    @staticmethod
    def resolve(name: str, config: XLSTMConfig) -> XLSTMConfig:
        out = resolve_linear(name, config)
        if out.input_gate == EXP:
            for setting_name, needed in (("normalize", "max"), ("decay_convention", "target"), ("score_dropout", 0)):
                got = getattr(out, setting_name)
                if got != needed:
                    raise ValueError(f"{setting_name}: input_gate 'exp' takes {needed!r}, got {got!r}")
        return out

    def make_decays(self, dim: int) -> list[Decay]:
        return [(ExponentialGate if self.config.input_gate == EXP else InputAndForgetGate)(dim, self.num_heads)]

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        if self.config.input_gate == SIGMOID or self.config.direction != "both":
            return super().mix(x, q, k, v, layout)
        q, k = (apply_feature_map(self.config.feature_map, t) for t in (q, k))
        with no_autocast(x):
            wide = wide_dtype(x)
            i, log_f = cast("InputAndForgetGate", self.first_decay()).logits(x.to(wide))
            scans = {name: stabilised(i, log_f, layout, name == "backward") for name in ("forward", "backward")}
            m = torch.maximum(*(scan.m for scan in scans.values()))
            own = shifted(i, -m).exp() * (q.to(wide) * k.to(wide)).sum(-1)  # (B, H, L)
            y, row = -own[..., None] * v, -own
            angles, scan_parts = self.angles(x, layout), linear_attention_parts
            if layout.part is not None:
                scan_parts = partial(split_attention_parts, part=layout.part)
            for name, scan in scans.items():
                settings = Settings(self.form, name, "max", "target", feature_map=None, chunk_size=self.chunk_size)
                gates = Gates(scan.log_decay, angles=angles)
                sums = scan_parts(q, fold(k, scan.key), v, gates, segments=layout.segments, settings=settings)
                weight = (scan.m - m).exp().to(wide)
                y = y + weight[..., None] * sums.numerator
                if sums.row_sum is not None:
                    row = row + weight * sums.row_sum
            scale = self.head_dim**-0.5
            y = scale * y / torch.maximum((scale * row).abs(), least(m).to(wide))[..., None]
        return (y if layout.valid is None else y.masked_fill(~layout.valid[:, None, :, None], 0)).to(v.dtype)


FAMILY = {
    "xlstm": Entry(
        MLSTMAttention,
        LinearMixer(
            InputAndForgetGate,
            normalize="max",
            source="mLSTM, 2405.04517",
            published=Parts(conv_width=4, conv_first=True, head_norm="groupnorm", out_gate="sigmoid"),
            left_out="projection to twice the width around it",
        ),
    ),
}
