"""What callers hand to the operator: checked, and brought to one shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lion.ops.settings import Settings


def mismatch(name: str, expected: str, x: Any) -> ValueError:
    got = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" if torch.is_tensor(x) else type(x).__name__
    return ValueError(f"{name}: expected {expected}, got {got}")


def check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Here and below messages are made where a check fails: a graph of all lengths cannot print them."""
    if torch.jit.is_tracing():  # padding, chunks and steps would stay those of the example
        raise RuntimeError("torch.jit.trace: the trace would be wrong at other lengths, use torch.export")
    if not torch.is_tensor(q) or q.dim() != 4 or not q.is_floating_point():
        raise mismatch("q", "floating point (B, H, L, D)", q)
    if q.shape[2] == 0:
        raise mismatch("q", "at least one token", q)
    if not torch.is_tensor(k) or k.shape != q.shape or k.dtype != q.dtype:
        raise mismatch("k", f"{q.dtype} {tuple(q.shape)}, as q", k)
    if not torch.is_tensor(v) or v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.dtype != q.dtype:
        raise mismatch("v", f"{q.dtype} {tuple(q.shape[:3])} + (E,)", v)


class Gates(NamedTuple):
    """What makes the mask of q and k, as `lion.ops.linear_attention` takes it."""

    log_decay: Tensor | None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    prefix: Tensor | None = None


def check_gates(q: Tensor, gates: Gates, settings: Settings) -> None:
    """Shapes, and what does not go together."""
    batch, heads, length, dim = q.shape
    log_decay, beta, bonus, angles, prefix = gates
    if log_decay is not None:
        check_floats("log_decay", log_decay, (heads,), (heads, dim), (batch, heads, length), tuple(q.shape))
    if beta is not None:
        check_floats("beta", beta, (batch, heads, length))
    if bonus is not None:
        check_floats("bonus", bonus, (heads,), (heads, dim))
    if angles is not None:
        if dim % 2:
            raise ValueError(f"angles: rotation turns pairs of key dimensions, got an odd D = {dim}")
        pairs = (length, dim // 2)
        check_floats("angles", angles, pairs, (heads, *pairs), (batch, 1, *pairs), (batch, heads, *pairs))
    if beta is not None:
        if log_decay is not None or bonus is not None:
            raise ValueError("beta: the delta rule takes neither log_decay nor bonus")
        if settings.normalize != "none":
            raise ValueError(f"beta: the delta rule takes normalize='none', got {settings.normalize!r}")
        if settings.dropout_p:
            raise ValueError("dropout_p: the delta rule has no scores to drop")
    if prefix is not None:
        check_floats("prefix", prefix, tuple(q.shape))
        if log_decay is None or log_decay.shape != prefix.shape:
            raise ValueError("prefix: expected the sums of a log_decay of the same shape")
        for name, value, taken in (
            ("direction", settings.direction, settings.direction != "both"),
            ("normalize", settings.normalize, settings.normalize == "none"),
            ("decay_convention", settings.decay_convention, settings.decay_convention != "between"),
        ):
            if not taken:
                raise ValueError(f"prefix: does not go with {name}={value!r}")
        if bonus is not None:
            raise ValueError("prefix: does not go with a bonus")
    vectors = log_decay is not None and log_decay.dim() in (2, 4)
    if settings.form == "blockwise" and (beta is not None or vectors):
        raise ValueError("form: 'blockwise' takes no decay or one a token and head, use 'chunk'")


def is_whole(x: Any) -> bool:
    """Return whether x is a tensor of integers."""
    return torch.is_tensor(x) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_floats(name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
    floats = torch.is_tensor(x) and x.is_floating_point()
    if not floats or not any(x.dim() == len(shape) and x.shape == shape for shape in shapes):
        *others, last = map(str, shapes)
        raise mismatch(name, f"floating point {' or '.join([', '.join(others)] * bool(others) + [last])}", x)


def expand_decay(log_decay: Tensor | None, q: Tensor, clamp: bool = True) -> Tensor:
    """Every kind of decay as (B or 1, H or 1, L, D or 1), float32 or wider.

    What is above 0 becomes 0, for forms would disagree on a lambda above 1; at 0 itself torch 2.14 gives no gradient.
    Without `clamp` decays are not copied: the rnn form clamps a piece at a time.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if log_decay is None:
        return q.new_zeros((), dtype=wide).expand(1, 1, q.shape[2], 1)
    log_decay = log_decay.to(wide).clamp_max(0) if clamp else log_decay.to(wide)
    if log_decay.dim() <= 2:  # (H,) or (H, D), the same for every token
        per_head = log_decay[:, None] if log_decay.dim() == 1 else log_decay
        log_decay = per_head[None, :, None].expand(-1, -1, q.shape[2], -1)
    return log_decay[..., None] if log_decay.dim() == 3 else log_decay


def sum_dtype(x: Tensor) -> torch.dtype:
    """Of what is summed over tokens before it is divided: that of x, but float16 ends at 65,504."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def is_static(size: int) -> bool:
    """False for a symbol, which stands for all sizes in a graph of `torch.compile` or `torch.export`."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # brings sympy: only to those who compile

    return has_static_value(size)


def round_up(length: int, multiple: int) -> int:
    """Up to a multiple; a symbol to the next one above it, for a graph that asks whether it is one would be split."""
    return -(-length // multiple) * multiple if is_static(length) else (length // multiple + 1) * multiple


def no_autocast(x: Tensor) -> torch.autocast:
    """A region that computes in the dtypes given; decays and row sums stay in float32 on every device."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
