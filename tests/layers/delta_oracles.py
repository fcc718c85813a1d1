"""Oracles of the delta rules, see `oracles.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .oracle_parts import (
    Read,
    Way,
    Weights,
    apply,
    dot,
    linear,
    memory,
    outer,
    project,
    sigmoid,
    softplus,
    split,
    unit,
    unit_key,
)


def deltanet(w: Weights, x: Tensor, state, way: Way):
    """Compute S = S (I - beta k k^T) + beta v k^T, with S as (E, D) in the paper and (D, E) here."""
    q, k, v = unit_heads(w, x, way.heads)
    beta = sigmoid(linear(w, "decays.0.gate", x, False))[..., None]
    S, _ = memory(state, q, v)
    S = S - outer(beta * k, apply(k, S)) + outer(beta * k, v)
    own = dot(q, beta * k)
    return Read(apply(q, S), own, own, v), (S, None)


def corrected(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, read: Tensor, erase: Tensor, state, undecayed=False):
    """Compute S = alpha S', S = S - erase (S^T read)^T + k v^T, and read y = q S / sqrt(D).

    If `undecayed`, `read` reads S'.
    """
    before = memory(state, q, v)[0]
    S = alpha[..., None] * before
    S = S - outer(erase, apply(read, before if undecayed else S)) + outer(k, v)
    q = q / math.sqrt(q.shape[-1])
    return Read(apply(q, S), dot(q, k), dot(q, k), v), (S, None)


def unit_heads(w: Weights, x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return q and k of norm 1 after SiLU, and v."""
    q, k, v = project(w, x, heads)
    return unit_key(q), unit_key(k), v


def head_decay(w: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute alpha = exp(-exp(A) softplus(W x + dt)) of Gated DeltaNet, (B, H, 1)."""
    w = {name: w[f"decays.0.decay.{name}"] for name in ("step.weight", "step_bias", "a")}
    return torch.exp(-torch.exp(w["a"]) * softplus(linear(w, "step", x, False) + w["step_bias"]))[..., None]


def channel_decay(w: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute alpha = exp(-exp(A) softplus(f(x) + dt)) of KDA, (B, H, D); A is a number per head."""
    f = linear(w, "decays.0.decay.up", linear(w, "decays.0.decay.down", x, False), False)
    dt = softplus(f + w["decays.0.decay.step_bias"])
    return torch.exp(-torch.exp(w["decays.0.decay.a"])[:, None] * split(dt, heads))


def gated_delta(f: Callable[[Weights, Tensor, int], Tensor]):
    """Make the cell S_t = (I - beta k p^T) Diag(alpha_t) S_{t-1} + beta k v^T; `f` returns alpha (B, H, 1 or D).

    p is k. In Comba it is sigmoid(c) k, which reads the state before the decay, and q - d p reads.
    """

    def cell(w: Weights, x: Tensor, state, way: Way):
        q, k, v = unit_heads(w, x, way.heads)
        beta = sigmoid(linear(w, "decays.0.gate", x, False))[..., None]
        p = k
        if "decays.0.c" in w:
            p = sigmoid(w["decays.0.c"])[:, None] * k
            q = q - w["decays.0.d"][:, None] * p
        return corrected(q, beta * k, v, f(w, x, way.heads), p, beta * k, state, undecayed="decays.0.c" in w)

    return cell


def deltaproduct(w: Weights, x: Tensor, state, way: Way):
    """Compute S_0 = alpha S', S_j = (I - beta_j k_j k_j^T) S_{j-1} + beta_j k_j v_j^T for j = 1 .. n, y = q S_n.

    `own` are the same steps from an empty state.
    """
    dim = x.shape[-1]
    n = (len(w["qkv.weight"]) // dim - 1) // 2
    q, k, v = (split(t, way.heads) for t in linear(w, "qkv", x).split((dim, n * dim, n * dim), -1))
    q = unit_key(q) / math.sqrt(q.shape[-1])
    beta = 2 * sigmoid(split(linear(w, "decays.0.gate", x, False), way.heads))
    S = own = torch.zeros_like(outer(q, q))
    S = S if state is None else head_decay(w, x, way.heads)[..., None] * state[0]
    for key, value, b in zip(k.chunk(n, -1), v.chunk(n, -1), beta.split(1, -1)):
        key = unit_key(key)
        S, own = (T - outer(b * key, apply(key, T)) + outer(b * key, value) for T in (S, own))
    one = torch.ones_like(q[..., 0])
    return Read(apply(q, S), one, one, apply(q, own)), (S, None)


def gdn2(w: Weights, x: Tensor, state, way: Way):
    """Compute S = (I - k (b * k)^T) Diag(alpha) S' + k (g * v)^T, with the channel-wise gates b and g."""
    q, k, v = unit_heads(w, x, way.heads)
    b, g = (split(sigmoid(linear(w, f"decays.0.{name}", x, False)), way.heads) for name in ("read", "write"))
    return corrected(q, k, g * v, channel_decay(w, x, way.heads), b * k, k, state)


def rwkv7(w: Weights, x: Tensor, state, way: Way):
    """Compute S_t = S_{t-1} (diag(w_t) - c_t^T (a_t * c_t)) + v_t^T k'_t, y = r S^T, with rows c, k', v."""

    def lora(name: str, x: Tensor, hidden: Callable[[Tensor], Tensor]) -> Tensor:
        up = linear(w, f"decays.0.{name}_up", hidden(linear(w, f"decays.0.{name}_down", x, False)), False)
        return split(sigmoid(w[f"decays.0.{name}"] + up), way.heads)

    r, k, v = project(w, x, way.heads)
    keep = torch.exp(-math.exp(-0.5) * lora("w", x, torch.tanh))
    a = lora("a", x, lambda h: h)
    c = unit(k * split(w["decays.0.k_k"], way.heads))
    k = k * (1 + (a - 1) * split(w["decays.0.k_a"], way.heads))
    S = memory(state, v, k)[0]  # (E, D)
    S = S * keep[..., None, :] - outer((S @ c[..., None])[..., 0], a * c) + outer(v, k)
    return Read((S @ r[..., None])[..., 0], dot(r, k), dot(r, k), v), (S, None)
