"""Arguments of the operator: checks, and expansion of decays to a common shape."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lion.ops.dtypes import wide_dtype
from lion.ops.modes import is_static, may_wait
from lion.ops.settings import Settings, with_fields


def mismatch(name: str, expected: str, x: Any) -> ValueError:
    got = type(x).__name__
    if torch.is_tensor(x):
        got = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return ValueError(f"{name}: expected {expected}, got {got}")


def check_dense(name: str, x: Tensor) -> None:
    """Check that a tensor holds rows of one length, in a type with which this package computes.

    Raises:
        ValueError: A nested tensor, or numbers of 8 bits.
    """
    if x.is_nested:
        raise ValueError(
            f"{name}: a nested tensor, expected rows of one length: pad them and pass `valid`, or join them and pass "
            "`segments`"
        )
    if x.is_floating_point() and x.dtype.itemsize == 1:
        raise ValueError(f"{name}: {x.dtype}, expected float16, bfloat16, float32 or float64")


def check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes and dtypes of q, k (B, H, L, D) and v (B, H, L, E).

    All checks build their messages only after a failure, because a graph with dynamic lengths cannot format them.
    """
    if torch.jit.is_tracing():  # padding, chunks and steps would be fixed to those of the example
        raise RuntimeError("torch.jit.trace: the trace would be wrong at other lengths, use torch.export")
    if torch.is_tensor(q):
        check_dense("q", q)
    if not torch.is_tensor(q) or q.dim() != 4 or not q.is_floating_point():
        raise mismatch("q", "floating point (B, H, L, D)", q)
    if q.shape[2] == 0 or q.shape[3] == 0:
        raise mismatch("q", "at least one token and one dimension", q)
    if not torch.is_tensor(k) or k.shape != q.shape or k.dtype != q.dtype:
        raise mismatch("k", f"{q.dtype} {tuple(q.shape)}, as q", k)
    if not torch.is_tensor(v) or v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.dtype != q.dtype:
        raise mismatch("v", f"{q.dtype} {tuple(q.shape[:3])} + (E,)", v)


class Gates(NamedTuple):
    """The tensors that make the mask of an operator, and rotate its queries and keys.

    Attributes:
        log_decay: Logarithms log lambda <= 0. None (Lion-lit), (H,) (Lion-D) or (B, H, L) (Lion-S); with one lambda for
            each key dimension, (H, D) or (B, H, L, D). Logarithms above 0 count as 0, because a lambda is at most 1;
            above 1e-3 they raise an error, where values are checked (see `beta`).
        beta: Writing strengths (B, H, L) of the delta rule (see `lion.ops.delta`), in [0, 1], or in [0, 2] for negative
            eigenvalues. Other values raise an error, except in a graph, on a GPU and with prepared masks, where they
            are not checked. The keys should have norm 1. Requires `normalize="none"`; decays take the convention
            "target".
        bonus: Weights (H,) or (H, D) of each token's own key: `sum_d bonus_d q_id k_id` on the diagonal. Without a
            bonus, the weight is 1.
        angles: Rotation of q and k (`lion.ops.rotary`) in radians: (L, D/2), (H, L, D/2) or (B, 1 or H, L, D/2). Row
            sums are those of the unrotated scores. For row sums of the rotated scores, rotate q and k before the call.
        prefix: Prefix sums s (B, H, L, D) of a `log_decay` of the same shape, `M_ij = exp(s_i - s_j)` within a segment.
            Pass `prefix` if the sums exist already and need a gradient: the gradient of the decays then goes to
            `prefix` alone, at less cost (`lion.ops.prefix`). Requires a single direction and `normalize="none"`; not
            with a bonus or the convention "between". Not for `step` and `linear_attention_parts`.
        erase: Vectors e (B, H, L, D) of the delta rule, `S_i = (I - e_i r_i^T) Diag(lambda_i) S_{i-1} + w_i v_i^T`. By
            default e is w, which is beta k, or k without beta.
        read: Vectors r (B, H, L, D) of the delta rule, which read what is erased. By default r is k. Any of `beta`,
            `erase` and `read` selects the delta rule.
        floor: Smallest divisors (B, H, L) of the rows under `normalize="max"`, above 0; by default 1. If the scores of
            a row are divided by a number, its floor is 1 divided by that number. At padding, it is any number above 0.
            Not for `linear_attention_parts`.
    """

    log_decay: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    prefix: Tensor | None = None
    erase: Tensor | None = None
    read: Tensor | None = None
    floor: Tensor | None = None

    @property
    def delta(self) -> bool:
        """Return whether these are gates of the delta rule."""
        return self.beta is not None or self.erase is not None or self.read is not None


