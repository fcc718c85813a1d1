"""Reference definition of the operator, token by token: slow, explicit, never optimised.

Every form is tested against this definition. Each sequence is computed separately: padding is deleted, segments are cut
apart, and one direction is the plain recurrence with an explicit state (Eq. 5, Theorem 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.arguments import expand_decay, no_decay


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    read: Tensor | None = None,
    bonus: Tensor | None = None,
    angles: Tensor | None = None,
    floor: Tensor | None = None,
    direction: str = "both",
    normalize: str = "sum",
    decay_convention: str = "source",
    scale: float | None = None,
    undecayed_erase: bool = False,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Compute `lion.ops.linear_attention` by its definition, in the dtype of the inputs: float64 in, float64 out.

    The shapes are those of `linear_attention`. q and k must be mapped already.
    """
    batch, heads, length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    log_decay = no_decay(q) if log_decay is None else expand_decay(log_decay, q)
    log_decay = torch.where(log_decay > 0, 0.0, log_decay).to(q.dtype).expand(batch, heads, length, dim)
    bonus = q.new_ones(heads, dim) if bonus is None else bonus.reshape(heads, -1).expand(heads, dim)
    delta = any(x is not None for x in (beta, erase, read))
    turned = (q, k) if angles is None else (_turn(q, angles), _turn(k, angles))
    if angles is not None:
        erase, read = (x if x is None else _turn(x, angles) for x in (erase, read))
    undecayed = torch.zeros_like(log_decay), torch.ones_like(bonus)

    rows = []
    for b in range(batch):
        out = [q.new_zeros(heads, v.shape[-1]) for _ in range(length)]
        for tokens in _sequences(b, length, valid, segments):

            def cut(x: Tensor | None, b=b, tokens=tokens) -> Tensor | None:
                return None if x is None else x[b][:, tokens]

            if delta:
                y = _delta(*map(cut, (*turned, v, log_decay, beta, erase, read)), direction, undecayed_erase) * scale
            else:
                numerator = _scan_all(*map(cut, (*turned, v, log_decay)), bonus, direction, decay_convention)
                ones = v.new_ones(*v.shape[:3], 1)
                a, own = undecayed if normalize == "pre" else (log_decay, bonus)
                rowsum = _scan_all(*map(cut, (q, k, ones, a)), own, direction, decay_convention)  # (H, n, 1)
                if normalize in ("sum", "pre"):
                    y = numerator / rowsum.clamp_min(eps)
                elif normalize == "max":
                    least = torch.ones_like(rowsum) if floor is None else cut(floor[..., None])
                    y = scale * numerator / torch.maximum((scale * rowsum).abs(), least)
                else:
                    y = scale * numerator
            for place, token in enumerate(tokens):
                out[token] = y[:, place]
        rows.append(torch.stack(out, 1))
    return torch.stack(rows)


def reference_one_scan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Tensor | None = None,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Compute `lion.ops.one_scan_attention` by its definition, in the dtype of the inputs: float64 in, float64 out.

    The shapes are those of `one_scan_attention`. q must be mapped already.
    """
    rows = []
    for b in range(q.shape[0]):
        out = [v.new_zeros(q.shape[1], v.shape[-1]) for _ in range(q.shape[2])]
        for tokens in _sequences(b, q.shape[2], valid, segments):
            largest = torch.stack([k[b, :, t] for t in tokens]).amax(0).detach()
            weights = {t: (k[b, :, t] - largest).exp() for t in tokens}  # (H, D)
            total = sum(weights.values())
            own = None if angles is None else angles if angles.dim() < 4 else angles[b]
            S = 0
            for t in tokens:
                key = weights[t] / total
                key = key if own is None else _turn(key, own[..., t, :].expand(len(key), -1))
                S = S + key[:, :, None] * v[b, :, t, None, :]  # (H, D, E)
            for t in tokens:
                query = q[b, :, t] if own is None else _turn(q[b, :, t], own[..., t, :].expand(q.shape[1], -1))
                out[t] = torch.einsum("hd,hde->he", query, S)
        rows.append(torch.stack(out, 1))
    return torch.stack(rows)


def _sequences(b: int, length: int, valid: Tensor | None, segments: Tensor | None) -> list[list[int]]:
    """Return the lists of tokens that batch row `b` consists of once padding is deleted."""
    tokens = [t for t in range(length) if valid is None or valid[b, t]]
    if segments is None:
        return [tokens] if tokens else []
    ids = [int(segments[b, t]) for t in tokens]
    return [[t for t, s in zip(tokens, ids) if s == segment] for segment in dict.fromkeys(ids) if segment >= 0]


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply pairs (p, p + D/2), as complex numbers, by `exp(i angle)`."""
    real, imaginary = x.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def _scan_all(q, k, v, log_decay, bonus, direction, decay_convention):
    """Compute the numerator (H, n, E) of one sequence; q, k, log_decay (H, n, D), v (H, n, E), bonus (H, D)."""
    n = q.shape[1]
    lam = log_decay.exp()
    numerator, counted = 0, 0  # `counted`: how often each token's own key is included
    for name, order in (("forward", range(n)), ("backward", range(n - 1, -1, -1))):
        if direction not in (name, "both"):
            continue
        target = decay_convention in ("target", "between") or (decay_convention == "symmetric" and name == "forward")
        before = -1 if name == "forward" else 1  # offset of the previous token, whose lambda `source` takes
        decays = [lam[:, i] if target else lam[:, (i + before) % n] for i in range(n)]
        numerator = numerator + _scan(q, k, v, decays, order, read_first=decay_convention == "between")
        counted += decay_convention != "between"
    own = (q * k * (bonus[:, None] - counted)).sum(-1)
    return numerator + own[..., None] * v


def _scan(q, k, v, decays, order, read_first):
    """Compute `S = lambda S + k v^T` and `y = q S` along `order`; the first decay meets S = 0.

    y is read before S is updated if `read_first`, else after.
    """
    S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    y = {}
    for i in order:
        new = decays[i][:, :, None] * S + k[:, i, :, None] * v[:, i, None, :]
        y[i] = torch.einsum("hd,hde->he", q[:, i], S if read_first else new)
        S = new
    return torch.stack([y[i] for i in range(q.shape[1])], 1)


def _delta(q, k, v, log_decay, beta, erase, read, direction, undecayed_erase):
    """Compute `S = (I - e r^T) Diag(lambda) S + w v^T` and `y = q S`, with `(q . w) v` counted once."""
    w = k if beta is None else beta[..., None] * k
    e, r = w if erase is None else erase, k if read is None else read
    total = 0
    for name, order in (("forward", range(q.shape[1])), ("backward", range(q.shape[1] - 1, -1, -1))):
        if direction not in (name, "both"):
            continue
        S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        y = {}
        for i in order:
            decayed = log_decay[:, i].exp()[:, :, None] * S
            held = torch.einsum("hd,hde->he", r[:, i], S if undecayed_erase else decayed)
            S = decayed - e[:, i, :, None] * held[:, None] + w[:, i, :, None] * v[:, i, None]
            y[i] = torch.einsum("hd,hde->he", q[:, i], S)
        total = total + torch.stack([y[i] for i in range(q.shape[1])], 1)
    return total - (q * w).sum(-1)[..., None] * v if direction == "both" else total
