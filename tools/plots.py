"""Axes of plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def number_ticks(ax: Any, numbers: Sequence[float], **look: Any) -> None:
    """Make the x-axis logarithmic, with ticks at these numbers alone."""
    ax.set_xscale("log")
    ax.set_xticks(numbers, [f"{n:,}" for n in numbers], **look)
    ax.minorticks_off()


def by_length(ax: Any, lengths: Sequence[int]) -> None:
    """Make both axes logarithmic, with ticks at the lengths and at round values."""
    ax.set_yscale("log")
    number_ticks(ax, lengths)
    low, high = ax.get_ylim()
    digits = (1,)
    if high / low < 300:
        digits = (1, 2, 5)
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


def widen(ax: Any) -> None:
    """Widen the y-axis to at least a tenth of its largest value, so that noise does not fill the plot."""
    low, high = ax.get_ylim()
    lack = 0.1 * max(abs(low), abs(high)) - (high - low)
    if lack > 0:
        ax.set_ylim(low - lack / 2, high + lack / 2)


def tidy(ax: Any, axis: str = "both") -> None:
    """Draw a light grid along an axis, and only the left and the lower border."""
    ax.grid(True, axis=axis, color="0.9")
    open_sides(ax)
