"""Axes of the plots of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def by_length(ax: Any, lengths: Sequence[int]) -> None:
    """Make both axes logarithmic, with ticks at the lengths and at round values."""
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    digits = (1, 2, 5) if high / low < 300 else (1,)
    ticks = []
    for exponent in range(-4, 8):
        for digit in digits:
            tick = digit * 10.0**exponent
            if low <= tick <= high:
                ticks.append(tick)
    ax.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    ax.grid(True, color="0.88", linewidth=0.7)


def open_sides(ax: Any) -> None:
    """Draw only the left and the lower border."""
    ax.spines[["top", "right"]].set_visible(False)
