"""Steps without a finite loss or gradient, skipped without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteGuard:
    """Skips optimizer steps whose loss or gradient is not finite, without waiting for the device.

    The decision is a tensor that the fused optimizer reads; the counts stay on the device until `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, device=device)  # skipped, in a row

    def skip(self, loss: Tensor, norm: Tensor) -> Tensor:
        """1. where this step must not be taken, else 0.; the same in every process."""
        bad = (~torch.isfinite(loss.float() + norm.float())).float()
        self.counts[0] += bad
        self.counts[1] = (self.counts[1] + 1) * bad
        return bad

    def read(self) -> tuple[int, int]:
        skipped, row = self.counts.tolist()
        return int(skipped), int(row)
