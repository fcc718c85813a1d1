"""Attention layers behind one interface: x (B, L, dim) -> (B, L, dim)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import check_settings, nearest, setting
from lion.layers.decay import DECAYS
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.layers.padding import places_of, without_padding
from lion.layers.scans import AS_THEY_STAND, SCANS, Grid
from lion.ops import (
    DECAY_CONVENTIONS,
    DIRECTIONS,
    FORMS,
    NORMALIZE,
    SCAN_MERGES,
    State,
    linear_attention,
    multi_scan_attention,
    prefill,
    rope_frequencies,
    rotary_angles,
    step,
)
from lion.ops.features import FEATURE_MAPS, apply_feature_map
from lion.ops.settings import check_chunk_size

ALTERNATING = "alternating"  # forward in the first block, backward in the second, and so on (Table 16)
NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


@dataclass
class AttentionConfig:
    """Settings of an attention layer. None means: what the mixer's entry in `MIXERS` says.

    `direction` is more than what is seen: the mixers of LION take `decay_convention="source"` in "both" and "target" in
    one, as the paper does (`lion.ops.decay`), so the same weights make other masks; one that is given holds in each.

    `scans` are the orders in which the patches of an image are visited, entries of `SCANS`, each with a decay of its
    own; `scan_merge` is how several become one (`lion.ops.multiscan`).
    """

    feature_map: str | None = setting(None, choices=FEATURE_MAPS)
    normalize: str | None = setting(None, choices=NORMALIZE)
    decay_convention: str | None = setting(None, choices=DECAY_CONVENTIONS)
    direction: str = setting("both", choices=(*DIRECTIONS, ALTERNATING))
    scans: tuple[str, ...] = AS_THEY_STAND
    scan_merge: str = setting("masks", choices=SCAN_MERGES)
    form: str = setting("auto", choices=("auto", *FORMS), free=True)
    chunk_size: int = setting(64, min=1, free=True)
    qkv_bias: bool = True
    score_dropout: float = setting(0.0, min=0, max=1)
    out_norm: str | None = setting(None, choices=NORMS)
    out_gate_rank: int = setting(0, min=0)

    def resolved(self, mixer: str, preset: str = "paper") -> AttentionConfig:
        """The same with every None filled in from the mixer's entry.

        Raises:
            ValueError: A value that is no choice, or a pair that does not work.
        """
        check_settings(self)
        self.check_scans(mixer)
        if mixer == SOFTMAX:
            if self.direction not in ("both", "forward"):
                raise ValueError(
                    f"direction {self.direction!r} is not available with mixer 'softmax', use 'both' or 'forward'"
                )
            if self.form not in ("auto", "full"):
                raise ValueError(f"form {self.form!r} is not available with mixer 'softmax', which has only 'full'")
            for name in ("normalize", "decay_convention"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to linear mixers, 'softmax' has none")
            return self
        if self.score_dropout and self.form in ("chunk", "rnn"):
            raise ValueError(
                f"score_dropout exists in the full form only, use form 'auto' or 'full', got {self.form!r}"
            )
        entry = MIXERS[mixer]
        filled = {"feature_map": entry.feature_map, "normalize": entry.normalize}
        both = self.direction == "both"
        filled["decay_convention"] = entry.decay_convention if both else entry.causal_decay_convention
        if preset == "released":
            filled |= entry.released
        out = replace(self, **{k: v for k, v in filled.items() if getattr(self, k) is None})
        if entry.decay and DECAYS[entry.decay].delta:
            if out.normalize != "none":
                raise ValueError(f"normalize {out.normalize!r} is not available with the delta rule, use 'none'")
            if self.score_dropout:
                raise ValueError("score_dropout is not available with the delta rule, which has no scores")
        maps = [out.feature_map] + ([entry.key_map] if entry.key_map else [])
        for name in maps:
            if out.normalize in ("sum", "pre") and not FEATURE_MAPS[name].positive:
                positive = ", ".join(n for n, m in FEATURE_MAPS.items() if m.positive)
                raise ValueError(
                    f"normalize {out.normalize!r} divides by a row sum, which feature_map {name!r} can make zero or "
                    f"negative; use normalize 'none' or one of {positive}"
                )
        return out

    def check_scans(self, mixer: str) -> None:
        for name in self.scans:
            if name not in SCANS:
                raise ValueError(f"scans: {name!r} is no scan, {nearest(name, SCANS)}")
        if not self.scans:
            raise ValueError("scans: expected at least one")
        decay = None if mixer == SOFTMAX else MIXERS[mixer].decay
        if self.scans != AS_THEY_STAND and not (decay and DECAYS[decay].scans):
            fits = ", ".join(name for name, entry in MIXERS.items() if entry.decay and DECAYS[entry.decay].scans)
            raise ValueError(f"scans: not available with mixer {mixer!r}, only with {fits}")

    def at(self, layer: int) -> AttentionConfig:
        """Of one block of a model: `alternating` becomes a direction."""
        if self.direction != ALTERNATING:
            return self
        return replace(self, direction="backward" if layer % 2 else "forward")


class Attention(nn.Module):
    """Projections around a mixing of heads, which the subclass gives as `mix`."""

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if dim < 1 or dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.num_heads = num_heads
        self.config = config
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.out_norm = NORMS[config.out_norm](dim) if config.out_norm else None
        rank = config.out_gate_rank
        self.out_gate = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim)) if rank else None

    def forward(
        self, x: Tensor, grid: Grid | None = None, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: (B, L, dim).
            grid: The places of the tokens, see `lion.layers.scans.make_grid`.
            valid, segments: (B, L), see `lion.ops.linear_attention`. What padding holds reaches neither tokens nor
                parameters; the output there means nothing, but is finite.
        """
        x, kept = without_padding(x, valid, segments)
        q, k, v = self.heads(x)
        return self.merge(x, self.mix(x, q, k, v, grid, kept, segments))

    def heads(self, x: Tensor) -> Tensor:
        """q, k, v (3, B, H, L, D) of x (B, L, dim)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, H, L, D) -> (B, L, dim): heads side by side, norm, gate, projection."""
        y = y.transpose(1, 2).flatten(2)
        if self.out_norm is not None:
            y = self.out_norm(y)
        if self.out_gate is not None:
            y = y * torch.sigmoid(self.out_gate(x))
        return self.proj(y)

    def mix(self, x, q, k, v, grid, kept, segments) -> Tensor:
        raise NotImplementedError


