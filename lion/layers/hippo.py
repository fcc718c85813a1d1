"""Lion-D and Lion-S on long sequences (sections 4.5 and C.2): decays with step sizes that start from HiPPO."""

from __future__ import annotations

from dataclasses import dataclass

from lion.config import fill, setting
from lion.layers.attention import AttentionConfig
from lion.layers.decay import Decay
from lion.layers.decays import DECAYS, GATES, SelectiveHippoDecay
from lion.layers.linear import LionAttention
from lion.layers.mixers import MIXERS
from lion.layers.spectra import RANDOM, SPECTRA, TURNING

USUAL_SPECTRUM = {"vector": "legs", "scalar": "s4d_real"}  # legs as in S5; a scalar decay cannot rotate
VALUE_STARTS = ("zoh", "zoh_per_step", "dense")
HIPPO = tuple(name for name, entry in MIXERS.items() if entry.decay in ("hippo", "selective_hippo"))


@dataclass
class HippoConfig(AttentionConfig):
    """Settings of decays that start from HiPPO (`lion.layers.decays.HippoDecay`): the switches of Tables 5 and 6.

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

    @staticmethod
    def resolve(name: str, config: AttentionConfig) -> HippoConfig:
        if not isinstance(config, HippoConfig):
            config = HippoConfig(**vars(config))
        c = fill(config, {"decay_shape": "vector"})
        c = fill(c, {"spectrum": USUAL_SPECTRUM[c.decay_shape]})
        if c.spectrum in TURNING and c.decay_shape == "scalar":
            raise ValueError(
                f"spectrum: {c.spectrum!r} rotates pairs of key dimensions, a scalar decay has none: use s4d_real or "
                "random"
            )
        if c.dt_min > c.dt_max:
            raise ValueError(f"dt_min: {c.dt_min} is above dt_max {c.dt_max}")
        if issubclass(DECAYS[MIXERS[name].decay], SelectiveHippoDecay):
            c = fill(c, {"decay_gate": "sigmoid"})
        elif c.decay_gate is not None:
            raise ValueError(f"decay_gate: mixer {name!r} has none, because its decays do not depend on the tokens")
        return LionAttention.resolve(name, fill(c, {"value_start": "dense" if c.spectrum == RANDOM else "zoh"}))

    def make_decay(self, dim: int) -> Decay:
        c = self.config
        own = {"gate": c.decay_gate} if c.decay_gate is not None else {}
        how = {"spectrum": c.spectrum, "shape": c.decay_shape, "dt_min": c.dt_min, "dt_max": c.dt_max}
        return DECAYS[self.mixer.decay](dim, self.num_heads, **how, **own)
