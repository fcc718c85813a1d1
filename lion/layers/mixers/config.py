"""Settings of mixers and of attention layers, the recipe's `model.attention` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import ClassVar, Self

from lion.config import Absent, setting
from lion.layers.layout import ROW_MAJOR
from lion.layers.mixers.parts import BLOCKS, NO_PART, OUT_GATES, Parts
from lion.layers.norms import NO_NORM, NORMS, over_tokens
from lion.layers.rotations import NO_ROTATION, ROTATIONS
from lion.ops import DECAY_CONVENTIONS, DIRECTIONS, FORMS, NORMALIZE, SCAN_MERGES
from lion.ops.features import FEATURE_MAPS
from lion.ops.settings import CHUNK_SIZE, KERNELS

PARTS_OF_BLOCKS = sorted({field.name for field in fields(Parts)} - {"conv_width", "out_norm", "out_gate"})
ALTERNATING = "alternating"  # forward in the first block, backward in the second, and so on (Table 16)


@dataclass(kw_only=True)
class MixerConfig:
    """Settings that every mixer has.

    `chunk_size` is the number of tokens of a chunk, or of a step of the rnn form. `score_dropout` is 0 for mixers that
    compute no scores.
    """

    direction: str = setting("both", choices=(*DIRECTIONS, ALTERNATING))
    form: str = setting("auto", choices=("auto", *FORMS), free="rounding")
    chunk_size: int = setting(CHUNK_SIZE, min=1, free="rounding")
    block: str = setting(BLOCKS[0], choices=BLOCKS)
    score_dropout: float = setting(0.0, min=0, max=1)

    # what models ask of every mixer; settings in `AttentionConfig`, and no keys of a recipe for other mixers
    @property
    def scans(self) -> tuple[str, ...]:
        return ROW_MAJOR

    @property
    def rotation(self) -> str | None:
        return NO_ROTATION

    @property
    def out_norm(self) -> str | None:
        return NO_NORM

    def label(self) -> str:
        """Return a label of the settings that only this kind of mixer has; "" if they have their defaults."""
        return ""

    def block_label(self) -> str:
        """Return a label of the parts around the heads that are set; "" if the block is plain."""
        return "" if self.block == BLOCKS[0] else "published block"

    def at(self, layer: int) -> Self:
        """Return the settings of block `layer` of a model, where `alternating` becomes "forward" or "backward"."""
        if self.direction != ALTERNATING:
            return self
        return replace(self, direction="backward" if layer % 2 else "forward")


@dataclass(kw_only=True)
class AttentionConfig(MixerConfig):
    """Settings of an attention layer. None selects the value of the mixer's entry in `MIXERS`.

    `direction` also selects the default decay convention. The mixers of LION use `decay_convention="source"` in both
    directions and "target" in a single direction, as in the paper (`lion.ops.decay`). The same weights then make
    different masks. An explicit `decay_convention` holds in every direction.

    `decay_temperature` T changes the decays of Lion-D and Lion-S to `lambda^(1/T)`. With `lambda = 0.5` at the
    start of training, a token's weight halves every T tokens. The recipes of LION have T = 1; GLA has 16.

    `scans` are the orders in which the patches of an image are visited (entries of `SCANS`). Each scan has a separate
    decay. `scan_merge` determines how several scans are merged (`lion.ops.multiscan`).

    `kernels="triton"` computes scalar decays on a GPU by the kernels of `lion.ops.fused`, which no GPU has run yet.

    `block="published"` adds the parts that the publication of the mixer has around its recurrence
    (`lion.layers.mixers.parts.Parts`); the mixers of LION have none. Three of these parts can be set for any mixer, in
    either block: `conv_width`, the width of a convolution of q, k and v (0: none), `out_norm`, a norm over the whole
    width after the heads, and `out_gate`, a gate on the outputs.
    """

    feature_map: str | None = setting(None, choices=FEATURE_MAPS)
    normalize: str | None = setting(None, choices=NORMALIZE)
    decay_convention: str | None = setting(None, choices=DECAY_CONVENTIONS)
    decay_temperature: float | None = setting(None, above=0, max=1000)
    scans: tuple[str, ...] = ROW_MAJOR
    scan_merge: str = setting("masks", choices=SCAN_MERGES)
    rotation: str | None = setting(None, choices=(NO_ROTATION, *ROTATIONS))
    kernels: str = setting("auto", choices=KERNELS, free="rounding")
    qkv_bias: bool = True
    conv_width: int | None = setting(None, min=0, max=64)
    out_norm: str | None = setting(None, choices=(NO_NORM, *NORMS))
    out_gate: str | None = setting(None, choices=(NO_PART, *OUT_GATES))

    absent: ClassVar[Mapping[str, Absent]] = MappingProxyType(
        dict.fromkeys(
            PARTS_OF_BLOCKS, Absent((None,), "a part of published blocks, which attention.block=published adds")
        )
    )

    def block_label(self) -> str:
        parts = [super().block_label()]
        for name in ("conv_width", "out_gate"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name.replace('_', ' ')} {value}")
        return ", ".join(filter(None, parts))


def check_rotation(config: AttentionConfig) -> None:
    """Check the rotation against `normalize`.

    Raises:
        ValueError: The rotation cannot be combined with the row sums of `normalize`.
    """
    rotation = ROTATIONS.get(config.rotation or NO_ROTATION)
    if rotation is not None and config.normalize != "none" and not rotation.row_sums:
        raise ValueError(
            f"rotation {config.rotation!r} does not go with row sums (normalize {config.normalize!r}); use normalize "
            "'none', or rotation 'rope'"
        )


def streams(config: MixerConfig) -> bool:
    """Return whether no token sees a later one, by its direction and norm.

    This is a function because Dynamo evaluates a property that reads `super().causal` as true.
    """
    return config.direction == "forward" and not over_tokens(config.out_norm)
