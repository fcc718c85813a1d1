"""The block of BERT, whose norms stand behind the residuals."""

from __future__ import annotations

from torch import Tensor

from lion.layers.block import Block


class PostNorm(Block):
    """`norm(x + mixer(x))`, `norm(x + mlp(x))`."""

    final_norm = False

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.norm1(x + self.drop_path(self.dropout(mixed)))
        return self.norm2(x + self.drop_path(self.dropout(self.mlp(x))))
