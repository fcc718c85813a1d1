"""Position embeddings by name: modules from positions (B, L) below `count` to embeddings (B, L, dim).

A new kind is one class and its line in `POSITIONS`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lion.ops.dtypes import wide_dtype

BASE = 10_000  # the longest wavelength, divided by 2 pi


class ScaledSinusoidal(nn.Module):
    """Sines and cosines of fixed frequencies (1706.03762), times one learned factor (FLASH, 2202.10447).

    The factor starts at 1/sqrt(dim), so that position embeddings start as small as token embeddings.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.dim = count, dim
        self.scale = nn.Parameter(torch.full((1,), dim**-0.5))

    def forward(self, positions: Tensor) -> Tensor:
        """Map positions (B, L) to (B, L, dim), with sine and cosine of a frequency side by side."""
        wide = wide_dtype(self.scale)  # bfloat16 would round positions above 256
        even = torch.arange(0, self.dim, 2, device=positions.device, dtype=wide)
        angle = positions[..., None] * BASE ** (-even / self.dim)  # (B, L, dim / 2), rounded up
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)
        return self.scale * waves[..., : self.dim].to(self.scale.dtype)


POSITIONS: dict[str, type[nn.Embedding | ScaledSinusoidal]] = {
    "learned": nn.Embedding,
    "scaled_sinusoidal": ScaledSinusoidal,
}
