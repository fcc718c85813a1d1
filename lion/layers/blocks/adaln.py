"""The block of DiT (2212.09748): the conditioning vector of the model shifts and scales the norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lion.layers.blocks.base import Block
from lion.layers.layout import Layout
from lion.layers.norms import NORMS

PLAIN = ("layernorm", "rmsnorm")  # norms that also exist without learned weights


class Modulation(nn.Linear):
    """A linear map from a context (B, dim) to `count` vectors (B, 1, dim) per sample, all of which start at 0."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim, count * dim)
        self.count = count
        self.start()

    def start(self) -> None:
        """Reset weights and biases to 0, after an initialisation of all linear layers."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def vectors(self, context: Tensor) -> tuple[Tensor, ...]:
        """Return the vectors (B, 1, dim) of a context (B, dim)."""
        return self(context)[:, None].chunk(self.count, -1)


def plain_norm(norm: str, dim: int, eps: float) -> nn.Module:
    """Return a norm without learned weights, because scale and shift come from the context.

    Raises:
        ValueError: The norm exists only with learned weights.
    """
    if norm not in PLAIN:
        raise ValueError(f"norm: {norm!r} always has learned weights, block 'adaln_zero' takes {' or '.join(PLAIN)}")
    return NORMS[norm](dim, eps=eps, elementwise_affine=False)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class AdaLNZero(Block):
    """The block `x + g1 mixer(m1(norm(x)))`, `x + g2 mlp(m2(norm(x)))` with `m(x) = x (1 + scale) + shift`.

    Gates g, scales and shifts are linear in the `context` (B, dim). They start at 0, so the block starts as the
    identity. The second part needs an MLP.
    """

    final_norm = False  # the model adds a final norm, which is modulated, too
    conditional = True

    def __init__(
        self, dim: int, num_heads: int, *, norm: str = "layernorm", norm_eps: float = 1e-6, **settings: Any
    ) -> None:
        super().__init__(dim, num_heads, norm=norm, norm_eps=norm_eps, **settings)
        self.norm1 = plain_norm(norm, dim, norm_eps)
        if self.mlp is not None:
            self.norm2 = plain_norm(norm, dim, norm_eps)
        self.before_mixer, self.after_mixer = Modulation(dim, 2), Modulation(dim, 1 if self.mlp is None else 4)

    def before(self, x: Tensor, layout: Layout, context: Tensor) -> Tensor:
        return modulated(self.norm1(x, layout), *self.before_mixer.vectors(context))

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Tensor) -> Tensor:
        first, *modulation = self.after_mixer.vectors(context)
        x = x + first * self.drop_path(self.dropout(mixed, layout))
        if self.mlp is None or self.norm2 is None:
            return x
        shift, scale, second = modulation
        y = self.mlp(modulated(self.norm2(x, layout), shift, scale))
        return x + second * self.drop_path(self.dropout(y, layout))
