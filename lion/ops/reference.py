"""The definition, token by token: slow, explicit, never optimised; every form is judged against it.

Each sequence is taken alone: padding is deleted, segments are cut apart, and one direction is the plain
recurrence with an explicit state (Eq. 5, Theorem 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    direction: str = "both",
    normalize: str = "sum",
    gate: str = "source",
    scale: float | None = None,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`lion.ops.linear_attention` by its definition, in the dtype given: float64 in, float64 out.

    Shapes as there: q, k (B, H, L, D), v (B, H, L, E), log_decay None, (H,), (B, H, L), (H, D) or (B, H, L, D).
    """
    batch, heads, length, dim = q.shape
    if scale is None:
        scale = dim**-0.5
    if log_decay is None:
        log_decay = q.new_zeros(heads)
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None, None].expand(batch, heads, length, dim)
    elif log_decay.dim() == 2:
        log_decay = log_decay[:, None].expand(batch, heads, length, dim)
    elif log_decay.dim() == 3:
        log_decay = log_decay[..., None].expand(batch, heads, length, dim)  # one lambda for all key dimensions

    rows = []
    for b in range(batch):
        out = [q.new_zeros(heads, v.shape[-1]) for _ in range(length)]
        for tokens in _sequences(b, length, valid, segments):
            numerator, rowsum = _one_sequence(
                q[b][:, tokens], k[b][:, tokens], v[b][:, tokens], log_decay[b][:, tokens], direction, gate
            )
            y = numerator * scale if normalize == "none" else numerator / rowsum.clamp_min(eps)[..., None]
            for place, token in enumerate(tokens):
                out[token] = y[:, place]
        rows.append(torch.stack(out, 1))
    return torch.stack(rows)


def _sequences(b: int, length: int, valid: Tensor | None, segments: Tensor | None) -> list[list[int]]:
    """The token lists that batch row `b` consists of once padding is deleted."""
    tokens = [t for t in range(length) if valid is None or valid[b, t]]
    if segments is None:
        return [tokens] if tokens else []
    ids = [int(segments[b, t]) for t in tokens]
    return [[t for t, s in zip(tokens, ids) if s == segment] for segment in dict.fromkeys(ids) if segment >= 0]


def _one_sequence(q, k, v, log_decay, direction, gate):
    """Numerator (H, n, E) and row sum (H, n) of one sequence; q, k (H, n, D), v (H, n, E), log_decay (H, n, D)."""
    n = q.shape[1]
    lam = log_decay.exp()
    forward_target = gate in ("target", "symmetric")
    backward_target = gate == "target"
    numerator, rowsum = 0, 0
    if direction != "backward":
        # lambda_i of the token that receives, or lambda_{i-1} of the token being left
        decays = [lam[:, i] if forward_target else lam[:, i - 1] for i in range(n)]
        y, c = _scan(q, k, v, decays, range(n))
        numerator, rowsum = numerator + y, rowsum + c
    if direction != "forward":
        decays = [lam[:, i] if backward_target else lam[:, (i + 1) % n] for i in range(n)]
        y, c = _scan(q, k, v, decays, range(n - 1, -1, -1))
        numerator, rowsum = numerator + y, rowsum + c
    if direction == "both":  # each direction counted the diagonal in full: take half of it off each
        own = (q * k).sum(-1)
        numerator, rowsum = numerator - own[..., None] * v, rowsum - own
    return numerator, rowsum


def _scan(q, k, v, decays, order):
    """`S = lambda S + k v^T`, `z = lambda z + k`, `y = q S`, `c = q z` along `order` (the first decay meets S = 0)."""
    S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    z = q.new_zeros(q.shape[0], q.shape[2])
    y, c = {}, {}
    for i in order:
        S = decays[i][:, :, None] * S + k[:, i, :, None] * v[:, i, None, :]
        z = decays[i] * z + k[:, i]
        y[i] = torch.einsum("hd,hde->he", q[:, i], S)
        c[i] = (q[:, i] * z).sum(-1)
    n = q.shape[1]
    return torch.stack([y[i] for i in range(n)], 1), torch.stack([c[i] for i in range(n)], 1)
