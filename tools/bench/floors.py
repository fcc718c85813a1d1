"""The least time that a form can take here: its matrix products, and its inputs and outputs moved.

Counted are the products that the algorithm cannot do without, none of them twice; masks, gates, row sums and
softmax are not. So nothing is faster than its floor, and a target below the floor of its form is out of reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tools.bench.probe import best


class Size(NamedTuple):
    """A batch: B, H, L, D (values are as wide as keys), C tokens a chunk, and how often the tokens are gone through."""

    batch: int
    heads: int
    length: int
    dim: int
    chunk: int = 1
    directions: int = 2
    scans: int = 1

    def pairs(self, tokens: int) -> int:
        """FLOPs of one product of every token with `tokens` others, 2 B H L T D."""
        return 2 * self.batch * self.heads * self.length * tokens * self.dim

    def states(self) -> int:
        """FLOPs of one product of every token with a (D, D) state, 2 B H L D D."""
        return self.pairs(self.dim)


def published_flops(length: int, dim: int) -> tuple[int, int]:
    """FLOPs of one attention layer with one head of width D on L tokens in inference, as the paper counts them (C.12):
    `L (6 D^2 + 4 L D + 2 L)` with softmax, and `L (16 D^2 + 24 D + 7)` as a bidirectional RNN.

    The terms of the second add up to 8 in the place of 7.
    """
    return length * (6 * dim**2 + 4 * length * dim + 2 * length), length * (16 * dim**2 + 24 * dim + 7)


def sdpa(n: Size, kind: str) -> int:
    """Q K^T, and its softmax times V."""
    return 2 * n.pairs(n.length)


def full(n: Size, kind: str) -> int:
    """Q K^T and (Q K^T * M) V, of several scans with the mean of their masks; without decay K^T V and Q (K^T V)."""
    if kind == "delta":
        return delta(n, n.length, n.dim)
    return 2 * n.states() if kind in ("plain", "one_scan") else 2 * n.pairs(n.length)


def chunk(n: Size, kind: str) -> int:
    """Both products inside chunks; in each direction K^T V and Q S, and a state a chunk carried on. One scan is the
    product."""
    if kind == "one_scan":
        return full(n, kind)
    size = min(n.chunk, n.length)
    count = -(-n.length // size)
    if kind == "delta":
        between = 6 * n.states() if count > 1 else 0  # W S, Q S, K^T N, each in both directions
        return delta(n, size, 2 * n.dim if count > 1 else n.dim) + between
    between = n.directions * (2 * n.states() + 2 * n.batch * n.heads * count * n.dim**2) if count > 1 else 0
    return n.scans * (2 * n.pairs(size) + between)


def delta(n: Size, tokens: int, solved: int) -> int:
    """Of a chunk in both directions: K K^T (symmetric: half), Q K^T (a triangle each: one), a triangular solve for
    `solved` columns (half a product of D each), and the scores times the new values (a triangle each: one)."""
    one = n.pairs(tokens)
    return one // 2 + one + one * solved // n.dim + one


def blockwise(n: Size, kind: str) -> int:
    """As full, whatever the block."""
    return 2 * n.pairs(n.length)


FORWARD = {"sdpa": sdpa, "full": full, "chunk": chunk, "rnn": chunk, "blockwise": blockwise}


def flops(form: str, kind: str, which: str, n: Size) -> int:
    """Of a form for mixers of a kind, "plain", "decay" or "delta"; the backward pass has two products for each one."""
    return FORWARD[form](n, kind) * (3 if which == "both" else 1)


def traffic(inputs: Iterable[Tensor], out: Tensor, which: str) -> int:
    """Bytes of inputs and output, each moved once; backward also those of their gradients."""
    moved = [*inputs, out]
    if which == "both":
        moved += [t for t in moved[:-1] if t.requires_grad] + [out]
    return sum(t.nbytes for t in moved)


def floor(work: int, moved: int, rates: dict[str, float]) -> dict[str, float]:
    """Milliseconds that the arithmetic and the bytes take at the machine's rates; the larger one is the floor."""
    arithmetic, memory = 1e3 * work / rates["flops"], 1e3 * moved / rates["bytes"]
    return {"arithmetic_ms": arithmetic, "bytes_ms": memory, "floor_ms": max(arithmetic, memory)}


def measure_rates(device: torch.device, dtype: torch.dtype, heads: int, dim: int) -> dict[str, float]:
    """What this machine does: FLOP/s of its fastest large product, two of attention's shape and a square one, and
    bytes/s of a large copy (read and written)."""
    cuda = device.type == "cuda"
    batch, length, side = (64, 2048, 8192) if cuda else (4, 1024, 1024)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def product(a: Tensor, b: Tensor) -> float:
        return 2 * a.shape[:-1].numel() * a.shape[-1] * b.shape[-1] / best(lambda: a @ b, device)

    rows = random(batch * heads, length, dim)
    rate = max(product(rows, rows.mT.contiguous()), product(random(batch * heads, length, length), rows))
    rate = max(rate, product(random(side, side), random(side, side)))
    source = torch.ones(2**28 if cuda else 2**26, device=device)  # far more than a cache holds
    target = torch.empty_like(source)
    return {"flops": rate, "bytes": 2 * source.nbytes / best(lambda: target.copy_(source), device)}
