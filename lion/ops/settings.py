"""Settings of the operator, other than its tensors: one object, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from lion.config import nearest
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.features import FEATURE_MAPS

FORMS = ("full", "chunk", "rnn")
NORMALIZE = ("sum", "max", "pre", "none")
SCAN_MERGES = ("masks", "outputs")
KERNELS = ("auto", "graph", "triton")
REQUIRED = "required"  # default of `feature_map`, which must be passed if rows are divided by their sums
HINTS = {  # hints for names of SDPA and of other libraries
    "is_causal": 'direction="forward" ignores later tokens',
    "causal": 'direction="forward" ignores later tokens',
    "attn_mask": "valid (B, L) marks padding, segments (B, L) packed rows; other masks do not factor into a recurrence",
    "mask": "use valid (B, L), True for tokens and False for padding",
    "key_padding_mask": "use valid (B, L), its opposite: True for tokens and False for padding",
    "enable_gqa": "repeat k and v to the number of query heads",
    "recurrent": "did you mean 'rnn'?",
    "parallel": "did you mean 'full'?",
    "bidirectional": "did you mean 'both'?",
}
CHUNK_SIZE = 64  # tokens per chunk, and per step of the rnn form, where no size is given
FULL_UP_TO = 256  # tokens; above, chunk is faster to train (`./run.sh bench ops`) and to run (`bench inference`)


def hint(word: str, names: Iterable[str], otherwise: str | None = None) -> str:
    """Return a hint for a word that is not among the names: its equivalent here, else the nearest name."""
    return HINTS.get(str(word)) or nearest(word, names, otherwise)


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        more = hint(value, choices, "")
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}{more and f', {more}'}")


def number(name: str, value: float, kind: type, low: float, high: float = math.inf) -> None:
    """Check that a value is a number of type `kind` from `low` to `high`.

    Raises:
        ValueError: A value of another type, out of range, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}: expected a {'whole ' if kind is Integral else ''}number, got {value!r}")
    if not low <= value <= high:
        span = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{name}: expected {span}, got {value}")


def check_chunk_size(chunk_size: int) -> None:
    number("chunk_size", chunk_size, Integral, 1)


