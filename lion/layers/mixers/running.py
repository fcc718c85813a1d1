"""Running maxima of logits, which keep exponentials in range: xLSTM's input gate, Performer's keys."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops import Part
from lion.ops.segments import segment_starts


def running_maximum(
    logit: Tensor, step: Tensor, segment_index: Tensor | None, before: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `m_t = max(step_t + m_{t-1}, logit_t)` (B, H, L), m_{t-1} and the last m (B, H), of tokens in scan order.

    With the sums P of the steps it is `P_t + max_{j <= t} (logit_j - P_j)`. Segments are separated by adding more to
    each of them than the values of the one before differ from its own.

    Args:
        logit: At least 0, (B, H, L), float64.
        step: Added to m at each token.
        segment_index: Integers (B, L), the same for all tokens of a segment; m starts at 0 in each segment.
        before: Running maximum (B, H) of earlier tokens, by default 0.
        reverse: Whether the scan goes from right to left.
    """
    if reverse:
        index = segment_index if segment_index is None else segment_index.flip(1)
        m, earlier, last = running_maximum(logit.flip(-1), step.flip(-1), index, before, False)
        return m.flip(-1), earlier.flip(-1), last
    total = step.cumsum(-1)
    level = logit - total
    start = logit.new_zeros(logit.shape[:2]) if before is None else before.to(logit.dtype)
    level = torch.cat([torch.maximum(level[..., :1], start[..., None]), level[..., 1:]], -1)
    if segment_index is None:
        m = total + level.cummax(-1).values
        return m, torch.cat([start[..., None], m[..., :-1]], -1), m[..., -1].clone()
    first = segment_starts(segment_index)
    apart = first.cumsum(1)[:, None] * (level.amax(-1, keepdim=True) - level.amin(-1, keepdim=True) + 1)
    m = total + (level + apart).cummax(-1).values - apart
    earlier = torch.cat([start[..., None], m[..., :-1]], -1).masked_fill(first[:, None], 0)
    return m, earlier, m[..., -1].clone()


def entering_maximum(logit: Tensor, step: Tensor, segment_index: Tensor | None, reverse: bool, part: Part) -> Tensor:
    """Return the running maximum (B, H) that enters a part of rows which are split over processes.

    A part p maps the maximum m that enters it to `max(sum of its steps + m, last m_p)`, with m_p from m = 0.
    """
    *_, last = running_maximum(logit, step, segment_index, None, reverse)
    every_last, every_sum = part.gather(last, step.sum(-1))  # (count, B, H)
    order = range(part.count - 1, part.rank, -1) if reverse else range(part.rank)
    m, ahead = torch.zeros_like(last), -1 if reverse else 1
    for p in order:
        added = every_sum[p] + m
        if part.first is not None and part.last is not None:
            # m passes through the part if it holds tokens of one segment
            added = added.masked_fill((part.first[:, p] != part.last[:, p])[:, None], 0)
        m = torch.maximum(added, every_last[p])
        if part.first is not None and part.last is not None:
            left, entered = (part.first, part.last) if reverse else (part.last, part.first)
            m = m.masked_fill((left[:, p] != entered[:, p + ahead])[:, None], 0)
    return m
