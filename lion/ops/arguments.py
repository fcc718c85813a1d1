"""What callers hand to the operator: checked, and brought to one shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def expect(ok: bool, name: str, expected: str, x: Tensor) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}")


def check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    expect(q.dim() == 4 and q.is_floating_point(), "q", "floating point (B, H, L, D)", q)
    batch, heads, length = q.shape[:3]
    expect(length > 0, "q", "at least one token", q)
    expect(k.shape == q.shape and k.dtype == q.dtype, "k", f"{q.dtype} {tuple(q.shape)}, as q", k)
    expected = f"{q.dtype} {(batch, heads, length)} + (E,)"
    expect(v.dim() == 4 and v.shape[:3] == q.shape[:3] and v.dtype == q.dtype, "v", expected, v)


def check_gates(
    q: Tensor, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None, angles: Tensor | None
) -> None:
    batch, heads, length, dim = q.shape
    if log_decay is not None:
        shapes = ((heads,), (heads, dim), (batch, heads, length), (batch, heads, length, dim))
        expected = f"floating point {', '.join(map(str, shapes[:-1]))} or {shapes[-1]}"
        expect(log_decay.shape in shapes and log_decay.is_floating_point(), "log_decay", expected, log_decay)
    if beta is not None:
        expected = f"floating point {(batch, heads, length)}"
        expect(beta.shape == (batch, heads, length) and beta.is_floating_point(), "beta", expected, beta)
    if bonus is not None:
        expected = f"floating point {(heads,)} or {(heads, dim)}"
        expect(bonus.shape in ((heads,), (heads, dim)) and bonus.is_floating_point(), "bonus", expected, bonus)
    if angles is not None:
        if dim % 2:
            raise ValueError(f"angles: rotation turns pairs of key dimensions, got an odd D = {dim}")
        shapes = ((length, dim // 2), (heads, length, dim // 2), (batch, 1, length, dim // 2))
        shapes += ((batch, heads, length, dim // 2),)
        expected = f"floating point {', '.join(map(str, shapes[:-1]))} or {shapes[-1]}"
        expect(angles.shape in shapes and angles.is_floating_point(), "angles", expected, angles)


def check_masks(q: Tensor, valid: Tensor | None, segments: Tensor | None) -> None:
    batch, length = q.shape[0], q.shape[2]
    if valid is not None:
        expect(valid.shape == (batch, length) and valid.dtype == torch.bool, "valid", f"bool {(batch, length)}", valid)
    if segments is not None:
        whole = not (segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool)
        expect(segments.shape == (batch, length) and whole, "segments", f"integer {(batch, length)}", segments)


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


def no_autocast(x: Tensor) -> torch.autocast:
    """A region that computes in the dtypes given; gates and row sums stay in float32 on every device."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