@dataclass(frozen=True)
class Settings:
    """Settings of linear attention, `Y = scale(Q K^T * M) V` with a decay mask M.

    Attributes:
        form: Form of the computation: "full", "chunk", "rnn" or "auto" (by length). All compute the same function, at
            different cost. "full" is dense in L (without decay it is the product `Q (K^T V)`). "chunk" is linear in L
            and parallel. "rnn" is linear and sequential, with memory that does not grow with L.
        direction: "both", "forward" (token i attends to j <= i) or "backward" (j >= i); each counts the diagonal once.
        normalize: Divisor of each row. "sum" divides by the row sum c (at least `eps`), for positive feature maps.
            "max" divides by `max(|c|, 1)` (xLSTM), where c includes `scale` and both directions are added up first.
            "pre" divides by the sum without decay, taken before the mask (appendix B.1-B.3). "none" does not divide.
            "max" and "none" take `scale`.
        decay_convention: Convention for the decays that M_ij multiplies: "source", "target", "symmetric" or "between".
            `lion.ops.decay` shows the masks.
        feature_map: Map phi that is applied to q and k, an entry of `lion.ops.features.FEATURE_MAPS`, or None if q and
            k have been mapped already. Required under "sum" and "pre": a row of signed scores can sum to nearly zero,
            and the division then explodes. If there are no gradients, no `angles` and no `prefix`, loops over chunks
            and steps hold no copy of phi(q) and phi(k).
        scale: Factor on the scores, by default 1/sqrt(D). It cancels under "sum" and "pre".
        chunk_size: Largest number of tokens per chunk, at least 1; in the rnn form, tokens per step.
        eps: Smallest divisor of a row under "sum" and "pre".
        dropout_p: Probability of dropping a score, 0 to 1; only in the full form.
        undecayed_erase: Whether the erase of the delta rule reads the state before the token's decay (RWKV-7, Comba),
            `S_i = (Diag(lambda_i) - e_i r_i^T) S_{i-1} + w_i v_i^T`.
        kernels: "graph" for the graphs of PyTorch, "triton" for the kernels of `lion.ops.kernels` where a call fits
            (`lion.ops.fused`), equal up to rounding. "auto" takes the graphs: no GPU has timed the kernels yet.
        scan_merge: Method of merging several scans (`lion.ops.multiscan`), "masks" or "outputs".

    Raises:
        ValueError: A value out of its range or choices, or two values that cannot be combined.
    """

    form: str = "full"
    direction: str = "both"
    normalize: str = "sum"
    decay_convention: str = "source"
    feature_map: str | None = REQUIRED
    scale: float | None = None
    chunk_size: int = CHUNK_SIZE
    eps: float = 1e-6
    dropout_p: float = 0.0
    scan_merge: str = "masks"
    undecayed_erase: bool = False
    kernels: str = "auto"

    def __post_init__(self) -> None:
        choice("form", self.form, (*FORMS, "auto"))
        choice("direction", self.direction, DIRECTIONS)
        choice("normalize", self.normalize, NORMALIZE)
        choice("decay_convention", self.decay_convention, DECAY_CONVENTIONS)
        choice("scan_merge", self.scan_merge, SCAN_MERGES)
        choice("kernels", self.kernels, KERNELS)
        if self.feature_map not in (None, REQUIRED):
            choice("feature_map", self.feature_map, tuple(FEATURE_MAPS))
        check_chunk_size(self.chunk_size)
        if self.scale is not None:
            number("scale", self.scale, Real, -math.inf)
        number("eps", self.eps, Real, 0)
        number("dropout_p", self.dropout_p, Real, 0, 1)
        if self.dropout_p and self.form not in ("full", "auto"):
            raise ValueError(f"dropout_p: score dropout exists in the full form only, got form={self.form!r}")

    @property
    def row_sums(self) -> bool:
        """Return whether rows are divided by a sum."""
        return self.normalize != "none"

    def scale_of(self, dim: int) -> float:
        """Return the factor on scores of keys with `dim` dimensions."""
        if self.scale is None:
            return dim**-0.5
        return self.scale


DEFAULTS = Settings()
NAMES = tuple(field.name for field in fields(Settings))


def with_fields(settings: Settings, given: dict[str, Any], unused: tuple[str, ...] = ()) -> Settings:
    """Return the settings, overridden by the fields that are passed by name.

    Raises:
        ValueError: An object other than `Settings`, a name that is not a field, a field that is `unused` here, or no
            feature map under row sums.
    """
    if not isinstance(settings, Settings):
        raise ValueError(f"settings: expected lion.ops.Settings, or its fields by name, got {settings!r}")
    for name in given:
        if name in unused:
            raise ValueError(f"{name}: not a setting here, leave it out")
        if name not in NAMES:
            raise ValueError(f"{name}: not a setting here, {hint(name, [n for n in NAMES if n not in unused])}")
    if given:
        settings = replace(settings, **given)
    if settings.feature_map != REQUIRED:
        return settings
    if settings.normalize in ("sum", "pre"):
        positive = [name for name, phi in FEATURE_MAPS.items() if phi.positive]
        raise ValueError(
            f"feature_map: normalize={settings.normalize!r} divides by row sums, which need positive scores; pass one "
            f"of {', '.join(positive)}, or None if q and k have been mapped already"
        )
    return replace(settings, feature_map=None)


def resolve_form(form: str, length: int, decays: bool = True, dropout_p: float = 0.0) -> str:
    """Return the form that is used, which differs from `form` for "auto".

    "auto" is full up to `FULL_UP_TO` tokens, where full is faster to train and to run, and chunk above. Without decays
    or with dropout, "auto" is always full.
    """
    if form != "auto":
        return form
    return "full" if length <= FULL_UP_TO or not decays or dropout_p else "chunk"
