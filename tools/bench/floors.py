"""Lower bounds on the run time of a form on this machine, from its matrix products and its memory traffic.

Only matrix products that the algorithm needs are counted, each of them once. Masks, gates, row sums and softmax are not
counted. No implementation of a form can therefore be faster than the lower bound (the floor) of that form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tools.probe import best


class Size(NamedTuple):
    """Size of a batch: B, H, L, D (values have the width of keys), tokens per chunk, directions and number of scans."""

    batch: int
    heads: int
    length: int
    dim: int
    chunk: int = 1
    directions: int = 2
    scans: int = 1

    def pairs(self, tokens: int) -> int:
        """Return the FLOPs of one product of every token with T = `tokens` other tokens, 2 B H L T D."""
        return 2 * self.batch * self.heads * self.length * tokens * self.dim

    def states(self) -> int:
        """Return the FLOPs of one product of every token with a (D, D) state, 2 B H L D D."""
        return self.pairs(self.dim)


def published_flops(length: int, dim: int) -> tuple[int, int]:
    """Return the FLOPs of one attention layer in inference by the paper's formulas (C.12).

    The layer has one head of width D and runs on L tokens. The formulas are `L (6 D^2 + 4 L D + 2 L)` with softmax, and
    `L (16 D^2 + 24 D + 7)` as a bidirectional RNN. The terms that the paper lists for the RNN add up to 8 instead of 7.
    """
    return length * (6 * dim**2 + 4 * length * dim + 2 * length), length * (16 * dim**2 + 24 * dim + 7)


def sdpa(n: Size, kind: str) -> int:
    """Return the FLOPs of SDPA: Q K^T, and its softmax times V."""
    return 2 * n.pairs(n.length)


def full(n: Size, kind: str) -> int:
    """Return the FLOPs of the full form.

    With decay, the products are Q K^T and (Q K^T * M) V; several scans share them, with the mean of their masks.
    Without decay, the products are K^T V and Q (K^T V).
    """
    if kind == "delta":
        return delta(n, n.length, n.dim)
    if kind in ("plain", "one_scan"):
        return 2 * n.states()
    return 2 * n.pairs(n.length)


def chunk(n: Size, kind: str) -> int:
    """Return the FLOPs of the chunk form.

    The products are Q K^T and its product with V inside chunks. Between chunks, each direction needs K^T V and Q S, and
    the update of one state per chunk. Kind "one_scan" has no chunks: its FLOPs are those of the full form.
    """
    if kind == "one_scan":
        return full(n, kind)
    size = min(n.chunk, n.length)
    count = -(-n.length // size)
    if kind == "delta":
        if count == 1:
            return delta(n, size, n.dim)
        return delta(n, size, 2 * n.dim) + 6 * n.states()  # W S, Q S and K^T N, each in both directions
    between = 0
    if count > 1:
        between = n.directions * (2 * n.states() + 2 * n.batch * n.heads * count * n.dim**2)
    return n.scans * (2 * n.pairs(size) + between)


def delta(n: Size, tokens: int, solved: int) -> int:
    """Return the FLOPs of the delta rule inside chunks of `tokens` tokens, in both directions.

    With the FLOPs of one full product Q K^T as the unit, the terms are:

    - K K^T: 1/2, because the matrix is symmetric.
    - Q K^T: 1, a triangle in each direction.
    - Triangular solves for `solved` columns: `solved` / D, half of it in each direction.
    - Scores times new values: 1, a triangle in each direction.
    """
    one = n.pairs(tokens)
    return one // 2 + one + one * solved // n.dim + one


FORWARD = {"sdpa": sdpa, "full": full, "chunk": chunk, "rnn": chunk}


def flops(form: str, kind: str, which: str, n: Size) -> int:
    """Return the FLOPs of a form for mixers of a kind: "plain", "one_scan", "decay" or "delta".

    The backward pass has two products for each product of the forward pass.
    """
    forward = FORWARD[form](n, kind)
    if which == "both":
        return 3 * forward
    return forward


def traffic(inputs: Iterable[Tensor], out: Tensor, which: str) -> int:
    """Return the bytes of inputs and output, each moved once; the backward pass adds the bytes of their gradients."""
    moved = [*inputs, out]
    if which == "both":
        moved += [t for t in moved[:-1] if t.requires_grad] + [out]
    return sum(t.nbytes for t in moved)


def floor(work: int, moved: int, rates: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of the arithmetic and of the memory traffic at the machine's rates, and their maximum."""
    arithmetic, memory = 1e3 * work / rates["flops"], 1e3 * moved / rates["bytes"]
    return {"arithmetic_ms": arithmetic, "bytes_ms": memory, "floor_ms": max(arithmetic, memory)}


def measure_rates(device: torch.device, dtype: torch.dtype, heads: int, dim: int) -> dict[str, float]:
    """Measure the rates of this machine.

    Returns:
        `flops`: FLOP/s of the fastest of three large matrix products (two with attention's shapes, one square).
        `bytes`: bytes/s of a large copy, counting both the read and the written bytes.
    """
    batch, length, side, copied = 4, 1024, 1024, 2**26
    if device.type == "cuda":
        batch, length, side, copied = 64, 2048, 8192, 2**28

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def product(a: Tensor, b: Tensor) -> float:
        return 2 * a.shape[:-1].numel() * a.shape[-1] * b.shape[-1] / best(lambda: a @ b, device)

    rows = random(batch * heads, length, dim)
    rate = max(product(rows, rows.mT.contiguous()), product(random(batch * heads, length, length), rows))
    rate = max(rate, product(random(side, side), random(side, side)))
    source = torch.ones(copied, device=device)  # far larger than any cache
    target = torch.empty_like(source)
    return {"flops": rate, "bytes": 2 * source.nbytes / best(lambda: target.copy_(source), device)}
