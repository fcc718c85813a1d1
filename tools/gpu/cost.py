"""Bytes, products, launches, and the least time that they take on a GPU: estimates by arithmetic, nothing is timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch

from tools.gpu.targets import FUSED_SHARE, GAP, LAUNCH, Target


@dataclass(frozen=True)
class Cost:
    """Triton `kernels`, `launches` of them, `library` calls of products, `fallbacks` to other eager operators, bytes
    `moved`, and `flops` of products."""

    kernels: int = 0
    launches: int = 0
    library: int = 0
    fallbacks: int = 0
    moved: int = 0
    flops: int = 0

    @property
    def calls(self) -> int:
        return self.launches + self.library + self.fallbacks

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(a * times for a in astuple(self)))

    def seconds(self, target: Target, dtype: torch.dtype, graphs: bool = True) -> float:
        """The least time: that of the bytes or of the products, whichever is longer, and the gaps between kernels;
        without CUDA graphs no less than the CPU takes to launch them."""
        work = max(self.moved / target.bandwidth, self.flops / target.rate(dtype)) + self.calls * GAP
        return work if graphs else max(work, self.calls * LAUNCH)


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def fused_softmax(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Cost]:
    """Softmax attention of q, k, v (B, H, L, D) by FlashAttention, in both directions, by stage.

    Forward reads q, k, v and writes the output and a float32 number a token; backward reads these and the output's
    gradient, and writes three gradients and another number a token. Products: 2 forward, 5 backward.
    """
    batch, heads, length, dim = shape
    tokens = batch * heads * length
    tensor, number, product = tokens * dim * dtype.itemsize, 4 * tokens, 2 * tokens * length * dim
    return {
        "forward": Cost(1, 1, 0, 0, 4 * tensor + number, 2 * product),
        "backward": Cost(2, 2, 0, 0, 10 * tensor + 4 * number, 5 * product),
    }


def fused_seconds(cost: Cost, target: Target, dtype: torch.dtype, graphs: bool = True) -> float:
    """`Cost.seconds` of a fused kernel, whose products reach a share of the tensor cores' rate."""
    return replace(cost, flops=round(cost.flops / FUSED_SHARE)).seconds(target, dtype, graphs)
