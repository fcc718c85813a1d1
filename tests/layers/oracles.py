"""Oracles: every mixer as printed in its paper, token by token in float64, from the weights alone (no code of lion).

A cell takes the weights, a token x (B, dim) and a state, and returns the read-out and the new state. With H heads and
D = dim / H, the state of a head is `S` (D, E), with y = q S, and `z` (D), with the row sum q z. `both` is the sum of a
forward and a backward run, minus the contribution of a token to itself (`own`), which both runs include.

The LION entries use another decay convention with `both`: a decay belongs to the token being left (Eq. 14), so it is
applied `late`, after the read-out. Rotations follow token positions, so a backward run rotates in the opposite
direction (`turn` = -1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lion.layers.mixers import LINEAR

from .delta_oracles import channel_decay, deltanet, deltaproduct, gated_delta, gdn2, head_decay, rwkv7
from .oracle_parts import (
    Read,
    Way,
    Weights,
    apply,
    dot,
    elu1,
    linear,
    memory,
    outer,
    project,
    shifted,
    sigmoid,
    silu,
    softplus,
    split,
)

# Cells: (weights, x (B, dim), state, way) -> Read, state


def decayed(q: Tensor, k: Tensor, v: Tensor, f: Tensor | float, state):
    """Update S = diag(f) S + k v^T, z = f z + k, then read y = q S; f is (B, H, D), (.., 1) or a number."""
    S, z = memory(state, q, v)
    f = torch.as_tensor(f, dtype=q.dtype).expand_as(q)
    S = f[..., None] * S + outer(k, v)
    z = f * z + k
    return Read(apply(q, S), dot(q, z), dot(q, k), v), (S, z)


def lion(f: Callable[[Weights, Tensor, int], Tensor]):
    """Make the cell of LION; `f` returns lambda per head (B or 1, H, 1) or per key dimension (B, H, D)."""

    def cell(w: Weights, x: Tensor, state, way: Way):
        q, k, v = project(w, x, way.heads)
        q = shifted(q)
        k = shifted(k)
        kept = f(w, x, way.heads)
        if not way.late:
            return decayed(q, k, v, kept, state)
        read, (S, z) = decayed(q, k, v, 1.0, state)
        return read, (kept[..., None] * S, kept * z)

    return cell


def undecayed(w: Weights, x: Tensor, heads: int) -> Tensor:
    return x.new_ones(1)


def fixed(w: Weights, x: Tensor, heads: int) -> Tensor:
    return sigmoid(w["decays.0.a"])[:, None]


def selective(w: Weights, x: Tensor, heads: int) -> Tensor:
    return sigmoid(linear(w, "decays.0.gate", x))[..., None]


def selective_vector(w: Weights, x: Tensor, heads: int) -> Tensor:
    return split(sigmoid(linear(w, "decays.0.gate", x)), heads)


def turning(f: Callable[[Weights, Tensor, int], Tensor]):
    """Make the cell of LION with complex states, one for key dimensions p and p + D/2.

    `f` returns the decay of each complex state (B or 1, H, D/2), which rotates by frequency * dt per step. Row sums
    use states without rotation.
    """

    def cell(w: Weights, x: Tensor, state, way: Way):
        q, k, v = project(w, x, way.heads)
        q = shifted(q)
        k = shifted(k)
        kept = f(w, x, way.heads)
        angle = way.turn * split(w["decays.0.frequency"] * torch.exp(w["decays.0.log_dt"]), way.heads)
        qc, kc = (torch.complex(*y.chunk(2, -1)) for y in (q, k))

        def moved(S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return (kept * torch.exp(1j * angle))[..., None] * S, torch.cat([kept, kept], -1) * z

        S, z = (torch.zeros_like(outer(kc, v)), torch.zeros_like(q)) if state is None else state
        if not way.late:
            S, z = moved(S, z)
        S = S + outer(kc.conj(), v)
        z = z + k
        return Read(apply(qc, S).real, dot(q, z), dot(q, k), v), moved(S, z) if way.late else (S, z)

    return cell


def hippo(w: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute the decay exp(B dt) of each pair of key dimensions (4.5)."""
    return split(torch.exp(-torch.exp(w["decays.0.log_rate"]) * torch.exp(w["decays.0.log_dt"])), heads)[None]