class LayerState(NamedTuple):
    """What a causal layer remembers: the operator's `S` and `z`, and the next token's `position` (B,)."""

    S: Tensor
    z: Tensor
    position: Tensor


class LionAttention(Attention):
    """Masked, scaled linear attention, `Y = scale(phi(Q) phi(K)^T * M) V` (Eq. 13), in any of its forms.

    Args:
        dim: Width of the tokens, a multiple of `num_heads`.
        num_heads: Heads H.
        mixer: An entry of `MIXERS`: which decay makes the mask M, and with what around it.
        config: The remaining settings; keyword arguments override them (`form="chunk"`, `chunk_size=32`, ..).

    The form can be changed at any time with `set_form`; weights do not depend on it. With `direction="forward"`
    the layer streams: `prefill` a prompt, then `step`. The mixers of LION have another `decay_convention` in one
    direction than in both (`AttentionConfig`).
    """

    def __init__(
        self, dim: int, num_heads: int, mixer: str = "lion_s", config: AttentionConfig | None = None, **settings
    ) -> None:
        if mixer not in MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(MIXERS)}, got {mixer!r}")
        super().__init__(dim, num_heads, replace(config or AttentionConfig(), **settings).resolved(mixer))
        if self.config.direction == ALTERNATING:
            raise ValueError(f"direction: {ALTERNATING!r} is that of a model, one layer goes forward or backward")
        self.mixer = MIXERS[mixer]
        kinds = [DECAYS[self.mixer.decay]] * len(self.config.scans) if self.mixer.decay else []
        self.decays = nn.ModuleList(kind(dim, num_heads) for kind in kinds)  # one of each scan
        if self.mixer.rotary and dim // num_heads % 2:
            raise ValueError(f"num_heads: mixer {mixer!r} turns pairs, got an odd head dim {dim // num_heads}")
        self.form, self.chunk_size = self.config.form, self.config.chunk_size

    def mix(self, x, q, k, v, grid, kept, segments) -> Tensor:
        extra = None if grid is None else grid.extra
        how = dict(
            form=self.form,
            direction=self.config.direction,
            chunk_size=self.chunk_size,
            valid=kept,
            dropout_p=self.config.score_dropout if self.training else 0.0,
        )
        if self.config.scans != AS_THEY_STAND:
            return self.mix_scans(x, q, k, v, grid, extra, segments, how)
        given = self.arguments(x, q, k, v, places_of(x, kept), extra)
        return linear_attention(**given, **how, segments=segments)

    def mix_scans(self, x, q, k, v, grid, extra, segments, how) -> Tensor:
        """Every scan with its own decays (B, H, L) or (H,), in the order in which the tokens stand."""
        c = self.config
        if grid is None or grid.orders is None or len(grid.orders) != len(c.scans):
            raise ValueError(f"grid: scans {', '.join(c.scans)} need the orders of `make_grid`")
        if segments is not None:
            raise ValueError("segments: several scans go over one image a row, without segments")
        q, k = apply_feature_map(c.feature_map, q), apply_feature_map(c.feature_map, k)
        how |= dict(
            scan_merge=c.scan_merge, normalize=c.normalize, decay_convention=c.decay_convention, scale=self.mixer.scale
        )
        return multi_scan_attention(q, k, v, [d(x, k, extra).log_decay for d in self.decays], grid.orders, **how)

    def arguments(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, places: Tensor, extra: Tensor | None = None
    ) -> dict:
        """The operator's arguments for tokens x (B, L, dim) at `places` (B or 1, L)."""
        c, m, phi = self.config, self.mixer, self.config.feature_map
        if self.decays and not self.decays[0].scans:  # it has to do with keys
            q, k, phi = apply_feature_map(phi, q), apply_feature_map(m.key_map or phi, k), None
        given = self.decays[0](x, k, extra)._asdict() if self.decays else {"k": k}
        angles = None
        if m.rotary:  # (B, 1, L, D/2), the same for all rows unless padding shifts them
            places = places.expand(x.shape[0], -1) if places.shape[0] > 1 else places[0]
            frequencies = rope_frequencies(q.shape[-1], device=x.device, dtype=torch.float64)
            angles = rotary_angles(places.unsqueeze(-2), frequencies)
        how = dict(feature_map=phi, normalize=c.normalize, decay_convention=c.decay_convention, scale=m.scale)
        return dict(q=q, v=v, angles=angles, **how, **given)

    def prefill(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, LayerState]:
        """Mix a prompt x (B, L, dim) in the chunk form; the output (B, L, dim) and the state to go on from.

        Raises:
            ValueError: The layer is not causal.
        """
        self._causal()
        x, valid = without_padding(x, valid, None)
        count = torch.full((x.shape[0],), x.shape[1], device=x.device) if valid is None else valid.sum(1)
        inputs = self.arguments(x, *self.heads(x), places_of(x, valid))
        y, state = prefill(**inputs, chunk_size=self.chunk_size, valid=valid)
        return self.merge(x, y), LayerState(*state, count)

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Mix the next token(s) x (B, C, dim), constant time and memory a token; the output and the new state.

        Equal to `direction="forward"` over the whole sequence. A state is a tuple of tensors:
        `torch.save(state._asdict(), path)`, `LayerState(**torch.load(path))`.
        """
        self._causal()
        places = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        y, new = step(State(state.S, state.z), **self.arguments(x, *self.heads(x), places))
        return self.merge(x, y), LayerState(*new, state.position + x.shape[1])

    def initial_state(self, batch: int) -> LayerState:
        """The empty state, for a stream without a prompt."""
        weight, width = self.proj.weight, self.proj.weight.shape[0] // self.num_heads
        S = weight.new_zeros(
            batch, self.num_heads, width, width, dtype=torch.promote_types(weight.dtype, torch.float32)
        )
        return LayerState(S, S[..., 0].clone(), torch.zeros(batch, dtype=torch.long, device=weight.device))

    def _causal(self) -> None:
        if self.config.direction != "forward":
            raise ValueError(f"direction: only 'forward' streams, this layer has {self.config.direction!r}")
        if self.config.scans != AS_THEY_STAND:
            raise ValueError("scans: a stream has one order, that in which its tokens come")


class SoftmaxAttention(Attention):
    """The baseline: softmax attention through `scaled_dot_product_attention`; a feature map only if one is asked for
    (Table 14)."""

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig | None = None, **settings) -> None:
        super().__init__(dim, num_heads, replace(config or AttentionConfig(), **settings).resolved(SOFTMAX))

    def mix(self, x, q, k, v, grid, kept, segments) -> Tensor:
        if self.config.feature_map is not None:
            q, k = (apply_feature_map(self.config.feature_map, x) for x in (q, k))
        causal = self.config.direction == "forward"
        mask = None
        if kept is not None:
            ids = torch.zeros_like(kept, dtype=torch.int) if segments is None else segments
            mask = (ids[:, None, :, None] == ids[:, None, None, :]) & kept[:, None, None, :]
            if causal:
                mask = mask.tril()
            mask = mask | ~kept[:, None, :, None]  # a padding row reads anything, so that it is finite
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.config.score_dropout if self.training else 0.0,
            is_causal=causal and mask is None,
        )
        return y if mask is None else y.masked_fill(~kept[:, None, :, None], 0)


def make_attention(mixer: str, dim: int, num_heads: int, config: AttentionConfig) -> Attention:
    """The attention layer that a recipe's `model.mixer` names."""
    if mixer == SOFTMAX:
        return SoftmaxAttention(dim, num_heads, config)
    return LionAttention(dim, num_heads, mixer, config)


def set_form(model: nn.Module, form: str, chunk_size: int | None = None) -> None:
    """Run every linear attention of `model` in this form from now on; weights are untouched.

    Besides "auto" and `FORMS` there is "blockwise", the paper's own Lion-chunk (`lion.ops.blockwise`).

    Raises:
        ValueError: An unknown form, one that softmax attention does not have, or a chunk without tokens.
    """
    if chunk_size is not None:
        check_chunk_size(chunk_size)
    known = ("auto", *FORMS, "blockwise")
    if form not in known:
        raise ValueError(f"form: expected one of {', '.join(known)}, got {form!r}")
    for layer in model.modules():
        if isinstance(layer, SoftmaxAttention) and form not in ("auto", "full"):
            raise ValueError(f"form: softmax attention has only 'full', got {form!r}")
        if isinstance(layer, LionAttention):
            layer.form = form
            layer.chunk_size = layer.config.chunk_size if chunk_size is None else chunk_size


def forms_of(model: nn.Module) -> tuple[str, ...]:
    """The forms that a model can run in."""
    return ("full",) if any(isinstance(m, SoftmaxAttention) for m in model.modules()) else FORMS
