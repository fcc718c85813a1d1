"""Functions that the oracles share, and the state and read-out of a cell."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]


class Way(NamedTuple):
    heads: int
    late: bool = False
    turn: int = 1


class Read(NamedTuple):
    """A read-out: numerator (B, H, E), row sum (B, H), and the weight `own` (B, H) of the token's value v (B, H, E)."""

    numerator: Tensor
    rowsum: Tensor
    own: Tensor
    v: Tensor

    def flip(self) -> Read:
        return Read(*(x.flip(1) for x in self))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(x))


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def unit_key(x: Tensor) -> Tensor:
    """Return silu(x) of norm 1; 1e-6 under the root is that of flash-linear-attention and transformers."""
    y = silu(x)
    return y / ((y * y).sum(-1, keepdim=True) + 1e-6).sqrt()


def shifted(x: Tensor) -> Tensor:
    """Apply the feature map of LION, section 3.2."""
    return unit(silu(x) + 0.5)


def linear(w: Weights, name: str, x: Tensor, bias: bool = True) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if bias else y


def split(x: Tensor, heads: int) -> Tensor:
    """Split the heads: (.., H D) -> (.., H, D)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def project(w: Weights, x: Tensor, heads: int) -> list[Tensor]:
    return [split(y, heads) for y in linear(w, "qkv", x).chunk(3, -1)]


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def apply(q: Tensor, S: Tensor) -> Tensor:
    return (q[..., :, None] * S).sum(-2)


def memory(state, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.zeros_like(outer(q, v)), torch.zeros_like(q)) if state is None else state