NO_GATES = Gates()


def take_gates(gates: Gates | Tensor | None, fields: dict[str, Any], *, prefix: bool = True) -> Gates:
    """Return the gates of a call, and remove those passed by name from its `fields`. A tensor is `log_decay` alone.

    Raises:
        ValueError: A gate that is passed twice, or a `prefix` where none is taken.
    """
    if not isinstance(gates, Gates):
        gates = Gates(log_decay=gates)
    by_name = {}
    for name in Gates._fields:
        if name in fields:
            if getattr(gates, name) is not None:
                raise ValueError(f"{name}: passed twice, in gates and by name")
            by_name[name] = fields.pop(name)
    if by_name:
        gates = gates._replace(**by_name)
    if gates.prefix is not None and not prefix:
        raise ValueError("prefix: only linear_attention and prefill take it")
    return gates


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | Tensor | None,
    settings: Settings,
    fields: dict[str, Any],
    *,
    unused: tuple[str, ...] = (),
    prefix: bool = True,
) -> tuple[Gates, Settings]:
    """Check the arguments of a call, and return its gates and settings, with the `fields` that are passed by name.

    `unused` are settings that the call does not have, beside `scan_merge`; without `prefix`, it does not take this
    gate.
    """
    check_tokens(q, k, v)
    gates = take_gates(gates, fields, prefix=prefix)
    settings = with_fields(settings, fields, ("scan_merge", *unused))
    check_gates(q, gates, settings)
    return gates, settings


def check_gates(q: Tensor, gates: Gates, settings: Settings) -> None:
    """Check the shapes of the gates, and that they can be combined with each other and with the settings."""
    batch, heads, length, dim = q.shape
    tokens = (batch, heads, length)
    vectors = (batch, heads, length, dim)
    if gates.log_decay is not None:
        check_floats("log_decay", gates.log_decay, (heads,), (heads, dim), tokens, vectors)
    if gates.beta is not None:
        check_floats("beta", gates.beta, tokens)
    if gates.erase is not None:
        check_floats("erase", gates.erase, vectors)
    if gates.read is not None:
        check_floats("read", gates.read, vectors)
    if gates.bonus is not None:
        check_floats("bonus", gates.bonus, (heads,), (heads, dim))
    if gates.angles is not None:
        if dim % 2:
            raise ValueError(f"angles: rotation acts on pairs of key dimensions, got an odd D = {dim}")
        half = dim // 2
        shared = (batch, 1, length, half)
        check_floats("angles", gates.angles, (length, half), (heads, length, half), shared, (*tokens, half))
    if gates.floor is not None:
        check_floats("floor", gates.floor, tokens)
        if settings.normalize != "max":
            raise ValueError(f"floor: only normalize='max' has a smallest divisor, got {settings.normalize!r}")
    if gates.delta:
        check_delta(gates, settings)
    elif settings.undecayed_erase:
        raise ValueError("undecayed_erase: only the delta rule erases, pass beta, erase or read")
    if gates.prefix is not None:
        check_floats("prefix", gates.prefix, vectors)
        check_prefix(gates, gates.prefix, settings)


def check_prefix(gates: Gates, prefix: Tensor, settings: Settings) -> None:
    """Check that prefix sums can be combined with the other gates and with the settings."""
    if gates.log_decay is None or gates.log_decay.shape != prefix.shape:
        raise ValueError("prefix: expected the sums of a log_decay of the same shape")
    if settings.direction == "both":
        raise ValueError("prefix: cannot be combined with direction='both'")
    if settings.normalize != "none":
        raise ValueError(f"prefix: cannot be combined with normalize={settings.normalize!r}")
    if settings.decay_convention == "between":
        raise ValueError("prefix: cannot be combined with decay_convention='between'")
    if gates.bonus is not None:
        raise ValueError("prefix: cannot be combined with a bonus")


