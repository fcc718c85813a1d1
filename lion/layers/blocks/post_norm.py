"""The block of BERT, whose norms follow the residual connections."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lion.layers.blocks.base import Block
from lion.layers.layout import Layout


class PostNorm(Block):
    """The post-norm block: `norm(x + mixer(x))`, then `norm(x + mlp(x))`, if there is an MLP."""

    final_norm = False

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        return x

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        x = self.norm1(x + self.drop_path(self.dropout(mixed, layout)), layout)
        if self.mlp is None or self.norm2 is None:
            return x
        return self.norm2(x + self.drop_path(self.dropout(self.mlp(x), layout)), layout)
