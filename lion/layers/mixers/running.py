"""Running maxima of logits, which keep exponentials in range: xLSTM's input gate, Performer's keys."""

from __future__ import annotations

import torch
from torch import Tensor


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
    first = segment_index.diff(dim=1, prepend=segment_index[:, :1]) != 0
    apart = first.cumsum(1)[:, None] * (level.amax(-1, keepdim=True) - level.amin(-1, keepdim=True) + 1)
    m = total + (level + apart).cummax(-1).values - apart
    earlier = torch.cat([start[..., None], m[..., :-1]], -1).masked_fill(first[:, None], 0)
    return m, earlier, m[..., -1].clone()
