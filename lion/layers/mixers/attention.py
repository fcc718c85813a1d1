"""Attention layers: the projections around the mixing of heads, and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lion.config import nearest, setting
from lion.layers.layout import PLAIN, ROW_MAJOR, SCANS, Layout
from lion.layers.mixers.base import Mixer
from lion.layers.norms import NO_NORM, NORMS, check_causal, over_tokens
from lion.layers.rotations import NO_ROTATION, ROTATIONS
from lion.ops import DECAY_CONVENTIONS, DIRECTIONS, FORMS, NORMALIZE, SCAN_MERGES
from lion.ops.features import FEATURE_MAPS

ALTERNATING = "alternating"  # forward in the first block, backward in the second, and so on (Table 16)


@dataclass
class AttentionConfig:
    """Settings of an attention layer. None selects the value of the mixer's entry in `MIXERS`.

    `direction` also selects the default decay convention. The mixers of LION use `decay_convention="source"` in both
    directions and "target" in a single direction, as in the paper (`lion.ops.decay`). The same weights then make
    different masks. An explicit `decay_convention` holds in every direction.

    `scans` are the orders in which the patches of an image are visited (entries of `SCANS`). Each scan has a separate
    decay. `scan_merge` determines how several scans are merged (`lion.ops.multiscan`).

    `out_norm` is a norm over the whole width, after the heads. Then comes a gate `sigmoid(x W1 W2)`, where W1 has
    `out_gate_rank` columns (0: no gate).
    """

    feature_map: str | None = setting(None, choices=FEATURE_MAPS)
    normalize: str | None = setting(None, choices=NORMALIZE)
    decay_convention: str | None = setting(None, choices=DECAY_CONVENTIONS)
    direction: str = setting("both", choices=(*DIRECTIONS, ALTERNATING))
    scans: tuple[str, ...] = ROW_MAJOR
    scan_merge: str = setting("masks", choices=SCAN_MERGES)
    rotation: str | None = setting(None, choices=(NO_ROTATION, *ROTATIONS))
    form: str = setting("auto", choices=("auto", *FORMS), free=True)
    chunk_size: int = setting(64, min=1, free=True)
    qkv_bias: bool = True
    score_dropout: float = setting(0.0, min=0, max=1)
    out_norm: str | None = setting(None, choices=(NO_NORM, *NORMS))
    out_gate_rank: int | None = setting(None, min=0)

    def label(self) -> str:
        """Return a label of the settings that only this kind of mixer has; "" if they have their defaults."""
        return ""

    def at(self, layer: int) -> AttentionConfig:
        """Return the settings of block `layer` of a model, where `alternating` becomes "forward" or "backward"."""
        if self.direction != ALTERNATING:
            return self
        return replace(self, direction="backward" if layer % 2 else "forward")


def check_scan_names(config: AttentionConfig) -> None:
    """Check the names of the scans.

    Raises:
        ValueError: An unknown scan, or no scan.
    """
    for scan in config.scans:
        if scan not in SCANS:
            raise ValueError(f"scans: unknown scan {scan!r}, {nearest(scan, SCANS)}")
    if not config.scans:
        raise ValueError("scans: expected at least one")


def check_rotation(config: AttentionConfig) -> None:
    """Check the rotation against `normalize`.

    Raises:
        ValueError: The rotation cannot be combined with the row sums of `normalize`.
    """
    turns = config.rotation not in (None, NO_ROTATION)
    if turns and config.normalize != "none" and not ROTATIONS[config.rotation].row_sums:
        raise ValueError(
            f"rotation {config.rotation!r} does not go with row sums (normalize {config.normalize!r}); use normalize "
            "'none', or rotation 'rope'"
        )


class Attention(Mixer):
    """Projections to q, k and v, a mixing of heads (`mix`, defined by the subclass), and the output projection."""

    Config = AttentionConfig

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if dim < 1 or dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.config = config
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.rotation = None
        if config.rotation not in (None, NO_ROTATION):
            self.rotation = ROTATIONS[config.rotation](num_heads, self.head_dim)
        self.out_norm = None if config.out_norm in (None, NO_NORM) else NORMS[config.out_norm](dim)
        rank = config.out_gate_rank
        self.out_gate = (
            nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)) if rank else None
        )

    def forward(self, x: Tensor, layout: Layout | Tensor | None = PLAIN) -> Tensor:
        """Mix tokens x (B, L, dim).

        `layout` describes padding and segments. A mask (B, L) that is True for tokens is accepted as well.
        """
        layout = Layout.given(x, layout)
        x = layout.clean(x)
        q, k, v = self.heads(x)
        return self.merge(x, self.mix(x, q, k, v, layout), layout)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Return the outputs (B, H, L, D) of the heads for tokens x (B, L, dim), where padding is 0."""
        raise NotImplementedError

    def heads(self, x: Tensor) -> Tensor:
        """Return q, k and v of x (B, L, dim), stacked as (3, B, H, L, D)."""
        if x.dim() != 3 or x.shape[-1] != self.qkv.in_features:
            raise ValueError(f"x: expected tokens (B, L, {self.qkv.in_features}), got shape {tuple(x.shape)}")
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        if self.rotation is None or not self.rotation.shared or layout.angles is not None:
            return layout
        return layout._replace(angles=self.rotation(x, layout))

    def angles(self, x: Tensor, layout: Layout, more: Tensor | None = None) -> Tensor | None:
        """Return the rotation angles of tokens x (B, L, dim), plus the angles `more`; None if there are neither."""
        if self.rotation is None:
            return more
        angles = layout.angles if self.rotation.shared else None
        if angles is None:
            angles = self.rotation(x, layout)
        return angles if more is None else angles + more

    def merge(self, x: Tensor, y: Tensor, layout: Layout = PLAIN) -> Tensor:
        """Map (B, H, L, D) to (B, L, dim): concatenate the heads, then apply norm, gate and output projection."""
        y = y.transpose(1, 2).flatten(2)
        if self.out_norm is not None:
            y = self.out_norm(y, layout)
        if self.out_gate is not None:
            y = y * torch.sigmoid(self.out_gate(x))
        return self.proj(y)

    @property
    def causal(self) -> bool:
        return self.config.direction == "forward" and not over_tokens(self.config.out_norm)

    def check_causal(self) -> None:
        if self.config.direction != "forward":
            raise ValueError(f"direction: only 'forward' streams, this layer has {self.config.direction!r}")
        check_causal(self.config.out_norm, "out_norm")
