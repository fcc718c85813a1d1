"""Estimates of the least time on a GPU, computed from bytes, products and launches; nothing is timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch

from tools.gpu.targets import FUSED_SHARE, GAP, LAUNCH, Target


@dataclass(frozen=True)
class Cost:
    """Counts of the work on a GPU.

    Attributes:
        kernels: Number of different Triton kernels.
        launches: Launches of Triton kernels, or of eager operators without products.
        library: Library calls of matrix products.
        fallbacks: Calls of other eager operators from compiled code.
        moved: Bytes read and written.
        flops: FLOPs of products.
    """

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
        """Return the least time in seconds.

        This is the time of the bytes or the time of the products, whichever is longer, plus the gaps between kernels.
        Without CUDA graphs, it is at least the time that the CPU needs to launch all calls.
        """
        work = max(self.moved / target.bandwidth, self.flops / target.rate(dtype)) + self.calls * GAP
        if graphs:
            return work
        return max(work, self.calls * LAUNCH)


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def fused_softmax(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, Cost]:
    """Return the cost of softmax attention (FlashAttention, not causal) of q, k, v (B, H, L, D), by stage.

    The forward pass reads q, k, v; it writes the output and one float32 number per token. The backward pass first reads
    the output and its gradient, and writes another number per token; then it reads q, k, v, the gradient and both
    numbers, and writes three gradients. There are 2 products forward and 5 backward.
    """
    batch, heads, length, dim = shape
    tokens = batch * heads * length
    tensor, number, product = tokens * dim * dtype.itemsize, 4 * tokens, 2 * tokens * length * dim
    return {
        "forward": Cost(1, 1, 0, 0, 4 * tensor + number, 2 * product),
        "backward": Cost(2, 2, 0, 0, 9 * tensor + 3 * number, 5 * product),
    }


def fused_seconds(cost: Cost, target: Target, dtype: torch.dtype, graphs: bool = True) -> float:
    """Return `Cost.seconds` of a fused kernel, whose products reach `FUSED_SHARE` of the tensor cores' rate."""
    return replace(cost, flops=round(cost.flops / FUSED_SHARE)).seconds(target, dtype, graphs)
