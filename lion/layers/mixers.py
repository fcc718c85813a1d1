"""The table of linear mixers: the parts of each mixer, by name. A new mixer is one entry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearMixer:
    """The parts of a linear mixer.

    Attributes:
        decay: Entry of `DECAYS`, which includes gates on the key; None: no decay.
        feature_map: Feature map of queries and keys, an entry of `FEATURE_MAPS`.
        key_map: Feature map of keys, if different.
        normalize: Normalisation, as in `lion.ops.linear_attention`.
        scale: Factor on the scores, where `normalize` uses one; None is 1/sqrt(D).
        decay_convention, causal_decay_convention: Decay conventions (`lion.ops.decay`), in both directions and in one.
            The linear Transformers use "target" in both cases, so that every direction is their published recurrence
            (Theorem 3.1). RetNet's rotation is an exception: it depends on positions, so it rotates the other way in
            the backward direction.
        rotation: Entry of `ROTATIONS` that rotates q and k.
        one_scan: Whether both directions are one scan without decay, with keys that are normalised over the sequence
            (`lion.ops.one_scan`); `decay` then applies only to a single direction.
        out_norm, out_gate_rank: Norm and gate after the heads, as in `AttentionConfig`; None: the model decides.
        model_tpe, model_rotation: Parts of the published models, outside the mixer, that encode the order of tokens:
            the number of hidden states of MD-TPE (`lion.layers.tpe`), and an entry of `ROTATIONS`.
        source: Publication.
        left_out: Parts of the published block, around its recurrence, that this entry leaves out.
    """

    decay: str | None
    feature_map: str = "identity"
    key_map: str | None = None
    normalize: str = "none"
    scale: float | None = None
    decay_convention: str = "target"
    causal_decay_convention: str = "target"
    rotation: str = "none"
    one_scan: bool = False
    out_norm: str | None = None
    out_gate_rank: int = 0
    model_tpe: int = 0
    model_rotation: str | None = None
    source: str = ""
    left_out: str = ""


LION = {"feature_map": "silu_shifted", "normalize": "sum", "decay_convention": "source", "source": "LION, 2502.16249"}

MIXERS = {
    "lion_lit": LinearMixer(None, **LION),
    "lion_d": LinearMixer("fixed", **LION),
    "lion_s": LinearMixer("selective", **LION),
    "lion_s_vector": LinearMixer("selective_vector", **LION),
    "lion_d_hippo": LinearMixer("hippo", **LION),
    "lion_s_hippo": LinearMixer("selective_hippo", **LION),
    "linear_transformer": LinearMixer(
        None, feature_map="elu1", normalize="sum", source="Katharopoulos et al., 2006.16236", left_out="nothing"
    ),
    "retnet": LinearMixer(
        "retention", rotation="rope", source="2307.08621", left_out="group norm, output gate, normalised scores"
    ),
    "gated_rfa": LinearMixer(
        "random_feature_gate",
        feature_map="elu1",
        normalize="sum",
        source="2103.02143",
        left_out="random features (elu + 1 in their place)",
    ),
    "mamba2": LinearMixer(
        "discrete",
        feature_map="silu",
        scale=1.0,
        source="2405.21060",
        left_out="short convolution, SiLU on v, B and C shared by heads, skip D, gated norm",
    ),
    "mamba": LinearMixer(
        "discrete_vector",
        scale=1.0,
        source="2312.00752",
        left_out="short convolution, SiLU on v, A and a low-rank step for each channel and B, C for all (here for each "
        "head), skip D, output gate",
    ),
    "rwkv6": LinearMixer(
        "receptance",
        scale=1.0,
        decay_convention="between",
        causal_decay_convention="between",
        source="2404.05892",
        left_out="token shift, group norm, output gate",
    ),
    "gla": LinearMixer("low_rank", source="2312.06635", left_out="head norm, output gate"),
    "hgrn2": LinearMixer(
        "bounded",
        feature_map="silu",
        key_map="identity",
        scale=1.0,
        source="2404.07904",
        left_out="bounds that rise over layers, activation of v, norm, output gate",
    ),
    "xlstm": LinearMixer(
        "input_and_forget",
        normalize="max",
        source="mLSTM, 2405.04517",
        left_out="exponential input gate, short convolution, head norm, output gate, skip",
    ),
    "lightnet": LinearMixer(
        "key_softmax",
        feature_map="silu",
        key_map="identity",
        scale=1.0,
        one_scan=True,
        out_norm="rmsnorm",
        out_gate_rank=64,
        model_tpe=64,
        model_rotation="lrpe",
        source="LightNet, 2405.21022",
        left_out="nothing",
    ),
    "deltanet": LinearMixer(
        "delta",
        feature_map="silu_unit",
        scale=1.0,
        source="2406.06484",
        left_out="short convolution, SiLU on v, head norm",
    ),
}
SOFTMAX = "softmax"  # the baseline: no feature map, no decay, PyTorch's SDPA
NONE = "none"  # the floor: values pass through unchanged
