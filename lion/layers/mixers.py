"""The table of mixers: what each named model is made of. A new linear mixer is one entry."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mixer:
    """A linear mixer as data.

    `decay` names an entry of `DECAYS` (None: no decay), `feature_map` one of `FEATURE_MAPS`, `normalize` is
    "sum" or "none". `gate` is the index convention in both directions, `causal_gate` in one (Eq. 5).
    `released` is what the authors' code does otherwise (`model.preset=released`).
    """

    decay: str | None
    feature_map: str = "silu_shifted"
    normalize: str = "sum"
    gate: str = "source"
    causal_gate: str = "target"
    released: dict[str, str] = field(default_factory=dict)


MIXERS = {
    "lion_lit": Mixer(decay=None, released={"feature_map": "elu1"}),
    "lion_d": Mixer(decay="fixed"),
    "lion_s": Mixer(decay="selective"),
}
SOFTMAX = "softmax"  # the baseline: no feature map, no decay, PyTorch's SDPA
