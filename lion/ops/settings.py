"""What can be asked of the operator, beside its tensors: one object, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from lion.config import nearest
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS
from lion.ops.features import FEATURE_MAPS

FORMS = ("full", "chunk", "rnn")
NORMALIZE = ("sum", "max", "pre", "none")
SCAN_MERGES = ("masks", "outputs")
FULL_UP_TO = 256  # tokens; above it the chunk form trains (`./run.sh bench ops`) and runs (`bench inference`) faster


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def number(name: str, value: float, kind: type[Real], low: float, high: float = math.inf) -> None:
    """Raises ValueError: It is no number of this kind, or not in this range; NaN is in none."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}: expected a {'whole ' if kind is Integral else ''}number, got {value!r}")
    if not low <= value <= high:
        span = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{name}: expected {span}, got {value}")


def check_chunk_size(chunk_size: int) -> None:
    number("chunk_size", chunk_size, Integral, 1)


@dataclass(frozen=True)
class Settings:
    """How linear attention is computed, `Y = scale(Q K^T * M) V` with a decay mask M.

    Attributes:
        form: "full", "chunk", "rnn", "auto" (by length) or "blockwise" (`lion.ops.blockwise`). All compute the same
            function; they differ in cost. "full" is dense in L (without decay it is the product `Q (K^T V)`), "chunk"
            is linear in L and parallel, "rnn" is linear and sequential, with memory that does not grow with L.
        direction: "both", "forward" (token i reads j <= i) or "backward" (j >= i); each counts the diagonal once.
        normalize: "sum" divides each row by its sum c (at least `eps`), for positive feature maps; "max" by
            `max(|c|, 1)` (xLSTM), both directions added up first; "pre" by the sum without decay, taken before the mask
            (appendix B.1-B.3); "none" does not divide. "max" and "none" take `scale`.
        decay_convention: Which tokens' decays lie between two tokens, "source", "target", "symmetric" or "between":
            `lion.ops.decay` prints the masks.
        feature_map: An entry of `lion.ops.features.FEATURE_MAPS` that q and k have yet to go through (None: they have);
            without gradients, chunks and steps then hold no copy of them.
        scale: Factor on the scores, default 1/sqrt(D). It cancels under "sum" and "pre".
        chunk_size: Tokens a chunk at most, at least 1; of "rnn", tokens a step.
        eps: Smallest row sum.
        dropout_p: Probability of dropping a score, 0 to 1; in the full form only.
        scan_merge: How several scans become one (`lion.ops.multiscan`), "masks" or "outputs".

    Raises:
        ValueError: A value out of its range or choices, or two that do not go together.
    """

    form: str = "full"
    direction: str = "both"
    normalize: str = "sum"
    decay_convention: str = "source"
    feature_map: str | None = None
    scale: float | None = None
    chunk_size: int = 64
    eps: float = 1e-6
    dropout_p: float = 0.0
    scan_merge: str = "masks"

    def __post_init__(self) -> None:
        choice("form", self.form, (*FORMS, "blockwise", "auto"))
        choice("direction", self.direction, DIRECTIONS)
        choice("normalize", self.normalize, NORMALIZE)
        choice("decay_convention", self.decay_convention, DECAY_CONVENTIONS)
        choice("scan_merge", self.scan_merge, SCAN_MERGES)
        if self.feature_map is not None:
            choice("feature_map", self.feature_map, tuple(FEATURE_MAPS))
        check_chunk_size(self.chunk_size)
        if self.scale is not None:
            number("scale", self.scale, Real, -math.inf)
        number("eps", self.eps, Real, 0)
        number("dropout_p", self.dropout_p, Real, 0, 1)
        if self.dropout_p and self.form not in ("full", "auto"):
            raise ValueError(f"dropout_p: score dropout exists in the full form only, got form={self.form!r}")

    def scale_of(self, dim: int) -> float:
        """The factor on scores of keys with `dim` dimensions."""
        return dim**-0.5 if self.scale is None else self.scale


DEFAULTS = Settings()
NAMES = tuple(field.name for field in fields(Settings))


def with_fields(settings: Settings, given: dict[str, Any], unused: tuple[str, ...] = ()) -> Settings:
    """The settings with the fields given by name laid over them.

    Raises:
        ValueError: No settings, a name that is no field, or one of those that are `unused` here.
    """
    if not isinstance(settings, Settings):
        raise ValueError(f"settings: expected lion.ops.Settings, or its fields by name, got {settings!r}")
    if not given:
        return settings
    for name in given:
        if name not in NAMES or name in unused:
            raise ValueError(f"{name}: no setting here, {nearest(name, [n for n in NAMES if n not in unused])}")
    return replace(settings, **given)


def resolve_form(form: str, length: int, decays: bool = True, dropout_p: float = 0.0) -> str:
    """The form that "auto" stands for: full while it is the faster one to train and to run, chunk above."""
    if form != "auto":
        return form
    return "full" if length <= FULL_UP_TO or not decays or dropout_p else "chunk"
