"""Attention layers behind one interface: x (B, L, dim) -> (B, L, dim)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.decay import DECAYS
from lion.layers.features import FEATURE_MAPS, feature_map
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.ops import FORMS, linear_attention
from lion.ops.decay import DIRECTIONS, GATES

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


@dataclass
class AttentionConfig:
    """Settings of an attention layer. None means: what the mixer's entry in `MIXERS` says."""

    feature_map: str | None = setting(None, choices=FEATURE_MAPS)
    normalize: str | None = setting(None, choices=("sum", "none"))
    gate: str | None = setting(None, choices=GATES)
    direction: str = setting("both", choices=DIRECTIONS)
    form: str = setting("auto", choices=("auto", *FORMS), free=True)
    chunk_size: int = setting(64, min=1, free=True)
    qkv_bias: bool = True
    score_dropout: float = setting(0.0, min=0, max=1)
    out_norm: str | None = setting(None, choices=NORMS)
    out_gate_rank: int = setting(0, min=0)

    def resolved(self, mixer: str, preset: str = "paper") -> AttentionConfig:
        """The same with every None filled in from the mixer's entry.

        Raises:
            ValueError: A pair that does not work.
        """
        if mixer == SOFTMAX:
            if self.direction == "backward":
                raise ValueError("direction 'backward' is not available with mixer 'softmax', use 'both' or 'forward'")
            if self.form not in ("auto", "full"):
                raise ValueError(f"form {self.form!r} is not available with mixer 'softmax', which has only 'full'")
            for name in ("feature_map", "normalize", "gate"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to linear mixers, 'softmax' has none")
            return self
        if self.score_dropout and self.form in ("chunk", "rnn"):
            raise ValueError(
                f"score_dropout exists in the full form only, use form 'auto' or 'full', got {self.form!r}"
            )
        entry = MIXERS[mixer]
        filled = {"feature_map": entry.feature_map, "normalize": entry.normalize}
        filled["gate"] = entry.gate if self.direction == "both" else entry.causal_gate
        if preset == "released":
            filled |= entry.released
        out = replace(self, **{k: v for k, v in filled.items() if getattr(self, k) is None})
        if out.normalize == "sum" and not FEATURE_MAPS[out.feature_map].positive:
            positive = ", ".join(name for name, m in FEATURE_MAPS.items() if m.positive)
            raise ValueError(
                f"normalize 'sum' divides by a row sum, which feature_map {out.feature_map!r} can make zero or "
                f"negative; use normalize 'none' or one of {positive}"
            )
        return out


class Attention(nn.Module):
    """Projections around a mixing of heads, which the subclass gives as `mix`."""

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.num_heads = num_heads
        self.config = config
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.out_norm = NORMS[config.out_norm](dim) if config.out_norm else None
        rank = config.out_gate_rank
        self.out_gate = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim)) if rank else None

    def forward(
        self, x: Tensor, coords: Tensor | None = None, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: (B, L, dim).
            coords: Integer (axes, L), the place of each token; -1 marks extra tokens (cls).
            valid, segments: (B, L), see `lion.ops.linear_attention`.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, D) each
        extra = None if coords is None else (coords < 0).all(0)
        y = self.mix(x, q, k, v, extra, valid, segments).transpose(1, 2).flatten(2)  # (B, L, dim)
        if self.out_norm is not None:
            y = self.out_norm(y)
        if self.out_gate is not None:
            y = y * torch.sigmoid(self.out_gate(x))
        return self.proj(y)

    def mix(self, x, q, k, v, extra, valid, segments) -> Tensor:
        raise NotImplementedError


class LionAttention(Attention):
    """Masked, scaled linear attention, `Y = scale(phi(Q) phi(K)^T * M) V` (Eq. 13), in any of its forms.

    Args:
        dim: Width of the tokens, a multiple of `num_heads`.
        num_heads: Heads H.
        mixer: "lion_lit", "lion_d" or "lion_s": which decay makes the mask M.
        config: The remaining settings; keyword arguments override them (`form="chunk"`, `chunk_size=32`, ..).

    The form can be changed at any time with `set_form`; weights do not depend on it.
    """

    def __init__(
        self, dim: int, num_heads: int, mixer: str = "lion_s", config: AttentionConfig | None = None, **settings
    ) -> None:
        if mixer not in MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(MIXERS)}, got {mixer!r}")
        super().__init__(dim, num_heads, replace(config or AttentionConfig(), **settings).resolved(mixer))
        self.decay = DECAYS[MIXERS[mixer].decay](dim, num_heads) if MIXERS[mixer].decay else None
        self.form, self.chunk_size = self.config.form, self.config.chunk_size

    def mix(self, x, q, k, v, extra, valid, segments) -> Tensor:
        c = self.config
        return linear_attention(
            feature_map(c.feature_map, q),
            feature_map(c.feature_map, k),
            v,
            None if self.decay is None else self.decay(x, extra),
            form=self.form,
            direction=c.direction,
            normalize=c.normalize,
            gate=c.gate,
            chunk_size=self.chunk_size,
            valid=valid,
            segments=segments,
            dropout_p=c.score_dropout if self.training else 0.0,
        )


class SoftmaxAttention(Attention):
    """The baseline: softmax attention through `scaled_dot_product_attention`."""

    def __init__(self, dim: int, num_heads: int, config: AttentionConfig | None = None, **settings) -> None:
        super().__init__(dim, num_heads, replace(config or AttentionConfig(), **settings).resolved(SOFTMAX))

    def mix(self, x, q, k, v, extra, valid, segments) -> Tensor:
        causal = self.config.direction == "forward"
        mask = None
        if valid is not None or segments is not None:
            ids = torch.zeros_like(valid, dtype=torch.int) if segments is None else segments
            kept = ids >= 0 if valid is None else valid & (ids >= 0)
            mask = (ids[:, None, :, None] == ids[:, None, None, :]) & kept[:, None, None, :]
            if causal:
                mask = mask.tril()
            mask = mask | ~kept[:, None, :, None]  # a padding row reads anything, so that it is finite
            q, k, v = (t.masked_fill(~kept[:, None, :, None], 0) for t in (q, k, v))
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

    Raises:
        ValueError: An unknown form, or one that softmax attention does not have.
    """
    if form not in ("auto", *FORMS):
        raise ValueError(f"form: expected one of auto, {', '.join(FORMS)}, got {form!r}")
    for layer in model.modules():
        if isinstance(layer, SoftmaxAttention) and form not in ("auto", "full"):
            raise ValueError(f"form: softmax attention has only 'full', got {form!r}")
        if isinstance(layer, LionAttention):
            layer.form = form
            layer.chunk_size = chunk_size or layer.config.chunk_size


def forms_of(model: nn.Module) -> tuple[str, ...]:
    """The forms that a model can run in."""
    return ("full",) if any(isinstance(m, SoftmaxAttention) for m in model.modules()) else FORMS
