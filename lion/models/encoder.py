"""The stack of blocks that every model shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from lion.config import setting
from lion.layers.attention import NORMS, AttentionConfig
from lion.layers.block import MLPS, Block
from lion.layers.mixers import MIXERS, SOFTMAX
from lion.layers.scans import Grid


@dataclass
class EncoderConfig:
    """Shape of the encoder. `preset` decides where paper and released code differ in what the model is."""

    mixer: str = setting(choices=(SOFTMAX, *MIXERS))
    dim: int = setting(min=1, max=65_536)
    depth: int = setting(min=1, max=1_000)
    num_heads: int = setting(min=1)
    preset: str = setting("paper", choices=("paper", "released"))
    mlp: str = setting("mlp", choices=MLPS)
    mlp_ratio: float = setting(4.0, above=0, max=1000)
    norm: str = setting("layernorm", choices=NORMS)
    norm_eps: float = setting(1e-6, above=0)
    dropout: float = setting(0.0, min=0, max=1)
    drop_path: float = setting(0.0, min=0, max=0.99)
    init_std: float = setting(0.02, above=0)
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            fits = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            near = min(fits, key=lambda h: abs(h - self.num_heads))
            raise ValueError(f"num_heads {self.num_heads} does not divide dim {self.dim}, nearest: {near}")
        try:
            self.attention = self.attention.resolved(self.mixer, self.preset)
        except ValueError as error:
            raise ValueError(f"attention.{error}") from None


class Encoder(nn.Module):
    """`depth` blocks and a final norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        c = config
        rates = [c.drop_path * i / max(c.depth - 1, 1) if c.drop_path else None for i in range(c.depth)]
        self.blocks = nn.ModuleList(
            Block(
                c.dim,
                c.num_heads,
                mixer=c.mixer,
                attention=c.attention.at(layer),
                mlp=c.mlp,
                mlp_ratio=c.mlp_ratio,
                norm=c.norm,
                norm_eps=c.norm_eps,
                dropout=c.dropout,
                drop_path=rate,
            )
            for layer, rate in enumerate(rates)
        )
        self.norm = NORMS[c.norm](c.dim, eps=c.norm_eps)

    def forward(
        self, x: Tensor, grid: Grid | None = None, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """(B, L, dim) -> (B, L, dim)."""
        for block in self.blocks:
            x = block(x, grid, valid, segments)
        return self.norm(x)


def init_weights(module: nn.Module, std: float) -> None:
    """DeiT's initialisation: Linear truncated normal, biases 0; norms, convolutions and decays keep their own."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=std)
            if m.bias is not None:
                nn.init.zeros_(m.bias)
