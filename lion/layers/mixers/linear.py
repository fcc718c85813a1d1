"""Linear attention layers: the mixers of `MIXERS`, in every form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from lion.config import check_settings, fill, nearest, present
from lion.layers.layout import ROW_MAJOR, Layout, check_scan_names
from lion.layers.mixers.attention import Attention
from lion.layers.mixers.base import MixerInfo, check_state, state_type
from lion.layers.mixers.config import AttentionConfig, check_rotation, streams
from lion.layers.mixers.decay import Decay, Gating, fold
from lion.layers.mixers.parts import PLAIN_BLOCK, C, Parts, describe, parts_of, with_parts
from lion.layers.mixers.registry import MIXERS, own_settings
from lion.layers.rotations import NO_ROTATION
from lion.layers.shares import by_heads, check_share
from lion.ops import (
    FORMS,
    Gates,
    Settings,
    State,
    linear_attention,
    multi_scan_attention,
    prefill,
    split_attention,
    step,
)
from lion.ops.dtypes import wide_dtype
from lion.ops.features import FEATURE_MAPS, apply_feature_map

USUAL = "lion_s"


@dataclass(frozen=True)
class LinearMixer:
    """The parts of a linear mixer.

    Attributes:
        decay: Class of the decay, which includes gates on the key; None: no decay.
        feature_map: Feature map of queries and keys, an entry of `FEATURE_MAPS`.
        key_map: Feature map of keys, if different.
        normalize: Normalisation, as in `lion.ops.linear_attention`.
        scale: Factor on the scores, where `normalize` uses one; None is 1/sqrt(D).
        decay_convention, causal_decay_convention: Decay conventions (`lion.ops.decay`), in both directions and in one.
            The linear Transformers use "target" in both cases, so that every direction is their published recurrence
            (Theorem 3.1). RetNet's rotation is an exception: it depends on positions, so it rotates the other way in
            the backward direction.
        rotation: Entry of `ROTATIONS` that rotates q and k.
        undecayed_erase: Whether the erase of a delta rule reads the undecayed state (`lion.ops.Settings`).
        plain: Parts around the heads in every block.
        published: Parts of the published block; None: those of `plain`.
        source: Publication.
        left_out: Parts of the published block, around its recurrence, that this entry leaves out.
    """

    decay: type[Decay] | None
    feature_map: str = "identity"
    key_map: str | None = None
    normalize: str = "none"
    scale: float | None = None
    decay_convention: str = "target"
    causal_decay_convention: str = "target"
    rotation: str = "none"
    undecayed_erase: bool = False
    plain: Parts = PLAIN_BLOCK
    published: Parts | None = None
    source: str = ""
    left_out: str = ""

    def parts(self, config: AttentionConfig) -> Parts:
        """Return the parts around the heads of a layer with these settings."""
        return parts_of(config, self.plain, self.published or self.plain)


def linear_mixers() -> dict[str, LinearMixer]:
    """Return the parts of every linear mixer of `MIXERS`, by name."""
    return {name: entry.fields for name, entry in MIXERS.items() if isinstance(entry.fields, LinearMixer)}


def usual_mixer(kind: type) -> str:
    """Return the mixer of a class of layers: its only one, or `USUAL`.

    Raises:
        ValueError: The class has several other mixers.
    """
    names = [name for name, entry in MIXERS.items() if entry.layer is kind] or [USUAL]
    if USUAL in names or len(names) == 1:
        return USUAL if USUAL in names else names[0]
    raise ValueError(f"mixer: {kind.__name__} needs one of {', '.join(names)}")


def resolve_linear(name: str, config: C) -> C:
    """Return the settings of a linear mixer with every None replaced by its convention, see `Mixer.resolve`."""
    check_settings(config)
    check_scan_names(config.scans)
    entry, several = MIXERS[name].fields, config.scans != ROW_MAJOR
    if several and config.rotation not in (None, NO_ROTATION):
        raise ValueError(f"rotation {config.rotation!r} needs one order of the tokens, not several scans")
    if several and not (entry.decay and entry.decay.scans):
        fits = ", ".join(n for n, other in linear_mixers().items() if other.decay and other.decay.scans)
        raise ValueError(f"scans: not available with mixer {name!r}, only with {fits}")
    if config.decay_temperature is not None and not (entry.decay and entry.decay.tempered):
        fits = ", ".join(n for n, other in linear_mixers().items() if other.decay and other.decay.tempered)
        raise ValueError(f"decay_temperature: not available with mixer {name!r}, only with {fits}")
    conventions = (None, entry.decay_convention, entry.causal_decay_convention)
    if entry.decay is None and config.decay_convention not in conventions:
        raise ValueError(f"decay_convention {config.decay_convention!r}: mixer {name!r} has no decay")
    if config.score_dropout and config.form in ("chunk", "rnn"):
        raise ValueError(f"score_dropout exists in the full form only, use form 'auto' or 'full', got {config.form!r}")
    filled = {name: getattr(entry, name) for name in ("feature_map", "normalize", "rotation")}
    both = config.direction == "both"
    filled["decay_convention"] = entry.decay_convention if both else entry.causal_decay_convention
    out = with_parts(fill(config, filled), entry.parts(config))
    if entry.decay and entry.decay.delta:
        if out.normalize != "none":
            raise ValueError(f"normalize {out.normalize!r} is not available with the delta rule, use 'none'")
        if config.score_dropout:
            raise ValueError("score_dropout is not available with the delta rule, which has no scores")
        if out.decay_convention != "target":
            raise ValueError(
                f"decay_convention {out.decay_convention!r} is not available with the delta rule, use 'target'"
            )
    check_rotation(out)
    maps = [out.feature_map] + ([entry.key_map] if entry.key_map else [])
    for phi in maps:
        if out.normalize in ("sum", "pre") and not FEATURE_MAPS[phi].positive:
            positive = ", ".join(n for n, m in FEATURE_MAPS.items() if m.positive)
            raise ValueError(
                f"normalize {out.normalize!r} divides by a row sum, which feature_map {phi!r} can make zero or "
                f"negative; use normalize 'none' or one of {positive}"
            )
    return out


class Operands(NamedTuple):
    """Operands of the operator, and the state of the decay.

    Attributes:
        q, k, v: Queries and keys (B, H, L, D), values (B, H, L, E).
        gates: Gates of the operator.
        state: State of the decay after these tokens; empty if the decay has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    state: tuple[Tensor, ...] = ()


