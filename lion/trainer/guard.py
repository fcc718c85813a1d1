"""Skipping of optimizer steps whose loss or gradient is not finite."""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteGuard:
    """A guard that skips optimizer steps whose loss or gradient is not finite, without waiting for the device.

    The decision is a tensor that the fused optimizer reads. The counts stay on the device until `read` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, device=device)  # skipped steps: in total, and consecutive at present

    def skip(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 if the step must be skipped, else 0.0; the result is the same in every process."""
        bad = (~torch.isfinite(loss.float() + norm.float())).float()
        self.counts[0] += bad
        self.counts[1] = (self.counts[1] + 1) * bad
        return bad

    def read(self) -> tuple[int, int]:
        """Return the number of skipped steps, in total and consecutive at present."""
        skipped, row = self.counts.tolist()
        return int(skipped), int(row)
