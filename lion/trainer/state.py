"""Where a run stands, and what a stop costs it."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Says when the next checkpoint is late, where they are saved by the clock."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()

    @property
    def late(self) -> bool:
        return self.seconds is not None and time.monotonic() - self.started >= self.seconds


def promise(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What a resumed run has in common with the one that was never stopped, from here on."""
    changed = [f"{k} {then.get(k)} -> {v}" for k, v in now.items() if then.get(k) != v]
    if changed:
        return f"from here on: same data order, not the same bits ({', '.join(changed)})"
    if not now["deterministic"]:
        return "from here on: same data order, not the same bits (this GPU needs trainer.deterministic=true for them)"
    return "from here on: bit for bit what the run would have been without a stop"