@state_type
class LinearState(NamedTuple):
    """The state of a causal layer.

    Attributes:
        S, z: State of the operator.
        position: Position (B,) of the next token.
        decay: State of the decay, empty if the decay has none.
    """

    S: Tensor
    z: Tensor
    position: Tensor
    decay: tuple[Tensor, ...] = ()


class LionAttention(Attention):
    """Masked, scaled linear attention, `Y = scale(phi(Q) phi(K)^T * M) V` (Eq. 13), in any of its forms.

    `layer(x)` mixes tokens x (B, L, dim). `layer(x, lion.Layout.of(x, valid=.., segments=..))` handles padding and
    packed sequences.

    Args:
        dim: Width of the tokens, a multiple of `num_heads`.
        num_heads: Number of heads H.
        mixer: The decay that makes the mask M, with the gates and the feature map of its publication: "lion_lit",
            "lion_d", "lion_s" (LION), "lion_s_vector" (a decay for each key dimension), "lion_d_hippo",
            "lion_s_hippo" (long sequences), "linear_transformer", "performer", "retnet", "gated_rfa", "mamba2",
            "mamba", "rwkv6", "gla", "hgrn2", "xlstm", "deltanet", "gated_deltanet", "kda", "comba", "gdn2", "rwkv7",
            "deltaproduct", "lightnet". None: "lion_s", or the mixer of a class that has only one.
        config: Settings as one object, `AttentionConfig`; None selects the defaults of the mixer, with a plain
            block.
        device, dtype: Device and dtype of the weights; gates and sums stay in float32.
        **settings: Settings by name, which override `config`: `feature_map`, `normalize`, `decay_convention`,
            `rotation` (by default those of the mixer), `decay_temperature`, `direction` ("both", "forward",
            "backward"), `scans`, `scan_merge` (orders of an image's patches), `form` ("auto", "full", "chunk", "rnn"),
            `chunk_size`, `kernels` ("auto", "graph", "triton"), `qkv_bias`, `score_dropout`, `conv_width`, `out_norm`,
            `out_gate`. `block` set to "published" adds the parts around the published recurrence.

    Raises:
        ValueError: An unknown mixer or value, or settings that cannot be combined.

    `set_form` changes the form at any time; the weights do not depend on the form. With `direction="forward"` the layer
    streams in constant time and memory per token: `prefill` a prompt (in chunks), then `step`. The mixers of LION use
    different decay conventions in one direction and in both (`AttentionConfig`).
    """

    forms = FORMS

    def __new__(cls, dim: int = 0, num_heads: int = 0, mixer: str | None = None, *_: Any, **__: Any) -> Self:
        """Return a layer of the mixer's class: `LionAttention(dim, num_heads, "lightnet")` is a `LightNetAttention`."""
        layer = MIXERS[mixer].layer if mixer in MIXERS else cls
        return super().__new__(layer if issubclass(layer, cls) else cls)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mixer: str | None = None,
        config: AttentionConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        linear, mixer = linear_mixers(), usual_mixer(type(self)) if mixer is None else mixer
        if mixer not in linear:
            other = f"use lion.make_mixer({mixer!r}, ..)" if mixer in MIXERS else nearest(mixer, linear, "")
            raise ValueError(f"mixer: expected one of {', '.join(linear)}, got {mixer!r}{other and f', {other}'}")
        config = self.resolve(mixer, own_settings(mixer, config, settings, type(self)))
        super().__init__(dim, num_heads, config, linear[mixer].parts(config))
        self.mixer_name = mixer
        self.mixer = linear[mixer]
        decays = self.make_decays(dim)
        self.decays = nn.ModuleList(decays)
        for decay in decays:
            decay.reverse = self.config.direction == "backward"
            decay.temperature = self.config.decay_temperature or decay.temperature
        self.form, self.chunk_size = self.config.form, self.config.chunk_size
        self.operator_settings = self.make_settings()
        self.to(device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.mixer_name!r}, {super().extra_repr()}, form={self.form!r}"

    def make_settings(self) -> Settings:
        """Return the settings of the operator, which change with the form alone."""
        c = self.config
        return Settings(
            form=self.form,
            direction=c.direction,
            normalize=present(c.normalize, "normalize"),
            decay_convention=present(c.decay_convention, "decay_convention"),
            feature_map=None if self.maps_first else c.feature_map,
            scale=self.mixer.scale,
            chunk_size=self.chunk_size,
            kernels=self.config.kernels,
            scan_merge=c.scan_merge,
            undecayed_erase=self.mixer.undecayed_erase,
        )

    def first_decay(self) -> Decay:
        """Return the decay of the first scan, often the only one."""
        return cast("Decay", self.decays[0])

    @property
    def maps_first(self) -> bool:
        """Return whether the feature map is applied in the layer: the decay may use or change the mapped keys."""
        if self.mixer.key_map or self.config.scans != ROW_MAJOR:
            return True
        return any(not decay.scans for decay in self.decays)

    def make_decays(self, dim: int) -> list[Decay]:
        """Return one decay per scan, none for a mixer without decay."""
        kind = self.mixer.decay
        return [] if kind is None else [kind(dim, self.num_heads) for _ in self.config.scans]

    @staticmethod
    def resolve(name: str, config: Any) -> Any:
        return resolve_linear(name, config)

    @staticmethod
    def info(name: str) -> MixerInfo:
        entry: LinearMixer = MIXERS[name].fields
        memory = "none" if entry.decay is None else entry.decay.per
        divisor = {"sum": "row sum", "pre": "row sum before decays", "max": "max(abs(row sum), 1)", "none": "-"}[
            entry.normalize
        ]
        return MixerInfo(entry.source, memory, divisor, describe(entry.published or PLAIN_BLOCK), entry.left_out or "-")

    @staticmethod
    def knows_order(name: str, config: AttentionConfig) -> bool:
        return MIXERS[name].fields.decay is not None

    def check_split(self, count: int) -> None:
        if self.config.score_dropout:
            raise ValueError("attention.score_dropout=0 is needed: scores between processes are not computed")
        if self.config.scans != ROW_MAJOR:
            check_share("num_heads", self.num_heads, count)

    @property
    def unrolled(self) -> bool:
        return any(decay.delta for decay in self.decays)

    @property
    def causal(self) -> bool:
        return streams(self.config) and self.config.scans == ROW_MAJOR

    def check_causal(self) -> None:
        super().check_causal()
        if self.config.scans != ROW_MAJOR:
            raise ValueError("scans: a stream has one order, in which its tokens arrive")

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        super().set_form(form, chunk_size)
        self.form = form
        self.chunk_size = self.config.chunk_size if chunk_size is None else chunk_size
        self.operator_settings = self.make_settings()

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        settings = self.operator_settings
        if self.training and self.config.score_dropout:
            settings = replace(settings, dropout_p=self.config.score_dropout)
        if self.config.scans != ROW_MAJOR:
            return self.mix_scans(x, q, k, v, layout, settings)
        given = self.operands(x, q, k, v, layout)
        q, k, v, gates = given.q, given.k, given.v, given.gates
        if layout.part is not None:
            return split_attention(q, k, v, gates, part=layout.part, segments=layout.segments, settings=settings)
        return linear_attention(q, k, v, gates, segments=layout.segments, settings=settings)

    def mix_scans(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, settings: Settings) -> Tensor:
        """Mix tokens by several scans, each with separate decays (B, H, L) or (H,), in sequence order."""
        scans, rows = self.config.scans, layout if layout.whole is None else layout.whole
        if rows.orders is None or len(rows.orders) != len(scans):
            raise ValueError(f"layout: scans {', '.join(scans)} need the orders of `grid_layout`")
        if rows.segment_index is not None:
            raise ValueError("segments: several scans need one image per row, without segments")
        q, k = self.mapped(q, k)
        log_decays = [decay(x, k, layout).log_decay for decay in self.decays]

        def mix_rows(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
            *log_decays, rows = more
            return multi_scan_attention(q, k, v, log_decays, rows.orders, valid=rows.valid, settings=settings)

        return by_heads(mix_rows, layout, q, k, v, *log_decays)

    def mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys after their feature maps."""
        feature_map = self.config.feature_map
        return apply_feature_map(feature_map, q), apply_feature_map(self.mixer.key_map or feature_map, k)

    def operands(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: tuple[Tensor, ...] = ()
    ) -> Operands:
        """Return the operands for tokens x (B, L, dim), and the state of the decay after them."""
        if self.maps_first:
            q, k = self.mapped(q, k)
        gating = self.first_decay()(x, k, layout, state) if self.decays else Gating(k)
        if gating.query_shift is not None:
            q = (q + gating.query_shift).to(q.dtype)
        if gating.value_gate is not None:
            v = fold(v, gating.value_gate)
        gates = gating.gates
        angles = self.angles(x, layout, gates.angles)
        if angles is not None:
            gates = gates._replace(angles=angles)
        return Operands(q, gating.k, v, gates, gating.state)

    def prefill_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, LinearState]:
        given = self.operands(x, q, k, v, layout)
        y, new = prefill(
            given.q, given.k, given.v, given.gates, segments=layout.segments, settings=self.operator_settings
        )
        return y, LinearState(new.S, new.z, layout.next_position(x), given.state)

    def step_heads(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LinearState, valid: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        check_state(state, LinearState, x)
        layout = Layout.after(x, state.position, valid)
        given = self.operands(x, q, k, v, layout, state.decay)
        before = State(state.S, state.z)
        y, new = step(given.q, given.k, given.v, before, given.gates, valid=valid, settings=self.operator_settings)
        return y, LinearState(new.S, new.z, state.position + layout.tokens_of(x), given.state)

    def initial_heads(self, batch: int) -> LinearState:
        weight, shape = self.like, (batch, self.num_heads, self.head_dim, self.value_dim)
        S = weight.new_zeros(shape, dtype=wide_dtype(weight))
        position = torch.zeros(batch, dtype=torch.long, device=weight.device)
        z = S[..., 0].clone()
        return LinearState(S, z, position, self.first_decay().initial_state(z) if self.decays else ())


def with_settings(constructor: Callable[..., Any], config: type) -> inspect.Signature:
    """Return the signature of a constructor with the settings of `config` by name, in place of its last argument."""
    signature = inspect.signature(constructor)
    parameters = list(signature.parameters.values())[:-1]
    for field in fields(config):
        setting = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        parameters.append(setting)
    return signature.replace(parameters=parameters)


# What `help`, `inspect` and notebooks show; of a class with both methods they read `__new__`.
SIGNATURE = with_settings(LionAttention.__init__, AttentionConfig)
LionAttention.__init__.__signature__ = SIGNATURE  # type: ignore[attr-defined]
LionAttention.__new__.__signature__ = SIGNATURE  # type: ignore[attr-defined]