def selective_hippo(w: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute the decay exp((B - sigmoid(W x + b)) dt)."""
    fixed = torch.exp(w["decays.0.log_rate"])
    selected = sigmoid(linear(w, "decays.0.gate", x))
    return split(torch.exp(-(fixed + selected) * torch.exp(w["decays.0.log_dt"])), heads)


def linear_transformer(w: Weights, x: Tensor, state, way: Way):
    q, k, v = project(w, x, way.heads)
    return decayed(elu1(q), elu1(k), v, 1.0, state)


def performer(w: Weights, x: Tensor, state, way: Way):
    """Run linear attention with phi(x) = exp(w x' - |x'|^2 / 2) / sqrt(m) for x' = x / D^(1/4), without stabilisers."""
    q, k, v = project(w, x, way.heads)
    features = w["random_features"]

    def phi(t: Tensor) -> Tensor:
        t = t / t.shape[-1] ** 0.25
        return torch.exp(t @ features.T - (t * t).sum(-1, keepdim=True) / 2) / math.sqrt(len(features))

    return decayed(phi(q), phi(k), v, 1.0, state)


def retnet(w: Weights, x: Tensor, state, way: Way):
    """Compute S = gamma e^(i theta) S + conj(k) v^T, y = Re(q S) / sqrt(D); dimensions p and p + D/2 are one number."""
    q, k, v = project(w, x, way.heads)
    D = q.shape[-1]
    q, k = (torch.complex(t[..., : D // 2], t[..., D // 2 :]) for t in (q, k))
    rows = []
    for h in range(way.heads):
        theta = [way.turn * 10000.0 ** (-2 * p / D) for p in range(D // 2)]
        rows.append([(1 - 2.0 ** (-5 - h)) * complex(math.cos(t), math.sin(t)) for t in theta])
    A = torch.tensor(rows, dtype=q.dtype)  # (H, D/2)
    S, _ = memory(state, q, v)
    S = A[..., None] * S + outer(k.conj(), v)
    own = dot(q, k.conj()).real / math.sqrt(D)
    return Read(apply(q, S).real / math.sqrt(D), own, own, v), (S, None)


def gated_rfa(w: Weights, x: Tensor, state, way: Way):
    q, k, v = project(w, x, way.heads)
    g = sigmoid(linear(w, "decays.0.gate", x))[..., None]
    return decayed(elu1(q), (1 - g) * elu1(k), v, g, state)


def mamba(w: Weights, x: Tensor, state, way: Way):
    """Run Mamba, with a number A for each state dimension, or Mamba-2, with one A per head and SiLU on q and k."""
    q, k, v = project(w, x, way.heads)
    if w["decays.0.a"].numel() == way.heads:
        q = silu(q)
        k = silu(k)
    dt = softplus(linear(w, "decays.0.step", x, False) + w["decays.0.step_bias"])[..., None]
    A = -torch.exp(split(w["decays.0.a"], way.heads))  # (H, D or 1)
    return decayed(q, dt * k, v, torch.exp(dt * A), state)


def rwkv6(w: Weights, x: Tensor, state, way: Way):
    """Run RWKV-6, with the read-out before the update."""
    q, k, v = project(w, x, way.heads)
    d = w["decays.0.w"] + linear(w, "decays.0.up", torch.tanh(linear(w, "decays.0.down", x, False)), False)
    f = torch.exp(-torch.exp(split(d, way.heads)))
    u = split(w["decays.0.u"], way.heads)
    S, _ = memory(state, q, v)
    own = dot(q, u * k)
    read = Read(apply(q, S + outer(u * k, v)), own, own, v)
    return read, (f[..., None] * S + outer(k, v), None)


def gla(w: Weights, x: Tensor, state, way: Way):
    q, k, v = project(w, x, way.heads)
    alpha = sigmoid(linear(w, "decays.0.up", linear(w, "decays.0.down", x, False))) ** (1 / 16)
    return decayed(q / math.sqrt(q.shape[-1]), k, v, split(alpha, way.heads), state)


def hgrn2(w: Weights, x: Tensor, state, way: Way):
    q, logits, v = project(w, x, way.heads)
    bound = split(sigmoid(w["decays.0.bound"]), way.heads)
    f = bound + (1 - bound) * sigmoid(logits)
    return decayed(silu(q), 1 - f, v, f, state)


def mlstm(w: Weights, x: Tensor, state, way: Way, input_gate=sigmoid):
    """Run the mLSTM without its stabiliser m, which changes no value: h = C q / max(|n q|, 1)."""
    q, k, v = project(w, x, way.heads)
    i, f = linear(w, "decays.0.gates", x, False).chunk(2, -1)
    i = input_gate(i + w["decays.0.input_bias"])[..., None]
    f = sigmoid(f + w["decays.0.forget_bias"])[..., None]
    return decayed(q, i * k / math.sqrt(k.shape[-1]), v, f, state)


def lightnet(w: Weights, x: Tensor, state, way: Way):
    """Compute Eq. 5: s_t = s_{t-1} + exp(k_t), key exp(k_t) / s_t, KV_t = diag(1 - key) KV_{t-1} + key v_t^T."""
    q, k, v = project(w, x, way.heads)
    logits = k
    if "decays.0.gate.0.weight" in w:
        logits = split(linear(w, "decays.0.gate.1", linear(w, "decays.0.gate.0", x, False), False), way.heads)
    s, of_decay, S = (torch.zeros_like(k), torch.zeros_like(k), memory(None, q, v)[0]) if state is None else state
    s = s + torch.exp(k)
    of_decay = of_decay + torch.exp(logits)
    key = torch.exp(k) / s
    kept = 1 - torch.exp(logits) / of_decay
    S = kept[..., None] * S + outer(key, v)
    own = dot(silu(q), key)
    return Read(apply(silu(q), S), own, own, v), (s, of_decay, S)


def lightnet_both(w: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute Eq. 6 and 7 before the norm: silu(Q) (softmax of K over the sequence)^T V, (B, L, H, E)."""
    q, k, v = (torch.stack(parts, 1) for parts in zip(*(project(w, x[:, t], heads) for t in range(x.shape[1]))))
    weights = torch.exp(k) / torch.exp(k).sum(1, keepdim=True)
    return apply(silu(q), sum(outer(weights[:, t], v[:, t]) for t in range(x.shape[1]))[:, None])


def plain(numerator: Tensor, rowsum: Tensor) -> Tensor:
    return numerator


def ratio(numerator: Tensor, rowsum: Tensor) -> Tensor:
    return numerator / rowsum


def bounded(numerator: Tensor, rowsum: Tensor) -> Tensor:
    return numerator / torch.where(rowsum.abs() > 1, rowsum.abs(), torch.ones_like(rowsum))


ORACLES = {
    "lion_lit": (lion(undecayed), ratio),
    "lion_d": (lion(fixed), ratio),
    "lion_s": (lion(selective), ratio),
    "lion_s_vector": (lion(selective_vector), ratio),
    "lion_d_hippo": (turning(hippo), ratio),
    "lion_s_hippo": (turning(selective_hippo), ratio),
    "linear_transformer": (linear_transformer, ratio),
    "performer": (performer, ratio),
    "retnet": (retnet, plain),
    "gated_rfa": (gated_rfa, ratio),
    "mamba2": (mamba, plain),
    "mamba": (mamba, plain),
    "rwkv6": (rwkv6, plain),
    "gla": (gla, plain),
    "hgrn2": (hgrn2, plain),
    "xlstm": (mlstm, bounded),
    "xlstm, exponential": (partial(mlstm, input_gate=torch.exp), bounded),
    "lightnet": (lightnet, plain),
    "deltanet": (deltanet, plain),
    "gated_deltanet": (gated_delta(head_decay), plain),
    "kda": (gated_delta(channel_decay), plain),
    "comba": (gated_delta(head_decay), plain),
    "deltaproduct": (deltaproduct, plain),
    "gdn2": (gdn2, plain),
    "rwkv7": (rwkv7, plain),
}


def scan(name: str, w: Weights, x: Tensor, way: Way) -> Read:
    """Run a cell over x (B, L, dim); return all read-outs (B, L, ..)."""
    if name not in ORACLES:
        raise LookupError(f"no oracle of {name!r}: write it from the paper, not from the code, and add it to ORACLES")
    state = None
    reads = []
    for t in range(x.shape[1]):
        read, state = ORACLES[name][0](w, x[:, t], state, way)
        reads.append(read)
    return Read(*(torch.stack(parts, 1) for parts in zip(*reads)))


def oracle(name: str, w: Weights, x: Tensor, heads: int, direction: str = "forward") -> Tensor:
    """Compute the output (B, L, dim) of a layer for x (B, L, dim)."""
    if name == "lightnet" and direction == "both":
        return behind_heads(w, x, lightnet_both(w, x, heads).flatten(2))
    late = direction == "both" and LINEAR[name.partition(",")[0]].decay_convention == "source"
    if direction != "backward":
        read = scan(name, w, x, Way(heads, late))
    if direction != "forward":
        back = scan(name, w, x.flip(1), Way(heads, late, -1)).flip()
    if direction == "backward":
        read = back
    elif direction == "both":
        own = read.own[..., None]
        read = read._replace(
            numerator=read.numerator + back.numerator - own * read.v, rowsum=read.rowsum + back.rowsum - read.own
        )
    y = ORACLES[name][1](read.numerator, read.rowsum[..., None])
    return behind_heads(w, x, y.flatten(2))


def behind_heads(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    """Apply RMSNorm over the whole width and the gate, if there are any, and the projection."""
    if "out_norm.weight" in w:
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * w["out_norm.weight"]
    if "out_gate.0.weight" in w:
        y = y * sigmoid(linear(w, "out_gate.1", linear(w, "out_gate.0", x, False), False))
    return linear(w, "proj", y)
