"""What callers hand to the operator: checked, and brought to one shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def mismatch(name: str, expected: str, x: Tensor) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}")


def check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Here and below messages are made where a check fails: a graph of all lengths cannot print them."""
    if torch.jit.is_tracing():  # padding, chunks and steps would stay those of the example
        raise RuntimeError("torch.jit.trace: the trace would be wrong at other lengths, use torch.export")
    if q.dim() != 4 or not q.is_floating_point():
        raise mismatch("q", "floating point (B, H, L, D)", q)
    if q.shape[2] == 0:
        raise mismatch("q", "at least one token", q)
    if k.shape != q.shape or k.dtype != q.dtype:
        raise mismatch("k", f"{q.dtype} {tuple(q.shape)}, as q", k)
    if v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.dtype != q.dtype:
        raise mismatch("v", f"{q.dtype} {tuple(q.shape[:3])} + (E,)", v)


def check_gates(
    q: Tensor, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None, angles: Tensor | None
) -> None:
    batch, heads, length, dim = q.shape
    if log_decay is not None:
        check_floats("log_decay", log_decay, (heads,), (heads, dim), (batch, heads, length), tuple(q.shape))
    if beta is not None:
        check_floats("beta", beta, (batch, heads, length))
    if bonus is not None:
        check_floats("bonus", bonus, (heads,), (heads, dim))
    if angles is not None:
        if dim % 2:
            raise ValueError(f"angles: rotation turns pairs of key dimensions, got an odd D = {dim}")
        places = (length, dim // 2)
        check_floats("angles", angles, places, (heads, *places), (batch, 1, *places), (batch, heads, *places))


def check_floats(name: str, x: Tensor, *shapes: tuple[int, ...]) -> None:
    if not x.is_floating_point() or not any(x.dim() == len(shape) and x.shape == shape for shape in shapes):
        *others, last = map(str, shapes)
        raise mismatch(name, f"floating point {' or '.join([', '.join(others)] * bool(others) + [last])}", x)


def check_masks(q: Tensor, valid: Tensor | None, segments: Tensor | None) -> None:
    shape = (q.shape[0], q.shape[2])
    if valid is not None and (valid.shape != shape or valid.dtype != torch.bool):
        raise mismatch("valid", f"bool {shape}", valid)
    if segments is not None:
        whole = not (segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool)
        if segments.shape != shape or not whole:
            raise mismatch("segments", f"integer {shape}", segments)


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")


def as_lanes(log_decay: Tensor | None, q: Tensor, cut: bool = True) -> Tensor:
    """Every kind of decay as (B or 1, H or 1, L, D or 1), float32 or wider: a number is a vector of one lane.

    What is above 0 is cut, for forms would disagree on a lambda above 1; at 0 itself the gradient flows. Without `cut`
    the gates are not copied: the rnn form cuts a piece at a time.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if log_decay is None:
        return q.new_zeros((), dtype=wide).expand(1, 1, q.shape[2], 1)
    log_decay = log_decay.to(wide).clamp_max(0) if cut else log_decay.to(wide)
    if log_decay.dim() <= 2:  # (H,) or (H, D), the same for every token
        per_head = log_decay[:, None] if log_decay.dim() == 1 else log_decay
        log_decay = per_head[None, :, None].expand(-1, -1, q.shape[2], -1)
    return log_decay[..., None] if log_decay.dim() == 3 else log_decay


def sum_dtype(x: Tensor) -> torch.dtype:
    """Of what is summed over tokens before it is divided: that of x, but float16 ends at 65,504."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def as_runs(valid: Tensor | None, segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Segments as a non-decreasing count (B, L), padding belonging to the segment before it; and all valid tokens."""
    if segments is None:
        return None, valid
    segments = segments.long()
    valid = segments >= 0 if valid is None else valid & (segments >= 0)
    ids = segments.masked_fill(~valid, -1)
    place = torch.arange(ids.shape[1], device=ids.device)
    filled = ids.gather(1, torch.where(valid, place, 0).cummax(1).values)  # padding takes the id before it
    starts = valid & (filled != F.pad(filled[:, :-1], (1, 0), value=-1))
    ordered = ids.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + (ordered[:, 0] >= 0)
    together, message = (starts.sum(1) == distinct).all(), "segments: the tokens of a segment must stand together"
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        torch._assert_async(together, message)  # a graph and a GPU are not waited for
    elif not together:
        raise ValueError(f"{message}, got an id that comes back")
    return starts.cumsum(1), valid


def is_number(size: int) -> bool:
    """False for a symbol, which stands for all sizes in a graph of `torch.compile` or `torch.export`."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # brings sympy: only to those who compile

    return has_static_value(size)


def rounded(length: int, multiple: int) -> int:
    """Up to a multiple; a symbol to the next one above it, for a graph that asks whether it is one would be split."""
    return -(-length // multiple) * multiple if is_number(length) else (length // multiple + 1) * multiple


def no_autocast(x: Tensor) -> torch.autocast:
    """A region that computes in the dtypes given; gates and row sums stay in float32 on every device."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