def check_delta(gates: Gates, settings: Settings) -> None:
    """Check that the gates of a delta rule can be combined with the other gates and with the settings."""
    name = next(name for name in ("beta", "erase", "read") if getattr(gates, name) is not None)
    for other in ("bonus", "prefix"):
        if getattr(gates, other) is not None:
            raise ValueError(f"{name}: the delta rule takes no {other}")
    if settings.normalize != "none":
        raise ValueError(f"{name}: the delta rule takes normalize='none', got {settings.normalize!r}")
    if gates.log_decay is not None and settings.decay_convention != "target":
        got = settings.decay_convention
        raise ValueError(f"decay_convention: decays of the delta rule take 'target', got {got!r}")
    if settings.dropout_p:
        raise ValueError("dropout_p: the delta rule has no scores to drop")


def is_integer_tensor(x: Any) -> bool:
    """Return whether x is a tensor of integers."""
    return torch.is_tensor(x) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_floats(name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
    floats = torch.is_tensor(x) and x.is_floating_point()
    if not floats or not any(x.dim() == len(shape) and x.shape == shape for shape in shapes):
        *others, last = map(str, shapes)
        raise mismatch(name, f"floating point {' or '.join([', '.join(others)] * bool(others) + [last])}", x)


def expand_decay(log_decay: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a decay of any kind to (B or 1, H, L, D or 1), float32 or wider, without a copy of all tokens."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(wide_dtype(q))
    if log_decay.dim() <= 2:  # (H,) or (H, D), shared by all tokens
        per_head = log_decay[:, None] if log_decay.dim() == 1 else log_decay
        return per_head[None, :, None].expand(-1, -1, q.shape[2], -1)
    if not torch.compiler.is_compiling() and log_decay.requires_grad and log_decay.stride(2) == 0:
        log_decay = log_decay.contiguous()  # each token has a gradient; Dynamo cannot read such a stride of an input
    if log_decay.dim() == 3:
        return log_decay[..., None]
    return log_decay


def round_up(length: int, multiple: int) -> int:
    """Round `length` up to a multiple of `multiple`.

    A symbolic length is always rounded to the next multiple above it: a test whether the length is a multiple already
    would split the graph.
    """
    if is_static(length):
        return -(-length // multiple) * multiple
    return (length // multiple + 1) * multiple


def no_autocast(x: Tensor) -> torch.autocast:
    """Disable autocast on the device of x, so that decays and row sums stay in float32 on every device."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def check_values(gates: Gates, valid: Tensor | None) -> None:
    """Check the values of log_decay, beta and floor at valid tokens, except in a graph and on a GPU.

    There, the check would wait for the device. A NaN passes and reaches the outputs: a trainer skips steps whose loss
    is not finite. Positive logarithms that rounding explains pass, and count as 0.

    Raises:
        ValueError: A log_decay above 0, a beta outside [0, 2], or a floor of 0 or below.
    """
    for name, x, (least, most), expected in (
        ("log_decay", gates.log_decay, (-math.inf, 1e-3), "logarithms, at most 0 (the log() of decays from 0 to 1)"),
        ("beta", gates.beta, (0, 2), "values from 0 to 2"),
        ("floor", gates.floor, (torch.finfo(torch.float32).tiny, math.inf), "values above 0"),
    ):
        if x is None or not may_wait(x.device) or not x.numel():
            continue
        lowest, highest = x.detach().aminmax()
        if lowest >= least and highest <= most:  # the usual case, without a NaN, in which no mask of all tokens is made
            continue
        outside = (x < least) | (x > most)
        if valid is not None and x.dim() > 2:
            outside = outside & (valid[:, None] if x.dim() == 3 else valid[:, None, :, None])
        if outside.any():
            raise ValueError(f"{name}: expected {expected}, got {x[outside][0].item():.4g}")
