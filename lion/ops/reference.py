"""Reference definition of the operator, token by token: slow, explicit, never optimised.

Every form is tested against this definition. Each sequence is computed separately: padding is deleted, segments are cut
apart, and one direction is the plain recurrence with an explicit state (Eq. 5, Theorem 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.arguments import expand_decay


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
    if scale is None:
        scale = dim**-0.5
    expanded = expand_decay(log_decay, q)
    decays = q.new_zeros(q.shape)
    if expanded is not None:
        decays = torch.where(expanded > 0, 0.0, expanded).to(q.dtype).expand(batch, heads, length, dim)
    own = q.new_ones(heads, dim)
    if bonus is not None:
        own = bonus.reshape(heads, -1).expand(heads, dim)
    turned_q, turned_k = turn(q, angles), turn(k, angles)
    if erase is not None:
        erase = turn(erase, angles)
    if read is not None:
        read = turn(read, angles)
    delta = beta is not None or erase is not None or read is not None
    ones = v.new_ones(batch, heads, length, 1)

    y = q.new_zeros(batch, heads, length, v.shape[-1])
    for b in range(batch):
        for tokens in sequences(b, length, valid, segments):

            def cut(x: Tensor, b=b, tokens=tokens) -> Tensor:
                return x[b][:, tokens]

            a = cut(decays)
            if delta:
                w = cut(turned_k)
                if beta is not None:
                    w = cut(beta)[..., None] * w
                e = w if erase is None else cut(erase)
                r = cut(turned_k) if read is None else cut(read)
                out = scale * delta_rule(cut(turned_q), cut(v), a, w, e, r, direction, undecayed_erase)
            else:
                numerator = scan_all(cut(turned_q), cut(turned_k), cut(v), a, own, direction, decay_convention)
                if normalize == "pre":
                    a, own_of_rows = torch.zeros_like(a), torch.ones_like(own)
                else:
                    own_of_rows = own
                row_sum = scan_all(cut(q), cut(k), cut(ones), a, own_of_rows, direction, decay_convention)  # (H, n, 1)
                out = numerator * scale
                if normalize in ("sum", "pre"):
                    out = numerator / row_sum.clamp_min(eps)
                if normalize == "max":
                    least = torch.ones_like(row_sum) if floor is None else cut(floor[..., None])
                    out = scale * numerator / torch.maximum((scale * row_sum).abs(), least)
            y = write(y, out, b, tokens)
    return y


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
    batch, heads, length, _ = q.shape
    if angles is not None:
        angles = angles.expand(batch, heads, length, -1)
    y = q.new_zeros(batch, heads, length, v.shape[-1])
    for b in range(batch):
        for tokens in sequences(b, length, valid, segments):
            keys = k[b][:, tokens].softmax(1)
            queries = q[b][:, tokens]
            if angles is not None:
                keys = turn(keys, angles[b][:, tokens])
                queries = turn(queries, angles[b][:, tokens])
            S = torch.einsum("hnd,hne->hde", keys, v[b][:, tokens])
            y = write(y, torch.einsum("hnd,hde->hne", queries, S), b, tokens)
    return y


def write(y: Tensor, out: Tensor, b: int, tokens: list[int]) -> Tensor:
    """Return the outputs y (B, H, L, E) with those of some tokens (H, n, E) of row b."""
    y = y.clone()
    y[b, :, tokens] = out
    return y


def sequences(b: int, length: int, valid: Tensor | None, segments: Tensor | None) -> list[list[int]]:
    """Return the lists of tokens that batch row `b` consists of once padding is deleted."""
    found: dict[int, list[int]] = {}
    for token in range(length):
        segment = 0 if segments is None else int(segments[b, token])
        if segment >= 0 and (valid is None or valid[b, token]):
            found.setdefault(segment, []).append(token)
    return list(found.values())


def turn(x: Tensor, angles: Tensor | None) -> Tensor:
    """Multiply pairs (p, p + D/2), as complex numbers, by `exp(i angle)`."""
    if angles is None:
        return x
    real, imaginary = x.chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def orders(direction: str, n: int) -> dict[str, range]:
    """Return the order in which each active direction visits n tokens."""
    found = {}
    if direction != "backward":
        found["forward"] = range(n)
    if direction != "forward":
        found["backward"] = range(n - 1, -1, -1)
    return found


def scan_all(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, direction: str, decay_convention: str
) -> Tensor:
    """Compute the numerator (H, n, E) of one sequence; q, k, log_decay (H, n, D), v (H, n, E), bonus (H, D)."""
    n = q.shape[1]
    lam = log_decay.exp()
    numerator = torch.zeros_like(v)
    counted = 0  # how often each token's own key is included
    for name, order in orders(direction, n).items():
        decays = lam
        if decay_convention == "source" or (decay_convention == "symmetric" and name == "backward"):
            decays = lam.roll(1 if name == "forward" else -1, 1)  # of the token before, along the scan
        numerator = numerator + scan(q, k, v, decays, order, read_first=decay_convention == "between")
        if decay_convention != "between":
            counted += 1
    own = (q * k * (bonus[:, None] - counted)).sum(-1)
    return numerator + own[..., None] * v


def scan(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, order: range, read_first: bool) -> Tensor:
    """Compute `S = lambda S + k v^T` and `y = q S` along `order`; the first decay meets S = 0.

    y is read before S is updated if `read_first`, else after.
    """
    S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    y = {}
    for i in order:
        new = decays[:, i, :, None] * S + k[:, i, :, None] * v[:, i, None, :]
        y[i] = read_state(q, S if read_first else new, i)
        S = new
    return torch.stack([y[i] for i in sorted(y)], 1)


def read_state(q: Tensor, S: Tensor, i: int) -> Tensor:
    """Return `q_i S` (H, E) for a state (H, D, E)."""
    return torch.einsum("hd,hde->he", q[:, i], S)


def delta_rule(
    q: Tensor,
    v: Tensor,
    log_decay: Tensor,
    w: Tensor,
    e: Tensor,
    r: Tensor,
    direction: str,
    undecayed_erase: bool,
) -> Tensor:
    """Compute `S = (I - e r^T) Diag(lambda) S + w v^T` and `y = q S`, with `(q . w) v` counted once."""
    n = q.shape[1]
    lam = log_decay.exp()
    total = torch.zeros_like(v)
    for order in orders(direction, n).values():
        S = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
        y = {}
        for i in order:
            decayed = lam[:, i, :, None] * S
            held = read_state(r, S if undecayed_erase else decayed, i)
            S = decayed - e[:, i, :, None] * held[:, None] + w[:, i, :, None] * v[:, i, None]
            y[i] = read_state(q, S, i)
        total = total + torch.stack([y[i] for i in range(n)], 1)
    if direction == "both":
        total = total - (q * w).sum(-1)[..., None] * v
    return total
