"""Norms by name: modules (x, layout) -> x of tokens x (B, L, dim). A new one is one class and its line in `NORMS`."""

from __future__ import annotations

from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x)


class NoNorm(nn.Module):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return x


NORMS: dict[str, type[nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
NO_NORM = "none"
